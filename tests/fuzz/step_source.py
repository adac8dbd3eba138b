"""The source text of a random cell, statement by statement."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FLOAT, BOOL, INT = "float", "bool", "int"


@dataclass(frozen=True)
class Value:
    """A local variable of the step."""

    name: str
    shape: tuple[int, ...]
    """Without the batch."""
    kind: str = FLOAT

    @property
    def width(self) -> int:
        return self.shape[-1]

    def like(self, other: Value) -> bool:
        return (self.shape, self.kind) == (other.shape, other.kind)


FLOATS = ", dtype=torch.float64"
_CONSTANTS = {FLOAT: f"0.5{FLOATS}", BOOL: "True", INT: "1"}


@dataclass
class Statement:
    """Some lines of the step."""

    text: str
    made: list[Value] = field(default_factory=list)
    """The variables that these lines are for."""

    def without_work(self) -> str:
        """The same variables as constants, for a smaller step."""
        return "\n".join(
            f"{value.name} = torch.full((rows, *{value.shape}), {_CONSTANTS[value.kind]})"
            for value in self.made
        )


@dataclass
class Source:
    """A cell as text."""

    states: tuple[int, ...]
    """Widths."""
    inputs: tuple[int, ...]
    setup: list[str] = field(default_factory=list)
    """Lines of __init__."""
    above: list[str] = field(default_factory=list)
    """Lines above the class."""
    statements: list[Statement] = field(default_factory=list)
    new_states: list[str] = field(default_factory=list)
    output: str = ""
    changes: list[str] = field(default_factory=list)
    """What is done between two calls, to ``cell`` and ``space``, the module's variables."""
    words: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The whole module."""
        lines = [*HEAD, *self.above, "", "class Cell(nn.Module):", "    def __init__(self):"]
        lines += ["        super().__init__()", *_indented(self.setup, 8)]
        lines += ["", "    def forward(self, x, state):", *_indented(self._unpacking(), 8)]
        lines += _indented([s.text for s in self.statements], 8)
        lines.append(f"        return {self.output}, {self._packed(self.new_states)}")
        zeros = [f"torch.zeros(batch, {width}{FLOATS})" for width in self.states]
        lines += [
            "",
            "    def initial_state(self, batch):",
            f"        return {self._packed(zeros)}",
        ]
        return "\n".join(lines) + "\n"

    def _unpacking(self) -> list[str]:
        lines = ["rows = (x[0] if isinstance(x, tuple) else x).shape[0]"]
        lines.append("x0 = x" if len(self.inputs) == 1 else "x0, x1 = x")
        names = ", ".join(f"h{i}" for i in range(len(self.states)))
        return [*lines, f"{names} = state"]

    def _packed(self, parts: Sequence[str]) -> str:
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


HEAD = [
    "import functools, math, random, torch",
    "import torch.nn.functional as F",
    "from torch import distributions as D, nn",
]


def _indented(texts: Sequence[str], spaces: int) -> list[str]:
    return [" " * spaces + line for text in texts for line in text.split("\n") if line]


ENDS = """torch.tanh({a}) | torch.tanh({a}) | torch.tanh({a}) | {a}.clamp(-1.5, 1.5)
    0.5 * {b} + 0.5 * torch.tanh({a}) | 0.3 * {a} | torch.sigmoid({a}) | {a}
    {b} + 0.1 * torch.sin({a})"""
"""From variables to new states; {b} is the old one."""


class Writer:
    """Writes a source by the words of a grammar."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        count = rng.choice([1, 1, 1, 2, 2, 3])
        self.source = Source(
            tuple(rng.randint(1, 9) for _ in range(count)),
            tuple(rng.randint(1, 9) for _ in range(rng.choice([1, 1, 2]))),
        )
        self.values = [Value(f"h{i}", (w,)) for i, w in enumerate(self.source.states)]
        self.values += [Value(f"x{i}", (w,)) for i, w in enumerate(self.source.inputs)]
        self._given = set(self.values)
        self._matrices: list[tuple[str, tuple[int, ...]]] = []
        self._count = 0

    # What statements are made of

    def name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def number(self, least: float = -2.0, most: float = 2.0) -> str:
        special = [n for n in (-1, 0, 1, 0.5, 2) if least <= n <= most]
        drawn = round(self.rng.uniform(least, most), 2)
        return repr(self.rng.choice(special) if special and self.rng.random() < 0.3 else drawn)

    def new(self, text: str, shape: Sequence[int], kind: str = FLOAT) -> Value:
        """A variable with the value of an expression."""
        value = Value(self.name("v"), tuple(shape), kind)
        self.do(f"{value.name} = {text}", [value])
        return value

    def do(self, text: str, made: Sequence[Value] = ()) -> None:
        self.source.statements.append(Statement(text, list(made)))
        self.values += made

    def one_of(
        self, block: str, *values: Value, shape: Sequence[int] | None = None, kind: str = FLOAT,
        **names: Any,
    ) -> Value:  # fmt: skip
        """A variable by one alternative of a block: they are lines, or parts of a line between |.

        Args:
            block: ``expression``, or ``expression -> shape`` with the names of numbers. {} or {a},
                {b}, ... are the values, {w} is the width of the first one; others are ``names``.
                One with {new} is statements, and {new} is the variable. \\n begins a new line.
            shape: Where the block says none; that of the first value.
        """
        line = self.chosen(block)
        text, _, said = line.partition(" -> ")
        names = {"w": values[0].shape[-1] if values and values[0].shape else 0, **names}
        if said:
            shape = [int(eval(one, {}, dict(names))) for one in said.split(",") if one != "row"]
        made = Value(self.name("v"), tuple(values[0].shape if shape is None else shape), kind)
        text = self.filled(text, *values, new=made.name, **names)
        self.do(text if "{new}" in line else f"{made.name} = {text}", [made])
        return made

    def chosen(self, block: str) -> str:
        """One of the alternatives of a block."""
        return self.rng.choice([one.strip() for one in re.split(r" \| |\n", block.strip())])

    def filled(self, text: str, *values: Value, **names: Any) -> str:
        """A text with what stands for its names in brackets."""
        known = {"": values[0].name if values else "", **names}
        known |= {letter: value.name for letter, value in zip("abcd", values, strict=False)}
        text = text.replace(r"\n", "\n")
        return re.sub(r"\{(\w*)\}", lambda m: str(known.get(m[1], m[0])), text)

    def say(self, block: str, *values: Value, **names: Any) -> None:
        """Statements by one alternative of a block, which make no variable."""
        self.do(self.filled(self.chosen(block), *values, **names))

    def setup(self, block: str, *values: Value, **names: Any) -> None:
        """The same in __init__."""
        self.source.setup.append(self.filled(self.chosen(block), *values, **names))

    def above(self, text: str) -> None:
        """Lines above the class, once."""
        if text not in self.source.above:
            self.source.above.append(text)

    def pair(self) -> tuple[Value, Value]:
        """Two variables of one shape, or one twice."""
        a = self.pick(dims=None)
        return a, self.rng.choice([v for v in self.values if v.like(a)])

    def use(self, word: Any) -> None:
        """Writes the statements of a word."""
        self.source.words.add(word.__name__)
        word(self)

    def pick(
        self, kind: str = FLOAT, dims: int | None = 1, width: int | None = None, least: int = 1
    ) -> Value:
        """A variable like this; a new one if there is none."""
        fitting = [
            v
            for v in self.values
            if v.kind == kind
            and (dims is None or len(v.shape) == dims)
            and (not v.shape or v.shape[-1] >= least)
            and (width is None or v.shape[-1:] == (width,))
        ]
        if fitting:
            recent = fitting[-4:]
            return self.rng.choice(recent if self.rng.random() < 0.6 else fitting)
        if kind != FLOAT:
            one = self.pick(FLOAT, dims, width, least)
            text = {BOOL: "{} > {n}", INT: "(3 * {}).clamp(-9, 9).long()"}[kind]
            return self.one_of(text, one, kind=kind, n=self.number())
        if dims == 0:
            return self.one_of("{}.sum(-1)", self.pick(), shape=())
        if dims == 2:
            width = width or max(least, self.rng.randint(1, 4))
            groups = self.rng.randint(1, 3)
            one = self.pick(width=groups * width)
            return self.one_of("{}.unflatten(-1, ({g}, {k})) -> g,k", one, g=groups, k=width)
        return self.fitted(width or max(least, self.rng.randint(1, 9)))

    def fitted(self, width: int) -> Value:
        """A variable of that width, made of another one."""
        one = self.pick()
        block = "{m}({}) | {} @ {p}"
        if one.width > width:
            block += " | {}[:, {first}:{end}]"
        if one.width == 1:
            block += " | {}.expand(-1, {n})"
        first = self.rng.randint(0, max(0, one.width - width))
        m, p = self.linear(one.width, width), self.matrix(one.width, width)
        names = {"m": m, "p": p, "n": width, "first": first, "end": first + width}
        return self.one_of(block, one, shape=(width,), **names)

    def linear(self, inputs: int, outputs: int) -> str:
        bias = "" if self.rng.random() < 0.7 else ", bias=False"
        return self.module(f"nn.Linear({inputs}, {outputs}{bias})")

    def module(self, text: str) -> str:
        name = f"self.{self.name('m')}"
        self.source.setup.append(f"{name} = {text}")
        return name

    def parameter(self, *shape: int) -> str:
        name = f"self.{self.name('p')}"
        scale = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
        self.source.setup.append(f"{name} = nn.Parameter({scale:.3f} * torch.randn({shape}))")
        return name

    def buffer(self, *shape: int) -> str:
        name = self.name("b")
        self.source.setup.append(f"self.register_buffer('{name}', torch.randn({shape}))")
        return f"self.{name}"

    def matrix(self, rows: int, columns: int) -> str:
        """A weight, now and then one that is there already, or a function of one."""
        known = [name for name, shape in self._matrices if shape == (rows, columns)]
        turned = [f"{name}.t()" for name, shape in self._matrices if shape == (columns, rows)]
        if known + turned and self.rng.random() < 0.3:
            return self.rng.choice(known + turned)
        if self.rng.random() < 0.5:
            self._matrices.append((name := self.parameter(rows, columns), (rows, columns)))
        else:
            self._matrices.append((name := self.parameter(columns, rows), (columns, rows)))
            name = f"{name}.{self.rng.choice(['t()', 'T', 'mT', 'transpose(0, 1)'])}"
        block = 6 * "{p} | " + "torch.tanh({p}) | ({p} * 0.8) | F.softmax({p}, 0) | torch.tril({p})"
        block += " | ({p} / {p}.norm())"
        if rows == columns:
            block += " | ({p} - {p}.t()) | ({p} + 0.1 * torch.eye({n}, dtype=torch.float64))"
        return self.filled(self.chosen(block), p=name, n=rows)

    def vector(self, width: int) -> str:
        """Something of rows that all are the same: a parameter, a buffer, a constant."""
        numbers = [round(self.rng.uniform(-1, 1), 2) for _ in range(width)]
        ways = [self.parameter, self.parameter, self.buffer, self.parameter]
        if self.rng.random() < 0.15:
            return f"torch.tensor({numbers}{FLOATS})"
        if self.rng.random() < 0.2:
            return self.parameter(1, width)
        return self.rng.choice(ways)(width)

    def groups_of(self, value: Value) -> tuple[int, int]:
        """Factors of a width."""
        every = [g for g in range(1, value.width + 1) if value.width % g == 0]
        groups = self.rng.choice(every)
        return groups, value.width // groups

    # The end

    def finish(self) -> Source:
        """What the step returns."""
        source, rng = self.source, self.rng
        for i, width in enumerate(source.states):
            new, old = self.pick(width=width), f"h{i}"
            if rng.random() < 0.5:
                others = [v for v in self.values if v.shape == (width,) and v.kind == FLOAT]
                new = next((v for v in reversed(others) if v not in self._given), new)
            made = self.one_of(ENDS, new, Value(old, (width,)))
            source.new_states.append(made.name)
        results = [rng.choice(self.values[-12:]).name for _ in range(rng.choice([1, 1, 2, 3]))]
        if rng.random() < 0.6:
            results[0] = source.new_states[0]
        names = ", ".join(f"'y{i}': {name}" for i, name in enumerate(results))
        text = f"({', '.join(results)})" if len(results) > 1 else results[0]
        source.output = rng.choice([text, text, f"{{{names}}}"])
        return source
