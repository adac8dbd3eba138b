"""``cuda_graphs=True``: what is recorded of a chunk and repeated for others gives the same numbers.

Without a GPU a recorder for the CPU stands in, which repeats each operator on the same memory.

Longer than 350 lines, because its tests are of one topic.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from loops import (
    MODES,
    Mixed,
    Unseen,
    check_same,
    generator,
    leaves_with_gradient,
    plain_loop,
)
from recorders import CalledAgain, Repeated
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedrnn
from fusedrnn.recurrent import graphs

T = TypeVar("T")
H = 4
STATE = torch.zeros(3, H, dtype=torch.float64)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Repeated]]:
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Repeated)
    Repeated.count = Repeated.replays = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fusedrnn")
        yield Repeated


class Counted(nn.Module):
    """Counts how often Python takes the step, unseen: else no graph would repeat it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.count = cell, Unseen(0)

    def forward(self, x: Any, state: Any) -> Any:
        self.count.value += 1
        return self.cell(x, state)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class Drawing(nn.Module):
    """Draws without waiting for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * H, 2 * H, dtype=torch.float64)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.linear(torch.cat([x, h], -1)).chunk(2, -1)
        scale = nn.functional.softplus(scale)
        z = torch.distributions.Normal(loc, scale, validate_args=False).rsample()
        z = self.dropout(z) + torch.rand(z.shape, dtype=z.dtype)
        soft = nn.functional.gumbel_softmax(torch.stack([z, h], -1), tau=0.7)
        late = torch.empty_like(z).exponential_(2.0) * (torch.rand_like(h) < torch.sigmoid(h))
        return z, torch.tanh(soft[..., 1] + z * late.detach() + 0.5 * h)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seq_len", [16, 15, 9])
@pytest.mark.parametrize("make", [Drawing, Mixed, lambda: nn.LSTMCell(H, H, dtype=torch.float64)])
def test_values(make: Any, seq_len: int, mode: str, recorder: type[Repeated]) -> None:
    """Noise, trees, a shorter last chunk: results and gradients of the plain loop."""
    cell = Counted(make())
    rnn = fusedrnn.Recurrent(cell, mode=mode, cuda_graphs=True)
    for call in range(3):
        x: Any = double(seq_len, 3, H)
        start: Any = STATE if isinstance(cell.cell, Drawing) else (STATE, STATE + 1)
        if isinstance(cell.cell, Mixed):
            x = {"x": double(seq_len, 3, 3), "scale": double(seq_len, 3)}
            start = cell.cell.initial_state(3)
            start["h"].requires_grad_()
        leaves = [*leaves_with_gradient(x, start), *cell.parameters()]
        cell.count.value = 0
        check_same(
            lambda: rnn(x, start, generator=generator()),  # noqa: B023
            lambda: plain_loop(cell, x, start),  # noqa: B023
            leaves,
        )
        if call == 0:
            assert recorder.count == 0
        else:
            assert recorder.count == 2 * call  # forward, backward
            assert cell.count.value < 3 * seq_len
    whole = seq_len // (4 if seq_len > 9 else 3)
    assert recorder.replays == 2 * (whole - 1 + whole)
    assert rnn.explain(x, start).is_recorded


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("return_sequence", [True, False])
@pytest.mark.parametrize("lengths", [None, [20, 3, 11]])
def test_lengths_resets_and_last_outputs(
    lengths: Any, return_sequence: bool, mode: str, recorder: type[Repeated]
) -> None:
    cells = [nn.GRUCell(H, H, dtype=torch.float64), nn.GRUCell(H, H, dtype=torch.float64)]
    settings: Any = {"bidirectional": True, "return_sequence": return_sequence, "mode": mode}
    rnn = fusedrnn.Recurrent(cells, cuda_graphs=True, **settings)
    expected = fusedrnn.Recurrent(cells, **settings)
    x, initial = double(20, 3, H), double(1, H)
    reset = torch.rand(20, 3) < 0.2
    for _ in range(2):
        check_same(
            lambda: rnn(x, lengths=lengths, reset=reset, reset_to=(initial, initial)),
            lambda: expected(x, lengths=lengths, reset=reset, reset_to=(initial, initial)),
            [x, initial, *rnn.parameters()],
        )
    assert recorder.count == 4


class Attending(nn.Module):
    """Reads a tensor of its own, and a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=torch.float64)
        self.memory: Any = None
        self.scale = 1.0

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        weights = (self.memory * h).sum(-1).softmax(0)
        return torch.tanh(
            self.linear(x + h * self.scale) + (weights[..., None] * self.memory).sum(0)
        )


def test_each_call_records_anew(recorder: type[Repeated]) -> None:
    """What a step reads may be another tensor or number in each call."""
    cell = Attending()
    rnn = fusedrnn.Recurrent(cell, mode="replay", cuda_graphs=True)
    for call in range(4):
        cell.memory, cell.scale = double(5, 3, H), 1.0 + call
        cell.linear = nn.Linear(H, H, dtype=torch.float64)
        x = double(12, 3, H)
        check_same(
            lambda: rnn(x, STATE),  # noqa: B023
            lambda: plain_loop(cell, x, STATE),  # noqa: B023
            [x, cell.memory, *cell.parameters()],
        )
    assert recorder.count == 2 * 3


def test_backward_of_an_earlier_call(recorder: type[Repeated]) -> None:
    """Results and gradients of a call stay what they are when other calls record."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=torch.float64), cuda_graphs=True)
    expected = fusedrnn.Recurrent(rnn.cell)
    rnn(double(16, 3, H))[0].sum().backward()
    inputs = [double(16, 3, H) for _ in range(3)]
    results = [rnn(x) for x in inputs]
    kept = copy.deepcopy([[leaf.detach() for leaf in pair] for pair in results])
    for x, result in reversed(list(zip(inputs, results, strict=True))):
        found = torch.autograd.grad(result[0].sum() + result[1].sum(), [x, *rnn.parameters()])
        wanted = expected(x)
        exact = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), [x, *rnn.parameters()])
        torch.testing.assert_close(found, exact)
    torch.testing.assert_close([[*pair] for pair in results], kept)
    assert recorder.count == 3 + 3


def test_without_gradients(recorder: type[Repeated]) -> None:
    rnn = fusedrnn.Recurrent(nn.LSTMCell(H, H), cuda_graphs=True, return_sequence=False)
    expected = fusedrnn.Recurrent(rnn.cell, return_sequence=False)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(17, 3, H)
            torch.testing.assert_close(rnn(x), expected(x))
    assert recorder.count == 1


class Passing(nn.Module):
    """A part of the state that stays as it is, a counter, and an output without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=torch.float64)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, kept, count = state
        new = torch.tanh(self.linear(x + h)) * kept
        return {"h": new, "is_positive": new > 0, "unused": new.cos()}, (new, kept, count + 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [True, False])
def test_states_that_stay_and_missing_gradients(frozen: bool, mode: str) -> None:
    cell = Passing().requires_grad_(not frozen)
    rnn = fusedrnn.Recurrent(cell, mode=mode, cuda_graphs=True)
    for call in range(2):
        x = torch.randn(16, 3, H, dtype=torch.float64)
        state = (double(3, H), double(3, H), torch.zeros(3, dtype=torch.int64))
        leaves = [state[0], state[1], *([] if frozen else cell.parameters())]
        found, expected = rnn(x, state), plain_loop(cell, x, state)
        torch.testing.assert_close(found, expected)
        for loss in (lambda r: r[0]["h"].sum(), lambda r: r[1][0].sin().sum()):
            gradients = torch.autograd.grad(loss(found), leaves, retain_graph=True)
            exact = torch.autograd.grad(loss(expected), leaves, retain_graph=True)
            torch.testing.assert_close(gradients, exact, msg=f"call {call}")


def test_autocast(recorder: type[Repeated]) -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), cuda_graphs=True)
    expected = fusedrnn.Recurrent(rnn.cell)
    for _ in range(2):
        x = torch.randn(16, 3, H, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            check_same(lambda: rnn(x), lambda: expected(x), [x, *rnn.parameters()])  # noqa: B023
    assert recorder.count == 2


def test_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.RECORDERS, "cpu", CalledAgain)
    compile, counter = torch.compile, CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        torch, "compile", lambda function, **named: compile(function, backend=counter, **named)
    )
    cell = Drawing()
    rnn = fusedrnn.Recurrent(cell, torch_compile=True, cuda_graphs=True)
    for _ in range(2):
        x = double(16, 3, H)
        check_same(
            lambda: rnn(x, STATE, generator=generator()),  # noqa: B023
            lambda: plain_loop(cell, x, STATE),  # noqa: B023
            [x, *cell.parameters()],
        )
    assert CalledAgain.count == 2
    assert rnn.explain(x, STATE).is_compiled


class By(nn.Module):
    """A step by any function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.function(x, h)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, h: h + x * x.sum().item(), "waits for the values of a tensor"),
        (lambda x, h: h + x if x.sum() > 0 else h - x, "waits for the values of a tensor"),
        (lambda x, h: h + x + x[x > 0].sum(), "waits for the values of a tensor"),
        (lambda x, h: (h + x).index_put((x > 0,), x.mean()), "waits for the values of a tensor"),
        (lambda x, h: h + x + torch.linalg.inv(x.mT @ x + torch.eye(H)).sum(), "linalg"),
        (lambda x, h: h + x * torch.randint(2, x.shape), "draws random numbers in a way"),
        (
            lambda x, h: h + torch.distributions.Normal(x, 1.0, validate_args=True).rsample(),
            "waits for the values",
        ),
    ],
)
def test_what_no_graph_can_record(function: Any, reason: str, recorder: type[Repeated]) -> None:
    rnn = fusedrnn.Recurrent(By(function), cuda_graphs=True)
    x = torch.randn(9, 3, H)
    found = rnn.explain(x, torch.zeros(3, H))
    assert not found.is_recorded
    assert reason in found.record_reason
    assert f"CUDA graphs: no, the step {found.record_reason[9:]}" in str(found)
    for _ in range(2):
        rnn(x, torch.zeros(3, H))
    assert recorder.count == 0


def test_what_a_graph_can_record(recorder: type[Repeated]) -> None:
    def step(x: Tensor, h: Tensor) -> Tensor:
        eps = torch.distributions.Normal(x, 1.0, validate_args=False).rsample()
        return torch.where(eps > 0, h, eps)[:, [1, 0, 3, 2]] * torch.tensor(0.5)

    rnn = fusedrnn.Recurrent(By(step), cuda_graphs=True)
    assert rnn.explain(torch.randn(9, 3, H), torch.zeros(3, H)).is_recorded


def test_a_buffer_that_changes() -> None:
    cell = By(lambda x, h: cell.norm(x + h))
    cell.norm = nn.BatchNorm1d(H)
    rnn = fusedrnn.Recurrent(cell, cuda_graphs=True)
    found = rnn.explain(torch.randn(9, 3, H), torch.zeros(3, H))
    assert found.record_reason == "the step changes a buffer"


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_recording_that_fails(place: str, recorder: type[Repeated]) -> None:
    """The call goes on without, and says why, once."""
    is_failing = False

    class Failing(Repeated):
        def record(self, function: Callable[[], T]) -> T:
            if is_failing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(function)

    graphs.RECORDERS["cpu"] = Failing
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), cuda_graphs=True)
    expected = fusedrnn.Recurrent(rnn.cell)
    x = torch.randn(16, 3, H, requires_grad=True)
    rnn(x)[0].sum().backward()
    is_failing = place == "forward"
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted when stream"):
        output = rnn(x)[0]
        is_failing = True
        gradients = torch.autograd.grad(output.sum(), [x, *rnn.parameters()])
    wanted = torch.autograd.grad(expected(x)[0].sum(), [x, *rnn.parameters()])
    torch.testing.assert_close(gradients, wanted)
    assert "not permitted" in rnn.explain(x).record_reason
    rnn(x)[0].sum().backward()  # without a warning


def test_a_step_that_changes_its_mind(recorder: type[Repeated]) -> None:
    """One that draws more numbers later than in its first step is not recorded."""
    count = Unseen(0)

    def step(x: Tensor, h: Tensor) -> Tensor:
        count.value += 1
        return h + x * torch.rand_like(x) + (torch.rand_like(x) if count.value > 6 else 0)

    rnn = fusedrnn.Recurrent(By(step), cuda_graphs=True)
    x = torch.randn(25, 3, H)
    with torch.no_grad():
        rnn(x, torch.zeros(3, H))
        count.value = -1
        with pytest.warns(UserWarning, match="the step draws other numbers"):
            rnn(x, torch.zeros(3, H))


def test_reasons_of_calls(recorder: type[Repeated]) -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), cuda_graphs=True)
    assert "fewer than 3 whole chunks" in rnn.explain(torch.randn(8, 3, H)).record_reason
    rnn(torch.randn(4, 3, H))
    del graphs.RECORDERS["cpu"]
    assert rnn.explain(torch.randn(9, 3, H)).record_reason == "the input is on cpu"
    graphs.RECORDERS["cpu"] = recorder
    with pytest.raises(TypeError, match="cuda_graphs must be a bool"):
        fusedrnn.Recurrent(nn.GRUCell(H, H), cuda_graphs="yes")  # type: ignore[arg-type]


def test_scan(recorder: type[Repeated]) -> None:
    weight = double(H, H)

    def step(h: Tensor, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ weight) * params
        return h, h.sum(-1)

    for _ in range(2):
        x, params = double(16, 3, H), double(H)
        both = [
            fusedrnn.scan(step, STATE, x, params, cuda_graphs=on, reverse=True)
            for on in (True, False)
        ]
        torch.testing.assert_close(*both)
        found, wanted = (
            torch.autograd.grad(h.sum() + sums.sin().sum(), [weight, x, params]) for h, sums in both
        )
        torch.testing.assert_close(found, wanted)
    assert recorder.count == 2
