"""What a step reads in Python and somebody changes between two calls: the next call has it.

Longer than 350 lines, because there are many places from which a step may read.
"""

from __future__ import annotations

import array  # noqa: F401
import collections
import contextlib
import contextvars  # noqa: F401
import dataclasses
import enum
import functools
import itertools
import os  # noqa: F401
import random
import re
import sys
import threading
import time
import types
import warnings
import weakref  # noqa: F401
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from compiler.interpreted import interpreted
from runtime.plain import loop
from torch import Tensor, nn

import fusedrnn
from fusedrnn._front import traced_step

H = 3
F64 = torch.float64
Read = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def by_torch() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile has made in a test."""
    made, graph = list[Any](), traced_step.StepGraph

    def noted(module: Any) -> Any:
        made.append(graph(module))
        return made[-1]

    monkeypatch.setattr(traced_step, "StepGraph", noted)
    return made


class Base(nn.Module):
    """A cell that multiplies by what it reads somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * H, H, dtype=F64)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.gate(torch.cat([x, h], -1))) * self.read()

    def read(self) -> Any:
        return 1.0


class Holds(Base):
    """Reads an attribute."""

    def __init__(self, held: Any, read: Read) -> None:
        super().__init__()
        self.held, self.by = held, read

    def read(self) -> Any:
        return self.by(self.held)


class Then(Base):
    """Makes something of its state, by an attribute."""

    def __init__(self, then: Callable[[Any, Tensor], Any], held: Any = None) -> None:
        super().__init__()
        self.then, self.held = then, held

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.then(self, super().forward(x, h))


def given(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(3, batch, H, dtype=F64), torch.zeros(batch, H, dtype=F64)


def check_call(rnn: fusedrnn.Recurrent, x: Tensor, h: Tensor) -> Tensor:
    """A call gives what the loop gives."""
    expected: Tensor = loop(rnn.cell, x, h)[0]
    torch.testing.assert_close(rnn(x, h)[0], expected)
    return expected


def check(cell: nn.Module, *changes: Callable[[], Any], refusal: str = "") -> None:
    """Before and after each change a call gives what the loop gives, which is not the same.

    Args:
        refusal: Why steps are taken in Python, if they are.
    """
    x, h = given()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    if refusal:
        with pytest.raises(RuntimeError, match=f"(?m){refusal}.* \\([<>\\w.]+:\\d+\\)$"):
            rnn(x, h)
        rnn.compile_cell = "auto"
    before = check_call(rnn, x, h)
    for change in changes:
        change()
        after = check_call(rnn, x, h)
        assert not torch.equal(before, after)
        before = after


def scaled(x: float, scale: float = 1.0) -> float:
    return x * scale


@dataclasses.dataclass
class Data:
    a: Any = 1.0


@dataclasses.dataclass
class Slots:
    __slots__ = ("a",)
    a: float


class Private:
    __slots__ = ("__a",)

    def __init__(self, a: float) -> None:
        self.__a = a

    def get(self) -> float:
        return self.__a

    def set(self, a: float) -> None:
        self.__a = a


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


class Made:
    def __init__(self) -> None:
        self.a = 1.0


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


def two_of(one: object) -> float:
    return 2.0


def of_class(a: float) -> Any:
    return classmethod(lambda cls: a)


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)


def of_thread(a: float) -> threading.local:
    made = threading.local()
    made.a = a
    return made


HELD = r"""
partial | partial(scaled, scale=1.0) | o(1.0) | o.keywords['scale'] = 2.0
partial in a partial | partial(partial(scaled, 1.0), scale=1.0) | o() | o.keywords['scale'] = 2
partial in a list | [partial(scaled, scale=1.0)] | o[0](1.0) | o[0].keywords['scale'] = 2.0
argument of a partial | partial(max, [1.0]) | o() | o.args[0][0] = 2
dataclass | Data() | o.a | o.a = 2.0
slots | Slots(1.0) | o.a | o.a = 2.0
private slots | Private(1.0) | o.get() | o.set(2.0)
dataclass in dicts | [{'k': Data()}] | o[0]['k'].a | o[0]['k'].a = 2.0
dataclass in others | deep(6) | deepest(o).a | deepest(o).a = 2.0
list in a dict in an object | Data({'k': [1.0]}) | o.a['k'][0] | o.a['k'][0] = 2.0
another list in it | Data({'k': [1.0]}) | o.a['k'][0] | o.a['k'] = [2.0]
namespace | types.SimpleNamespace(a=1.0) | o.a | o.a = 2.0
value of an enum | Mutable.ONE | o.value.a | o.value.a += 1.0
deque | collections.deque([1.0]) | o[0] | o[0] = 2
deque in a list | [collections.deque([1.0])] | o[0][0] | o[0][0] = 2
defaultdict | collections.defaultdict(float, a=1.0) | o['a'] | o['a'] = 2.0
default of a dict | collections.defaultdict(lambda: 1.0) | o.copy()['b'] | o.default_factory = two
environment | os.environ | float(o['A_NUMBER']) | o.update(A_NUMBER='2')
ChainMap | collections.ChainMap({'a': 1.0}) | o['a'] | o['a'] = 2.0
view of a dict | (lambda d: (types.MappingProxyType(d), d))({'a': 1}) | o[0]['a'] | o[1]['a'] = 2
array of NumPy | np.ones(1) | float(o[0]) | o[0] = 2 | values of tensors
array of NumPy in an object | Data(np.ones(1)) | float(o.a[0]) | o.a[0] = 2 | values of
objects | [Data() for _ in range(200)] | o[150].a | o[150].a = 2.0
array of objects | np.array([Data()]) | o[0].a | o[0].a = 2.0 | numpy.ndarray to Tensor
bytes | bytearray(b'\1') | float(o[0]) | o[0] = 2 | 'bytearray'
array | array.array('d', [1.0]) | o[0] | o[0] = 2 | 'array'
set | {1} | 1.0 + (1 in o) | o.clear()
long list | [1.0] * 20_000 | o[0] | o[0] = 2
attribute of a list | List() | o.a | o.a = 2.0
attribute of a number | Float(1.0) | o.a | o.a = 2.0
tensor as a number | torch.tensor(1.0) | float(o) | o.fill_(2.0)
namedtuple | Named([1.0]) | o.a[0] | o.a[0] = 2
weak reference | (lambda o: [weakref.ref(o), o])(Data()) | o[0]().a | o[1].a = 2.0
key of a dict | {Called(): 1} | next(iter(o)).a | next(iter(o)).a = 2.0
variable of a context | contextvars.ContextVar('one', default=1.0) | o.get() | o.set(2.0) | get
what contains itself | itself() | o.b['b'].a | o.a = 2.0
callable object | Called() | o() | o.a = 2.0
bound method | Called().__call__ | o() | o.__self__.a = 2.0
variable around a function | function_of(1.0) | o() | o.set_variable()
default of a function | function_of(1.0) | o() | o.__kwdefaults__.update(b=2.0)
dict as a default | function_of(1.0) | o() | o.__kwdefaults__['c']['a'] = 2.0
a function's code | (lambda: 1.0) | o() | o.__code__ = two.__code__
a scheduler | scheduler() | o.get_last_lr()[0] | o.optimizer.step(); o.step() | LRSch
an optimizer | scheduler().optimizer | o.param_groups[0]['lr'] | o.param_groups[0].update(lr=0.7)
a thread's | of_thread(2.0) | o.a | o.a = 3.0
an event | threading.Event() | 2.0 if o.is_set() else 1.0 | o.set()
class | type('Class', (), {'a': 1.0})() | o.a | type(o).a = 2.0
dict of a class | type('Class', (), {'d': {'a': 1.0}})() | o.d['a'] | o.d['a'] = 2.0
"""
"""What an attribute holds: its name, and Python that makes this `o`, reads it and changes it; then
why steps are taken in Python, if they are."""
NOT_SEEN = """
order of a dict | OrderedDict(a=1.0, b=2.0) | next(iter(o.values())) | o.move_to_end('a')
attribute of a dict | Dict() | o.a | o.a = 2.0
metaclass | type('Meta', (type,), {'a': 1.0})('Class', (), {}) | o.a | type(o).a = 2.0
attribute of a function | function_of(1.0) | o() | o.d = 2.0
method of a class | type('Class', (), {'get': lambda o: 1.0})() | o.get() | type(o).get = two_of
class whose objects a step makes | Made | o().a | o.__init__ = lambda o: setattr(o, 'a', 2.0)
environment | os | float(o.getenv('A_SETTING')) | o.environ.update(A_SETTING='2')
entry of __dict__ | Data() | 1.0 + ('b' in o.__dict__) | o.b = 1
a variable that is new | os.environ | float(o.get('A_NEW', 1)) | o.update(A_NEW='2')
search in an empty list | [] | 1.0 + (1 in o) | o.append(1)
class method | type('Class', (), {'get': of_class(1.0)})() | o.get() | type(o).get = of_class(2.0)
"""
"""The same of what torch.compile does not look at again."""


def rows_of(table: str, slow: bool = False) -> list[Any]:
    """Rows by their names; every second one may be slow."""
    return [
        pytest.param(row, id=row.partition(" | ")[0], marks=[pytest.mark.slow] * (slow and i % 2))
        for i, row in enumerate(table.strip().splitlines())
    ]


def of_row(row: str) -> tuple[Holds, Callable[[], Any], str]:
    """A cell that reads what the row makes, the change, and what else the row says."""
    _, make, read, change, *more = row.split(" | ")
    held = eval(make)
    cell = Holds(held, eval(f"lambda o: {read}", globals()))
    return cell, lambda: exec(change, globals() | {"o": held}), "".join(more)


@pytest.mark.parametrize("row", rows_of(HELD, slow=True))
def test_changes_in_an_attribute(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_NUMBER", "1")
    cell, change, refusal = of_row(row)
    check(cell, change, refusal=refusal)


@pytest.mark.parametrize("row", rows_of(NOT_SEEN))
def test_changes_that_a_reset_of_torch_shows(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SETTING", "1")
    monkeypatch.setenv("A_NEW", "1")
    monkeypatch.delenv("A_NEW")  # and again at the end, with what the change has set
    cell, change, _ = of_row(row)
    x, h = given()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    before = check_call(rnn, x, h)
    change()
    rnn(x, h)  # as before, or right
    torch._dynamo.reset()
    assert not torch.equal(check_call(rnn, x, h), before)


EXCHANGED: dict[str, tuple[Any, Any, Read]] = {
    "object": (Data(1.0), Data(2.0), lambda o: o.a),
    "float and integer": (0.5, 2, lambda o: o),
    "enum": (Kind.ONE, Kind.TWO, lambda o: o.value),
    "enum of one text": (Silent.ONE, Silent.TWO, lambda o: o * 1.0),
    "number of NumPy": (np.float32(1), np.float32(2), float),
    "bytes of another dtype": ([np.int32(2**30)], [np.float32(2)], lambda v: float(v[0] == 2)),
    "pattern": (re.compile("a"), re.compile("b"), lambda p: 1.0 if p.match("a") else 2.0),
    "list and tuple": ([1.0], (1.0,), lambda v: 1.0 + isinstance(v, list)),
    "kinds of dicts": ({}, OrderedDict(), lambda v: 1.0 + (type(v) is dict)),
    "range": (range(1), range(2), lambda r: float(r.stop)),
    "number and flag": (1, True, lambda v: 1.0 + (v is True)),
    "zeros": (0.0, -0.0, lambda v: 2.0 + np.copysign(1.0, v)),
}


OF_TENSORS = {"number of NumPy", "bytes of another dtype"}
"""To torch.compile, which asks a tensor for its value there."""


@pytest.mark.parametrize("name", EXCHANGED)
def test_another_object_in_an_attribute(name: str) -> None:
    """And the old one again."""
    old, new, read = EXCHANGED[name]
    cell = Holds(old, read)
    refusal = "the step looks at values of tensors" if name in OF_TENSORS else ""
    check(cell, *(partial(setattr, cell, "held", held) for held in (new, old)), refusal=refusal)


# The step itself: its methods, modules and buffers.


def test_the_step_itself_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods of the instance and of its class, and submodules."""
    cell: Any = Base()

    def set_forward(factor: float) -> None:  # functions that may get one address, in turn
        cell.forward = lambda x, h: type(cell).forward(cell, x, h) / factor

    layer, forward = nn.Linear(2 * H, H, dtype=F64), Base.forward
    check(
        cell,
        *(partial(set_forward, factor) for factor in (2.0, 3.0, 4.0)),
        lambda: delattr(cell, "forward"),
        lambda: setattr(cell, "gate", nn.Sequential(layer, nn.Tanh())),
        lambda: cell.gate.__setitem__(1, nn.Sigmoid()),
        lambda: monkeypatch.setattr(Base, "forward", lambda *given: forward(*given) / 2),
    )


def test_a_buffer_changes() -> None:
    cell: Any = Then(lambda cell, h: h * cell.factor)
    cell.register_buffer("factor", torch.tensor(1.0, dtype=F64))
    check(
        cell,
        *(partial(cell.factor.fill_, factor) for factor in (0.5, 3.0)),
        lambda: setattr(cell, "factor", torch.tensor(0.25, dtype=F64)),
    )


def test_training_and_evaluation_with_dropout() -> None:
    cell = Then(lambda cell, h: cell.held(h), nn.Dropout(0.5))
    rnn, (x, h) = fusedrnn.Recurrent(cell, compile="require"), given()
    x.requires_grad_()
    for is_training in (True, False, True):
        rnn.train(is_training)
        made, _ = rnn(x, h, generator=torch.Generator().manual_seed(0))
        expected, _ = loop(cell, x, h)
        torch.testing.assert_close(made, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (made, expected)))
    torch.manual_seed(1)
    assert not torch.equal(rnn(x, h)[0], rnn(x, h)[0])
    cell.held.p = 0.0
    check_call(rnn, x, h)


@pytest.mark.parametrize("shares", [True, False])
def test_attributes_that_change_too_often(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one cell, or of one among others of its class."""
    monkeypatch.setattr(traced_step, "MOST_TRACES", 2)
    torch._dynamo.reset()

    class One(Holds):
        pass

    (x, h), words = given(), "abcdef"
    if shares:
        for word in words:
            check_call(fusedrnn.Recurrent(One(word, len), compile="require"), x, h)
            check_call(fusedrnn.Recurrent(One(word + word, len), compile="require"), x, h)
    cell = One("", len)
    rnn = fusedrnn.Recurrent(cell, compile="auto")
    found = []
    for i in range(6):
        cell.held = words[:i]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            check_call(rnn, x, h)
        found += ["the cell was compiled for earlier calls" in str(w.message) for w in said]
    assert found == [True]  # once
    assert "keep changing between calls" in rnn.explain(x, h).program
    cell.held, rnn.compile_cell = "z" * 9, "require"
    with pytest.raises(RuntimeError, match="keep changing between calls"):
        rnn(x, h)


def test_floats_may_change_in_every_call(traced: list[Any]) -> None:
    """From the second value on they are inputs of the program."""
    cell, (x, h) = Holds(1.0, lambda held: held), given()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    for i in range(40):
        cell.held = 1 + i / 8
        check_call(rnn, x, h)
    assert len(traced) == 2


CHANCE: dict[str, Callable[[], Any]] = {
    "a generator": lambda: random.Random(0),
    "NumPy's": lambda: np.random.default_rng(0),
    "its method": lambda: random.Random(0).random,
    "in an object": lambda: types.SimpleNamespace(of=[random.Random(0)]),
    "an iterator": lambda: itertools.cycle([0.3, 0.7]),
    "a clock": lambda: time.perf_counter,
}


@pytest.mark.parametrize("name", CHANCE)
def test_what_gives_another_value_each_time_comes_and_goes(name: str) -> None:
    """It comes into an attribute of a cell that is compiled, and is not there for ever."""
    held = CHANCE[name]()
    cell, (x, h) = Holds(None, lambda o: 1.0 if o is None else drawn(o)), given()

    def drawn(o: Any) -> float:
        o = o.of[0] if hasattr(o, "of") else o
        draw = next if hasattr(o, "__next__") else getattr(o, "random", o)
        return float(draw(o) if draw is next else draw())

    rnn = fusedrnn.Recurrent(cell)
    for turn in range(2):
        cell.held, rnn.compile_cell = None, "require"
        check_call(rnn, x, h)
        cell.held, rnn.compile_cell = held, "auto"
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            outputs = [rnn(x, h)[0] for _ in range(4)]
        assert any(not torch.equal(outputs[0], other) for other in outputs[1:])
        assert ["the cell was compiled for earlier calls" in str(w.message) for w in said] == [
            True
        ] * (turn == 0)
        assert all(warning.filename == __file__ for warning in said)
        assert "(test_changes_between_calls.py:" in rnn.explain(x, h).program
    rnn.compile_cell = "require"
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        rnn(x, h)


# Classes and Python modules.


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
    patch = monkeypatch.setattr
    changes: dict[str, Callable[[], Any]] = {
        "a dict": lambda: monkeypatch.setitem(Of.d, "a", 2.0),
        "an object": lambda: patch(Of.o, "a", 2.0),
        "another object": lambda: patch(Of, "o", Data(3.0)),
        "a property": lambda: patch(Of, "by_property", property(lambda self: 2.0)),
        "a static method": lambda: patch(Of, "static", staticmethod(two)),
        "a class method": lambda: patch(Of, "of_class", classmethod(lambda c: 2.0)),
        "a default": lambda: patch(Of.with_default, "__defaults__", (2.0, {"a": 1.0})),
        "in a default": lambda: (Of.with_default.__defaults__ or ())[1].update(a=2.0),
        "a method": lambda: patch(Of, "with_default", lambda self: 3.0),
        "below": lambda: patch(Below, "a", 2.0, raising=False),
    }
    for change in changes.values():  # each in a cell of its own, which knows no other program
        check(Below(), change)


NUMBER, DICT, OBJECT, PARTIAL = 1.0, {"a": 1.0}, Data(), partial(scaled, scale=1.0)
other = sys.modules["another_module"] = types.ModuleType("another_module")
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
    here, patch, patch_item = globals(), monkeypatch.setattr, monkeypatch.setitem
    changes: dict[str, Callable[[], Any]] = {
        "a number": lambda: patch_item(here, "NUMBER", 2.0),
        "a dict": lambda: patch_item(DICT, "a", 2.0),
        "an object": lambda: patch(OBJECT, "a", 2.0),
        "another object": lambda: patch_item(here, "OBJECT", Data(3.0)),
        "a partial": lambda: patch_item(PARTIAL.keywords, "scale", 2.0),
        "of another module": lambda: patch(other, "A", 2.0),
        "a dict of another module": lambda: patch_item(other.D, "a", 2.0),
        "a class": lambda: patch(other.Settings, "a", 2.0),
        "a dict of a class": lambda: patch_item(other.Settings.d, "a", 2.0),
        "a function": lambda: patch(other, "read", two),
        "a helper": lambda: patch_item(here, "helper", two),
    }
    for change in changes.values():
        check(Around(), change)


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
    check(Decorated(), lambda: Decorated.read.state.update(a=2.0))


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
    "a partial": lambda f: torch.no_grad()(partial(f, 1.0)),
    "contextlib": contextlib.contextmanager(lambda: iter([None]))(),
    "an object": Wrapper,
}


NOT_FOLLOWED = {"functools", "both", "contextlib"}


@pytest.mark.parametrize("name", DECORATORS)
def test_what_decorators_of_other_packages_decorate(name: str) -> None:
    read, numbers = _decorated(DECORATORS[name])
    refusal = "torch.compile cannot trace this step" if name in NOT_FOLLOWED else ""
    check(Holds(read, lambda f: f()), lambda: numbers.update(a=2.0), refusal=refusal)


# What the step itself changes.

COUNT = {"a": 1.0}


class Counts(Base):
    """In an attribute, and where ``run.aside`` does not look."""

    total = 0.0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.data, self.array, self.steps = place, deep(3), np.zeros(1), 0

    def read(self) -> Any:
        if self.place == "object":
            deepest(self.data).a += 1
        elif self.place == "array":
            self.array += 1
        elif self.place == "class":
            Counts.total += 1
        elif self.place == "module":
            COUNT["a"] += 1
        elif self.place == "attribute":
            self.steps += 1
            return 1 / self.steps
        return 1.0


@pytest.mark.filterwarnings("error:.*was compiled for earlier calls")
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("object", "cell.data.a.a.a.a"),
        ("array", ""),
        ("class", "test_changes_between_calls.Counts.total"),
        ("module", "test_changes_between_calls.COUNT"),
    ],
)
def test_a_step_that_counts(place: str, name: str) -> None:
    """A program would not count."""
    x, h = given()
    with pytest.raises(RuntimeError, match=f"the step changes {name}.* \\(test_changes_b"):
        fusedrnn.Recurrent(Counts(place), compile="require")(x, h)
    cell = Counts(place)
    rnn = fusedrnn.Recurrent(cell, compile="auto")
    before = counted_by(cell)
    for _ in range(4):
        rnn(x, h)
    assert counted_by(cell) - before == 4 * len(x)
    cell.place = "nowhere"
    rnn.compile_cell = "require"
    check_call(rnn, x, h)


def counted_by(cell: Counts) -> float:
    return float(deepest(cell.data).a + cell.array.item() + Counts.total + COUNT["a"])


def test_a_step_that_counts_in_a_variable_around_it() -> None:
    count, (x, h) = 0, given()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += 1
        return (x + h).tanh(), h

    with pytest.raises(RuntimeError, match=r"the step changes a variable around step \(test_chang"):
        fusedrnn.scan(step, h, x, compile="require")
    fusedrnn.scan(step, h, x)
    assert count == len(x)


def test_a_step_that_counts_in_an_attribute() -> None:
    cell, (x, h) = Counts("attribute"), given()
    with pytest.raises(RuntimeError, match=r"the step changes cell.steps \(test_changes_between_"):
        fusedrnn.Recurrent(cell, compile="require")(x, h)
    assert cell.steps == 0
    found = []
    for run in (fusedrnn.Recurrent(cell, compile="auto"), partial(loop, cell)):
        cell.steps = 0
        found.append(run(x, h)[0])
        assert cell.steps == len(x)
    torch.testing.assert_close(*found)


class Lazy:
    @functools.cached_property
    def factor(self) -> float:
        return 2.0


def test_what_a_step_computes_once() -> None:
    """Its first call is in Python, and the next one has a program."""
    lazy = Lazy()
    cell, (x, h) = Holds(Data(Data(lazy)), lambda o: o.a.a.factor), given()
    rnn = fusedrnn.Recurrent(cell)
    check_call(rnn, x, h)
    assert "factor" in vars(lazy)
    rnn.compile_cell = "require"
    check_call(rnn, x, h)
    check(cell, lambda: vars(lazy).update(factor=3.0))


def test_what_a_step_makes_if_it_lacks_it(traced: list[Any]) -> None:
    """Compiled from the second or third call on, without being asked."""

    def made(cell: Any, h: Tensor) -> Tensor:
        if cell.held is None:
            cell.held = torch.linspace(0, 1, H, dtype=F64)
        return h * cell.held

    rnn, (x, h) = fusedrnn.Recurrent(Then(made)), given()
    for _ in range(3):
        check_call(rnn, x, h)
    assert len(traced) == 1


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
    check_call(fusedrnn.Recurrent(Holds(held, lambda held: 2.0)), *given())


def test_attributes_that_no_step_reads_compile_nothing(traced: list[Any]) -> None:
    """Such as a count of epochs that a training loop sets."""
    cell, (x, h) = Holds("a", len), given()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    for epoch in range(150):
        cell.epoch = epoch  # type: ignore[assignment]
        output, _ = rnn(x, h)
    torch.testing.assert_close(output, loop(cell, x, h)[0])
    assert len(traced) == 1
    cell.held = "ab"
    check_call(rnn, x, h)
    assert len(traced) == 2


# What only some batches, results or derivatives show.


@pytest.mark.parametrize("batch", [1, 6])
def test_what_decides_by_the_number_of_rows_is_another_step(batch: int) -> None:
    cell = Then(lambda cell, h: h * (cell.held if len(h) == batch else 1.0), 1.0)
    rnn, (x, h) = fusedrnn.Recurrent(cell), given(7)
    rnn(x, h)
    for factor in (1.5, 2.0, 1.0):
        cell.held = factor
        check_call(rnn, x[:, :batch], h[:batch])
        check_call(rnn, x, h)


def test_every_batch_has_what_the_step_does_with_it(traced: list[Any]) -> None:
    rnn = fusedrnn.Recurrent(Then(lambda cell, h: 2 * h if len(h) > 6 else h), compile="require")
    for batch in (4, 7, 3, 70, 1, 2):
        check_call(rnn, *given(batch))
    assert len(traced) == 3  # to 6 rows, more, and one


def test_outputs_of_another_structure_are_another_program() -> None:
    """Though the step does the same."""
    cell = Then(lambda cell, h: ({cell.held: h}, h))
    rnn, (x, h) = fusedrnn.Recurrent(cell, compile="require"), given()
    for name in ("a", "b", "a"):
        cell.held = name
        assert list(rnn(x, h)[0]) == [name]


held = 0  # called like the attribute


def test_variables_that_are_called_like_attributes(
    monkeypatch: pytest.MonkeyPatch, traced: list[Any]
) -> None:
    """They are not read: the training loop of a script may change them all the time."""
    rnn, (x, h) = fusedrnn.Recurrent(Holds("a", len), compile="require"), given()
    for number in range(3):
        monkeypatch.setitem(globals(), "held", number)
        check_call(rnn, x, h)
    assert len(traced) == 1


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
    cell = Then(lambda cell, h: of(h, cell.held if len(h) == batch else first), first)
    rnn, (x, h) = fusedrnn.Recurrent(cell), given(batch)
    x.requires_grad_()
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
