"""The operators by which calls run programs: weights made of constants, and wrong calls.

Longer than 350 lines, because it has a list of what may be wrong.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime.driver_calls import SEED, Call, expected, random_call, resets
from runtime.driver_cells import CELLS, library
from torch import Tensor

from fusedrnn._compiler import program_operators
from fusedrnn._compiler.program import numbers_of

GRU = CELLS["gru"]
Sides = list[tuple[int, int, bool, int, int]]


def add(cell: Any, dtype: torch.dtype, *recipes: Any) -> int:
    """A program, and how its weights are made.

    Args:
        recipes: Which inputs it reads, weights and vectors.
    """
    form = cell.program
    shapes = [[width] for width in form.sequences], [[carry.width] for carry in form.carries]
    function = ctypes.cast(library(dtype)[f"stages_of_{cell.name}"], ctypes.c_void_p).value
    assert function is not None
    numbers = list(numbers_of((*shapes, *recipes)))
    return program_operators.add_program(form, function, dtype=dtype, constants=numbers)


def as_they_are(call: Call) -> tuple[list[int], list[Any], list[Any]]:
    """Recipes of constants that are the weights and vectors."""
    weights = [[[(i, -1, False, 0, w.shape[1])]] for i, w in enumerate(call.weights)]
    vectors = [[[(len(weights) + i, -1, False, 0, len(v))]] for i, v in enumerate(call.vectors)]
    return list(range(len(call.inputs))), weights, vectors


def forward(number: int, call: Call, constants: Sequence[Tensor], **changes: Any) -> list[Tensor]:
    options = arguments(number, call, constants) | changes
    return program_operators.call(*options.values())


def arguments(number: int, call: Call, constants: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "program": number,
        "tensors": [*call.inputs, *call.carries, *constants],
        "first_state": len(call.inputs),
        "seq_len": call.seq_len,
        "keeps": 2 if call.saves else 1,
        "reset_to": call.reset_to,
        "reset_kinds": call.kinds,
        "chunk": call.chunk,
        "reverse": call.reverse,
        "stream": call.stream,
        "first_step": call.first_step,
        "seed": torch.tensor([SEED]) if call.cell.draws else None,
        "lengths": call.lengths,
        "reset": call.reset,
    }


def backward(
    number: int,
    call: Call,
    constants: Sequence[Tensor],
    results: Sequence[Tensor],
    wants: Sequence[bool] | None = None,
    changes: dict[str, Any] | None = None,
) -> list[Tensor]:
    options = arguments(number, call, constants)
    del options["keeps"]
    sequences, states = len(call.grad_sequences), len(call.carries)
    kept = [*results[:sequences], *results[sequences + states :]]
    needs = [True] * len(options["tensors"]) if wants is None else wants
    wanted = [kind in (1, 2) for kind in call.kinds] if call.reset_to else []
    first = {name: options.pop(name) for name in ("program", "tensors", "first_state", "seq_len")}
    first |= {
        "kept": kept,
        "gradients": [*call.grad_sequences, *call.grad_last],
        "needs": [*needs, *wanted],
        "is_part": False,
    }
    return program_operators.call_backward(*(first | options | (changes or {})).values())


@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.parametrize("saves", [False, True])
def test_calls_with_weights_as_they_are(name: str, saves: bool) -> None:
    """Every cell of the driver's tests, against a loop."""
    cell = CELLS[name]
    options: dict[str, Any] = {"lengths": torch.tensor([7, 3, 5, 7]), "reverse": True}
    kinds = [(1, 2, 3, 0)[j % 4] for j in range(len(cell.program.carries))]
    call = random_call(cell, reset=resets(7, 4), kinds=kinds, saves=saves, chunk=3, **options)
    made = [*call.weights, *call.vectors]
    number = add(cell, torch.float64, *as_they_are(call))
    results = forward(number, call, made)
    gradients = backward(number, call, made, results)
    theirs = expected(call)
    ours = iter([*results[: len(call.grad_sequences) + len(call.carries)], *gradients])
    for what, value in theirs.items():
        found = next(ours)
        if what.startswith("grad reset_to") and not found.numel():
            continue
        torch.testing.assert_close(found, value, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("name", list(CELLS))
def test_a_batch_of_no_rows(name: str) -> None:
    """Gradients of constants, to which no row gives anything, are zeros and not what memory has."""
    call = random_call(CELLS[name], batch=0)
    made = [*call.weights, *call.vectors]
    number = add(CELLS[name], torch.float64, *as_they_are(call))
    results = forward(number, call, made)
    dirty = [torch.full_like(one, 1.0) for one in made]
    del dirty  # whose memory is likely to be used again
    gradients = backward(number, call, made, results)
    given = [*call.inputs, *call.carries, *made]
    assert [g.shape for g in gradients] == [t.shape for t in given]
    for gradient in gradients[-len(made) :]:
        assert not gradient.any()


# Weights that are made of constants.


class Recipes:
    """Random ones, and what torch makes by them."""

    def __init__(self, call: Call, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.constants: list[Tensor] = []
        self.weights = [[self._weight(*w.shape)] for w in call.weights]
        self.vectors = [self._vector(len(v)) for v in call.vectors]

    def made(self, constants: Sequence[Tensor]) -> list[Tensor]:
        return [
            *(
                self._sum(terms, constants, rows)
                for terms, rows in zip(self.weights, self._rows, strict=True)
            ),
            *(self._sum(terms, constants, None) for terms in self.vectors),
        ]

    def _sum(self, terms: list[Sides], every: Sequence[Tensor], rows: int | None) -> Tensor:
        found = []
        for sides in terms:
            parts = [self._side(side, every, rows) for side in sides]
            # In the memory in which operators make it, on which roundings of products depend.
            found.append(parts[0] if len(parts) == 1 else torch.cat([p.t() for p in parts]).t())
        return sum(found)  # type: ignore[return-value]

    def _side(self, side: tuple[int, int, bool, int, int], every: Any, rows: int | None) -> Tensor:
        constant, member, is_transposed, first, columns = side
        if constant == -1:
            return torch.zeros(columns, dtype=torch.float64)
        own = every[constant][member] if member >= 0 else every[constant]
        own = own.t() if is_transposed else own
        if rows is None:
            return own.reshape(-1).narrow(0, first, columns)
        return own.narrow(0, first, rows)

    def _new(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._generator)

    @property
    def _rows(self) -> list[int]:
        return self.__dict__.setdefault("rows", [])

    def _weight(self, rows: int, columns: int) -> Sides:
        self._rows.append(rows)
        sides: Sides = []
        for width in self._cut(columns):
            more = self._random.choice([0, 0, 1, 3])
            is_transposed, first = self._random.random() < 0.5, self._random.randint(0, more)
            shape = (rows + more, width)
            known = [
                (i, t)
                for i, c in enumerate(self.constants)
                for t in (False, True)
                if c.dim() > 1 and tuple(c.shape[-2:])[:: -1 if t else 1] == shape
            ]
            if known and self._random.random() < 0.6:
                i, is_transposed = self._random.choice(known)
            else:
                i = len(self.constants)
                stack = [3] if self._random.random() < 0.4 else []
                self.constants.append(self._new(*stack, *shape[:: -1 if is_transposed else 1]))
            member = self._random.randrange(3) if self.constants[i].dim() == 3 else -1
            sides.append((i, member, is_transposed, first, width))
        return sides

    def _vector(self, width: int) -> list[Sides]:
        terms = []
        for _ in range(self._random.choice([1, 1, 2, 3])):
            sides: Sides = []
            for part in self._cut(width):
                known = [i for i, c in enumerate(self.constants) if c.numel() >= part]
                if self._random.random() < 0.2:
                    sides.append((-1, -1, False, 0, part))
                elif known and self._random.random() < 0.6:
                    i = self._random.choice(known)
                    most = self.constants[i].numel() - part
                    sides.append((i, -1, False, self._random.randint(0, most), part))
                else:
                    more = self._random.choice([0, 0, part])
                    shape = (part + more,) if self._random.random() < 0.7 else (part + more, 1)
                    self.constants.append(self._new(*shape))
                    first = self._random.choice([0, more])
                    sides.append((len(self.constants) - 1, -1, False, first, part))
            terms.append(sides)
        return terms

    def _cut(self, width: int) -> list[int]:
        if width == 1 or self._random.random() < 0.6:
            return [width]
        first = self._random.randint(1, width - 1)
        return [first, *self._cut(width - first)]


@pytest.mark.parametrize("name", ["gru", *sorted(set(CELLS) - {"gru"})[:6]])
@pytest.mark.parametrize("seed", range(8))
def test_weights_that_are_made_of_constants(name: str, seed: int) -> None:
    cell = CELLS[name]
    call = random_call(cell, seed=seed)
    recipes = Recipes(call, seed)
    inputs = list(range(len(call.inputs)))
    number = add(cell, torch.float64, inputs, recipes.weights, recipes.vectors)
    constants = [constant.requires_grad_() for constant in recipes.constants]
    made = recipes.made(constants)
    as_made = [tensor.detach() for tensor in made]
    given = [constant.detach() for constant in constants]
    exact_number = add(cell, torch.float64, *as_they_are(call))
    theirs = forward(exact_number, call, as_made)
    ours = forward(number, call, given)
    assert all(map(torch.equal, ours, theirs)), "the same numbers"

    states = len(call.inputs) + len(call.carries)
    trained = [random.Random(seed + i).random() < 0.8 for i in range(len(constants))]
    of_made = backward(exact_number, call, as_made, theirs)[states:]
    with_graph = [(y, g) for y, g in zip(made, of_made, strict=True) if y.requires_grad]
    results, gradients = zip(*with_graph, strict=True)
    exact = torch.autograd.grad(results, constants, gradients, allow_unused=True)
    needs = [True] * states + trained
    found = backward(number, call, given, ours, needs)[states:]
    for gradient, one, need in zip(found, exact, trained, strict=True):
        if not need or one is None:
            assert gradient.shape == (0,)
        else:
            torch.testing.assert_close(gradient, one)
    memory = [g.untyped_storage().data_ptr() + 8 * int(g.storage_offset()) for g in found]
    used = [m for m, g in zip(memory, found, strict=True) if g.numel()]
    assert len(set(used)) == len(used), "each in memory of its own"


def test_tensors_come_as_the_step_has_them() -> None:
    """Of other dtypes, with more dimensions, and not in one piece."""
    call = random_call(GRU)
    made = [*call.weights, *call.vectors]
    number = add(GRU, torch.float64, *as_they_are(call))
    exact = forward(number, call, made)
    x, h = call.inputs[0], call.carries[0]
    changed = [x.float().double(), *call.inputs[1:]], [h.float().double(), *call.carries[1:]]
    rounded = forward(number, call, made, tensors=[*changed[0], *changed[1], *made])
    others = [x.float().unsqueeze(2), *call.inputs[1:]], [h.float()[:, None], *call.carries[1:]]
    same = forward(number, call, made, tensors=[*others[0], *others[1], *made])
    assert all(map(torch.equal, rounded, same))
    cut = [torch.stack([w, w], -1)[..., 0] for w in made]
    assert not cut[0].is_contiguous()
    assert all(map(torch.equal, exact, forward(number, call, cut)))


# Wrong calls.


def double(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


WRONG: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (lambda a: {"program": 1 << 40}, "there is no program"),
    (lambda a: {"program": -1}, "there is no program"),
    (lambda a: {"tensors": a["tensors"][:1]}, "got 1 tensors"),
    (lambda a: {"tensors": a["tensors"][:-1]}, "there is no constant"),
    (lambda a: {"first_state": -1}, "-1|inputs"),
    (lambda a: {"first_state": 1 << 40}, "inputs"),
    (lambda a: {"first_state": 0}, "."),
    (lambda a: {"seq_len": 0}, "."),
    (lambda a: {"seq_len": 8}, "must have the dimensions"),
    (lambda a: {"seq_len": -1}, "."),
    (lambda a: {"seq_len": 1 << 40}, "."),
    (lambda a: {"tensors": [double(7), *a["tensors"][1:]]}, "must have the dimensions"),
    (lambda a: {"tensors": [double(7, 4, 50), *a["tensors"][1:]]}, r"inputs\[0\] must have"),
    (lambda a: {"tensors": [double(), *a["tensors"][1:]]}, "."),
    (lambda a: {"tensors": [a["tensors"][0], double(), *a["tensors"][2:]]}, "."),
    (
        lambda a: {"tensors": [*a["tensors"][:2], double(3), *a["tensors"][3:]]},
        "a weight cannot be made",
    ),
    (
        lambda a: {"tensors": [*a["tensors"][:2], double(3, 3), *a["tensors"][3:]]},
        "a weight cannot be made",
    ),
    (lambda a: {"tensors": [*a["tensors"][:-1], double(2)]}, "a vector cannot be made"),
    (lambda a: {"reset_kinds": [7]}, "reset_kinds must be in"),
    (lambda a: {"reset_kinds": [0, 0, 0]}, "reset_to and reset_kinds"),
    (lambda a: {"reset_to": [double(4, 5)]}, "tensors for resets"),
    (
        lambda a: {"reset_to": [double(4, 5)] * 3, "reset_kinds": [1] * 3},
        "reset_to and reset_kinds",
    ),
    (lambda a: {"reset_to": [double(9, 5)], "reset_kinds": [1]}, "reset_to"),
    (lambda a: {"reset_to": [double()], "reset_kinds": [1]}, "."),
    (lambda a: {"chunk": -1}, "chunk must be 0"),
    (lambda a: {"stream": -1}, "stream must be 0"),
    (lambda a: {"first_step": -1}, "first_step must be 0"),
    (lambda a: {"lengths": torch.tensor([8, 1, 1, 1])}, "lengths must be in"),
    (lambda a: {"lengths": torch.tensor([1, 1])}, "lengths must be 4"),
    (lambda a: {"reset": torch.zeros(2, 2, dtype=torch.bool)}, "reset must have shape"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_wrong_calls(change: Callable[[dict[str, Any]], dict[str, Any]], reason: str) -> None:
    call = random_call(GRU)
    made = [*call.weights, *call.vectors]
    number = add(GRU, torch.float64, *as_they_are(call))
    options = arguments(number, call, made)
    results = program_operators.call(*options.values())
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*({reason})"):
        program_operators.call(*(options | change(options)).values())
    changes = change(options)
    more = {}
    if "tensors" in changes:
        more["needs"] = [True] * len(changes["tensors"]) + [True] * len(options["reset_to"])
    if "reset_to" in changes:
        more["needs"] = [True] * (len(options["tensors"]) + len(changes["reset_to"]))
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*({reason})"):
        backward(number, call, made, results, changes=changes | more)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kept": []}, "that forward has kept"),
        ({"kept": [double(3)] * 9}, "that forward has kept"),
        ({"kept": [double(7, 4, 4)]}, "sequences"),
        ({"gradients": []}, "gradients, got 0"),
        ({"gradients": [double(7, 4, 9), double(4, 5)]}, r"grad_sequences\[0\] must have shape"),
        ({"gradients": [double(7, 4, 5), double(4, 9)]}, r"grad_last\[0\] must have shape"),
        ({"gradients": [double(), double(4, 5)]}, "."),
        ({"needs": []}, "needs, got 0"),
        ({"needs": [True] * 99}, "needs, got 99"),
    ],
)
def test_wrong_calls_of_backward(change: dict[str, Any], reason: str) -> None:
    call = random_call(GRU)
    made = [*call.weights, *call.vectors]
    number = add(GRU, torch.float64, *as_they_are(call))
    results = forward(number, call, made)
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*({reason})"):
        backward(number, call, made, results, changes=change)


@pytest.mark.parametrize("keeps", [-1, 3])
def test_what_is_kept(keeps: int) -> None:
    call = random_call(GRU)
    with pytest.raises(RuntimeError, match="keeps must be 0, 1 or 2"):
        number = add(GRU, torch.float64, *as_they_are(call))
        forward(number, call, [*call.weights, *call.vectors], keeps=keeps)


def test_a_program_without_recipes() -> None:
    call = random_call(GRU)
    function = ctypes.cast(library(torch.float64)["stages_of_gru"], ctypes.c_void_p).value
    assert function is not None
    number = program_operators.add_program(GRU.program, function, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="fusedrnn: nobody has said"):
        forward(number, call, [*call.weights, *call.vectors])


def test_gradients_of_parts() -> None:
    """Those of constants come in the type in which they are added up."""
    call = random_call(GRU).to(torch.bfloat16)
    made = [*call.weights, *call.vectors]
    number = add(GRU, torch.bfloat16, *as_they_are(call))
    results, states = forward(number, call, made), len(call.inputs) + len(call.carries)
    whole = backward(number, call, made, results)
    part = backward(number, call, made, results, changes={"is_part": True})
    for i, (own, rounded) in enumerate(zip(part, whole, strict=True)):
        assert own.dtype == (torch.float32 if states <= i < states + len(made) else torch.bfloat16)
        assert torch.equal(own.bfloat16(), rounded)


def test_constants_of_other_shapes() -> None:
    call = random_call(GRU)
    number = add(GRU, torch.float64, *as_they_are(call))
    made = [*call.weights, *call.vectors]
    for i, tensor in enumerate(made):
        for wrong in (tensor[:-1], double(), tensor[:0]):
            with pytest.raises(RuntimeError, match=r"fusedrnn: a (weight|vector) cannot be made"):
                forward(number, call, [*made[:i], wrong, *made[i + 1 :]])
    for wrong in (made[:-1], []):
        with pytest.raises(RuntimeError, match=r"fusedrnn: there is no constant|cannot be made"):
            forward(number, call, wrong)


def side(constant: int, first: int, columns: int) -> list[list[Sides]]:
    return [[[(constant, -1, False, first, columns)]]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w, v: ([], w, v), "expected 1 inputs, got 0"),
        (lambda w, v: ([0, 0], w, v), "expected 1 inputs, got 2"),
        (lambda w, v: ([-1], w, v), "there is no input -1"),
        (lambda w, v: ([0], w[:-1], v), "weights"),
        (lambda w, v: ([0], w, v[:-1]), "vectors"),
        (lambda w, v: ([0], [[], *w[1:]], v), "a weight has one term, got 0"),
        (lambda w, v: ([0], [w[0] * 2, *w[1:]], v), "a weight has one term"),
        (lambda w, v: ([0], side(0, 0, 1) + w[1:], v), "sides have 1 columns"),
        (lambda w, v: ([0], side(0, 0, 0) + w[1:], v), "a side has no columns"),
        (lambda w, v: ([0], side(0, -1, 15) + w[1:], v), "a side has no columns"),
        (lambda w, v: ([0], [[[(-1, *w[0][0][0][1:])]], *w[1:]], v), "no zeros"),
        (lambda w, v: ([0], [[[(-2, *w[0][0][0][1:])]], *w[1:]], v), "there is no constant -2"),
        (lambda w, v: ([0], w, v, 5), "too many numbers"),
        (lambda w, v: ([0],), "too few numbers"),
    ],
)
def test_recipes_that_are_none(change: Callable[..., Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*{reason}"):
        add(GRU, torch.float64, *change(*as_they_are(random_call(GRU))[1:]))


def test_shapes_that_are_none() -> None:
    function = ctypes.cast(library(torch.float64)["stages_of_gru"], ctypes.c_void_p).value
    assert function is not None
    for numbers in ([1], [0, 0], [1, 1, 4, 1, 1, 5], [1, 2, -1, -5, 1, 1, 5], [1, 1, 5]):
        with pytest.raises(RuntimeError, match="fusedrnn: "):
            program_operators.add_program(
                GRU.program, function, dtype=torch.float64, constants=numbers
            )
