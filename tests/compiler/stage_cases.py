"""What the stages of ``stages.h`` compute, in torch, and random calls of them.

Longer than 350 lines, because a call has many parts that may be there or not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from compiler.guarded import Rows
from compiler.stage_library import CUDA, Call, Input, Output, accumulated
from torch import Tensor

from fusedrnn._ops import NORMAL, UNIFORM, draw

COLUMN, GROUP, DRAWN_NORMAL, DRAWN_UNIFORM, INDEX = "column", "group", "normal", "uniform", "index"
SUM, MAX, ARG_MAX = "sum", "max", "arg_max"
SEED = torch.tensor([0x1234_5678_9ABC_DEF0])


def gru(r: Tensor, u: Tensor, x: Tensor, p: Tensor, h: Tensor) -> list[Tensor]:
    n = torch.tanh(x + torch.sigmoid(r) * p)
    return [n + torch.sigmoid(u) * (h - n)]


def lstm(i: Tensor, f: Tensor, g: Tensor, o: Tensor, c: Tensor) -> list[Tensor]:
    new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(new), new]


def one_hot(place: Tensor, p: Tensor, column: Tensor) -> list[Tensor]:
    return [(place == column).to(p.dtype) + p - p.detach()]


def exponentials(x: Tensor, largest: Tensor) -> list[Tensor]:
    e = torch.exp(x - largest)
    return [e, e]


@dataclass(frozen=True)
class Kinds:
    """A stage's function, of inputs that all have as many columns as the stage."""

    inputs: list[str]
    outputs: list[str]
    function: Callable[..., list[Tensor]]
    places: list[int] = field(default_factory=list)
    """Inputs that are places in a group."""


KINDS = {
    "gru": Kinds([COLUMN] * 5, [COLUMN], gru),
    "lstm": Kinds([COLUMN] * 5, [COLUMN] * 2, lstm),
    "sample": Kinds(
        [COLUMN, COLUMN, DRAWN_NORMAL],
        [COLUMN],
        lambda loc, logvar, eps: [loc + eps * torch.exp(logvar / 2)],
    ),
    "draws": Kinds([DRAWN_NORMAL, DRAWN_UNIFORM], [COLUMN] * 2, lambda n, u: [n, u]),
    "moments": Kinds([COLUMN], [SUM] * 2, lambda x: [x, x * x]),
    "normalize": Kinds(
        [COLUMN, GROUP, GROUP, COLUMN],
        [COLUMN],
        lambda x, mean, scale, weight: [(x - mean) * scale * weight],
    ),
    "largest": Kinds([COLUMN], [MAX, ARG_MAX], lambda x: [x, x]),
    "exponentials": Kinds([COLUMN, GROUP], [COLUMN, SUM], exponentials),
    "one_hot": Kinds([GROUP, COLUMN, INDEX], [COLUMN], one_hot, places=[0]),
    "dropout": Kinds(
        [COLUMN, DRAWN_UNIFORM], [COLUMN], lambda x, u: [x * (u >= 0.25).to(x.dtype) / 0.75]
    ),
    "many_groups": Kinds([COLUMN, GROUP, GROUP], [COLUMN, SUM], lambda x, a, b: [x * a * b] * 2),
    "sample_of_a_layer": Kinds(
        [DRAWN_NORMAL, COLUMN, COLUMN],
        [COLUMN],
        lambda eps, loc, logvar: [loc + eps * torch.exp(logvar / 2)],
    ),
    "linear_of_a_layer": Kinds([COLUMN], [COLUMN], lambda x: [x]),
    "gru_of_a_layer": Kinds(
        [COLUMN] * 7,
        [COLUMN],
        lambda h, xr, xu, xn, pr, pu, pn: gru(xr + pr, xu + pu, xn, pn, h),
    ),
    "lstm_of_a_layer": Kinds(
        [COLUMN] * 9,
        [COLUMN] * 2,
        lambda c, *gates: lstm(*(x + p for x, p in zip(gates[:4], gates[4:], strict=True)), c),
    ),
}


def to_columns(numbers: Tensor, group: int, width: int) -> Tensor:
    """Each group's number in each of its columns."""
    return numbers.repeat_interleave(group, dim=1)[:, :width]


def reduced(kind: str, x: Tensor, group: int) -> Tensor:
    """One number of each group of columns; the last group may be shorter."""
    parts = x.split(group, dim=1)
    if kind == SUM:
        return torch.stack([part.sum(dim=1) for part in parts], dim=1)
    if kind == MAX:
        return torch.stack([part.amax(dim=1) for part in parts], dim=1)
    return torch.stack([part.argmax(dim=1).to(x.dtype) for part in parts], dim=1)


@dataclass
class Sizes:
    """How large a call is, and in which steps."""

    width: int
    steps: int = 3
    batch: int = 4
    groups: tuple[int, ...] = (1,)
    """From which a group's size is chosen, for each input and result that has groups."""
    first_t: int = 2
    first_step: int = 1000
    lengths: list[int] | None = None

    @property
    def rows(self) -> int:
        return self.steps * self.batch


class Case:
    """A call with random memory, and what it has to give, in float64.

    Args:
        backend: Draws the noise that is expected, as Call.run has it: where floats differ in the
            last bit, as without FMA, some are rounded to another number of 16 bits. The stage
            "draws" is compared to the library's noise.
    """

    def __init__(
        self,
        stage: str,
        dtype: torch.dtype,
        sizes: Sizes,
        rng: random.Random,
        backend: str,
    ):
        self.kinds, self.sizes, self.dtype, self.rng = KINDS[stage], sizes, dtype, rng
        self.backend, self.device = backend, device_of(backend)
        self.draws_itself = stage == "draws"
        self.memory: list[Rows] = []
        inputs = [self._input(i, kind) for i, kind in enumerate(self.kinds.inputs)]
        outputs = [self._output(kind) for kind in self.kinds.outputs]
        lengths = None if sizes.lengths is None else torch.tensor(sizes.lengths)
        self.call = Call(
            stage,
            dtype,
            sizes.width,
            sizes.batch,
            inputs,
            outputs,
            first_t=sizes.first_t,
            first_step=sizes.first_step,
            seed=SEED.to(self.device)
            if {DRAWN_NORMAL, DRAWN_UNIFORM} & set(self.kinds.inputs)
            else None,
            lengths=None if lengths is None else lengths.to(self.device),
        )
        t = sizes.first_t + torch.arange(sizes.rows) // sizes.batch
        b = torch.arange(sizes.rows) % sizes.batch
        self.takes_step = torch.ones(sizes.rows).bool() if lengths is None else t < lengths[b]
        self._expect()

    def _group(self) -> int:
        return self.rng.choice(self.sizes.groups)

    def _rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        made = Rows(rows, columns, dtype, self.rng, self.device)
        self.memory.append(made)
        return made.view

    def _random(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        made = self._rows(rows, columns, dtype)
        return made.copy_(torch.randn(rows, columns, dtype=torch.float64))

    def _any_dtype(self) -> torch.dtype:
        return self.rng.choice([self.dtype, accumulated(self.dtype)])

    def _input(self, i: int, kind: str) -> Input:
        rng, rows, width = self.rng, self.sizes.rows, self.sizes.width
        group = self._group() if kind in (GROUP, INDEX) else 0
        if kind not in (COLUMN, GROUP):
            offset = rng.choice([0, 4, 64, 1, 3, 70])
            return Input(group=group, offset=offset, stream=rng.randrange(2**32))
        columns = width if kind == COLUMN else -(-width // group)
        given = Input(group=group)
        # Only now and then the same numbers for all rows.
        given.data = self._random(rng.choice([rows, rows, 1]), columns, self._any_dtype())
        if i in self.kinds.places:
            size = min(group, width)
            given.data.copy_(torch.randint(0, size, given.data.shape))
        elif rng.random() < 0.5:
            given.bias = self._random(1, columns, accumulated(self.dtype))
        if rng.random() < 0.8:
            given.adds = rng.random() < 0.5
            dtype = self._any_dtype()
            given.gradient = (
                self._random(rows, columns, dtype)
                if given.adds
                else self._rows(rows, columns, dtype)
            )
        return given

    def _output(self, kind: str) -> Output:
        rng, rows, width = self.rng, self.sizes.rows, self.sizes.width
        group = self._group() if kind != COLUMN else 0
        columns = -(-width // group) if group else width
        wanted = Output(group=group)
        if rng.random() < 0.9:
            # A place is an integer, of which a 16-bit type has no large ones.
            dtype = accumulated(self.dtype) if kind == ARG_MAX else self._any_dtype()
            wanted.data = self._rows(rows, columns, dtype)
            wanted.rounds = rng.random() < 0.3 and kind != ARG_MAX
        sources = rng.choice([0, 1, 1, 2, 3])
        wanted.gradients = [self._random(rows, columns, self._any_dtype()) for _ in range(sources)]
        return wanted

    def _given(self, i: int, kind: str) -> tuple[Tensor, Tensor]:
        """The numbers of an input as a leaf, and in all columns of the stage."""
        rows, width = self.sizes.rows, self.sizes.width
        given = self.call.inputs[i]
        if kind == INDEX:
            index = (torch.arange(width) % given.group).double().expand(rows, width)
            return index, index
        if kind in (DRAWN_NORMAL, DRAWN_UNIFORM):
            noise = self._noise_of_library if self.draws_itself else self._noise_of_backend
            drawn = wide(noise(given, kind))
            return drawn, drawn
        assert given.data is not None
        leaf = wide(given.data).expand(rows, -1)
        if given.bias is not None:
            leaf = leaf + wide(given.bias)
        leaf = leaf.clone().requires_grad_()
        return leaf, leaf if kind == COLUMN else to_columns(leaf, given.group, width)

    def _noise_of_library(self, given: Input, kind: str) -> Tensor:
        """Before it is rounded to the storage type."""
        sizes = self.sizes
        drawn = draw(
            SEED,
            sizes.steps,
            sizes.batch,
            given.offset + sizes.width,
            stream=given.stream,
            distribution=NORMAL if kind == DRAWN_NORMAL else UNIFORM,
            dtype=accumulated(self.dtype),
            first_step=sizes.first_step + sizes.first_t,
        )
        return drawn[..., given.offset :].reshape(sizes.rows, sizes.width)

    def _noise_of_backend(self, given: Input, kind: str) -> Tensor:
        sizes, dtype = self.sizes, accumulated(self.dtype)
        drawn = torch.empty(sizes.rows, sizes.width, dtype=dtype, device=self.device)
        outputs = [Output(), Output()]
        outputs[kind == DRAWN_UNIFORM].data = drawn
        noise = [Input(offset=given.offset, stream=given.stream) for _ in range(2)]
        call = Call("draws", self.dtype, sizes.width, sizes.batch, noise, outputs)
        call.first_t, call.first_step = sizes.first_t, sizes.first_step
        call.seed = SEED.to(self.device)
        call.run(self.backend, 0, sizes.rows, backward=False)
        return drawn

    def _expect(self) -> None:
        given = [self._given(i, kind) for i, kind in enumerate(self.kinds.inputs)]
        made = self.kinds.function(*[columns for _, columns in given])
        self.results, total = [], torch.zeros((), dtype=torch.float64)
        keep = self.takes_step[:, None]
        for kind, x, wanted in zip(self.kinds.outputs, made, self.call.outputs, strict=True):
            result = x if kind == COLUMN else reduced(kind, x, wanted.group)
            self.results.append(result.detach() * keep)
            if kind in (COLUMN, SUM):
                for gradient in wanted.gradients:
                    total = total + (result * wide(gradient) * keep).sum()
        leaves = [leaf for leaf, _ in given if leaf.requires_grad]
        found = iter(
            torch.autograd.grad(total, leaves, allow_unused=True)
            if total.requires_grad
            else [None] * len(leaves)
        )
        self.gradients: list[Tensor | None] = []
        for (leaf, _), to in zip(given, self.call.inputs, strict=True):
            if not leaf.requires_grad:
                self.gradients.append(None)
                continue
            expected = next(found)
            expected = torch.zeros_like(leaf) if expected is None else expected
            if to.gradient is not None and to.adds:
                expected = expected + wide(to.gradient)
            self.gradients.append(expected)

    def hide_rows_that_take_no_step(self) -> None:
        """Fills their inputs and gradients with NaN, which must not be read."""
        rest = ~self.takes_step
        for given in self.call.inputs:
            if given.data is not None and len(given.data) > 1:
                given.data[rest] = torch.nan
        for wanted in self.call.outputs:
            for gradient in wanted.gradients:
                gradient[rest] = torch.nan

    def run(self, *, pieces: list[int] | None = None) -> None:
        """Forward and backward, in pieces that end at these rows."""
        ends = [0, *(pieces or []), self.sizes.rows]
        for backward in (False, True):
            for first, last in itertools.pairwise(ends):
                self.call.run(self.backend, first, last, backward=backward)

    def found(self) -> list[Tensor]:
        """Copies of what was written."""
        written = [wanted.data for wanted in self.call.outputs]
        written += [given.gradient for given in self.call.inputs]
        return [tensor.clone() for tensor in written if tensor is not None]

    def check(self) -> None:
        """Compares what was written, and destroys it."""
        for wanted, expected in zip(self.call.outputs, self.results, strict=True):
            if wanted.data is not None:
                is_narrow = wanted.rounds or wanted.data.dtype == self.dtype or self.draws_itself
                check_close(wanted.data, expected, self.dtype if is_narrow else None)
                if wanted.rounds:
                    rounded = wanted.data.to(self.dtype).to(wanted.data.dtype)
                    assert torch.equal(rounded, wanted.data)
        for given, gradient in zip(self.call.inputs, self.gradients, strict=True):
            if given.gradient is not None:
                assert gradient is not None
                is_narrow = given.gradient.dtype == self.dtype
                check_close(given.gradient, gradient, self.dtype if is_narrow else None)
        for rows in self.memory:
            assert rows.gaps_are_untouched()


def device_of(backend: str) -> str:
    return "cuda" if backend == CUDA else "cpu"


def check_largest(dtype: torch.dtype, backend: str, width: int, trials: int) -> None:
    """The stage "largest" of rows with ties, infinities and NaN."""
    inf, nan, device = torch.inf, torch.nan, device_of(backend)
    for trial in range(trials):
        choices = [[0.0, 1.0], [0.0, -inf], [1.0, nan, inf], [-inf], [-0.0, -1.0, nan]][trial % 5]
        x = torch.tensor(choices)[torch.randint(len(choices), (1, width))].to(dtype)
        largest, place = (
            torch.empty(1, 1, dtype=accumulated(dtype), device=device) for _ in range(2)
        )
        outputs = [Output(largest, group=width), Output(place, group=width)]
        call = Call("largest", dtype, width, 1, [Input(x.to(device))], outputs)
        call.run(backend, 0, 1, backward=False)
        value = x.double().amax(dim=1)
        index = ((x == value) | x.isnan()).int().argmax(dim=1)  # the first
        found = largest[0].cpu().double()
        torch.testing.assert_close(found, value, equal_nan=True, rtol=0, atol=0)
        assert place.item() == index.item()


def wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()


def check_close(found: Tensor, expected: Tensor, rounded_to: torch.dtype | None) -> None:
    computed_in = torch.float64 if found.dtype == torch.float64 else torch.float32
    error = (wide(found) - expected).abs()
    scale = expected.abs().amax() + 1
    bound = 30 * torch.finfo(computed_in).eps * scale
    if rounded_to is not None:
        info = torch.finfo(rounded_to)
        bound = bound + 0.51 * info.eps * expected.abs() + info.smallest_normal * info.eps
    assert (error <= bound).all(), f"{(error - bound).max():.3g} beyond {bound.max():.3g}"
