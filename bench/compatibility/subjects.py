"""The columns: modules that a check can be about, each with its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn import reference


class NotAvailable(Exception):
    """The column does not have the feature."""


class Skipped(Exception):
    """What the check needs is not installed."""


class Wrong(Exception):
    """Values differ, or a call passed that should have been refused."""


class Slow(Exception):
    """Right, but compiled too often."""


# Unlike each other and all usual numbers of steps and rows: torch.compile takes equal sizes that it
# sees first for sizes that are always equal.
INPUT, HIDDEN, LATENT = 4, 6, 2
_LOOP_OPTIONS = ("num_layers", "bias", "batch_first", "bidirectional")
_TORCH_OPTIONS = (*_LOOP_OPTIONS, "dropout")


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
        kind: "fusedrnn", "loop" or "torch".
    """

    name: str
    cell: str
    kind: str
    make: Callable[..., nn.Module]

    @property
    def is_ours(self) -> bool:
        """Whether it is a module of fusedrnn."""
        return self.kind == "fusedrnn"

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

        Features are "fusedrnn", "noise", "lengths" (and reset), "packed" or the name of a cell.
        """
        has = {
            "fusedrnn": self.is_ours,
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
        known = {"loop": _LOOP_OPTIONS, "torch": _TORCH_OPTIONS}.get(self.kind, tuple(options))
        for name in options:
            is_projection = name == "proj_size"
            if (is_projection and self.cell != "lstm") or (
                name not in known and not (is_projection and self.kind == "torch")
            ):
                raise NotAvailable(name)
        if self.kind == "fusedrnn" and self.has_noise:
            options["latent_size"] = LATENT
        return self.make(INPUT, HIDDEN, dtype=dtype, **options)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("StochasticGRU", "stochastic_gru", "fusedrnn", fusedrnn.StochasticGRU),
        Subject("GRU", "gru", "fusedrnn", fusedrnn.GRU),
        Subject("LSTM", "lstm", "fusedrnn", fusedrnn.LSTM),
        Subject("plain loop", "stochastic_gru", "loop", LoopModule),
        Subject("nn.GRU", "gru", "torch", nn.GRU),
        Subject("nn.LSTM", "lstm", "torch", nn.LSTM),
    )
}
OURS = tuple(name for name, subject in SUBJECTS.items() if subject.is_ours)
# The column that says what each of our modules should do at least.
RIVALS = {"StochasticGRU": "plain loop", "GRU": "nn.GRU", "LSTM": "nn.LSTM"}


def flat(results: tuple[Any, Any]) -> tuple[Tensor, ...]:
    """output, h_n and, of an LSTM, c_n."""
    output, last = results
    return (output, last) if isinstance(last, Tensor) else (output, *last)


def hx_of(states: Sequence[Tensor]) -> Any:
    """The states as a module takes them."""
    return None if not states else states[0] if len(states) == 1 else tuple(states)
