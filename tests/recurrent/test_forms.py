"""Lengths, resets and the last output alone, against loops that treat each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import MODES, Mixed, check_same, leaves_with_gradient
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn

T, B = 8, 3
LENGTHS = [5, 8, 1]


def row(tree: Any, i: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[i : i + 1], tree)


def joined(trees: list[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *trees)


def loop_over_rows(
    cell: nn.Module,
    input: Any,
    state: Any,
    lengths: list[int],
    reset: Tensor | None = None,
    reset_to: Any = None,
    *,
    reverse: bool = False,
    only_last: bool = False,
) -> tuple[Any, Any]:
    """Each row for itself, with as many steps as it has. ``reset_to(state, time, row)``."""
    states, outputs = [], []
    for i, length in enumerate(lengths):
        own, made = row(state, i), {}
        for time in range(length)[:: -1 if reverse else 1]:
            if reset is not None and reset[time, i]:
                own = reset_to(own, time, i)
            x = pytree.tree_map(lambda leaf: leaf[time, i : i + 1], input)  # noqa: B023
            result = cell(x, own)
            if pytree.tree_structure(result) == pytree.tree_structure(own):
                own, y = result, pytree.tree_leaves(result)[0]
            else:
                y, own = result
            last = y
            made[time] = y
        zeros = pytree.tree_map(torch.zeros_like, last)
        steps = [made.get(time, zeros) for time in range(len(input_steps(input)))]
        outputs.append(
            last if only_last else pytree.tree_map(lambda *leaves: torch.stack(leaves), *steps)
        )
        states.append(own)
    if only_last:
        return joined(outputs), joined(states)
    return pytree.tree_map(lambda *leaves: torch.cat(leaves, 1), *outputs), joined(states)


def input_steps(input: Any) -> Tensor:
    return pytree.tree_leaves(input)[0]


def mixed_input() -> dict[str, Tensor]:
    return {
        "x": torch.randn(T, B, 3, dtype=torch.float64, requires_grad=True),
        "scale": torch.randn(T, B, dtype=torch.float64, requires_grad=True),
    }


def zeroed(state: Any, time: int, i: int) -> Any:
    return pytree.tree_map(torch.zeros_like, state)


RESET = torch.tensor(
    [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1]],
    dtype=torch.bool,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_lengths(mode: str, chunk_size: int | None, only_last: bool, resets: bool) -> None:
    cell = Mixed()
    rnn = fusedrnn.Recurrent(cell, mode=mode, chunk_size=chunk_size, return_sequence=not only_last)
    input = mixed_input()
    reset = RESET if resets else None
    check_same(
        lambda: rnn(input, lengths=LENGTHS, reset=reset),
        lambda: loop_over_rows(
            cell, input, cell.initial_state(B), LENGTHS, reset, zeroed, only_last=only_last
        ),
        [*leaves_with_gradient(input), *cell.parameters()],
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("only_last", [False, True])
def test_lengths_in_both_directions(mode: str, only_last: bool) -> None:
    cells = [nn.GRUCell(3, 4, dtype=torch.float64) for _ in range(2)]
    rnn = fusedrnn.Recurrent(cells, True, mode=mode, return_sequence=not only_last)
    x = torch.randn(T, B, 3, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(B, 4, dtype=torch.float64)

    def expected() -> tuple[Any, Any]:
        both = [
            loop_over_rows(
                cell, x, start, LENGTHS, RESET, zeroed, reverse=bool(i), only_last=only_last
            )
            for i, cell in enumerate(cells)
        ]
        return torch.cat([output for output, _ in both], -1), tuple(state for _, state in both)

    parameters = [p for cell in cells for p in cell.parameters()]
    check_same(lambda: rnn(x, None, LENGTHS, RESET), expected, [x, *parameters])


def test_what_is_behind_the_end_is_not_looked_at() -> None:
    cell = nn.LSTMCell(3, 4, dtype=torch.float64)
    x = torch.randn(T, B, 3, dtype=torch.float64)
    for i, length in enumerate(LENGTHS):
        x[length:, i] = float("nan")
    x.requires_grad_()
    output, _ = fusedrnn.Recurrent(cell)(x, lengths=LENGTHS)
    found = torch.autograd.grad(output.sum(), [x, *cell.parameters()])
    assert all(gradient.isfinite().all() for gradient in found)
    assert output[5:, 0].eq(0).all()
    assert found[0][5:, 0].eq(0).all()


class Budget(nn.Module):
    """What is left of a budget, whose root has no derivative below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.9], dtype=torch.float64))

    def forward(self, x: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        left = left - self.rate * x
        return torch.sqrt(left), left


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resets", [False, True])
def test_rows_that_have_ended_take_no_steps_that_are_not_in_the_data(
    mode: str, resets: bool
) -> None:
    """Their own state with the input of another row could be NaN, and so could gradients."""
    cell = Budget()
    x = torch.rand(T, B, 1, dtype=torch.float64)
    for i, length in enumerate(LENGTHS):
        x[length:, i] = 0.0
    x = (x / x.sum(0)).requires_grad_()
    start = torch.ones(B, 1, dtype=torch.float64, requires_grad=True)
    full = torch.full((1, 1), 1.5, dtype=torch.float64, requires_grad=True)
    given: dict[str, Any] = {"reset": RESET, "reset_to": full} if resets else {}
    check_same(
        lambda: fusedrnn.Recurrent(cell, mode=mode)(x, start, lengths=LENGTHS, **given),
        lambda: loop_over_rows(
            cell, x, start, LENGTHS, given.get("reset"), lambda state, time, i: full
        ),
        [x, start, *cell.parameters(), *([full] if resets else [])],
    )


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_no_rows(mode: str) -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(3, 4), mode=mode)
    x = torch.randn(T, 0, 3, requires_grad=True)
    output, state = rnn(x, lengths=[])
    output.sum().backward()
    assert (output.shape, state.shape) == ((T, 0, 4), (0, 4))
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["one row", "rows", "sequence"])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("batch_first", [False, True])
def test_reset_to(mode: str, kind: str, chunk_size: int | None, batch_first: bool) -> None:
    cell = nn.LSTMCell(3, 4, dtype=torch.float64)
    rnn = fusedrnn.Recurrent(cell, batch_first=batch_first, mode=mode, chunk_size=chunk_size)
    x = torch.randn(T, B, 3, dtype=torch.float64, requires_grad=True)
    start = tuple(torch.randn(B, 4, dtype=torch.float64, requires_grad=True) for _ in "hc")
    sizes = {"one row": (1,), "rows": (B,), "sequence": (T, B)}[kind]
    to = tuple(torch.randn(*sizes, 4, dtype=torch.float64, requires_grad=True) for _ in "hc")

    def of(state: Any, time: int, i: int) -> Any:
        if kind == "sequence":
            return tuple(leaf[time, i : i + 1] for leaf in to)
        return row(to, 0 if kind == "one row" else i)

    def run() -> tuple[Any, Any]:
        if not batch_first:
            return rnn(x, start, reset=RESET, reset_to=to)  # type: ignore[no-any-return]
        values = tuple(leaf.transpose(0, 1) for leaf in to) if kind == "sequence" else to
        output, state = rnn(x.transpose(0, 1), start, reset=RESET.t(), reset_to=values)
        return output.transpose(0, 1), state

    check_same(
        run,
        lambda: loop_over_rows(cell, x, start, [T] * B, RESET, of),
        [x, *start, *to, *cell.parameters()],
    )


@pytest.mark.parametrize("mode", MODES)
def test_reset_of_some_leaves(mode: str) -> None:
    cell = Mixed()
    input, start = mixed_input(), cell.initial_state(B)
    h = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    check_same(
        lambda: fusedrnn.Recurrent(cell, mode=mode)(input, reset=RESET, reset_to={"h": h}),
        lambda: loop_over_rows(
            cell, input, start, [T] * B, RESET, lambda state, time, i: {**state, "h": h}
        ),
        [h, *leaves_with_gradient(input), *cell.parameters()],
    )


def test_reset_without_a_batch() -> None:
    cell = nn.GRUCell(3, 4, dtype=torch.float64)
    x = torch.randn(T, 3, dtype=torch.float64, requires_grad=True)
    to = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def expected() -> tuple[Any, Any]:
        start = torch.zeros(1, 4, dtype=torch.float64)
        output, state = loop_over_rows(
            cell, x[:, None], start, [T], RESET[:, :1], lambda state, time, i: to[None]
        )
        return output[:, 0], state[0]

    rnn = fusedrnn.Recurrent(cell)
    check_same(
        lambda: rnn(x, reset=RESET[:, 0], reset_to=to), expected, [x, to, *cell.parameters()]
    )


def test_a_tree_of_packed_sequences() -> None:
    cell = Mixed()
    input = mixed_input()
    packed = pytree.tree_map(
        lambda leaf: nn.utils.rnn.pack_padded_sequence(leaf, LENGTHS, enforce_sorted=False), input
    )
    output, state = fusedrnn.Recurrent(cell)(packed)
    padded, expected_state = fusedrnn.Recurrent(cell)(input, lengths=LENGTHS)
    own, lengths = nn.utils.rnn.pad_packed_sequence(output[0])
    assert lengths.tolist() == LENGTHS
    assert torch.equal(own, padded[0])
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
