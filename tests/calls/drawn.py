"""What a call draws at random, as its operators are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedrnn import _call as fused_call
from fusedrnn import _library


@dataclass
class Drawn:
    """What a call drew at random."""

    seed: Tensor | None = None  # of noise
    mask_seed: Tensor | None = None  # of dropout and zoneout
    # bool, what weight_dropout keeps of each weight; None for weights that it leaves alone.
    kept_weights: list[Tensor | None] = field(default_factory=list)


@contextlib.contextmanager
def noting(note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Calls ``note`` with the name and arguments of each operator that is called meanwhile."""
    operators = _library.operators

    class Noted:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                note(name, arguments, named)
                return getattr(operators, name)(*arguments, **named)

            return call

    with mock.patch.object(_library, "operators", Noted()):
        yield


@contextlib.contextmanager
def recorded_draws() -> Iterator[Drawn]:
    """Records what a call draws at random, as long as the context lasts."""
    drop, drawn = fused_call._drop_if_recurrent, Drawn()

    def note(name: str, arguments: Any, named: dict[str, Any]) -> None:
        if "backward" not in name:
            drawn.seed, drawn.mask_seed = named.get("seed"), named.get("mask_seed")

    def dropped(name: str, weight: Tensor, p: float) -> Tensor:
        before, ones = torch.get_rng_state(), torch.ones_like(weight)
        scales = drop(name, ones, p)
        drawn.kept_weights.append(None if scales is ones else scales != 0)
        torch.set_rng_state(before)
        return drop(name, weight, p)

    with noting(note), mock.patch.object(fused_call, "_drop_if_recurrent", dropped):
        yield drawn
