"""``cuda_graphs=True``: what is recorded of a chunk and repeated for others gives the same numbers.

Without a GPU a recorder for the CPU stands in, which repeats each operator on the same memory.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recurrent.loops import (
    F64,
    By,
    Mixed,
    Unseen,
    check_same,
    double,
    generator,
    leaves_with_gradient,
    plain_loop,
)
from runtime.recorders import Repeated
from torch import Tensor, nn

import fusedrnn
from fusedrnn._runtime import cuda_graphs

pytestmark = [
    pytest.mark.usefixtures("steps_in_python", "recorder"),
    pytest.mark.filterwarnings("error:fusedrnn"),
]
H = 4
STATE = torch.zeros(3, H, dtype=F64)


def drawing(c: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Draws without waiting for anything."""
    loc, scale = c.linear(torch.cat([x, h], -1)).chunk(2, -1)
    scale = nn.functional.softplus(scale)
    z = torch.distributions.Normal(loc, scale, validate_args=False).rsample()
    z = c.dropout(z) + torch.rand(z.shape, dtype=z.dtype)
    soft = nn.functional.gumbel_softmax(torch.stack([z, h], -1), tau=0.7)
    late = torch.empty_like(z).exponential_(2.0) * (torch.rand_like(h) < torch.sigmoid(h))
    return z, torch.tanh(soft[..., 1] + z * late.detach() + 0.5 * h)


def drawing_cell() -> By:
    return By(drawing, linear=nn.Linear(2 * H, 2 * H, dtype=F64), dropout=nn.Dropout(0.25))


@pytest.mark.parametrize("seq_len", [16, 15, 9])
@pytest.mark.parametrize("make", [drawing_cell, Mixed, lambda: nn.LSTMCell(H, H, dtype=F64)])
def test_values(make: Any, seq_len: int, recorder: type[Repeated]) -> None:
    """Noise, trees, a shorter last chunk: results and gradients of the plain loop."""
    inner, count = make(), Unseen(0)  # unseen: else no graph would repeat the step

    def step(c: Any, x: Any, state: Any) -> Any:
        count.value += 1
        return inner(x, state)

    cell = By(step, inner=inner)
    rnn = fusedrnn.Recurrent(cell, cuda_graphs=True)
    for call in range(3):
        x: Any = double(seq_len, 3, H)
        start: Any = STATE if isinstance(inner, By) else (STATE, STATE + 1)
        if isinstance(inner, Mixed):
            x = {"x": double(seq_len, 3, 3), "scale": double(seq_len, 3)}
            start = inner.initial_state(3)
            start["h"].requires_grad_()
        count.value = 0
        check_same(
            lambda: rnn(x, start, generator=generator()),  # noqa: B023
            lambda: plain_loop(cell, x, start),  # noqa: B023
            [*leaves_with_gradient(x, start), *cell.parameters()],
        )
        assert recorder.count == 2 * call  # forward, backward
        assert call == 0 or count.value < 3 * seq_len
    whole = seq_len // (4 if seq_len > 9 else 3)
    assert recorder.replays == 2 * (whole - 1 + whole)
    assert rnn.explain(x, start).is_recorded


@pytest.mark.parametrize("return_sequence", [True, False])
@pytest.mark.parametrize("lengths", [None, [20, 3, 11]])
def test_lengths_resets_and_last_outputs(
    lengths: Any, return_sequence: bool, recorder: type[Repeated]
) -> None:
    cells = [nn.GRUCell(H, H, dtype=F64), nn.GRUCell(H, H, dtype=F64)]
    settings: Any = {"bidirectional": True, "return_sequence": return_sequence}
    rnn = fusedrnn.Recurrent(cells, cuda_graphs=True, **settings)
    expected = fusedrnn.Recurrent(cells, **settings)
    x, initial = double(20, 3, H), double(1, H)
    masks = (lengths, torch.rand(20, 3) < 0.2, (initial, initial))
    for _ in range(2):
        check_same(
            lambda: rnn(x, None, *masks),
            lambda: expected(x, None, *masks),
            [x, initial, *rnn.parameters()],
        )
    assert recorder.count == 4


def attending(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Reads a tensor of its own, and a number of Python."""
    weights = (c.memory * h).sum(-1).softmax(0)
    return torch.tanh(c.linear(x + h * c.scale) + (weights[..., None] * c.memory).sum(0))


def test_each_call_records_anew(recorder: type[Repeated]) -> None:
    """What a step reads may be another tensor or number in each call."""
    cell = By(attending)
    rnn = fusedrnn.Recurrent(cell, cuda_graphs=True)
    for call in range(4):
        cell.memory, cell.scale = double(5, 3, H), 1.0 + call
        cell.linear = nn.Linear(H, H, dtype=F64)
        x = double(12, 3, H)
        check_same(
            lambda: rnn(x, STATE),  # noqa: B023
            lambda: plain_loop(cell, x, STATE),  # noqa: B023
            [x, cell.memory, *cell.parameters()],
        )
    assert recorder.count == 2 * 3


def test_backward_of_an_earlier_call(recorder: type[Repeated]) -> None:
    """Results and gradients of a call stay what they are when other calls record."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=F64), cuda_graphs=True)
    expected = fusedrnn.Recurrent(rnn.cell)
    rnn(double(16, 3, H))[0].sum().backward()
    inputs = [double(16, 3, H) for _ in range(3)]
    results = [rnn(x) for x in inputs]
    kept = copy.deepcopy([[leaf.detach() for leaf in pair] for pair in results])
    for x, result in reversed(list(zip(inputs, results, strict=True))):
        check_same(lambda: result, lambda: expected(x), [x, *rnn.parameters()])  # noqa: B023
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


def passing(c: Any, x: Tensor, state: Any) -> Any:
    """A part of the state that stays as it is, a counter, and an output without gradient."""
    h, kept, count = state
    new = torch.tanh(c.linear(x + h)) * kept
    return {"h": new, "is_positive": new > 0, "unused": new.cos()}, (new, kept, count + 1)


@pytest.mark.parametrize("frozen", [True, False])
def test_states_that_stay_and_missing_gradients(frozen: bool) -> None:
    cell = By(passing, linear=nn.Linear(H, H, dtype=F64)).requires_grad_(not frozen)
    rnn = fusedrnn.Recurrent(cell, cuda_graphs=True)
    for call in range(2):
        x = torch.randn(16, 3, H, dtype=F64)
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


WAITS = "waits for the values of a tensor"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda c, x, h: h + x * x.sum().item(), WAITS),
        (lambda c, x, h: h + x if x.sum() > 0 else h - x, WAITS),
        (lambda c, x, h: h + x + x[x > 0].sum(), WAITS),
        (lambda c, x, h: (h + x).index_put((x > 0,), x.mean()), WAITS),
        (lambda c, x, h: h + x + torch.linalg.inv(x.mT @ x + torch.eye(H)).sum(), "linalg"),
        (
            lambda c, x, h: h + x * torch.randint(2, x.shape),
            "random numbers that a CUDA graph cannot",
        ),
        (lambda c, x, h: h + torch.distributions.Normal(x, 1.0, True).rsample(), WAITS),
        (lambda c, x, h: c.norm(x + h), "changes a buffer"),
    ],
)
def test_what_no_graph_can_record(function: Any, reason: str, recorder: type[Repeated]) -> None:
    rnn = fusedrnn.Recurrent(By(function, norm=nn.BatchNorm1d(H)), cuda_graphs=True)
    x = torch.randn(9, 3, H)
    found = rnn.explain(x, torch.zeros(3, H))
    assert not found.is_recorded
    assert reason in found.record_reason
    assert f"CUDA graphs: no, the step {found.record_reason[9:]}" in str(found)
    for _ in range(2):
        rnn(x, torch.zeros(3, H))
    assert recorder.count == 0


def test_what_a_graph_can_record(recorder: type[Repeated]) -> None:
    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        eps = torch.distributions.Normal(x, 1.0, validate_args=False).rsample()
        return torch.where(eps > 0, h, eps)[:, [1, 0, 3, 2]] * torch.tensor(0.5)

    rnn = fusedrnn.Recurrent(By(step), cuda_graphs=True)
    assert rnn.explain(torch.randn(9, 3, H), torch.zeros(3, H)).is_recorded


def test_a_step_that_changes_its_mind(recorder: type[Repeated]) -> None:
    """One that draws more numbers later than in its first step is not recorded."""
    count = Unseen(0)

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        count.value += 1
        return h + x * torch.rand_like(x) + (torch.rand_like(x) if count.value > 6 else 0)

    rnn = fusedrnn.Recurrent(By(step), cuda_graphs=True)
    x = torch.randn(25, 3, H)
    with torch.no_grad():
        rnn(x, torch.zeros(3, H))
        count.value = -1
        with pytest.warns(UserWarning, match="must draw random numbers by the same functions"):
            rnn(x, torch.zeros(3, H))


def test_reasons_of_calls(recorder: type[Repeated]) -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), cuda_graphs=True)
    assert "fewer than 3 whole chunks" in rnn.explain(torch.randn(8, 3, H)).record_reason
    rnn(torch.randn(4, 3, H))
    del cuda_graphs.RECORDERS["cpu"]
    assert rnn.explain(torch.randn(9, 3, H)).record_reason == "the input is on cpu"
    cuda_graphs.RECORDERS["cpu"] = recorder
    with pytest.raises(TypeError, match="cuda_graphs must be a bool"):
        fusedrnn.Recurrent(nn.GRUCell(H, H), cuda_graphs="yes")  # type: ignore[arg-type]
