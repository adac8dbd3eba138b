"""Cells that people write, compiled or in Python: values and gradients, against the plain loop.

Longer than 350 lines, because all options are tried with the same cells.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiler.interpreted import interpreted
from recurrent.registry import BY_NAME, CASES, Case, H
from runtime.gpu_programs import emulate
from runtime.plain import Masks, loop, loss_of
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import fusedrnn

T, B = 5, 3
SEVERAL = [BY_NAME[name] for name in ("GRUCell", "LSTMCell", "ForumCell", "dict state", "PlaNet")]
SEVERAL += [BY_NAME[name] for name in ("late reset, LayerNorm", "DreamerV2", "zoneout", "sLSTM")]
BACKENDS = ["compiled", "interpreted", "emulated"]
"""What runs programs: C++, torch, or the emulation of a GPU. If only one fails, it tells where to
look."""
IN_PYTHON = "in Python"
"""Steps in the place of a program."""


def turn(case: Case) -> int:
    """0 for a third of the cells, whose C++ CI has in float64; 1 for another one, which it has in
    one dtype of fewer bits; 2 for those that it only has by the interpreter."""
    return 0 if case in SEVERAL else CASES.index(case) % 3


def marked(case: Case, backend: str) -> Any:
    """The quick tests have C++ of several cells, and no C++ of the others."""
    if backend == IN_PYTHON:
        marks = []
    elif backend == "emulated":
        marks = [pytest.mark.slow if case in SEVERAL else pytest.mark.nightly]
    elif backend == "compiled" and turn(case) > 0:
        marks = [pytest.mark.nightly]
    elif (backend == "interpreted") == (case in SEVERAL):
        marks = [pytest.mark.nightly if backend == "interpreted" else pytest.mark.slow]
    else:
        marks = []
    return pytest.param(case, backend, id=f"{case}, {backend}", marks=marks)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What runs programs of one test."""
    found = getattr(request, "param", "compiled")
    if found == "emulated":
        emulate(monkeypatch)
    with interpreted() if found == "interpreted" else nullcontext():
        yield found


def on(cases: Sequence[Case], backends: Sequence[str] = BACKENDS) -> Any:
    """These cells by each of these backends; the GPU's has no steps in Python to fall back to."""
    pairs = [(case, backend) for case in cases for backend in backends]
    pairs = [(case, backend) for case, backend in pairs if case.compiles or backend != "emulated"]
    every = [marked(case, backend) for case, backend in pairs]
    return pytest.mark.parametrize(("case", "backend"), every, indirect=["backend"])


ALL, SOME = (on(cases, [*BACKENDS, IN_PYTHON]) for cases in (CASES, SEVERAL))


def how(case: Case) -> str:
    return "require" if case.compiles else "auto"


class Ready:
    """A cell and its module, which many tests share since a program is made once for each."""

    def __init__(self, cell: Any, compile: str, **options: Any) -> None:
        self.cell, self.rnn = cell, fusedrnn.Recurrent(cell, compile=compile, **options)

    def with_options(self, **options: Any) -> fusedrnn.Recurrent:
        """As if the module had been made with these; their defaults for the others."""
        every = {"chunk_size": None, "return_sequence": True, "batch_first": False}
        every |= {"recompute": True} | options
        if self.rnn.compile_cell == "never" and not every["recompute"]:
            every["chunk_size"] = None  # the graph of steps has none
        for name, value in every.items():
            setattr(self.rnn, name, value)
        return self.rnn


@functools.cache
def ready(case: Case, backend: str, dtype: torch.dtype = torch.float64) -> Ready:
    return Ready(case.cell(dtype), "never" if backend == IN_PYTHON else how(case))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def leaves_of(*trees: Any) -> list[Tensor]:
    """Those with gradient; of modules their parameters."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(trees):
        some = leaf.parameters() if isinstance(leaf, nn.Module) else [leaf]
        found += [one for one in some if isinstance(one, Tensor) and one.requires_grad]
    return found


def gradients(results: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss_of(results), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)
    ]


def check_same(
    ours: Any, expected: Any, leaves: Sequence[Tensor], tolerance: float = 1e-10
) -> None:
    """The same values, structures and gradients; a gradient of None is one of zeros."""
    assert pytree.tree_structure(ours) == pytree.tree_structure(expected)
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    found, exact = gradients(ours, leaves), gradients(expected, leaves)
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)


def check_call(
    case: Case, backend: str, masks: Masks | None = None, sizes: Any = (T, B), **options: Any
) -> None:
    """A call with a random state, against the loop."""
    one, masks = ready(case, backend), masks or Masks()
    cell, rnn = one.cell, one.with_options(**options)
    x, state = case.inputs(*sizes), case.state(cell, sizes[1])
    lengths = None if masks.lengths is None else list(masks.lengths)
    ours = rnn(x, state, lengths, masks.reset, masks.reset_to, generator=seeded())
    expected = loop(cell, x, state, masks, returns_sequence=options.get("return_sequence", True))
    check_same(ours, expected, leaves_of(x, state, masks.reset_to, cell))


STATES = ["one row", "rows", "sequence"]
"""Kinds of states at resets."""


def resets(seq_len: int = T, batch: int = B) -> Tensor:
    """That hit first, last and missing steps."""
    reset = torch.zeros(seq_len, batch, dtype=torch.bool)
    reset[0, 0] = reset[2] = reset[4, 1] = reset[4, 2] = True
    return reset


MASKS = Masks([3, 5, 1], resets())
"""Lengths that are not sorted, one of a single step, and resets."""
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "masked": {"masks": MASKS},
    **{f"chunks of {size}": {"masks": MASKS, "chunk_size": size} for size in (1, 2, 3, T, 50)},
    **{
        f"kept, return_sequence={whole}": {
            "masks": MASKS,
            "chunk_size": 2,
            "recompute": False,
            "return_sequence": whole,
        }
        for whole in (True, False)
    },
    "last output": {"return_sequence": False},
    "last output, lengths": {"masks": Masks([2, 5, 1]), "return_sequence": False},
    **{f"sizes {sizes}": {"sizes": sizes} for sizes in ((T, 1), (40, 7), (1, 5), (1, 1))},
}
"""Calls that give what the loop gives, by the arguments of check_call()."""


@pytest.mark.parametrize("way", ["masked", pytest.param("whole", marks=pytest.mark.slow)])
@ALL
def test_equals_the_loop(case: Case, backend: str, way: str) -> None:
    check_call(case, backend, **WAYS[way])


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("whole", "masked")])
@SOME
def test_other_calls_equal_the_loop(case: Case, backend: str, way: str) -> None:
    check_call(case, backend, **WAYS[way])


@pytest.mark.slow
@on(CASES, ["compiled", "interpreted"])
def test_draws_what_the_generic_recipe_draws(case: Case, backend: str) -> None:
    """By torch's own seed, from the state that a call without one starts from."""
    one, x = ready(case, backend), case.inputs(T, B)
    results = []
    for rnn in (one.with_options(), fusedrnn.Recurrent(one.cell, compile="never")):
        torch.manual_seed(7)
        results.append(rnn(x, case.zeros(one.cell, B)))
    check_same(*results, leaves_of(x, one.cell))


@pytest.mark.parametrize("case", [case for case in CASES if not case.compiles], ids=str)
def test_says_why_a_step_is_not_compiled(case: Case) -> None:
    cell = case.cell()
    try:
        with interpreted():
            fusedrnn.Recurrent(cell, compile="require")(case.inputs(2, 2), case.state(cell, 2))
    except RuntimeError as error:
        assert str(error).startswith("fusedrnn: the cell cannot be compiled: ")


@pytest.mark.parametrize("kind", STATES)
@SOME
def test_other_states_at_resets(case: Case, backend: str, kind: str) -> None:
    torch.manual_seed(1)
    masks = case.masks(ready(case, backend).cell, kind, torch.rand(T, B) < 0.4, [5, 2, 4])
    check_call(case, backend, masks, chunk_size=2)


BY_KEYS = [BY_NAME[name] for name in ("dict state", "PlaNet", "LFADS", "DreamerV3")]


@pytest.mark.parametrize("key", [0, -1])
@on(BY_KEYS, [*BACKENDS[:2], IN_PYTHON])
def test_a_reset_of_some_keys(case: Case, backend: str, key: int) -> None:
    state = case.state(ready(case, backend).cell, B)
    some = list(state)[key]
    check_call(case, backend, Masks(None, torch.rand(T, B) < 0.4, {some: state[some]}))


def turned(tree: Any) -> Any:
    """Rows before steps, or the other way round."""
    return pytree.tree_map(lambda leaf: leaf.transpose(0, 1), tree)


def is_packed(tree: Any) -> bool:
    return isinstance(tree, PackedSequence)


@pytest.mark.parametrize("kind", ["zero", *STATES])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("seq_len", [B, T])
@on(SEVERAL, ["compiled", IN_PYTHON])
def test_batch_first(case: Case, backend: str, seq_len: int, packs: bool, kind: str) -> None:
    """With as many steps as rows, a reset that is taken the wrong way round is no error."""
    one, x, lengths = ready(case, backend), case.inputs(seq_len, B), [seq_len - 1, seq_len, 2]
    state = case.state(one.cell, B)
    masks = case.masks(one.cell, kind, torch.rand(seq_len, B) < 0.3, lengths)
    assert masks.reset is not None
    given, to = turned(x), turned(masks.reset_to) if masks.has_steps else masks.reset_to
    if packs:
        form: Any = {"batch_first": True, "enforce_sorted": False}
        given = pytree.tree_map(lambda leaf: pack_padded_sequence(leaf, lengths, **form), given)
    rnn, of_rows = one.with_options(batch_first=True), None if packs else lengths
    output, last = rnn(given, state, of_rows, masks.reset.t(), to, generator=seeded())
    if packs:
        output = pytree.tree_map(
            lambda leaf: pad_packed_sequence(leaf, batch_first=True)[0], output, is_leaf=is_packed
        )
    expected = loop(one.cell, x, state, masks)
    leaves = leaves_of(x, state, masks.reset_to, one.cell)
    check_same((turned(output), last), expected, leaves)


MORE = ["ForumCell", "late reset, LayerNorm", "GRUCell", "sLSTM", "MGU"]
STACKED = ["LSTMCell", "zoneout", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@functools.cache
def layers(name: str, is_bidirectional: bool, backend: str) -> Ready:
    """Two layers; the second one has the width of the first one's output."""
    first, directions = BY_NAME[name], 1 + is_bidirectional
    kind, more = type(first.make()), {"late reset, LayerNorm": [nn.LayerNorm]}.get(name, [])
    cells = [first.cell() for _ in range(directions)]
    cells += [kind(H * directions, H, *more).double() for _ in range(directions)]
    how = {"compile": "never" if backend == IN_PYTHON else "require"}
    return Ready(cells, bidirectional=is_bidirectional, **how)


def check_layers(
    case: Case, one: Ready, masks: Masks, sizes: tuple[int, int] = (T, B), **options: bool
) -> None:
    """A call of several cells with random states, against the loop, whose options are given."""
    x, states = case.inputs(*sizes), tuple(case.state(cell, sizes[1]) for cell in one.cell)
    rnn = one.with_options(return_sequence=options["returns_sequence"])
    ours = rnn(x, states, masks.lengths, masks.reset, generator=seeded())
    expected = loop(one.cell, x, states, masks, **options)
    check_same(ours, expected, leaves_of(x, states, *one.cell))


@pytest.mark.parametrize("backend", ["compiled", IN_PYTHON], indirect=True)
@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("returns_sequence", [False, True])
def test_layers_and_directions(
    name: str, backend: str, is_bidirectional: bool, returns_sequence: bool
) -> None:
    masks = Masks([4, 5, 2], torch.rand(T, B) < 0.2)
    options = {"is_bidirectional": is_bidirectional, "returns_sequence": returns_sequence}
    check_layers(BY_NAME[name], layers(name, is_bidirectional, backend), masks, **options)


@pytest.mark.parametrize("name", ["ForumCell", pytest.param("PlaNet", marks=pytest.mark.slow)])
def test_a_part_of_the_gradients(name: str) -> None:
    """Without those of the input, then without those of the weights, then of one weight alone."""
    case = BY_NAME[name]
    cell, x = case.cell(), case.inputs(T, B)
    state, rnn = case.state(cell, B), fusedrnn.Recurrent(cell, compile="require")
    every = leaves_of(x, state, cell)
    for wanted in (leaves_of(state, cell), leaves_of(x), leaves_of(state), every[-1:]):
        for leaf in every:
            leaf.requires_grad_(any(leaf is one for one in wanted))
        ours = rnn(x, state, generator=seeded())
        check_same(ours, loop(cell, x, state), wanted)


@on(SEVERAL, ["compiled", IN_PYTHON])
def test_without_gradients(case: Case, backend: str) -> None:
    one, x = ready(case, backend), case.inputs(T, B)
    state = case.state(one.cell, B)
    with torch.no_grad():
        ours = one.with_options()(x, state, generator=seeded())
        torch.testing.assert_close(ours, loop(one.cell, x, state), rtol=1e-10, atol=1e-10)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(ours))


# Errors of other dtypes.

QUICK = {"LSTMCell": torch.bfloat16, "ForumCell": torch.float16, "sLSTM": torch.float32}
QUICK |= {"late reset, LayerNorm": torch.float32}


def rounded() -> Iterator[Any]:
    """Cells in one dtype in CI, in turn; the quick tests have some of them."""
    cases = [case for case in CASES if case.compiles and not case.is_discrete]
    for i, case in enumerate(cases):
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for dtype in dtypes:
            is_in_ci = dtype == dtypes[i // 3 % 3] and turn(case) == 1
            marks = [pytest.mark.slow if is_in_ci else pytest.mark.nightly]
            is_quick = QUICK.get(case.name) == dtype
            yield pytest.param(
                case, dtype, id=f"{case}, {str(dtype)[6:]}", marks=[] if is_quick else marks
            )


@pytest.mark.parametrize(("case", "dtype"), list(rounded()))
def test_errors_are_at_most_twice_those_of_the_loop(
    case: Case, dtype: torch.dtype, backend: str
) -> None:
    """Against float64 on the same numbers: all results together, and all gradients together.

    The median of several calls where errors are a matter of luck.
    """
    found = [errors(case, dtype, backend) for _ in range(9 if case.has_kinks else 1)]
    ours, theirs = (torch.tensor(one).median(0).values for one in zip(*found, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        allowed = 2 * other + torch.finfo(dtype).eps / 8  # where the loop is exact by luck
        assert mine <= allowed, found


def errors(
    case: Case,
    dtype: torch.dtype,
    backend: str,
    sizes: tuple[int, int] = (6, 64),
    returns_sequence: bool = True,
) -> tuple[list[float], list[float]]:
    """Of a program and of the loop: those of results and of gradients."""
    one = ready(case, backend, dtype)
    cell, rnn = one.cell, one.with_options(return_sequence=returns_sequence)
    x, state = case.inputs(*sizes, dtype), case.state(cell, sizes[1])
    by_loop = functools.partial(loop, returns_sequence=returns_sequence)
    exact_cell = case.cell()
    exact_cell.load_state_dict(cell.state_dict())
    exact_x, exact_state = (copied(tree, torch.float64) for tree in (x, state))
    exact = judged(
        lambda: by_loop(exact_cell, exact_x, exact_state, drawn_in=dtype),
        leaves_of(exact_x, exact_state, exact_cell),
    )
    leaves = leaves_of(x, state, cell)
    ours = judged(lambda: rnn(x, state, generator=seeded()), leaves)
    theirs = judged(lambda: by_loop(cell, x, state), leaves)
    mine, others = (
        [error(found, right) for found, right in zip(run, exact, strict=True)]
        for run in (ours, theirs)
    )
    return mine, others


def copied(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
            if leaf.is_floating_point()
            else leaf
        ),
        tree,
    )


def judged(
    run: Callable[[], tuple[Any, Any]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients."""
    results = run()
    return pytree.tree_leaves(results), gradients(results, leaves)


def error(these: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The root of the mean square of the tensors' relative errors, of each in its norm."""
    squares = []
    for mine, right in zip(these, exact, strict=True):
        right = right.detach().double()
        norm = right.norm()
        if norm > 0:
            squares.append(((mine.detach().double() - right).norm() / norm) ** 2)
    return float(torch.stack(squares).mean().sqrt())


# Random calls of random cells.


SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
CALLS = [pytest.param(seed, "interpreted", marks=[SLOW] * (seed % 3 > 0)) for seed in range(60)] + [
    pytest.param(seed, "compiled", marks=NIGHTLY if seed % 6 else SLOW) for seed in range(60)
]
CALLS += [pytest.param(seed, IN_PYTHON, marks=[SLOW] * (seed >= 60)) for seed in range(150)]


@pytest.mark.parametrize(("seed", "backend"), CALLS, indirect=["backend"])
def test_random_calls(seed: int, backend: str) -> None:
    check_random_call(seed, backend)


def check_random_call(seed: int, backend: str, **options: Any) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    case, seq_len, batch = draw.choice(CASES), draw.choice([1, 2, 7, 20]), draw.choice([1, 2, 5])
    lengths = [draw.randint(1, seq_len) for _ in range(batch)] if draw.random() < 0.5 else None
    masks = Masks(lengths)
    if draw.random() < 0.5:
        kind, reset = draw.choice(["zero", *STATES]), torch.rand(seq_len, batch) < 0.3
        masks = case.masks(ready(case, backend).cell, kind, reset, lengths)
    options |= {"chunk_size": draw.choice([None, 1, 2, 5, 100])}
    options |= {"return_sequence": draw.random() < 0.7}
    check_call(case, backend, masks, (seq_len, batch), **options)
