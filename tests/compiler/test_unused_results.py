"""Results without gradient have no part in the gradients of others, not even infinity times 0."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import pytest
import torch
from compiler.interpreted import interpreted
from runtime.plain import loop
from torch import Tensor, nn

import fusedrnn
from fusedrnn._runtime import program_autograd

T, B, H = 4, 2, 3


class Watched(nn.Module):
    """Results whose derivatives are infinite where the state, or its norm, is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(H, H), nn.Linear(H, H)
        self.double()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[object, object]:
        h, norms = state
        new = torch.tanh(self.linear(x) + h)
        norm = h.square().sum(-1, keepdim=True).sqrt()
        root = self.head((self.head(h) - self.head.bias).abs().sqrt())
        return (new, torch.cat([h, root], -1), norm), (new, (norms + norm).expand_as(norms))


class Entropy(nn.Module):
    """A state that only an unused output reads, and its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.double()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[object, object]:
        h, p = state
        new = torch.tanh(self.linear(x) + h)
        return (new, p * p.log1p()), (new, (p + torch.relu(x)).sqrt())


def given(zeros: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(T, B, H).double()
    if zeros:
        return x, [torch.zeros(B, H).double().requires_grad_() for _ in range(2)]
    return x, [torch.rand(B, H).double().requires_grad_() for _ in range(2)]


def gradients(
    results: Sequence[Tensor], used: Sequence[bool], leaves: list[Tensor]
) -> list[Tensor]:
    torch.manual_seed(1)
    loss = sum((y * torch.randn_like(y)).sum() for y, u in zip(results, used, strict=True) if u)
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)]


def results_of(made: tuple[object, object]) -> list[Tensor]:
    outputs, last = made
    return [*outputs, *last]  # type: ignore[misc]


@pytest.mark.parametrize("kind", [pytest.param(Watched, marks=pytest.mark.slow), Entropy])
@pytest.mark.parametrize("zeros", [True, False])
def test_any_results_may_be_used(kind: type[nn.Module], zeros: bool) -> None:
    torch.manual_seed(0)
    cell = kind()
    x, state = given(zeros)
    leaves = [*state, *cell.parameters()]
    theirs = results_of(loop(cell, x, tuple(state)))
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("error")  # the plain loop would warn
        rnn = fusedrnn.Recurrent(cell, compile="require")
        for used in itertools.product([True, False], repeat=len(theirs)):
            wanted = gradients(results_of(loop(cell, x, tuple(state))), used, leaves)
            found = gradients(results_of(rnn(x, tuple(state))), used, leaves)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("returns_sequence", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_a_library_of_its_own(dtype: torch.dtype, returns_sequence: bool, recompute: bool) -> None:
    """Forward's chunks, noise and results serve the program for backward."""
    torch.manual_seed(0)
    cell = Watched().to(dtype)
    x, (h, norms) = given(zeros=True)
    x, h, norms = x.to(dtype), h.detach().to(dtype).requires_grad_(), norms.detach().to(dtype)
    rnn = fusedrnn.Recurrent(
        cell,
        compile="require",
        chunk_size=2,
        return_sequence=returns_sequence,
        recompute=recompute,
    )
    (y, _, norm), _ = rnn(x, (h, norms))
    exact = Watched().double()
    exact.load_state_dict(cell.state_dict())
    h64 = h.detach().double().requires_grad_()
    (y64, _, _), _ = loop(
        exact, x.double(), (h64, norms.double()), returns_sequence=returns_sequence
    )
    found = torch.autograd.grad(y.sum(), [h, *cell.linear.parameters()])
    wanted = torch.autograd.grad(y64.sum(), [h64, *exact.linear.parameters()])
    if returns_sequence:
        assert norm[0].eq(0).all()
    off = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=off, atol=off * b.abs().max().item())


def test_weights_of_unused_results_have_no_gradient() -> None:
    """As in a loop: zeros would have optimizers decay such weights."""
    x, state = given(zeros=False)
    cell = Watched()
    with interpreted():
        (y, root, _), _ = fusedrnn.Recurrent(cell, compile="require")(x, tuple(state))
        y.sum().backward(retain_graph=True)
        assert cell.head.weight.grad is None is cell.head.bias.grad
        assert cell.linear.weight.grad is not None
        root.sum().backward()
        assert cell.head.weight.grad is not None


def test_inputs_and_states_of_unused_results_have_no_gradient() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.GRUCell(H, H) for _ in range(2)])
            self.double()

        def forward(self, x: Sequence[Tensor], state: Sequence[Tensor]) -> object:
            new = [cell(*given) for cell, *given in zip(self.cells, x, state, strict=True)]
            return tuple(new), tuple(new)

    x = [torch.randn(T, B, H).double().requires_grad_() for _ in range(2)]
    state = [torch.randn(B, H).double().requires_grad_() for _ in range(2)]
    cell, found = Apart(), []
    for compile in ("require", "never"):
        with interpreted():
            (_, y), _ = fusedrnn.Recurrent(cell, compile=compile)(tuple(x), tuple(state))
            leaves = [*x, *state, *cell.parameters()]
            found.append(torch.autograd.grad(y.square().sum(), leaves, allow_unused=True))
    assert found[0][0] is None is found[0][2] and found[0][1] is not None is not found[0][3]
    for ours, theirs in zip(*found, strict=True):
        if ours is None:
            assert theirs is None or not theirs.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("padding", [0, 6, -1])
def test_rows_of_padding_have_no_gradient(padding: int) -> None:
    """Of an embedding, wherever a sequence has them; the first steps have none."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, H, padding_idx=padding)
            self.other, self.cell = nn.Embedding(7, H), nn.GRUCell(H, H)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            shared = torch.nn.functional.embedding(x, self.other.weight, padding_idx=2)
            return self.cell(self.table(x) + self.other(x) * shared, h)

    cell = Tokens().double()
    tokens = torch.randint(1, 6, (T, B))
    tokens[T - 1, 0] = padding % 7
    h, found = torch.zeros(B, H).double(), []
    for compile in ("require", "never"):
        with interpreted():
            y, _ = fusedrnn.Recurrent(cell, compile=compile)(tokens, h)
            found.append(torch.autograd.grad(y.square().sum(), [*cell.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not found[0][0][padding].any()


@pytest.mark.parametrize("pad", [-100, 7])
def test_integers_behind_ends_are_not_looked_at(pad: int) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.cell = nn.Embedding(7, H), nn.GRUCell(H, H)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.cell(self.table(x), h)

    lengths = [T, 1]
    tokens = torch.randint(7, (T, B))
    padded = tokens.clone()
    padded[1:, 1] = pad
    for first in (padded, tokens):
        with interpreted():
            rnn = fusedrnn.Recurrent(Tokens().double(), compile="require")
            h = torch.zeros(B, H).double()
            rnn(first, h, lengths)
            ours, theirs = (rnn(given, h, lengths)[0] for given in (padded, tokens))
        torch.testing.assert_close(ours, theirs)


def test_one_program_for_each_set_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    make = program_autograd.without_unused

    def noted(program: object, *given: object) -> object:
        calls.append(make(program, *given))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr(program_autograd, "without_unused", noted)
    cell = Watched()
    x, state = given(zeros=True)
    with interpreted():
        rnn = fusedrnn.Recurrent(cell, compile="require")
        for _ in range(2):
            (y, _, norm), _ = rnn(x, tuple(state))
            y.sum().backward()
        (y, _, norm), _ = rnn(x, tuple(state))
        (y.sum() + norm.sum()).backward()
    first, again, third = calls
    assert first is again is not third is not None


def test_where_none_can_be_built_steps_are_taken_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fusedrnn._front.refusals import CannotCompile
    from fusedrnn._runtime import find_program

    def fail(*_: object) -> None:
        raise CannotCompile("for this test")

    x, state = given(zeros=True)
    cell = Watched()
    leaves = [*state, *cell.linear.parameters()]
    with interpreted(makes_all_anew=True):
        rnn = fusedrnn.Recurrent(cell, compile="require")
        (y, _, _), _ = rnn(x, tuple(state))
        monkeypatch.setattr(find_program, "without_unused_results", fail)
        with pytest.warns(UserWarning, match="of only some results"):
            found = torch.autograd.grad(
                y.sum(), [*state, *cell.linear.parameters()], allow_unused=True
            )
    (y, _, _), _ = loop(cell, x, tuple(state))
    wanted = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None or not a.any()) if b is None else torch.allclose(a, b)
