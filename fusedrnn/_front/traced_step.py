"""A step through torch.compile: its guards find a graph, and a call runs the whole sequence by it.

torch.compile sees one step, on stand-ins, once per call. What it calls in the place of its graph
gets every tensor that the step reads, takes the whole sequence from the thread's call, and gives
results of all steps in the place of those of one.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.distributions import kl

from .._step.trees import Leaves
from .refusals import CHANGING, CannotTrace, ChangesPython
from .step_graph import StepGraph
from .torch_refusals import effect_of, reason_of

MOST_TRACES = 64
"""Of one step, by its code, whatever cells take it."""
_MOST_REFUSALS = 128
"""Of one step, whose code torch.compile would otherwise give up for good."""


class CallOnItsWay(Protocol):
    """A call of the step that is on its way."""

    inputs_seen: Leaves
    states_seen: Leaves
    """Stand-ins."""
    has_run: bool
    made: list[Tensor] | None
    """What ``run`` has returned."""

    def put_in_order(self, order: Sequence[int]) -> None:
        """Takes the tensors of its input in another order from now on."""

    def run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        """The results in the order of the graph's, of what torch.compile gives to it."""


_LONGEST_WAIT = 10.0
"""Seconds that a fork waits for a trace, which may wait for what the forking thread holds."""


class _Thread(threading.local):
    call: CallOnItsWay | None = None
    setting: Any = None
    """Of torch.compile, to be given back."""
    lock: Any = None


_thread = _Thread()


class TracedStep:
    """A function of marked_step.py, with graphs of its own."""

    def __init__(self, function: Callable[..., tuple[Any, Any]], of: str) -> None:
        """
        Args:
            of: Whose steps, in words.
        """
        # torch.compile keeps graphs by the code, so that is copied. By its name it keeps which
        # numbers have changed, which is to say nothing about steps of other classes.
        name = f"{function.__name__}_of_{re.sub(r'[^0-9A-Za-z_]+', '_', of)}"
        self.function = own = types.FunctionType(
            function.__code__.replace(co_name=name),
            function.__globals__,
            function.__name__,
            None,
            function.__closure__,
        )
        self.traces = self._refusals = 0
        self.is_full = False
        """Whether it has as many graphs as it may, so that other cells had better have own ones."""
        self._compiled = _compiled(own, self._backend)

    def __call__(self, call: CallOnItsWay, *given: Any) -> tuple[Any, Any]:
        """Output and new state, of the whole sequence of a call, as the user's step returns them.

        Args:
            given: The step, and its arguments with stand-ins.

        Raises:
            CannotTrace: torch.compile cannot take the step.
            Exception: What ``call.run`` raises.
        """
        outer, _thread.call = _thread.call, call
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # one graph, whether gradients are wanted or not
        try:
            try:
                made: tuple[Any, Any] = self._compiled(*given)
            except Exception as error:
                made = self._take_again(error, call, given)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # torch.compile lets some of its own pass, such as IndexError
            if call.has_run:
                raise
            self._refusals += 1
            self.is_full |= self._refusals >= _MOST_REFUSALS
            raise self._refusal(error) from error
        finally:
            torch._C._set_grad_enabled(was_enabled)
            _thread.call = outer
            if _thread.setting is not None:
                _end_of_trace()
        if not call.has_run:  # torch.compile has left it to Python, for one step
            raise CannotTrace("torch.compile is switched off")
        return made

    def _take_again(
        self, error: Exception, call: CallOnItsWay, given: Sequence[Any]
    ) -> tuple[Any, Any]:
        """After an error of a call that may be right the next time.

        torch 2.13 counts the calls of graphs for all threads at once, and says that there was none
        if another thread has started to count in between.
        """
        made: tuple[Any, Any]
        while call.made is not None and "found no compiled frames" in str(error):
            try:
                made = self._compiled(*given)
                return made
            except RuntimeError as other:
                error = other
        if call.has_run or not _is_warning(error):
            raise error
        with warnings.catch_warnings():  # which the user has made errors
            warnings.simplefilter("ignore")
            try:
                made = self._compiled(*given)
                return made
            except RuntimeError as other:
                if call.made is None:
                    raise
                return self._take_again(other, call, given)

    def _refusal(self, error: BaseException) -> CannotTrace:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, CannotTrace):
                return type(cause)(str(cause))
            if type(cause).__name__ == "FailOnRecompileLimitHit":
                self.is_full = True
                return CannotTrace(CHANGING)
            cause = cause.__cause__ or getattr(cause, "inner_exception", None)
        return CannotTrace(reason_of(error))

    def _backend(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        if self.traces >= MOST_TRACES:
            self.is_full = True
            raise CannotTrace(CHANGING)
        if effect := effect_of(InstructionTranslator.current_tx().output, module):
            raise ChangesPython(effect)
        graph = StepGraph(module)
        self.traces += 1
        # Its guards and its code are made after this: with a look at hooks, and without calls that
        # measure how long it takes.
        settings = {"skip_nnmodule_hook_guards": False}
        if hasattr(torch._dynamo.config, "record_runtime_overhead"):
            settings["record_runtime_overhead"] = False
        _thread.setting = torch._dynamo.config.patch(settings)
        _thread.setting.__enter__()

        def run(*args: Any) -> list[Tensor]:
            if _thread.setting is not None:
                _end_of_trace()
            call = _thread.call
            if call is None:
                raise RuntimeError("fusedrnn: a compiled step was called by itself")
            call.has_run = True
            if call.made is None:
                if not graph.is_known:
                    graph.know(args, call.inputs_seen, call.states_seen)
                if order := graph.order_of(args, call.inputs_seen):
                    call.put_in_order(order)
                call.made = call.run(graph, args)
            return call.made

        return run


def _end_of_trace() -> None:
    """Gives torch.compile's setting back."""
    setting, _thread.setting = _thread.setting, None
    if setting is not None:
        setting.__exit__(None, None, None)


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    # kl_divergence looks here before it searches, which torch.compile does not follow.
    kl._KL_MEMOIZE.update(kl._KL_REGISTRY)
    _change_torch()
    options: dict[str, Any] = {}
    if torch.__version__ >= "2.13":
        # Of its own limit torch.compile speaks in the log, with a function that is not the user's.
        options = {"recompile_limit": MOST_TRACES + 1, "isolate_recompiles": True}
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def _is_warning(error: BaseException) -> bool:
    return re.match(r"\w*Warning: ", str(error)) is not None


class _OfOthers(logging.Filter):
    """Leaves out what happens in our calls."""

    def filter(self, record: logging.LogRecord) -> bool:
        return _thread.call is None


def _change_torch() -> None:
    """Has torch.compile do some things in other calls than ours alone.

    It is not to warn of functions that it does not follow, and not to log errors of operations:
    such steps are taken in Python without a loss. And it is not to look at gradients of weights
    while it traces: a thread that trains these may be writing them, which ends the process.
    """
    from torch._dynamo import utils
    from torch._dynamo.variables import builder
    from torch._subclasses import meta_utils

    # What an operation raises in a trace, it raises in Python, too.
    logs = logging.getLogger("torch._subclasses.fake_tensor")
    if not any(isinstance(one, _OfOthers) for one in logs.filters):
        logs.addFilter(_OfOthers())
    _leave_out(utils, "warn_once", None)
    _leave_out(builder, "safe_has_grad", False)
    _leave_out(meta_utils, "safe_grad", None)


def _leave_out(module: Any, name: str, result: Any) -> None:
    """Has a function of torch do nothing in our calls, and return this."""
    theirs: Any = getattr(module, name, None)
    if theirs is None or hasattr(theirs, "of_others"):
        return

    def of_others(*given: Any, **options: Any) -> Any:
        return theirs(*given, **options) if _thread.call is None else result

    of_others.of_others = theirs  # type: ignore[attr-defined]
    setattr(module, name, of_others)


def _tracer() -> Any:
    """torch.compile's, which has a lock for the time of a trace; None before it is imported."""
    return sys.modules.get("torch._dynamo.convert_frame")


def _wait_for_trace() -> None:
    """Before a fork: a child has no thread that would ever release the lock of a trace."""
    lock = getattr(_tracer(), "compile_lock", None)
    _thread.lock = lock if lock is not None and lock.acquire(timeout=_LONGEST_WAIT) else None


def _go_on_in_parent() -> None:
    if _thread.lock is not None:  # it is None if this was imported while a thread has forked
        _thread.lock.release()


def _go_on_in_child() -> None:
    _go_on_in_parent()
    if _thread.lock is None and _tracer() is not None:
        _tracer().compile_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_wait_for_trace,
        after_in_parent=_go_on_in_parent,
        after_in_child=_go_on_in_child,
    )
