"""Steps that run as compiled programs: which do, and how.

Everything that traces, lowers and builds is imported when the first program is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _library
from ..options import text_of
from .runs import Run
from .trees import Leaves
from .variables import names_in

if TYPE_CHECKING:
    from .._compile.cell import Program
    from .steps import Resets

AUTO, REQUIRE, NEVER = COMPILE = ("auto", "require", "never")

_MOST_KINDS = 8
"""Programs of one cell that differ in nothing but what Python decides: more would be built anew in
each call."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def check_compile(value: Any) -> None:
    """
    Raises:
        ValueError: It is no value of ``compile``.
    """
    if not isinstance(value, str) or value not in COMPILE:
        names = ", ".join(map(repr, COMPILE))
        raise ValueError(f"fusedrnn: compile must be one of {names}, got {text_of(value)}")


@dataclass(frozen=True)
class Masks:
    """Rows that end, and rows that start anew, as programs take them."""

    inputs: int
    """Leaves of the input that are the step's own."""
    lengths: Tensor | None
    """int64 on the CPU."""
    reset: Tensor | None
    """(seq_len, batch)."""
    resets: Resets | None
    """Which leaves of the state are set, and whether a sequence of values is among the inputs."""


class Programs:
    """The programs of one cell, by all that makes its step another one."""

    def __init__(self) -> None:
        self._known: dict[Any, Program | str] = {}
        self._kinds: dict[Any, int] = {}

    def of(self, run: Run, inputs: Leaves, state: Leaves) -> Program | str:
        """The program of a run, or why there is none."""
        kind = _kind(run, inputs, state)
        key = (kind, _python(run))
        found = self._known.get(key)
        if found is None:
            if run.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "a CUDA graph is being captured, and no call before it has made the program"
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
            if self._kinds[kind] > _MOST_KINDS:
                return "attributes of its modules change from call to call"
            found = self._known[key] = _compiled(run, inputs, state)
        return found


def _compiled(run: Run, inputs: Leaves, state: Leaves) -> Program | str:
    from .._compile.cell import compiled
    from .._compile.trace import CannotCompile

    try:
        return compiled(run, inputs, state)
    except CannotCompile as error:
        return str(error)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of the compiler itself: the steps in Python are right
        return f"the compiler raises {type(error).__name__}: {error}"


def _kind(run: Run, inputs: Leaves, state: Leaves) -> Any:
    """Structure, widths and dtypes."""
    weights = run.weights.trained() | run.weights.frozen()
    return (
        run.signature[:2],
        tuple((leaf.shape[2:], leaf.dtype) for leaf in inputs),
        tuple((leaf.shape[1:], leaf.dtype) for leaf in state),
        tuple((name, w.shape, w.dtype, w.requires_grad) for name, w in weights.items()),
        run.device,
    )


def _python(run: Run) -> Any:
    """What Python may decide by: modes, attributes, and variables of classes and modules."""
    modules = list(run.weights.used.modules())
    kinds = tuple(
        (
            type(m),
            m.training,
            *map(id, m._forward_hooks.values()),
            *map(id, m._forward_pre_hooks.values()),
        )
        for m in modules
    )
    attributes = tuple(
        (key, _plain(value.value if value.entries is None else value.entries))
        for key, value in run.python.values().items()
    )
    around = tuple(part for kind in dict.fromkeys(map(type, modules)) for part in _around(kind))
    return kinds, attributes, around


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, dict):
        return tuple((repr(k), _plain(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_plain, value))
    return id(value)


_names: dict[type, tuple[tuple[Any, tuple[str, ...]], ...]] = {}


def _around(kind: type[nn.Module]) -> Iterator[Any]:
    """Plain values that a class of the user's has, or that its methods find around them."""
    if kind not in _names:
        found: list[tuple[Any, tuple[str, ...]]] = []
        for base in kind.__mro__:
            if base.__module__.startswith(("torch.", "fusedrnn.", "builtins")):
                continue
            found.append((base, tuple(n for n, v in vars(base).items() if isinstance(v, _PLAIN))))
            for function in vars(base).values():
                if isinstance(function, FunctionType):
                    found.append((function.__globals__, tuple(sorted(names_in(function.__code__)))))
        _names[kind] = tuple(found)
    for space, names in _names[kind]:
        variables = space if isinstance(space, dict) else vars(space)
        for name in names:
            value = variables.get(name)
            if isinstance(value, _PLAIN):
                yield name, repr(value)


def choose_program(
    run: Run, compile: str, others: str, programs: Programs, inputs: Leaves, state: Leaves
) -> Program | str:
    """The program that a call takes, or why it takes none.

    Args:
        others: Why other options exclude programs, or nothing.

    Raises:
        RuntimeError: ``compile`` is "require", and there is none.
    """
    found: Program | str
    if compile == NEVER:
        return "compile says so"
    found = others or _obstacle(run, inputs, state)
    if not found:
        assert run.masks is not None
        found = programs.of(run, inputs[: run.masks.inputs], state)
    if compile == REQUIRE and isinstance(found, str):
        raise RuntimeError(f"fusedrnn: the cell{run.place} cannot be compiled: {found}")
    return found


def _obstacle(run: Run, inputs: Leaves, state: Leaves) -> str:
    """Why a call takes no program, whatever its step is; or nothing."""
    if os.environ.get("FUSEDRNN_COMPILE") == "0":
        return "FUSEDRNN_COMPILE=0 says so"
    if run.masks is None:
        return "programs are for Recurrent"
    if run.autocast[0]:
        return "autocast is on"
    if run.device.type not in ("cpu", "cuda"):
        return f"programs run on a CPU or a GPU of NVIDIA's, and the input is on {run.device}"
    if run.device.type == "cuda" and _library.cuda is None:
        return _library.cuda_obstacle or "the CUDA kernels are not loaded"
    if run.rows == 0 or run.seq_len == 0:
        return "there is nothing to compute"
    if torch._C._len_torch_dispatch_stack():
        return "a mode of torch looks at all operations"
    leaves = (*inputs, *state, *run.weights.trained().values(), *run.weights.frozen().values())
    for leaf in leaves:
        if type(leaf) not in (Tensor, nn.Parameter, nn.Buffer):
            return f"a tensor is a {type(leaf).__name__}"
        if leaf.device != run.device:
            return f"a weight is on {leaf.device}"
    return ""
