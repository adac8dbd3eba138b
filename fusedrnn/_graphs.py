"""Who looks at a call besides autograd, and what torch.compile is told of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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


def is_alone() -> bool:
    """Whether nothing but autograd looks at a call: then it need not go through the dispatcher."""
    return not (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )
