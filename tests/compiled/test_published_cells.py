"""Cells that people write, by compiled steps: values and all gradients, against the plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from asked import HAS_COMPILE, recurrent
from plain import Masks, loop
from registry import BY_NAME, CASES, Case, H
from torch import Tensor, nn
from torch.utils import _pytree as pytree

T, B = 5, 3
MUST = [case for case in CASES if case.compiles]
SEVERAL = [BY_NAME[name] for name in ("GRUCell", "LSTMCell", "forum", "dict state", "PlaNet")]
SEVERAL += [BY_NAME[name] for name in ("late reset, LayerNorm", "DreamerV2", "zoneout", "sLSTM")]
ALL = pytest.mark.parametrize("case", CASES, ids=str)
SOME = pytest.mark.parametrize("case", SEVERAL, ids=str)


def how(case: Case) -> str:
    return "require" if case.compiles else "auto"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def loss_of(*trees: Any) -> Tensor:
    """Depends on every number, each with a weight of its own."""
    total: Any = 0.0
    for leaf in pytree.tree_leaves(trees):
        if leaf.is_floating_point():
            weight = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).view(leaf.shape)
            leaf = leaf.double()
            total = total + (leaf * leaf * weight).sum() + (leaf * weight).sum()
    return total  # type: ignore[no-any-return]


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


def check_call(case: Case, masks: Masks | None = None, batch: int = B, **options: Any) -> None:
    """A call with a random state, against the loop."""
    masks, cell = masks or Masks(), case.cell()
    x, state = case.inputs(T, batch), case.state(cell, batch)
    rnn = recurrent(cell, compile=how(case), **options)
    lengths = None if masks.lengths is None else list(masks.lengths)
    ours = rnn(x, state, lengths, masks.reset, masks.reset_to, generator=seeded())
    expected = loop(cell, x, state, masks, returns_sequence=options.get("return_sequence", True))
    check_same(ours, expected, leaves_of(x, state, masks.reset_to, cell))


@ALL
def test_equals_the_loop(case: Case) -> None:
    check_call(case)


@ALL
def test_lengths_and_resets(case: Case) -> None:
    """Not sorted, one row of a single step, with resets that hit first, last and missing steps."""
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[0, 0] = reset[2] = reset[4, 1] = reset[4, 2] = True
    check_call(case, Masks([3, 5, 1], reset))


@pytest.mark.skipif(not HAS_COMPILE, reason="compares compiled steps with the generic recipe")
@ALL
def test_draws_what_the_generic_recipe_draws(case: Case) -> None:
    """By torch's own seed, from the state that a call without one starts from."""
    cell, x = case.cell(), case.inputs(T, B)
    results = []
    for compile in (how(case), "never"):
        torch.manual_seed(7)
        state = case.zeros(cell, B)
        results.append(recurrent(cell, compile=compile)(x, state))
    check_same(*results, leaves_of(x, cell))


@pytest.mark.skipif(not HAS_COMPILE, reason="compares compiled steps with the generic recipe")
@pytest.mark.parametrize("case", [case for case in CASES if not case.compiles], ids=str)
def test_says_why_a_step_is_not_compiled(case: Case) -> None:
    cell = case.cell()
    try:
        recurrent(cell, compile="require")(case.inputs(2, 2), case.state(cell, 2))
    except RuntimeError as error:
        assert str(error).startswith("fusedrnn: ")


@SOME
@pytest.mark.parametrize("chunk_size", [1, 3, T, 50])
def test_chunks(case: Case, chunk_size: int) -> None:
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[2:4, 1] = True
    check_call(case, Masks([4, 2, 5], reset), chunk_size=chunk_size)


@SOME
@pytest.mark.parametrize("kind", ["one row", "rows", "sequence"])
def test_other_states_at_resets(case: Case, kind: str) -> None:
    torch.manual_seed(1)
    cell = case.cell()
    has_steps = kind == "sequence"
    to = case.state(cell, 1 if kind == "one row" else B, *((T,) if has_steps else ()))
    check_call(case, Masks([5, 2, 4], torch.rand(T, B) < 0.4, to, has_steps), chunk_size=2)


@pytest.mark.parametrize("name", ["dict state", "PlaNet", "LFADS", "DreamerV3"])
@pytest.mark.parametrize("key", [0, -1])
def test_a_reset_of_some_keys(name: str, key: int) -> None:
    case = BY_NAME[name]
    state = case.state(case.cell(), B)
    some = list(state)[key]
    check_call(case, Masks(None, torch.rand(T, B) < 0.4, {some: state[some]}))


@SOME
@pytest.mark.parametrize("lengths", [None, [2, 5, 1]])
def test_the_last_output(case: Case, lengths: list[int] | None) -> None:
    check_call(case, Masks(lengths), return_sequence=False)


@SOME
def test_one_row(case: Case) -> None:
    check_call(case, batch=1)


@SOME
def test_batch_first(case: Case) -> None:
    cell, x = case.cell(), case.inputs(T, B)
    state, reset = case.state(cell, B), torch.rand(T, B) < 0.3
    turned = pytree.tree_map(lambda leaf: leaf.transpose(0, 1), x)
    rnn = recurrent(cell, compile=how(case), batch_first=True)
    output, last = rnn(turned, state, [3, 5, 2], reset.t(), generator=seeded())
    output = pytree.tree_map(lambda leaf: leaf.transpose(0, 1), output)
    expected = loop(cell, x, state, Masks([3, 5, 2], reset))
    check_same((output, last), expected, leaves_of(x, state, cell))


STACKED = ["GRUCell", "LSTMCell", "ForumCell", "late reset, LayerNorm", "sLSTM", "zoneout", "MGU"]


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("returns_sequence", [False, True])
def test_layers_and_directions(name: str, is_bidirectional: bool, returns_sequence: bool) -> None:
    """Two layers; the second one has the width of the first one's output."""
    first, wide = BY_NAME[name], H * (1 + is_bidirectional)
    made = [first.cell() for _ in range(1 + is_bidirectional)]
    made += [as_wide(name, wide) for _ in range(1 + is_bidirectional)]
    x, states = first.inputs(T, B), tuple(first.state(cell, B) for cell in made)
    masks = Masks([4, 5, 2], torch.rand(T, B) < 0.2)
    named = {"bidirectional": is_bidirectional, "return_sequence": returns_sequence}
    rnn = recurrent(made, compile="require", **named)
    ours = rnn(x, states, masks.lengths, masks.reset, generator=seeded())
    options = {"is_bidirectional": is_bidirectional, "returns_sequence": returns_sequence}
    expected = loop(made, x, states, masks, **options)
    check_same(ours, expected, leaves_of(x, states, *made))


def as_wide(name: str, inputs: int) -> nn.Module:
    """The cell of a case with that many inputs."""
    kind = type(BY_NAME[name].make())
    more = {"late reset, LayerNorm": [nn.LayerNorm]}.get(name, [])
    return kind(inputs, H, *more).double()


@SOME
def test_a_part_of_the_gradients(case: Case) -> None:
    """Without those of the input, then without those of the weights, then of one weight alone."""
    cell, x = case.cell(), case.inputs(T, B)
    state, rnn = case.state(cell, B), recurrent(cell, compile=how(case))
    every = leaves_of(x, state, cell)
    for wanted in (leaves_of(state, cell), leaves_of(x), leaves_of(state), every[-1:]):
        for leaf in every:
            leaf.requires_grad_(any(leaf is one for one in wanted))
        ours = rnn(x, state, generator=seeded())
        check_same(ours, loop(cell, x, state), wanted)


@SOME
def test_without_gradients(case: Case) -> None:
    cell, x = case.cell(), case.inputs(T, B)
    state, rnn = case.state(cell, B), recurrent(cell, compile=how(case))
    with torch.no_grad():
        ours = rnn(x, state, generator=seeded())
        torch.testing.assert_close(ours, loop(cell, x, state), rtol=1e-10, atol=1e-10)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(ours))


@pytest.mark.parametrize("name", ["dropout inside", "zoneout"])
def test_training_and_evaluation_in_turn(name: str) -> None:
    case = BY_NAME[name]
    cell, x = case.cell(), case.inputs(T, B)
    state, rnn = case.state(cell, B), recurrent(cell, compile="require")
    for is_training in (True, False, True, False):
        cell.train(is_training)
        ours = rnn(x, state, generator=seeded())
        check_same(ours, loop(cell, x, state), leaves_of(x, state, cell))


SIZES = [(40, 7), (1, 5), (3, 1), (1, 1)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@SOME
def test_calls_of_other_sizes(case: Case, sizes: tuple[int, int]) -> None:
    """By one module, one after the other."""
    cell = case.cell()
    rnn = recurrent(cell, compile=how(case))
    for seq_len, batch in ((T, B), sizes):
        x, state = case.inputs(seq_len, batch), case.state(cell, batch)
        ours = rnn(x, state, generator=seeded())
        check_same(ours, loop(cell, x, state), leaves_of(x, state, cell))


# Errors of other dtypes.

ROUNDED = [case for case in MUST if not case.is_discrete]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUICK = {"GRUCell", "LSTMCell", "forum", "late reset, LayerNorm", "sLSTM", "VRNN", "dict output"}


def marked(case: Case, dtype: torch.dtype) -> Any:
    """The quick tests have some of the cells."""
    marks = [] if case.name in QUICK else [pytest.mark.slow]
    return pytest.param(case, dtype, id=f"{case}, {str(dtype)[6:]}", marks=marks)


@pytest.mark.parametrize(
    ("case", "dtype"), [marked(case, dtype) for case in ROUNDED for dtype in DTYPES]
)
def test_errors_are_at_most_twice_those_of_the_loop(case: Case, dtype: torch.dtype) -> None:
    """Against float64 on the same numbers: all results together, and all gradients together."""
    seq_len, batch = 6, 64
    cell = case.cell(dtype)
    x, state = case.inputs(seq_len, batch, dtype), case.state(cell, batch)
    exact_cell = case.cell()
    exact_cell.load_state_dict(cell.state_dict())
    exact_x, exact_state = (copied(tree, torch.float64) for tree in (x, state))
    exact = judged(
        lambda: loop(exact_cell, exact_x, exact_state, drawn_in=dtype),
        leaves_of(exact_x, exact_state, exact_cell),
    )
    leaves = leaves_of(x, state, cell)
    rnn = recurrent(cell, compile=how(case))
    ours = judged(lambda: rnn(x, state, generator=seeded()), leaves)
    theirs = judged(lambda: loop(cell, x, state), leaves)
    unit = torch.finfo(dtype).eps
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        allowed = 2 * error(other, right) + unit / 8  # where the loop is exact by luck
        assert error(mine, right) <= allowed, (error(mine, right), error(other, right))


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


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    case, batch = draw.choice(CASES), draw.choice([1, 2, 5])
    cell = case.cell()
    seq_len = draw.choice([1, 2, 7, 12])
    lengths = [draw.randint(1, seq_len) for _ in range(batch)] if draw.random() < 0.5 else None
    masks = Masks(lengths)
    if draw.random() < 0.5:
        kind = draw.choice(["zero", "one row", "rows", "sequence"])
        steps = (seq_len,) if kind == "sequence" else ()
        to = None if kind == "zero" else case.state(cell, 1 if kind == "one row" else batch, *steps)
        masks = Masks(lengths, torch.rand(seq_len, batch) < 0.3, to, bool(steps))
    chunk_size = draw.choice([None, 1, 2, 5, 100])
    is_sequence = draw.random() < 0.7
    x, state = case.inputs(seq_len, batch), case.state(cell, batch)
    options = {"chunk_size": chunk_size, "return_sequence": is_sequence}
    rnn = recurrent(cell, compile=how(case), **options)
    ours = rnn(x, state, masks.lengths, masks.reset, masks.reset_to, generator=seeded())
    expected = loop(cell, x, state, masks, returns_sequence=is_sequence)
    check_same(ours, expected, leaves_of(x, state, masks.reset_to, cell))
