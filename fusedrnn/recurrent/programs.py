"""Steps that run as compiled programs: which do, and how.

Everything that traces, lowers and builds is imported when the first program is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..options import text_of
from .chance import Chance
from .objects import NoKey, TooMuch
from .obstacles import obstacle_to_programs, unusual_weight
from .runs import Run
from .surroundings import surroundings
from .trees import Leaves

if TYPE_CHECKING:
    from .._compile.cell import Program
    from .steps import Resets

AUTO, REQUIRE, NEVER = COMPILE = ("auto", "require", "never")

_MOST_KINDS = 8
"""Programs of one cell that differ in nothing but what Python decides: more would be built anew in
each call."""
_CHANGING = (
    "numbers or objects that it reads in Python change from call to call; make them buffers or "
    "inputs"
)


def check_compile(value: Any) -> None:
    """
    Raises:
        ValueError: It is no value of ``compile``.
    """
    if not isinstance(value, str) or value not in COMPILE:
        names = ", ".join(map(repr, COMPILE))
        raise ValueError(f"fusedrnn: compile must be one of {names}, got {text_of(value)}")


_MOST_KEYS = 128
"""By which programs are found: more would be those of values that each call has only once."""
MOST_ROWS = 64
"""Of a batch by whose size a step may decide: larger ones count as this one."""


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

    def within_ends(self, inputs: Leaves) -> Leaves:
        """Inputs with 0 for integers behind the ends of rows, where there may be anything."""
        if self.lengths is None:
            return inputs
        made = list(inputs)
        for i, leaf in enumerate(made[: self.inputs]):
            if not leaf.is_floating_point() and leaf.dtype != torch.bool:
                times = torch.arange(leaf.shape[0], device=leaf.device)[:, None]
                ended = times >= self.lengths.to(leaf.device)
                made[i] = leaf.masked_fill(ended.view(*ended.shape, *(1,) * (leaf.dim() - 2)), 0)
        return tuple(made)


class Programs:
    """The programs of one cell, by all that makes its step another one."""

    def __init__(self) -> None:
        self._known: dict[Any, Program | str] = {}
        self._kinds: dict[Any, int] = {}
        self._too_much = ""
        """Why none is looked for."""
        self._no_key = ""
        """Why the last call did not look for one."""
        self._has_warned = False

    def of(self, run: Run, inputs: Leaves, state: Leaves) -> Program | str:
        """The program of a run, or why there is none."""
        if self._too_much:
            return self._too_much
        try:
            kind = _kind(run, inputs, state)
            key = _key(kind, run)
            found = self._known.get(key)
        except NoKey as error:
            self._no_key = error.reason(run.python) if isinstance(error, Chance) else str(error)
            self._too_much = self._no_key if isinstance(error, TooMuch) else ""  # that took a while
            return self._no_key
        except Exception as error:  # of an object that does not let itself be looked at
            if what := unusual_weight(run):
                return what
            return f"looking at what its modules hold raises {type(error).__name__}: {error}"
        return found if found is not None else self._new(kind, key, run, inputs, state)

    def _new(self, kind: Any, key: Any, run: Run, inputs: Leaves, state: Leaves) -> Program | str:
        if run.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and no call before it has made the program"
        count = self._kinds.get(kind, 0)
        if count >= _MOST_KINDS:
            return _CHANGING
        same = self._same(kind, run, inputs, state)
        if same is not None:
            return self._keep(key, same)
        if what := unusual_weight(run):
            return self._keep(key, what)
        found, is_lasting = _compiled(run, inputs, state)
        before, key = key, key if isinstance(found, str) else _key(kind, run)
        if key != before:  # maybe the step keeps what it computes once
            found, is_lasting = _compiled(run, inputs, state)
            if _key(kind, run) != key:
                self._kinds[kind] = count + _MOST_KINDS // 2
                return (
                    "the step changes what it reads in Python: an object in another one, an array, "
                    "or a variable of a class or of a Python module"
                )
        if is_lasting:
            self._kinds[kind] = count + 1
            self._keep(key, found)
        return found

    def _same(self, kind: Any, run: Run, inputs: Leaves, state: Leaves) -> Program | None:
        """A program of a step that does the same, though something has changed in Python."""
        known = [p for (k, *_), p in self._known.items() if k == kind and not isinstance(p, str)]
        others = list({id(program): program for program in known}.values())
        if not others:
            return None
        from .._compile.first_use import same_as

        found, _ = _made(lambda: same_as(others, run, inputs, state))
        return None if isinstance(found, str) else found

    def warn_once(self, reason: str, place: str) -> None:
        """Of a cell that was compiled before, and is no longer."""
        if reason not in (_CHANGING, self._no_key) or self._has_warned:
            return
        if all(isinstance(known, str) for known in self._known.values()):
            return  # as of any cell that never was: explain() says why
        self._has_warned = True
        warnings.warn(
            f"fusedrnn: the cell{place} is no longer compiled, because {reason}", stacklevel=2
        )

    def _keep(self, key: Any, found: Program | str) -> Program | str:
        self._known[key] = found
        if len(self._known) > _MOST_KEYS:
            del self._known[next(iter(self._known))]
        return found


def _key(kind: Any, run: Run) -> Any:
    return kind, described_by(run), min(run.rows, MOST_ROWS)


def described_by(run: Run) -> Any:
    """What Python may decide by.

    Raises:
        NoKey: It is too much to look at, or such that a program could not do what the step does.
    """
    return torch.get_default_dtype(), surroundings(run.weights.held.modules)


def _compiled(run: Run, inputs: Leaves, state: Leaves) -> tuple[Program | str, bool]:
    """A program or why there is none, and whether that is so for the next call, too."""
    from .._compile.first_use import compiled

    return _made(lambda: compiled(run, inputs, state))


def without_unused(
    program: Program,
    used: tuple[bool, ...],
    constants: Leaves,
    trained: Sequence[bool],
    inputs: Leaves,
    state: Leaves,
) -> Program | None:
    """The program for backward of a call that used only some of its results; None if there is none.

    Args:
        used: Of each output, then of each leaf of the last state.
        trained: Which constants have gradients.
    """
    from .._compile.without import without

    if used in program.without:
        return program.without[used]
    if constants and constants[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    count = len(program.output_shapes)
    found, is_lasting = _made(
        lambda: without(program, used[:count], used[count:], constants, trained, inputs, state)
    )
    made = None if isinstance(found, str) else found
    if is_lasting:
        program.without[used] = made
    return made


T = TypeVar("T")


def _made(make: Callable[[], T]) -> tuple[T | str, bool]:
    """A program or why there is none, and whether that is so for the next call, too."""
    from .._compile.trace import CannotCompile
    from .._compile.turns import Busy

    try:
        # What surrounds the call is not part of the step, and a trial needs gradients.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),  # which tracers do not pass
            _new_on_cpu(),
            _without_saved_hooks(),
        ):
            return make(), True
    except Busy as error:
        return str(error), False
    except CannotCompile as error:
        return str(error), True
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of the compiler itself: the steps in Python are right
        is_lasting = not isinstance(error, RecursionError)  # how deep the call was
        return f"the compiler raises {type(error).__name__}: {error}", is_lasting


def _new_on_cpu() -> AbstractContextManager[Any]:
    """Within, new tensors are on the CPU. torch's own way of saying so slows every operation."""
    is_so = torch.empty(0).device.type == "cpu"
    return nullcontext() if is_so else torch.device("cpu")


@contextmanager
def _without_saved_hooks() -> Iterator[None]:
    """Within, tensors that autograd saves stay as they are, which torch.func asks for."""
    autograd, hooks = torch._C._autograd, []
    while (hook := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(hook)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hook in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*hook)


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
    found = others or obstacle_to_programs(run, inputs, state)
    if not found:
        assert run.masks is not None
        found = programs.of(run, run.masks.within_ends(inputs)[: run.masks.inputs], state)
    if compile == REQUIRE and isinstance(found, str):
        raise RuntimeError(f"fusedrnn: the cell{run.place} cannot be compiled: {found}")
    if isinstance(found, str):
        programs.warn_once(found, run.place)
    return found
