"""What a step does, as text: all operations that torch runs in it, in their order.

This takes a thousandth of a second where a trace takes fifty, so a step that another process has
traced is recognised by it, and logs show whether a step does the same each time.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..recurrent.unusual import unusual
from .lines import is_own, line
from .trace import CannotCompile, FlatStep


def log_of(step: FlatStep) -> str:
    """Runs a step and says what it has done.

    What it raises is that of the step.
    """
    log = _Log()
    for tensor in step.arguments:
        log.know(tensor)
    with _without_questions(), log:
        results = step(*step.arguments, notes_lines=False)
    log.lines += [log.described(results), str(step.count), str(step.draws)]
    return "\n".join(log.lines)


_QUESTIONS = ("is_grad_enabled", "is_inference_mode_enabled")


@contextmanager
def _without_questions() -> Iterator[None]:
    """Within, the step may not ask whether gradients are wanted: a program serves both.

    Other threads, and torch itself, ask as before.
    """
    thread, before = threading.get_ident(), [getattr(torch, name) for name in _QUESTIONS]

    def watched(name: str, ask: Callable[[], bool]) -> Callable[[], bool]:
        def question() -> bool:
            if threading.get_ident() == thread and not is_own(sys._getframe(1).f_code.co_filename):
                raise CannotCompile(f"the step asks torch.{name}()")
            return ask()

        return question

    try:
        for name, ask in zip(_QUESTIONS, before, strict=True):
            setattr(torch, name, watched(name, ask))
        yield
    finally:
        for name, ask in zip(_QUESTIONS, before, strict=True):
            setattr(torch, name, ask)


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._numbers: dict[int, int] = {}
        """Of storages, by their addresses."""
        self._known: dict[int, tuple[Tensor, str]] = {}
        """Tensors by their ids, which they keep here, and what is said of each. So no storage takes
        the address of another one, either."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for that. Nothing here runs in its graphs."""
        return False

    def know(self, tensor: Tensor) -> None:
        """What comes into the step: not its numbers, but its shape."""
        number = self._numbers.setdefault(_memory_of(tensor), len(self._numbers))
        said = f"{number} {_layout(tensor)}"
        self._known[id(tensor)] = tensor, said
        self.lines.append(said)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before it runs: a tensor from elsewhere may be changed in place.
        line = f"{func} {self.described(args)} {self.described(kwargs or {})}"
        result = func(*args, **(kwargs or {}))
        self.lines.append(line)
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                self.know(tensor)
        return result

    def described(self, value: Any) -> str:
        """A value without addresses of this process."""
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            return self._tensor(value) if known is None else known[1]
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.described, value))}]"
        if isinstance(value, dict):
            return self.described([[name, value[name]] for name in sorted(value)])
        return repr(value)

    def _tensor(self, tensor: Tensor) -> str:
        number = self._numbers.get(_memory_of(tensor))
        if number is None:
            self.know(tensor)
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                return f"{_layout(tensor)} {_digest(tensor)}"
        return f"{number} {_layout(tensor)}"


def _memory_of(tensor: Tensor) -> int:
    """
    Raises:
        CannotCompile: The tensor is no plain array.
    """
    if what := unusual(tensor):
        raise CannotCompile(f"the step computes with a tensor that is {what}{line()}")
    return tensor.untyped_storage()._cdata


def _layout(tensor: Tensor) -> str:
    sizes, strides = tuple(tensor.shape), tensor.stride()
    return f"{tensor.dtype} {sizes} {strides} {tensor.storage_offset()} {tensor.device}"


def _digest(tensor: Tensor) -> str:
    """Of the numbers of a tensor that the step has not made."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
