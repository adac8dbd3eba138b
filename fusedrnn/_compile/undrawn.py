"""Steps that draw from Python's or NumPy's generators, of which a program would have one choice."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from ..recurrent.chance import AS_INPUT
from ..recurrent.generators import drawn_from
from ..recurrent.runs import Run
from .lines import in_brackets, is_own, line_in
from .trace import CannotCompile

T = TypeVar("T")


def undrawn(run: Run, take: Callable[[], T]) -> T:
    """``take()``, which takes steps of a run.

    Raises:
        CannotCompile: They draw from a generator of Python's or NumPy's.
    """
    for _ in range(2):  # once more, for another thread may have drawn
        before = run.random_states().others
        made = take()
        generator = drawn_from(before, run.random_states().others)
        if generator is None:
            return made
    whose = "Python's" if isinstance(generator, random.Random) else "NumPy's"
    where = in_brackets(_line_of_draw(run, take))
    raise CannotCompile(f"the step draws from {whose} random numbers{where}, and {AS_INPUT}")


def _line_of_draw(run: Run, take: Callable[[], Any]) -> str:
    """The user's line after which a generator has another state; or nothing. Takes long."""
    before, lines = run.random_states().others, [""]
    found: list[str] = []

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if found or is_own(file) or file == random.__file__:
            return None
        if drawn_from(before, run.random_states().others) is not None:
            found.append(lines[0])
        lines[0] = line_in(frame)
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        take()
    except Exception:  # the numbers that come now may be others
        return ""
    finally:
        sys.settrace(tracer)
    return found[0] if found else ""
