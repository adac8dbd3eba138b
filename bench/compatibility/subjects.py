"""The columns: modules that a check can be about, each with its reference."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn import reference

from .own_cell import OfOwnCells


class NotAvailable(Exception):
    """The column does not have the feature."""


class Skipped(Exception):
    """What the check needs is not installed."""


class Wrong(Exception):
    """Values differ, or a call passed that should have been refused."""


class Slow(Exception):
    """Right, but compiled too often."""


def package(name: str) -> Any:
    """An imported module of an optional package.

    Raises:
        Skipped: The package is not installed.
    """
    root = name.partition(".")[0]
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:  # without an origin it is a folder of that name
        raise Skipped(f"{root} is not installed")
    return importlib.import_module(name)


def distributed(name: str = "") -> Any:
    """torch.distributed, or a module of it.

    Raises:
        Skipped: torch was built without it.
    """
    if not torch.distributed.is_available():
        raise Skipped("torch has no torch.distributed")
    return importlib.import_module(f"torch.distributed.{name}".rstrip("."))


# In the message of a Recurrent that must be compiled.
NOT_COMPILED = "cannot be compiled"

# Unlike each other and all usual numbers of steps and rows: torch.compile takes equal sizes that it
# sees first for sizes that are always equal.
INPUT, HIDDEN, LATENT = 4, 6, 2
_LOOP_OPTIONS = ("num_layers", "bias", "batch_first", "bidirectional")
_OPTIONS = {
    "loop": _LOOP_OPTIONS,
    "torch": (*_LOOP_OPTIONS, "dropout"),
    "recurrent": (*_LOOP_OPTIONS, "return_sequence", "recompute"),
}


class LoopModule(nn.Module):
    """A StochasticGRU as it is written by hand: a loop over the steps, in plain torch."""

    def __init__(
        self, input_size: int, hidden_size: int, *, dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__()
        made = fusedrnn.StochasticGRU(input_size, hidden_size, LATENT, dtype=dtype, **options)
        for name, weight in made.named_parameters():
            self.register_parameter(name, nn.Parameter(weight.detach().clone()))
        self.options, self.names = options, [name for name, _ in made.named_parameters()]

    def forward(
        self, input: Tensor, hx: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        """As :func:`fusedrnn.reference.stochastic_gru`."""
        weights = [getattr(self, name) for name in self.names]
        return reference.stochastic_gru(input, weights, hx, **self.options, **arguments)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Subject:
    """A column.

    Attributes:
        name: Its heading.
        cell: In the names of fusedrnn.
        kind: "built-in" or "recurrent", which are of fusedrnn, "loop" or "torch".
        make_by_default: Where ``make`` makes modules that refuse to take their steps in Python.
    """

    name: str
    cell: str
    kind: str
    make: Callable[..., nn.Module]
    make_by_default: Callable[..., nn.Module] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is a module of fusedrnn."""
        return self.is_built_in or self.kind == "recurrent"

    @property
    def is_built_in(self) -> bool:
        """Whether it is a layer of fusedrnn with a cell of fusedrnn."""
        return self.kind == "built-in"

    @property
    def by_default(self) -> Subject:
        """The column with modules as users make them."""
        return replace(self, make=self.make_by_default or self.make)

    @property
    def has_noise(self) -> bool:
        """Whether its cell draws a latent."""
        return self.cell == "stochastic_gru"

    @property
    def state_count(self) -> int:
        """How many tensors a state has."""
        return 2 if self.cell == "lstm" else 1

    def needs(self, *features: str) -> None:
        """Leaves the check if the column lacks one of the features.

        Features are "fusedrnn" (any module of it), "built-in" (a layer of it), "noise", "lengths"
        (and reset), "packed", "unbatched" or the name of a cell.
        """
        has = {
            "fusedrnn": self.is_ours,
            "built-in": self.is_built_in,
            "noise": self.has_noise,
            "lengths": self.kind != "torch",
            "packed": self.kind != "loop",
            "unbatched": self.kind != "loop",
            self.cell: True,
        }
        for feature in features:
            if not has.get(feature, False):
                raise NotAvailable(feature)

    def module(self, *, dtype: torch.dtype, **options: Any) -> nn.Module:
        """A module of the common sizes."""
        known = _OPTIONS.get(self.kind, tuple(options))
        for name in options:
            is_projection = name == "proj_size"
            if (is_projection and self.cell != "lstm") or (
                name not in known and not (is_projection and self.kind == "torch")
            ):
                raise NotAvailable(name)
        if self.is_built_in and self.has_noise:
            options["latent_size"] = LATENT
        return self.make(INPUT, HIDDEN, dtype=dtype, **options)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("StochasticGRU", "stochastic_gru", "built-in", fusedrnn.StochasticGRU),
        Subject("GRU", "gru", "built-in", fusedrnn.GRU),
        Subject("LSTM", "lstm", "built-in", fusedrnn.LSTM),
        Subject("Recurrent", "gru", "recurrent", OfOwnCells, partial(OfOwnCells, compile="auto")),
        Subject("plain loop", "stochastic_gru", "loop", LoopModule),
        Subject("nn.GRU", "gru", "torch", nn.GRU),
        Subject("nn.LSTM", "lstm", "torch", nn.LSTM),
    )
}
OURS = tuple(name for name, subject in SUBJECTS.items() if subject.is_ours)
# The column that says what each of our modules should do at least.
RIVALS = {
    "StochasticGRU": "plain loop",
    "GRU": "nn.GRU",
    "LSTM": "nn.LSTM",
    "Recurrent": "plain loop",
}


def flat(results: tuple[Any, Any]) -> tuple[Tensor, ...]:
    """output, h_n and, of an LSTM, c_n."""
    output, last = results
    return (output, last) if isinstance(last, Tensor) else (output, *last)


def hx_of(states: Sequence[Tensor]) -> Any:
    """The states as a module takes them."""
    return None if not states else states[0] if len(states) == 1 else tuple(states)
