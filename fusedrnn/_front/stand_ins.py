"""Tensors in the place of one step's input and state, which torch.compile's guards look at.

Nobody reads their numbers, so they are kept from call to call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._step.trees import Leaves, differentiable

_MOST = 16
"""Kinds of leaves of which a cell's are kept."""


class StandIns:
    """Those of one cell."""

    def __init__(self) -> None:
        self._known: dict[Any, Leaves] = {}

    def of(self, leaves: Leaves, first: int, rows: int, is_input: bool) -> Leaves:
        """For each leaf one of the same kind, for one step.

        Args:
            first: The dimension of the batch, up to which none counts.
            rows: Of the stand-ins.
            is_input: Input and state have different ones, by which they are told apart.
        """
        key = (is_input, rows, *[(x.shape[first + 1 :], x.dtype, x.device) for x in leaves])
        found = self._known.get(key)
        if found is None:
            found = tuple([_stand_in(leaf, first, rows) for leaf in leaves])
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = found
        return found


def _stand_in(leaf: Tensor, first: int, rows: int) -> Tensor:
    shape = (rows, *leaf.shape[first + 1 :])
    with torch.inference_mode(False), torch.enable_grad():
        made = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        if differentiable(made):
            # As a state is from the second step of a loop on. Of one without a gradient,
            # torch.compile keeps no backward of a torch.autograd.Function. No leaf, because steps
            # may change it in place.
            made = made.requires_grad_() * 1
    torch._dynamo.maybe_mark_dynamic(made, 0)
    # Or else torch.compile would take other widths, which need other programs, for changing ones.
    # torch._dynamo.mark_static does this, but not while another thread is within torch.compile.
    made._dynamo_static_indices = set(range(1, made.dim()))  # type: ignore[attr-defined]
    return made
