"""A step from one list of tensors to another one, whose draws and stops are operations.

What leaves nothing in a graph of operations becomes an operation of its own: ``detach`` and
``no_grad`` a :data:`stop`, random numbers a :data:`draw`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._step.noise import MOST_DRAWS, NumberSource
from .._step.torch_draws import DRAWS
from .._step.user_lines import line, user_line
from .refusals import CannotCompile

ROWS = 3
"""Of the batch that is traced."""

_library = torch.library.Library("fusedrnn_step", "DEF")

_library.define("stop(Tensor x) -> Tensor")

_library.impl("stop", lambda x: x.clone(), "CompositeExplicitAutograd")
_library.define("kept(Tensor x) -> Tensor")
_library.impl("kept", lambda x: x.clone(), "CompositeExplicitAutograd")
_library.define("rounded(Tensor x) -> Tensor")
_library.impl("rounded", lambda x: x.clone(), "CompositeExplicitAutograd")
_library.define("joined(Tensor high, Tensor low) -> Tensor")
_library.impl("joined", lambda high, low: high + low, "CompositeExplicitAutograd")
_library.define("draw(Tensor like, int number, int[] shape, ScalarType dtype) -> Tensor")

_library.impl(
    "draw",
    lambda like, number, shape, dtype: torch.full(shape, 0.4, dtype=dtype, device=like.device),
    "CompositeExplicitAutograd",
)

stop = torch.ops.fusedrnn_step.stop
"""The identity, with a derivative of zero."""

kept = torch.ops.fusedrnn_step.kept
"""The identity; its operand is computed by a stage of its own."""

rounded = torch.ops.fusedrnn_step.rounded
"""The identity of float32; its stage computes in float64, and rounds here."""

joined = torch.ops.fusedrnn_step.joined
"""The sum of a number that has been rounded and of what that has lost; so is its gradient."""

draw = torch.ops.fusedrnn_step.draw
"""The numbers of a draw of the step."""


class DrawnNumbers(NamedTuple):
    """One draw of the step, in the order in which it draws."""

    distribution: int
    width: int
    """Numbers for each row of the batch."""


StepOfLists = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[Any, Any]]
"""Constants, inputs and carries to new carries and outputs."""


def _no_step(*_: object) -> Any:
    raise AssertionError("this step is there for its arguments alone")


class FlatStep:
    """A step from one list of tensors to another one, with its draws and stops as operations."""

    def __init__(
        self,
        step: StepOfLists,
        constants: Sequence[Tensor],
        inputs: Sequence[Tensor],
        carries: Sequence[Tensor],
        rows: int = ROWS,
        names: Sequence[str] = (),
    ) -> None:
        """
        Args:
            rows: Of inputs and carries; a trace is of ROWS.
            names: Of constants, which the step must not change.
        """
        self._step, self._rows, self._names = step, rows, names
        self.ends = (len(constants), len(constants) + len(inputs))
        self.arguments = [*constants, *inputs, *carries]
        self.draws: list[DrawnNumbers] = []
        self.count = 0
        """Of results that are states; outputs come behind them."""

    def __call__(self, *given: Tensor, notes_lines: bool = True) -> tuple[Tensor, ...]:
        """
        Args:
            notes_lines: Whether operations get their lines, which takes as long as a small one.
        """
        first, second = self.ends
        source = _Draws(given[first] if len(given) > first else given[0], self._rows)
        constants = zip(self._names, given, strict=False)
        with torch.enable_grad(), _Seen(source, notes_lines, constants):
            new, y = self._step(given[:first], given[first:second], given[second:])
        self.draws, self.count = source.draws, len(new)
        return (*new, *y)

    def without_step(self) -> FlatStep:
        """What it has drawn, for ``of_graph()`` of _compiler/trace.py, which may run later. Neither
        the step nor its weights are held."""
        made = copy.copy(self)
        made._step, first = _no_step, self.ends[0]
        zeros = [torch.empty_like(t, device="meta") for t in self.arguments[:first]]
        made.arguments = [*zeros, *self.arguments[first:]]
        return made


class _Draws(NumberSource):
    """Random numbers as operations of the graph."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.draws: list[DrawnNumbers] = []
        self._like, self._rows = like, rows

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        if not shape or shape[0] % self._rows:
            raise CannotCompile(
                f"the step draws random numbers of shape {tuple(shape)}, which does not have the "
                f"batch as its first dimension{line()}"
            )
        number = len(self.draws)
        if number >= MOST_DRAWS:
            raise CannotCompile(f"the step draws random numbers more than {MOST_DRAWS} times")
        self.draws.append(DrawnNumbers(distribution, math.prod(shape) // self._rows))
        made: Tensor = draw(self._like, number, list(shape), dtype)
        return made


_ASSIGNMENTS = {
    f"__i{name}__"
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
}

_ASSIGNMENTS |= {"__setitem__"}


def _changed(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What a function of torch's changes that it has not just made."""
    name: str = getattr(function, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith(("__", "requires_grad_"))
    found = [kwargs["out"]] if kwargs.get("out") is not None else []
    if (is_in_place or name in _ASSIGNMENTS) and function not in DRAWS:
        found += args[:1]
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


class _Seen(TorchFunctionMode):
    """Draws, and what cuts derivatives, become operations; every operation gets its line."""

    def __init__(
        self, source: _Draws, notes_lines: bool, constants: Iterable[tuple[str, Tensor]]
    ) -> None:
        super().__init__()
        self._source, self._notes_lines = source, notes_lines
        self._constants = {_memory(tensor): name for name, tensor in constants}
        self._stopped: list[Tensor] = []
        """Of which there is a detached tensor, which a stop has copied."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if changed := _changed(function, args, kwargs):
            with torch._C.DisableTorchFunction():
                self._check_changes(set(map(_memory, changed)))
        if self._notes_lines:
            fx_traceback.current_meta["stack_trace"] = user_line()
        drawn = DRAWS.get(function)
        if drawn is not None:
            kwargs.pop("generator", None)
            with self:  # what is made of the numbers is seen, too
                result = drawn(self._source, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if function is torch.Tensor.detach or not torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                if function is torch.Tensor.detach:
                    self._stopped.append(args[0])
                result = pytree.tree_map_only(
                    Tensor, lambda t: stop(t) if t.is_floating_point() else t, result
                )
        return result

    def _check_changes(self, changed: set[int]) -> None:
        """
        Args:
            changed: Memory.

        Raises:
            CannotCompile: A program would not change it.
        """
        for memory, name in self._constants.items():
            if memory in changed:
                raise CannotCompile(f"the step changes {name} in place{line()}")
        if any(_memory(stopped) in changed for stopped in self._stopped):
            # A stop is a copy, which does not change with what it is a copy of.
            raise CannotCompile(f"the step changes a tensor in place after a detach{line()}")


def _memory(tensor: Tensor) -> int:
    """What the views of one tensor of a trace have in common."""
    return getattr(tensor, "elem", tensor).untyped_storage()._cdata  # what a tracer wraps
