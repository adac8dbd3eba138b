"""What gives something else each time that a step asks it: generators, iterators and clocks.

A program would take for ever what its trace was given.
"""

from __future__ import annotations

import datetime
import dis
import io
import os
import weakref
from collections.abc import Iterable
from types import BuiltinMethodType, CodeType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from .generators import is_generator, makes_generators
from .objects import READS_ATTRIBUTE, NoKey, as_list, names_of

if TYPE_CHECKING:
    from .variables import Variables

_CLOCKS = "time monotonic perf_counter process_time thread_time clock_gettime"
_OF_NUMPY = {"default_rng", "RandomState", "SeedSequence"}
_OF_NUMPY |= {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}
_OF_MODULES = {
    "time": {*_CLOCKS.split(), *(f"{name}_ns" for name in _CLOCKS.split())}
    | {"localtime", "gmtime", "ctime", "asctime", "strftime"},
    "timeit": {"default_timer"},
    "datetime": {"now", "utcnow", "today"},
    "os": {"urandom", "getrandom", "times"},
    "secrets": {"choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"}
    | {"SystemRandom"},
    "uuid": {"uuid1", "uuid4"},
    "random": {"Random", "SystemRandom"},
    "numpy": _OF_NUMPY,
    "numpy.random": _OF_NUMPY,
}
"""Functions and methods of Python modules, and classes of generators that a step may make. Draws
from global generators show in their states, so only steps that do draw are refused; see
_compile/undrawn.py."""
_OF_MODULES |= {"posix": _OF_MODULES["os"], "nt": _OF_MODULES["os"]}
_OF_MODULES |= {"date": _OF_MODULES["datetime"]}
_NOTHING: frozenset[str] = frozenset()
AS_INPUT = (
    "a program would take the same choice each time; make it before the call and pass it as an "
    "input, as `forced = torch.rand(seq_len, batch, 1) < p` for torch.where in the step"
)
"""Why Python must not decide by chance, and what to do instead."""
_NO_CHANCE: tuple[type, ...] = (io.IOBase, *weakref.ProxyTypes)
"""Files, which steps write to; and what stands for another object."""


class Chance(NoKey):
    """A step can reach something that gives something else each time."""

    def __init__(self, what: str, value: Any = None, line: str = "") -> None:
        """
        Args:
            what: As in "the step can reach a random.Random".
            value: The object.
            line: Where the step asks it.
        """
        super().__init__(what)
        self._what, self._value, self._line = what, value, line

    def reason(self, python: Variables) -> str:
        """Why there is no program. ``python``: the variables that the step may read."""
        name = "" if self._value is None else python.name_of(self._is_held_by)
        found = f"{name} holds" if name else "the step can reach"
        where = f" ({self._line})" if self._line else ""
        return f"{found} {self._what}{where}, and {AS_INPUT}"

    def _is_held_by(self, one: Any) -> bool:
        """Whether a variable is the object, a method of it, or a container with it."""
        if isinstance(one, MethodType | BuiltinMethodType):
            return one is self._value or one.__self__ is self._value
        if isinstance(one, list | tuple | dict | set):
            return any(inner is self._value for inner in as_list(one))
        return one is self._value


def kind_of_chance(value: Any, kind: type, is_of_user: bool) -> str:
    """What an object is that gives something else each time; nothing for others.

    Args:
        is_of_user: Whether its class is in Python, and looked at: that of an iterator, too.
    """
    is_iterator = not is_of_user and hasattr(kind, "__next__") and not issubclass(kind, _NO_CHANCE)
    if is_iterator or is_generator(value):
        return f"an iterator ({_name_of(kind)})" if is_iterator else f"a {_name_of(kind)}"
    return _name_of(value) if makes_generators(value) else ""


def _name_of(value: Any) -> str:
    """Of a class or a function, without the private modules that it is in."""
    return f"{value.__module__.partition('._')[0]}.{value.__qualname__}".removeprefix("builtins.")


def asked_of(space: Any) -> set[str] | frozenset[str]:
    """The names of what gives something else each time, in a Python module or a class."""
    if isinstance(space, ModuleType):
        return _OF_MODULES.get(space.__name__, _NOTHING)
    is_date = isinstance(space, type) and issubclass(space, datetime.date)
    return _OF_MODULES["datetime"] if is_date else _NOTHING


def check_class(value: Any) -> None:
    """Refuses a class of generators, of which a step would make one.

    Raises:
        Chance: It is one.
    """
    if makes_generators(value):
        raise Chance(_name_of(value), value)


def check_function(function: Any, owner: str) -> None:
    """Refuses a function that a step has by itself, as by ``from time import time``.

    Args:
        owner: The name of the Python module or class that has it.

    Raises:
        Chance: It gives something else each time.
    """
    if function.__name__ in _OF_MODULES.get(owner, _NOTHING):
        raise Chance(f"{owner}.{function.__name__}", function)


def check_asked(codes: Iterable[CodeType], spaces: Iterable[Any]) -> None:
    """Refuses code that reads from Python modules or classes what gives something else each time.

    Raises:
        Chance: It does.
    """
    for space in spaces:
        for code in codes:
            for name in sorted(asked_of(space) & names_of(code).reads):
                raise Chance(f"{space.__name__}.{name}", line=_line_of(code, name))


def _line_of(code: CodeType, name: str) -> str:
    """The file and the line at which code reads an attribute of this name."""
    codes = [code]
    for one in codes:  # which grows
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(one):
            if instruction.opname in READS_ATTRIBUTE and instruction.argval == name:
                places = one.co_lines()
                line = next(n for begin, end, n in places if begin <= instruction.offset < end)
                return f"{os.path.basename(one.co_filename)}:{line}"
    return ""
