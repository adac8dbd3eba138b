"""What torch.compile is told of this package's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graphs(function: F) -> F:
    """``function`` runs when a graph is made, and the graph keeps its result.

    So says ``torch.compiler.assume_constant_result``, too; but it imports the compiler, which takes
    most of a second, for users who may never compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
