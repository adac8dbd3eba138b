"""Gradients that other ranks have not seen yet."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .gradients import Gradient


class _Shown(NamedTuple):
    """What ``.grad`` of a parameter was made."""

    grad: Tensor
    is_own: bool
    """Whether it is the one that waits, and not another that was there."""
    version: int


class Waiting:
    """The gradient of a task, until ranks exchange it."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self._shown: dict[int, _Shown] = {}

    def show(self) -> None:
        """Has it in ``.grad`` while it waits, so that who discards that discards it, too."""
        for i, grad in enumerate(self.gradient.results()):
            if grad is not None:
                parameter = self.gradient.layout.parameters[i]
                is_own = parameter.grad is None
                shown = grad if parameter.grad is None else parameter.grad
                parameter.grad = shown
                self._shown[i] = _Shown(shown, is_own, shown._version)

    def hide(self) -> bool:
        """Undoes ``show``, and forgets what was discarded since. Returns whether some is left."""
        for i, (shown, is_own, version) in self._shown.items():
            parameter = self.gradient.layout.parameters[i]
            is_kept = parameter.grad is shown
            if is_kept and is_own:
                parameter.grad = None
            elif is_kept and shown._version != version:
                is_kept = bool(shown.any())  # zero_grad(set_to_none=False)
            if not is_kept:
                self.gradient.discard(i)
        self._shown.clear()
        return any(self.gradient.present)
