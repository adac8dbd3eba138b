"""Who looks at a call besides autograd, and what torch.compile is told of functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])


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
        f"fusedrnn: {function.__qualname__} decides by values, so it stays out of graphs: compile "
        "without fullgraph=True; export, if it can be, with strict=False"
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
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


def is_alone() -> bool:
    """Whether nothing but autograd looks at a call: then it need not go through the dispatcher."""
    return not (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )
