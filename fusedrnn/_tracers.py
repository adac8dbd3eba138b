"""Who looks at a call besides autograd, and what torch.compile is told of functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Whether torch.compile or torch.export looks at this function.

    ``torch.compiler.is_compiling`` says so, too, in every other thread for as long as it does.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if not torch.compiler.is_compiling():  # which torch.export sets, too
        return False
    return torch.compiler.is_exporting() or torch._guards.TracingContext.try_get() is not None


def constant_in_graphs(function: F) -> F:
    """``function`` runs when a graph is made, and the graph keeps its result.

    So says ``torch.compiler.assume_constant_result``, too; but it imports the compiler, which takes
    most of a second, for users who may never compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_in_graphs(function: F) -> F:
    """torch.compile leaves ``function`` and all that it calls as they are.

    So says ``torch.compiler.disable``, too; but it imports the compiler. Where all must be one
    graph, errors of the compiler say what to do.
    """
    reason = (
        f"fusedrnn: {function.__qualname__} depends on values of tensors, so it stays out of "
        "graphs: compile without fullgraph=True; export, if it can be, with strict=False"
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling() and torch._C._dynamo.eval_frame.get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        compiler = sys.modules.get("torch._dynamo")
        # It has not yet all names while another thread imports it.
        graph_break = getattr(compiler, "graph_break", None)
        disable = getattr(compiler, "disable", None)
        if graph_break is None or disable is None:
            return function(*args, **kwargs)
        graph_break(msg=reason)
        return disable(function, reason=reason)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return cast(F, call)


def unseen(function: F) -> F:
    """``function`` for autograd to call, so that torch.compile does not look at it.

    The compiler would, and at all that it calls, as long as a graph of its runs. Without it, that
    is ``function`` itself.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    return cast(F, _disabled(function))


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)


def is_traced() -> bool:
    """Whether torch.jit.trace records a call, for others with other sizes."""
    return not is_compiling() and torch._C._is_tracing()  # torch.jit's function takes longer


_modes = torch._C._TorchDispatchModeKey
_TRACERS = (_modes.FAKE, _modes.PROXY, _modes.FUNCTIONAL)


def is_recorded() -> bool:
    """Whether a tracer such as make_fx sees what torch computes, and tensors may have no numbers.

    Within torch.compile it cannot be asked.
    """
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACERS)


def has_values(tensor: Tensor) -> bool:
    """Whether what is done may depend on the numbers of a tensor."""
    if is_compiling() or torch._C._functorch.is_batchedtensor(tensor):
        return False
    return not is_recorded()


def is_alone() -> bool:
    """Whether nothing but autograd looks at a call: then it need not go through the dispatcher."""
    return not (is_compiling() or is_transformed())


def is_transformed() -> bool:
    """Whether a transform of torch.func, torch.jit.trace or forward mode looks at a call."""
    return is_rewritten() or forward_ad._current_level >= 0


def is_rewritten() -> bool:
    """Whether a transform of torch.func or torch.jit.trace looks at a call."""
    return torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
