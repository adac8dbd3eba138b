"""The plain loop over a cell, which Recurrent must equal, and small cells to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedrnn.recurrent.noise import Noise, Seed
from fusedrnn.recurrent.reads import Watch

MODES = ["replay", "parallel"]


def at(tree: Any, time: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[time], tree)


def stack(trees: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def plain_loop(
    cell: nn.Module, input: Any, state: Any, *, reverse: bool = False, seed: int = 0
) -> tuple[Any, Any]:
    """Outputs and last state. A cell that returns its state alone has its first leaf as output."""
    seq_len, batch = pytree.tree_leaves(input)[0].shape[:2]
    noise = Noise(Seed(torch.Generator().manual_seed(seed)), 0)
    noise.chunk(0, seq_len, batch)
    structure = pytree.tree_structure(state)
    outputs = {}
    with Watch(noise):
        for time in range(seq_len)[:: -1 if reverse else 1]:
            noise.step(time)
            result = cell(at(input, time), state)
            if pytree.tree_structure(result) == structure:
                state, outputs[time] = result, pytree.tree_leaves(result)[0]
            else:
                outputs[time], state = result
    return stack([outputs[time] for time in range(seq_len)]), state


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(*trees: Any) -> Tensor:
    """Depends on every element of every tensor of floating point, each with a weight of its own."""
    total: Any = 0.0
    for leaf in pytree.tree_leaves(trees):
        if leaf.is_floating_point():
            weight = torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
            total = total + (leaf * leaf * weight).sum() + (leaf * weight).sum()
    return total  # type: ignore[no-any-return]


def leaves_with_gradient(*trees: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(trees)
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


def check_same(
    run: Callable[[], tuple[Any, Any]],
    expected: Callable[[], tuple[Any, Any]],
    leaves: Sequence[Tensor],
    tolerance: float = 1e-10,
    unused_is_zero: bool = False,
) -> None:
    """Results and gradients of all ``leaves``.

    Args:
        unused_is_zero: Whether a leaf without gradient may have one of zeros.
    """
    got, wanted = run(), expected()
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(loss_of(*got), leaves, allow_unused=True, retain_graph=True)
    exact = torch.autograd.grad(loss_of(*wanted), leaves, allow_unused=True)
    for mine, theirs in zip(gradients, exact, strict=True):
        if unused_is_zero:
            given = next((g for g in (mine, theirs) if g is not None), torch.zeros(()))
            mine, theirs = (torch.zeros_like(given) if g is None else g for g in (mine, theirs))
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiles by a backend that takes less time than the usual one, and counts graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend  # late: it imports the compiler

    counter = CompileCounterWithBackend("aot_eager")
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **named: compile(function, backend=counter, **named)
    )
    return counter


class Unseen:
    """A value of which nobody finds out that a step changes it, or somebody between two calls."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Mixed(nn.Module):
    """A state of two shapes and an output of its own, from an input of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 + 4 + 2, 6, dtype=torch.float64)

    def forward(self, input: dict[str, Tensor], state: dict[str, Any]) -> tuple[Any, Any]:
        h, (count, c) = state["h"], state["rest"]
        joined = torch.cat([input["x"], h, c[:, 0]], -1)
        made = torch.tanh(self.linear(joined)) * input["scale"].unsqueeze(-1)
        new = {"h": made[:, :4], "rest": (count + 1, c * 0.5 + made[:, None, 4:])}
        return (made.sum(-1), {"count": count}), new

    def initial_state(self, batch: int) -> dict[str, Any]:
        zeros = torch.zeros(batch, 6, dtype=torch.float64)
        counts = torch.zeros(batch, dtype=torch.int64)
        return {"h": zeros[:, :4], "rest": (counts, zeros[:, None, 4:])}


class Noisy(nn.Module):
    """Draws in all ways that are handed on."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, 2 * width, dtype=torch.float64)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.linear(torch.cat([x, h], -1)).chunk(2, -1)
        scale = nn.functional.softplus(scale)
        z = torch.distributions.Normal(loc, scale).rsample()
        z = self.dropout(z) + scale * torch.randn_like(z) + torch.rand(z.shape, dtype=z.dtype)
        logits = torch.stack([z, h], -1)
        hard = torch.distributions.OneHotCategoricalStraightThrough(logits=logits).rsample()
        soft = nn.functional.gumbel_softmax(logits, tau=0.7)
        late = torch.empty_like(z).exponential_(2.0) * torch.bernoulli(torch.sigmoid(h))
        return z, torch.tanh(hard[..., 0] * soft[..., 1] + z * late.detach() + 0.5 * h)
