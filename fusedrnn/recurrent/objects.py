"""Objects of Python as somebody sees them from outside: whose they are, and what they contain."""

from __future__ import annotations

import dis
import functools
import hashlib
import marshal
import sys
import weakref
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

_MOST_BYTES = 2**20
"""Of an array that is looked at."""
_WITH_ATTRIBUTES = (
    *("_thread", "argparse", "collections", "configparser", "dataclasses", "enum", "functools"),
    *("multiprocessing", "threading", "types"),
)
"""Modules of the standard library whose objects hold what users put there. Those of others, as
loggers, lead to all that a process has."""
_OF_TORCH = ("torch.distributions", "torch.optim", "torch.utils.data")
"""The same of torch: schedulers and samplers count epochs."""
_READS_VARIABLE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
READS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


class NoKey(Exception):
    """Why there is no key, a sentence without a stop."""


class TooMuch(NoKey):
    """It takes too long to find that out in each call."""


class Same:
    """Equal for one object, as long as it lives: another one may have its id then."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._value: Any = weakref.ref(value)
        except TypeError:  # of a type without weak references
            self._value = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        value = self.get()
        return value is not None and value is other.get()

    def get(self) -> Any:
        """The object, or None if it lives no more."""
        return self._value()


class Unordered:
    """Entries of a set, numbers and texts: in this process equal in the same order alone, in which
    a step may take them; another process has them in another order."""

    __slots__ = ("_bytes", "entries")

    def __init__(self, entries: list[Any]) -> None:
        self.entries, self._bytes = entries, marshal.dumps(entries, 2)

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unordered) and self._bytes == other._bytes


def package(name: str) -> str:
    """The outermost one that a Python module is in."""
    return name.partition(".")[0]


@functools.lru_cache(maxsize=4096)
def is_installed(name: str) -> bool:
    """Whether a Python module belongs to a package that somebody else has written."""
    top = package(name)
    if top in ("torch", "fusedrnn", "numpy") or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def holds_attributes(kind: type) -> bool:
    """Whether objects of an installed class hold what users put there, as settings do."""
    name = str(kind.__module__)
    top = package(name)
    if top == "fusedrnn":
        return False
    if top == "torch":
        return name.startswith(_OF_TORCH)
    return top in _WITH_ATTRIBUTES or (top != "numpy" and top not in sys.stdlib_module_names)


class Names(NamedTuple):
    """What a function and those within it read by name."""

    attributes: frozenset[str]
    """Also those in texts, for ``getattr``, and variables, which may be called like one."""
    reads: frozenset[str]
    """Those that it does read as attributes."""
    variables: tuple[str, ...]
    """Of its Python module, which may have others that are called like an attribute."""
    imports: tuple[str, ...]
    """Python modules that it imports itself; of relative ones the name without dots."""


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    inner = [names_of(one) for one in code.co_consts if isinstance(one, CodeType)]
    texts = {one for one in code.co_consts if isinstance(one, str) and one.isidentifier()}
    own = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    variables = {name for operation, name in own if operation in _READS_VARIABLE}
    imports = {name for operation, name in own if operation == "IMPORT_NAME"}
    reads = {name for operation, name in own if operation in READS_ATTRIBUTE}
    return Names(
        frozenset(texts.union(code.co_names, *(one.attributes for one in inner))),
        frozenset(reads.union(*(one.reads for one in inner))),
        tuple(sorted(variables.union(*(one.variables for one in inner)))),
        tuple(sorted(imports.union(*(one.imports for one in inner)))),
    )


def imported_by(function: FunctionType) -> list[ModuleType]:
    """Python modules that a function itself imports, as far as they are known."""
    names = names_of(function.__code__).imports
    around = function.__globals__.get("__package__") or ""
    whole = [name for own in names for name in (own, f"{around}.{own}") if name in sys.modules]
    return [sys.modules[name] for name in whole]


def contents(function: FunctionType) -> list[Any]:
    """What a function reads from the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            found.append(...)
    return found


def wrapped_by(value: Any) -> list[Any]:
    """What an object that decorates says it stands for."""
    try:
        return [value.__wrapped__]
    except Exception:  # of any kind: most objects have none, and some compute it
        return []


def as_list(value: Any) -> list[Any]:
    """The entries of a container, keys of a dict before each value."""
    if isinstance(value, dict):
        return [one for pair in list(value.items()) for one in pair]
    return list(value)


def is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and not value.dtype.hasobject


def has_bytes(value: Any) -> bool:
    """Whether it is an array of numbers of whatever library."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    try:
        memoryview(value).release()
    except (TypeError, ValueError, BufferError):
        return False
    return not isinstance(value, bytes)


def bytes_of(value: Any) -> tuple[Any, ...]:
    """What tells an array from others.

    Raises:
        TooMuch: It is too large to look at in each call, or has no bytes.
    """
    if hasattr(value, "dtype") and value.dtype.hasobject:
        raise TooMuch("an array in an attribute of its modules holds objects, which may change")
    size = value.nbytes if hasattr(value, "nbytes") else memoryview(value).nbytes
    if size > _MOST_BYTES:
        raise TooMuch(
            f"an array of {size:,} bytes in an attribute of its modules may change; register it "
            "as a buffer"
        )
    form = (str(value.dtype), value.shape) if hasattr(value, "dtype") else memoryview(value).format
    data = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
    return form, hashlib.blake2b(data, digest_size=16).digest() if size > 64 else data
