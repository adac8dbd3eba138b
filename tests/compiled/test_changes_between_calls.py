"""What a step reads in Python and somebody changes between two calls: the next call has it.

Longer than 350 lines, because there are many places from which a step may read.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import interpreted
from plain import loop
from registry import CASES
from torch import Tensor, nn

import fusedrnn
from fusedrnn._compile import first_use
from fusedrnn.recurrent import programs, surroundings

H = 3
F64 = torch.float64
Read = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def by_torch() -> Iterator[None]:
    with interpreted():
        yield


class Base(nn.Module):
    """A cell that multiplies by what it reads somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * H, H, dtype=F64)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.gate(torch.cat([x, h], -1))) * self.read()

    def read(self) -> Any:
        raise NotImplementedError


class Holds(Base):
    """Reads an attribute."""

    def __init__(self, held: Any, read: Read) -> None:
        super().__init__()
        self.held, self.by = held, read

    def read(self) -> Any:
        return self.by(self.held)


def check(cell: nn.Module, change: Callable[[], Any], compile: str = "require") -> None:
    """Before a change and after it a call gives what the loop gives, which is not the same."""
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    rnn = fusedrnn.Recurrent(cell, compile=compile)
    before = loop(cell, x, h)[0]
    torch.testing.assert_close(rnn(x, h)[0], before)
    change()
    after = loop(cell, x, h)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(rnn(x, h)[0], after)


def scaled(x: float, scale: float = 1.0) -> float:
    return x * scale


@dataclasses.dataclass
class Data:
    a: Any = 1.0


@dataclasses.dataclass
class Slots:
    __slots__ = ("a",)
    a: float


class Kind(enum.Enum):
    ONE, TWO = 1.0, 2.0


class Silent(float, enum.Enum):
    """Its members all have one text."""

    ONE, TWO = 1.0, 2.0

    def __repr__(self) -> str:
        return "a number"


class Mutable(enum.Enum):
    ONE = types.SimpleNamespace(a=1.0)


class List(list[float]):
    a = 1.0


class Dict(dict[str, float]):
    a = 1.0


class Float(float):
    a = 1.0


Named = collections.namedtuple("Named", "a")


class Called:
    def __init__(self) -> None:
        self.a = 1.0

    def __call__(self) -> float:
        return self.a


def set_a(one: Any) -> None:
    one.a = 2.0


def set_first(one: Any) -> None:
    one[0] = 2


def set_key(one: Any) -> None:
    one["a"] = 2.0


def set_scale(one: Any) -> None:
    one.keywords["scale"] = 2.0


def deep(levels: int) -> Data:
    return Data() if levels == 0 else Data(deep(levels - 1))


def deepest(one: Data) -> Data:
    return deepest(one.a) if isinstance(one.a, Data) else one


def itself() -> types.SimpleNamespace:
    one = types.SimpleNamespace(a=1.0)
    one.b = {"b": one}
    return one


def function_of(a: float) -> Any:
    def function(*, b: float = 1.0, c: dict[str, float] = {"a": 1.0}) -> float:  # noqa: B006
        return a * b * c["a"] * vars(function).get("d", 1.0)

    def set_variable() -> None:
        nonlocal a
        a = 2.0

    function.set_variable = set_variable  # type: ignore[attr-defined]
    return function


def two() -> float:
    return 2.0


HELD: dict[str, tuple[Callable[[], Any], Read, Callable[[Any], Any]]] = {
    "partial": (lambda: functools.partial(scaled, scale=1.0), lambda p: p(1.0), set_scale),
    "partial in a partial": (
        lambda: functools.partial(functools.partial(scaled, 1.0), scale=1.0),
        lambda p: p(),
        set_scale,
    ),
    "partial in a list": (
        lambda: [functools.partial(scaled, scale=1.0)],
        lambda v: v[0](1.0),
        lambda v: set_scale(v[0]),
    ),
    "argument of a partial": (
        lambda: functools.partial(max, [1.0]),
        lambda p: p(),
        lambda p: set_first(p.args[0]),
    ),
    "dataclass": (Data, lambda o: o.a, set_a),
    "slots": (lambda: Slots(1.0), lambda o: o.a, set_a),
    "dataclass in dicts": (
        lambda: [{"k": Data()}],
        lambda v: v[0]["k"].a,
        lambda v: set_a(v[0]["k"]),
    ),
    "dataclass in others": (lambda: deep(6), lambda o: deepest(o).a, lambda o: set_a(deepest(o))),
    "namespace": (lambda: types.SimpleNamespace(a=1.0), lambda o: o.a, set_a),
    "value of an enum": (lambda: Mutable.ONE, lambda o: o.value.a, lambda o: set_a(o.value)),
    "deque": (lambda: collections.deque([1.0]), lambda d: d[0], set_first),
    "deque in a list": (
        lambda: [collections.deque([1.0])],
        lambda v: v[0][0],
        lambda v: set_first(v[0]),
    ),
    "defaultdict": (lambda: collections.defaultdict(float, a=1.0), lambda d: d["a"], set_key),
    "default of a dict": (
        lambda: collections.defaultdict(lambda: 1.0),
        lambda d: d.copy()["b"],
        lambda d: setattr(d, "default_factory", two),
    ),
    "order of a dict": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda d: next(iter(d.values())),
        lambda d: d.move_to_end("a"),
    ),
    "ChainMap": (lambda: collections.ChainMap({"a": 1.0}), lambda d: d["a"], set_key),
    "view of a dict": (
        lambda: (lambda d: [types.MappingProxyType(d), d])({"a": 1.0}),
        lambda v: v[0]["a"],
        lambda v: set_key(v[1]),
    ),
    "array of NumPy": (lambda: np.ones(1), lambda a: float(a[0]), set_first),
    "array of NumPy in an object": (
        lambda: Data(np.ones(1)),
        lambda o: float(o.a[0]),
        lambda o: set_first(o.a),
    ),
    "bytes": (lambda: bytearray(b"\1"), lambda b: float(b[0]), set_first),
    "array": (lambda: array.array("d", [1.0]), lambda a: a[0], set_first),
    "set": (lambda: {1}, lambda s: 1.0 + (1 in s), lambda s: s.clear()),
    "long list": (lambda: [1.0] * 20_000, lambda v: v[0], set_first),
    "attribute of a list": (lambda: List(), lambda o: o.a, set_a),
    "attribute of a dict": (lambda: Dict(), lambda o: o.a, set_a),
    "attribute of a number": (lambda: Float(1.0), lambda o: o.a, set_a),
    "tensor as a number": (lambda: torch.tensor(1.0), float, lambda t: t.fill_(2.0)),
    "namedtuple": (lambda: Named([1.0]), lambda n: n.a[0], lambda n: set_first(n.a)),
    "weak reference": (
        lambda: (lambda o: [weakref.ref(o), o])(Data()),
        lambda v: v[0]().a,
        lambda v: set_a(v[1]),
    ),
    "key of a dict": (
        lambda: {Called(): 1},
        lambda d: next(iter(d)).a,
        lambda d: set_a(next(iter(d))),
    ),
    "variable of a context": (
        lambda: contextvars.ContextVar("one", default=1.0),
        lambda v: v.get(),
        lambda v: v.set(2.0),
    ),
    "metaclass": (
        lambda: types.new_class("Class", (), {"metaclass": type("Meta", (type,), {"a": 1.0})}),
        lambda v: v.a,
        lambda v: set_a(type(v)),
    ),
    "what contains itself": (itself, lambda o: o.b["b"].a, set_a),
    "callable object": (Called, lambda f: f(), set_a),
    "bound method": (lambda: Called().__call__, lambda f: f(), lambda f: set_a(f.__self__)),
    "variable around a function": (
        lambda: function_of(1.0),
        lambda f: f(),
        lambda f: f.set_variable(),
    ),
    "default of a function": (
        lambda: function_of(1.0),
        lambda f: f(),
        lambda f: f.__kwdefaults__.update(b=2.0),
    ),
    "dict as a default": (
        lambda: function_of(1.0),
        lambda f: f(),
        lambda f: set_key(f.__kwdefaults__["c"]),
    ),
    "attribute of a function": (
        lambda: function_of(1.0),
        lambda f: f(),
        lambda f: setattr(f, "d", 2.0),
    ),
    "a function's code": (
        lambda: types.FunctionType((lambda: 1.0).__code__, {}),
        lambda f: f(),
        lambda f: setattr(f, "__code__", two.__code__),
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_changes_in_an_attribute(name: str) -> None:
    make, read, change = HELD[name]
    held = make()
    kept = Mutable.ONE.value.a if held is Mutable.ONE else None
    try:
        check(Holds(held, read), lambda: change(held))
    finally:
        if kept is not None:
            Mutable.ONE.value.a = kept


EXCHANGED: dict[str, tuple[Any, Any, Read]] = {
    "enum": (Kind.ONE, Kind.TWO, lambda o: o.value),
    "enum of one text": (Silent.ONE, Silent.TWO, lambda o: o * 1.0),
    "number of NumPy": (np.float32(1), np.float32(2), float),
    "bytes of another dtype": ([np.int32(2**30)], [np.float32(2)], lambda v: float(v[0] == 2)),
    "pattern": (re.compile("a"), re.compile("b"), lambda p: 1.0 if p.match("a") else 2.0),
    "list and tuple": ([1.0], (1.0,), lambda v: 1.0 + isinstance(v, list)),
    "kinds of dicts": ({}, collections.OrderedDict(), lambda v: 1.0 + (type(v) is dict)),
    "range": (range(1), range(2), lambda r: float(r.stop)),
    "number and flag": (1, True, lambda v: 1.0 + (v is True)),
    "zeros": (0.0, -0.0, lambda v: 2.0 + np.copysign(1.0, v)),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_another_object_in_an_attribute(name: str) -> None:
    old, new, read = EXCHANGED[name]
    cell = Holds(old, read)
    check(cell, lambda: setattr(cell, "held", new))


# Classes and Python modules.


class Settings:
    a: Any = 1.0
    d: Any = {"a": 1.0}  # noqa: RUF012

    def get(self) -> float:
        return 1.0


class Of(Base):
    a: Any = 1.0
    d: Any = {"a": 1.0}  # noqa: RUF012
    o: Any = Data()
    by_property = property(lambda self: 1.0)

    @staticmethod
    def static() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    def with_default(self, a: float = 1.0, d: dict[str, float] = {"a": 1.0}) -> float:  # noqa: B006
        return a * d["a"]

    def read(self) -> Any:
        made = self.a * self.d["a"] * self.o.a * self.by_property * self.static()
        return made * self.of_class() * self.with_default()


class Below(Of):
    pass


def test_attributes_and_methods_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed in place or replaced, in the class itself or below it."""
    cell = Below()
    changes: dict[str, Callable[[], Any]] = {
        "a dict": lambda: monkeypatch.setitem(Of.d, "a", 2.0),
        "an object": lambda: monkeypatch.setattr(Of.o, "a", 2.0),
        "another object": lambda: monkeypatch.setattr(Of, "o", Data(3.0)),
        "a property": lambda: monkeypatch.setattr(Of, "by_property", property(lambda self: 2.0)),
        "a static method": lambda: monkeypatch.setattr(Of, "static", staticmethod(two)),
        "a class method": lambda: monkeypatch.setattr(Of, "of_class", classmethod(lambda c: 2.0)),
        "a default": lambda: monkeypatch.setattr(
            Of.with_default, "__defaults__", (2.0, {"a": 1.0})
        ),
        "in a default": lambda: set_key((Of.with_default.__defaults__ or ())[1]),
        "below": lambda: monkeypatch.setattr(Below, "a", 2.0, raising=False),
    }
    for change in changes.values():
        check(cell, change)


def test_attributes_and_methods_of_an_objects_class(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Holds(Settings(), lambda o: o.a * o.d["a"] * o.get())
    check(cell, lambda: monkeypatch.setattr(Settings, "a", 2.0))
    check(cell, lambda: monkeypatch.setitem(Settings.d, "a", 2.0))
    check(cell, lambda: monkeypatch.setattr(Settings, "get", lambda self: 2.0))


NUMBER, DICT, OBJECT, PARTIAL = 1.0, {"a": 1.0}, Data(), functools.partial(scaled, scale=1.0)
other = types.ModuleType("other")
exec(
    """
A, D = 1.0, {"a": 1.0}
class Settings:
    a, d = 1.0, {"a": 1.0}
def read():
    return A * D["a"] * Settings.a * Settings.d["a"]
""",
    vars(other),
)
imported = other.read


def helper() -> Any:
    return NUMBER * DICT["a"]


def by_helper() -> Any:
    return helper() * OBJECT.a * PARTIAL(1.0)


class Around(Base):
    def read(self) -> Any:
        return by_helper() * other.read() * other.Settings.a * imported()


def test_variables_of_python_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cell's own and of another one, read by helpers of helpers."""
    cell, here = Around(), globals()
    changes: dict[str, Callable[[], Any]] = {
        "a number": lambda: monkeypatch.setitem(here, "NUMBER", 2.0),
        "a dict": lambda: monkeypatch.setitem(DICT, "a", 2.0),
        "an object": lambda: monkeypatch.setattr(OBJECT, "a", 2.0),
        "another object": lambda: monkeypatch.setitem(here, "OBJECT", Data(3.0)),
        "a partial": lambda: monkeypatch.setitem(PARTIAL.keywords, "scale", 2.0),
        "of another module": lambda: monkeypatch.setattr(other, "A", 2.0),
        "a dict of another module": lambda: monkeypatch.setitem(other.D, "a", 2.0),
        "a class": lambda: monkeypatch.setattr(other.Settings, "a", 2.0),
        "a dict of a class": lambda: monkeypatch.setitem(other.Settings.d, "a", 2.0),
        "a function": lambda: monkeypatch.setattr(other, "read", two),
        "a helper": lambda: monkeypatch.setitem(here, "helper", two),
    }
    for change in changes.values():
        check(cell, change)


class Imports(Base):
    def read(self) -> Any:
        from imported_in_a_step import A  # type: ignore[import-not-found]

        return A


def test_a_python_module_that_the_step_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imported_in_a_step", other)
    check(Imports(), lambda: monkeypatch.setattr(other, "A", 2.0))


def counted(function: Any) -> Any:
    state = {"a": 1.0}

    @functools.wraps(function)
    def wrapper(self: Any) -> Any:
        return function(self) * state["a"]

    wrapper.state = state  # type: ignore[attr-defined]
    return wrapper


class Decorated(Base):
    @counted
    def read(self) -> Any:
        return 1.0


def test_what_a_decorator_holds() -> None:
    check(Decorated(), lambda: set_key(Decorated.read.state))


def _decorated(decorate: Callable[..., Any]) -> tuple[Callable[[], float], dict[str, float]]:
    numbers = {"a": 1.0}

    @decorate
    def read(*_: float) -> float:
        return numbers["a"]

    return (lambda: read(0.0)), numbers


class Wrapper:
    """As other packages have decorators that are objects."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function

    def __call__(self, *given: Any) -> Any:
        return self.__wrapped__(*given)


Wrapper.__module__ = "numpy.wrapper"

DECORATORS: dict[str, Callable[..., Any]] = {
    "no_grad": torch.no_grad(),
    "no_grad by itself": torch.no_grad,
    "functools": functools.singledispatch,
    "both": lambda f: torch.no_grad()(functools.singledispatch(f)),
    "a partial": lambda f: torch.no_grad()(functools.partial(f, 1.0)),
    "contextlib": contextlib.contextmanager(lambda: iter([None]))(),
    "an object": Wrapper,
}


@pytest.mark.parametrize("name", DECORATORS)
def test_what_decorators_of_other_packages_decorate(name: str) -> None:
    read, numbers = _decorated(DECORATORS[name])
    check(Holds(read, lambda f: f()), lambda: numbers.update(a=2.0))


class Made:
    a = 1.0

    def __init__(self) -> None:
        self.b = self.a


class Makes(Base):
    def read(self) -> Any:
        return Made().b


def test_what_a_step_makes_objects_of(monkeypatch: pytest.MonkeyPatch) -> None:
    check(
        Makes(), lambda: monkeypatch.setattr(Made, "__init__", lambda self: setattr(self, "b", 2.0))
    )


# What the step itself changes.

COUNT = {"a": 1.0}


class Counts(Base):
    """Where ``run.aside`` does not look."""

    total = 0.0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.data, self.array = place, deep(3), np.zeros(1)

    def read(self) -> Any:
        if self.place == "object":
            deepest(self.data).a += 1
        elif self.place == "array":
            self.array += 1
        elif self.place == "class":
            Counts.total += 1
        elif self.place == "module":
            COUNT["a"] += 1
        return 1.0


@pytest.mark.filterwarnings("error:fusedrnn")  # none says that it is no longer compiled
@pytest.mark.parametrize("place", ["object", "array", "class", "module"])
def test_a_step_that_counts(place: str) -> None:
    """A program would not count."""
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    with pytest.raises(RuntimeError, match="the step changes what it reads in Python"):
        fusedrnn.Recurrent(Counts(place), compile="require")(x, h)
    cell = Counts(place)
    rnn = fusedrnn.Recurrent(cell, compile="auto")
    for _ in range(4):
        torch.testing.assert_close(rnn(x, h)[0], loop(cell, x, h)[0])
    cell.place = "nowhere"
    rnn.compile_cell = "require"
    with pytest.raises(RuntimeError, match="change from call to call"):
        rnn(x, h)


class Lazy:
    @functools.cached_property
    def factor(self) -> float:
        return 2.0


def test_what_a_step_computes_once() -> None:
    lazy = Lazy()
    cell = Holds(Data(Data(lazy)), lambda o: o.a.a.factor)
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    rnn = fusedrnn.Recurrent(cell, compile="require")
    ours = rnn(x, h)[0]
    assert "factor" in vars(lazy)
    torch.testing.assert_close(ours, loop(cell, x, h)[0])
    check(cell, lambda: vars(lazy).update(factor=3.0))


# What is not looked at.

TOO_MUCH: dict[str, tuple[Any, Read, Callable[[Any], Any], str]] = {
    "objects": (
        [Data() for _ in range(200)],
        lambda v: v[150].a,
        lambda v: set_a(v[150]),
        "200 entries",
    ),
    "large array": (
        np.ones(2**18),
        lambda v: float(v[9]),
        lambda v: v.fill(2),
        "of 2,097,152 bytes",
    ),
    "array of objects": (np.array([Data()]), lambda v: v[0].a, lambda v: set_a(v[0]), "an array"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_take_too_long_to_look_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken in Python, which see all changes."""
    monkeypatch.setattr(surroundings, "_MOST", 100)
    held, read, change, reason = TOO_MUCH[name]
    cell, x, h = Holds(held, read), torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    with pytest.raises(RuntimeError, match=f"cannot be compiled: .*{reason}"):
        fusedrnn.Recurrent(cell, compile="require")(x, h)
    check(cell, lambda: change(held), compile="auto")


held = 0  # called like the attribute


@pytest.mark.parametrize(
    "held",
    [[0] * 200_000, dict.fromkeys(range(200_000)), {i: [i] for i in range(20_000)}],
    ids=["a list", "a dict", "lists in a dict"],
)
def test_large_containers_have_steps_taken_in_python(held: Any) -> None:
    """And are looked at once, not in each call."""
    cell = Holds(held, lambda held: 2.0)
    rnn = fusedrnn.Recurrent(cell, compile="auto")
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    with pytest.MonkeyPatch.context() as patch:
        looked = []
        look = programs.surroundings
        patch.setattr(programs, "surroundings", lambda m: (looked.append(1), look(m))[1])
        for _ in range(3):
            rnn(x, h)
    assert len(looked) == 1


class Hostile:
    """What says that it is a number, and is none."""

    __class__ = int  # type: ignore[assignment]


class Nameless(type):
    """Classes that cannot be put into a set."""

    def __eq__(cls, other: object) -> bool:
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


class Unhashable(metaclass=Nameless):
    scale = 2.0


@pytest.mark.parametrize("held", [Hostile(), Unhashable()], ids=["a number", "no hash"])
def test_objects_that_do_not_let_themselves_be_looked_at(held: Any) -> None:
    cell = Holds(held, lambda held: 2.0)
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    output, _ = fusedrnn.Recurrent(cell)(x, h)
    torch.testing.assert_close(output, loop(cell, x, h)[0])


def test_attributes_that_no_step_reads_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a count of epochs that a training loop sets."""
    traced = []
    trace = first_use.trace
    monkeypatch.setattr(first_use, "trace", lambda step: (traced.append(1), trace(step))[1])
    cell = Holds(2.0, lambda held: held)
    rnn = fusedrnn.Recurrent(cell, compile="require")
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    for epoch in range(150):
        cell.epoch = epoch  # type: ignore[assignment]
        output, _ = rnn(x, h)
    torch.testing.assert_close(output, loop(cell, x, h)[0])
    assert len(traced) == 1
    assert len(rnn._memories[0].programs._known) < 150
    cell.held = 3.0
    torch.testing.assert_close(rnn(x, h)[0], loop(cell, x, h)[0])
    assert len(traced) == 2


@pytest.mark.parametrize("batch", [1, 6])
def test_what_decides_by_the_number_of_rows_is_another_step(batch: int) -> None:
    """Though it does the same with the rows of a trace."""

    class Rows(Base):
        factor = 1.0

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            h = torch.tanh(self.gate(torch.cat([x, h], -1)))
            return h * self.factor if len(x) == batch else h * 1.0

    cell = Rows()
    rnn = fusedrnn.Recurrent(cell)
    x, h = torch.randn(3, 7, H, dtype=F64), torch.zeros(7, H, dtype=F64)
    rnn(x, h)
    (program,) = rnn._memories[0].programs._known.values()
    assert not isinstance(program, str)
    x, h = x[:, :batch], h[:batch]
    for factor in (1.5, 2.0, 1.0):
        cell.factor = factor
        torch.testing.assert_close(rnn(x, h)[0], loop(cell, x, h)[0])


def test_outputs_of_another_structure_are_another_program() -> None:
    """Though the step does the same."""

    class Named(Base):
        name = "a"

        def forward(self, x: Tensor, h: Tensor) -> Any:
            h = torch.tanh(self.gate(torch.cat([x, h], -1)))
            return {self.name: h}, h

    cell = Named()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    for name in ("a", "b", "a"):
        cell.name = name
        assert list(rnn(x, h)[0]) == [name]


def test_variables_that_are_called_like_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read: the training loop of a script may change them all the time."""
    cell = Holds(1.0, lambda v: v)
    before = surroundings.surroundings([cell])
    monkeypatch.setitem(globals(), "held", 1)
    assert surroundings.surroundings([cell]) == before
    cell.held = 2.0
    assert surroundings.surroundings([cell]) != before


def test_the_key_of_a_step_stays_the_same() -> None:
    for case in CASES:
        cell = case.cell()
        first, second = (surroundings.surroundings([cell]) for _ in range(2))
        assert first == second, case
        assert hash(first) == hash(second)


class _Reversed(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number, or by a global one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | None) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (BACKWARD_FACTOR if ctx.factor is None else ctx.factor), None


BACKWARD_FACTOR = 1.0


def _with_hook(h: Tensor, held: Any) -> Tensor:
    if held and h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    return h


def _detached(h: Tensor, held: Any) -> Tensor:
    z = h.clone()
    if held:
        z.detach_()
    return h + z


DERIVATIVES = {
    "a hook": (_with_hook, False, True),
    "a function": (lambda h, held: h + _Reversed.apply(h, held), 0.0, 0.5),
    "detach_": (_detached, False, True),
    "a global": (lambda h, held: h + _Reversed.apply(h, None), 0.0, 0.5),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_what_only_derivatives_show(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward is the same after the change, to the last operation. Other batches know no change."""
    of, first, second = DERIVATIVES[name]

    class Derives(Base):
        held: Any = first

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            held = self.held if len(x) == batch else first
            return of(torch.tanh(self.gate(torch.cat([x, h], -1))), held)  # type: ignore[no-any-return]

    monkeypatch.setitem(globals(), "BACKWARD_FACTOR", first)
    cell = Derives()
    rnn = fusedrnn.Recurrent(cell)
    x = torch.randn(3, batch, H, dtype=F64, requires_grad=True)
    h = torch.zeros(batch, H, dtype=F64)
    found = []
    for held in (first, second, first):
        cell.held = held
        monkeypatch.setitem(globals(), "BACKWARD_FACTOR", held)
        (gradient,) = torch.autograd.grad(rnn(x, h)[0].sum(), x)
        (expected,) = torch.autograd.grad(loop(cell, x, h)[0].sum(), x)
        torch.testing.assert_close(gradient, expected)
        found.append(gradient)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_every_batch_is_looked_at_when_it_comes_first() -> None:
    """Also one that no trial had; only in that batch is the step taken in Python."""

    class Many(Base):
        def read(self) -> Any:
            return 1.0

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            h = super().forward(x, h)
            return 2 * h if len(x) > 6 else h

    cell = Many()
    rnn = fusedrnn.Recurrent(cell)
    for batch in (4, 7, 3, 7):
        x, h = torch.randn(3, batch, H, dtype=F64), torch.zeros(batch, H, dtype=F64)
        torch.testing.assert_close(rnn(x, h)[0], loop(cell, x, h)[0])
    known = rnn._memories[0].programs._known
    assert {batch: isinstance(found, str) for (_, _, batch), found in known.items()} == {
        4: False,
        7: True,
        3: False,
    }


def _scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)


def _next(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    scheduler.optimizer.step()
    scheduler.step()


def _of_thread(factor: float) -> threading.local:
    made = threading.local()
    made.factor = factor
    return made


OBJECTS = {
    "a scheduler": (_scheduler, lambda held: held.get_last_lr()[0], _next),
    "an optimizer": (
        lambda: _scheduler().optimizer,
        lambda held: held.param_groups[0]["lr"],
        lambda held: held.param_groups[0].update(lr=0.7),
    ),
    "a thread's": (
        lambda: _of_thread(2.0),
        lambda held: held.factor,
        lambda held: setattr(held, "factor", 3.0),
    ),
    "an event": (
        threading.Event,
        lambda held: 2.0 if held.is_set() else 1.0,
        lambda held: held.set(),
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_torch_and_of_python(name: str) -> None:
    make, read, change = OBJECTS[name]
    cell = Holds(make(), read)
    check(cell, lambda: change(cell.held))
