"""A step through torch.compile: its guards find a graph, and a call runs the whole sequence by it.

torch.compile sees one step, on stand-ins, once per call. What it calls in the place of its graph
gets every tensor that the step reads, takes the whole sequence from the thread's call, and gives
results of all steps in the place of those of one.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.distributions import kl

from .._compile.lines import in_brackets, last_line
from ..recurrent.trees import Leaves
from .graph import Refusal, StepGraph, as_users_write

MOST_TRACES = 64
"""Of one step, by its code, whatever cells take it."""


class Call(Protocol):
    """A call of the step that is on its way."""

    inputs_seen: Leaves
    states_seen: Leaves
    """Stand-ins."""
    has_run: bool

    def run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        """The results in the order of the graph's, of what torch.compile gives to it."""


_thread = threading.local()


class CompiledStep:
    """A function of wrapped.py, with graphs of its own."""

    def __init__(self, function: Callable[..., tuple[Any, Any]]) -> None:
        # torch.compile keeps graphs by the code, so that is copied.
        self.function = own = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            None,
            function.__closure__,
        )
        self.traces = 0
        self.is_full = False
        """Whether it has as many graphs as torch.compile keeps."""
        self._compiled = _compiled(own, self._backend)

    def __call__(self, call: Call, *given: Any) -> tuple[Any, Any]:
        """Output and new state, of the whole sequence of a call, as the user's step returns them.

        Args:
            given: The step, and its arguments with stand-ins.

        Raises:
            Refusal: torch.compile cannot take the step.
            Exception: What ``call.run`` raises.
        """
        outer, _thread.call = getattr(_thread, "call", None), call
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # one graph, whether gradients are wanted or not
        try:
            made: tuple[Any, Any] = self._compiled(*given)
        except _errors() as error:
            if call.has_run:
                raise
            self.is_full |= type(error).__name__ == "FailOnRecompileLimitHit"
            raise Refusal(_reason_of(error)) from error
        finally:
            torch._C._set_grad_enabled(was_enabled)
            _thread.call = outer
        if not call.has_run:  # torch.compile has left it to Python, for one step
            raise Refusal("torch.compile is switched off")
        return made

    def _backend(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.traces += 1
        if effect := _effect():
            raise Refusal(effect)
        graph = StepGraph(module)

        def run(*args: Any) -> list[Tensor]:
            call: Call | None = getattr(_thread, "call", None)
            if call is None:
                raise RuntimeError("fusedrnn: a compiled step was called by itself")
            call.has_run = True
            graph.know(args, call.inputs_seen, call.states_seen)
            return call.run(graph, args)

        return run


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    # kl_divergence looks here before it searches, which torch.compile does not follow.
    kl._KL_MEMOIZE.update(kl._KL_REGISTRY)
    options: dict[str, Any] = {}
    if torch.__version__ >= "2.13":
        options = {"recompile_limit": MOST_TRACES, "isolate_recompiles": True}
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def _errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit, Refusal


def _effect() -> str:
    """What the step changes in Python, which torch.compile would change once for all steps."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    find = getattr(output, "get_replayed_side_effect_source_refs", None)
    if find is None:
        return ""
    try:
        found = find(populate_export_metadata=True)
    except Exception as error:
        return f"the step changes something in Python ({error})"
    return f"the step changes {as_users_write(found[0])}" if found else ""


def _reason_of(error: BaseException) -> str:
    """torch.compile's own words, with the user's last line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Refusal):
            return str(cause)
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines()]
    first = lines[0] if lines else type(error).__name__
    explained = [line[13:] for line in lines if line.startswith("Explanation: ")]
    said = "; ".join([first, *explained[:1]]).rstrip(".")
    where = in_brackets(last_line(text))
    return f"torch.compile cannot take this step: {said}{where}"
