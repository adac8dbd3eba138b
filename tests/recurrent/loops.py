"""What Recurrent must equal: the plain loop over a cell or a step; small cells to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from runtime.plain import at, loss_of, stacked
from runtime.plain import loop as plain_loop
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn._step.noise import Seed

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 1": {"chunk_size": 1},
    "chunks of 3": {"chunk_size": 3},
    "one chunk": {"chunk_size": 100},
    "last output": {"return_sequence": False},
    "no recomputation": {"recompute": False},
}
"""Options that leave numbers alone: any step by each of them is the plain loop."""
F64 = torch.float64


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, requires_grad=True)


def scan_loop(
    step: Callable[..., Any], state: Any, inputs: Any, *params: Any, reverse: bool = False
) -> tuple[Any, Any]:
    """As fusedrnn.scan."""
    outputs = {}
    times = range(len(pytree.tree_leaves(inputs)[0]))
    for time in times[:: -1 if reverse else 1]:
        state, outputs[time] = step(state, at(inputs, time), *params)
    return state, stacked([outputs[time] for time in times])


def linear(width: int) -> nn.Linear:
    return nn.Linear(width, width, dtype=F64)


def twice(h: Tensor) -> tuple[Tensor, Tensor]:
    """A state that is the output, too."""
    return h, h


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def leaves_with_gradient(*trees: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(trees)
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


def check_same(
    run: Callable[[], tuple[Any, Any]],
    expected: Callable[[], tuple[Any, Any]],
    leaves: Sequence[Tensor],
    tolerance: float = 1e-10,
    unused_is_zero: bool = False,
    their_leaves: Sequence[Tensor] | None = None,
) -> None:
    """Results and gradients of all ``leaves``.

    Args:
        unused_is_zero: Whether a leaf without gradient may have one of zeros.
        their_leaves: The leaves of ``expected`` where they are others, as those of a copied cell.
    """
    got, wanted = run(), expected()
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(loss_of(*got), leaves, allow_unused=True, retain_graph=True)
    other = leaves if their_leaves is None else their_leaves
    exact = torch.autograd.grad(loss_of(*wanted), other, allow_unused=True, retain_graph=True)
    for mine, theirs in zip(gradients, exact, strict=True):
        if unused_is_zero:
            given = next((g for g in (mine, theirs) if g is not None), torch.zeros(()))
            mine, theirs = (torch.zeros_like(given) if g is None else g for g in (mine, theirs))
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def check_cell(cell: nn.Module, x: Any, h: Any, *more: Any, **options: Any) -> fusedrnn.Recurrent:
    """Recurrent is the plain loop over a cell, for all that needs a gradient; ``more`` as well.

    In two calls: the second one has what the first one has found, and takes CUDA graphs. All random
    numbers come from the generator of the call, and torch's own is left as it was.
    """
    rnn = fusedrnn.Recurrent(cell, **options)

    def expected(given: torch.Generator) -> tuple[Any, Any]:
        seed, before = Seed(given), torch.get_rng_state()
        output, state = with_numbers_of(given, lambda: plain_loop(cell, x, h, seed=seed))
        if seed.is_drawn:  # it comes before all that torch draws
            given.set_state(after_seed(generator()).get_state())
            output, state = with_numbers_of(given, lambda: plain_loop(cell, x, h, seed=seed))
        torch.set_rng_state(before)
        return output if options.get("return_sequence", True) else at(output, -1), state

    leaves = leaves_with_gradient(x, h, list(cell.parameters()), more)
    for _ in range(2):
        before, mine, theirs = torch.get_rng_state(), generator(), generator()
        check_same(lambda: rnn(x, h, generator=mine), lambda: expected(theirs), leaves)  # noqa: B023
        assert torch.equal(mine.get_state(), theirs.get_state())
        assert torch.equal(torch.get_rng_state(), before)
    return rnn


def after_seed(given: torch.Generator) -> torch.Generator:
    Seed(given).on(torch.device("cpu"))
    return given


def with_numbers_of(given: torch.Generator, run: Callable[[], Any]) -> Any:
    """``run()``, for which functions of torch go on with the numbers of this generator."""
    torch.set_rng_state(given.get_state())
    results = run()
    given.set_state(torch.get_rng_state())
    return results


def check_scan(
    step: Callable[..., Any], h: Any, xs: Any, *params: Any, more: Any = (), **options: Any
) -> None:
    """``scan`` is the loop over a step, for all that needs a gradient; ``more`` as well."""

    def expected() -> tuple[Any, Any]:
        reverse = options.get("reverse", False)
        state, output = scan_loop(step, h, xs, *params, reverse=reverse)
        last = at(output, 0 if reverse else -1)
        return state, output if options.get("return_sequence", True) else last

    leaves = leaves_with_gradient(h, xs, params, more)
    for _ in range(2):
        check_same(lambda: fusedrnn.scan(step, h, xs, *params, **options), expected, leaves)


class Unseen:
    """A value of which nobody finds out that a step changes it, or somebody between two calls."""

    def __init__(self, value: Any) -> None:
        self._held = SimpleQueue[Any]()  # which shows nobody what it holds
        self._held.put(value)

    @property
    def value(self) -> Any:
        value = self._held.get()
        self._held.put(value)
        return value

    @value.setter
    def value(self, value: Any) -> None:
        self._held.get()
        self._held.put(value)


class By(nn.Module):
    """A step by any function of the cell, its input and its state, with attributes to read."""

    def __init__(self, function: Callable[[Any, Any, Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any, state: Any) -> Any:
        return self.function(self, x, state)


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
