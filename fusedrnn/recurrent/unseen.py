"""Random numbers that a step draws without a function of torch that can be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        """Functions of torch that are at work inside of each other."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.depth += 1
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.depth -= 1


class Unseen(TorchDispatchMode):
    """Sees operations that draw, and whether a function of torch was called for them in Python.

    None is for those of scripted functions and of other libraries.
    """

    def __init__(self) -> None:
        super().__init__()
        self._functions = _Functions()
        self.draw = ""
        """The first operation without a function."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for that. Nothing here runs in its graphs."""
        return False

    def __enter__(self) -> Any:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._functions.depth and torch.Tag.nondeterministic_seeded in func.tags:
            self.draw = self.draw or str(func.overloadpacket)
        return func(*args, **(kwargs or {}))
