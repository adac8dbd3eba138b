"""Lengths, resets and the last output alone, against loops over each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled.plain import Masks, loop
from loops import F64, MODES, WAYS, By, Mixed, check_same, double, leaves_with_gradient
from recorders import Repeated
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn.recurrent import graphs

pytestmark = pytest.mark.filterwarnings("error:fusedrnn")
T, B, H = 8, 3, 4
LENGTHS = [5, 8, 1]
RESET = torch.tensor(
    [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1]],
    dtype=torch.bool,
)


def by_rows(
    cell: Any,
    input: Any,
    state: Any,
    lengths: list[int],
    reset: Tensor | None = None,
    reset_to: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Each row for itself, with as many steps as it has; ``reset_to`` is of one row."""
    outputs, states = [], []
    for i, n in enumerate(lengths):
        steps = pytree.tree_map(lambda leaf: leaf[:n, i : i + 1], input)  # noqa: B023
        masks = Masks(reset=None if reset is None else reset[:n, i : i + 1], reset_to=reset_to)
        own = pytree.tree_map(lambda leaf: leaf[i : i + 1], state)  # noqa: B023
        y, end = loop(cell, steps, own, masks, **options)
        if options.get("returns_sequence", True):
            y = pytree.tree_map(
                lambda leaf: torch.cat([leaf, leaf.new_zeros(T - len(leaf), *leaf.shape[1:])]), y
            )
        outputs.append(y)
        states.append(end)
    of_batch = 1 if options.get("returns_sequence", True) else 0
    return (
        pytree.tree_map(lambda *leaves: torch.cat(leaves, of_batch), *outputs),
        pytree.tree_map(lambda *leaves: torch.cat(leaves), *states),
    )


def mixed_input() -> dict[str, Tensor]:
    return {"x": double(T, B, 3), "scale": double(T, B)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", ["no resets", "zeros", "some leaves"])
def test_lengths(to: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Repeated)
    cell, input = Mixed(), mixed_input()
    rnn = fusedrnn.Recurrent(cell, **WAYS[way])
    reset = None if to == "no resets" else RESET
    reset_to = {"h": double(1, 4)} if to == "some leaves" else None
    for lengths in (LENGTHS, [5, T - 1, 1], None):
        check_same(
            lambda: rnn(input, lengths=lengths, reset=reset, reset_to=reset_to),  # noqa: B023
            lambda: by_rows(
                cell,
                input,
                cell.initial_state(B),
                lengths or [T] * B,  # noqa: B023
                reset,
                reset_to,
                returns_sequence=WAYS[way].get("return_sequence", True),
            ),
            leaves_with_gradient(input, reset_to, list(cell.parameters())),
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_sequence", [True, False])
def test_lengths_in_both_directions(mode: str, is_sequence: bool) -> None:
    cells = [nn.GRUCell(3, H, dtype=F64) for _ in range(2)]
    rnn = fusedrnn.Recurrent(cells, True, mode=mode, return_sequence=is_sequence)
    x, start = double(T, B, 3), torch.zeros(B, H, dtype=F64)
    options = {"is_bidirectional": True, "returns_sequence": is_sequence}
    check_same(
        lambda: rnn(x, None, LENGTHS, RESET),
        lambda: by_rows(cells, x, (start, start), LENGTHS, RESET, **options),
        [x, *rnn.parameters()],
    )


def spending(c: Any, x: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of a budget, whose root has no derivative below 0."""
    left = left - c.rate * x
    return torch.sqrt(left), left


def logarithm(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Has no value at zero."""
    return torch.tanh(c.rate * x.log() + h)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("step", "padding"), [(spending, 0.0), (logarithm, torch.nan)])
def test_rows_that_have_ended_take_no_steps_that_are_not_in_the_data(
    step: Any, padding: float, resets: bool, mode: str
) -> None:
    """Their own state with the input of another row could be NaN, and so could gradients."""
    cell = By(step, rate=nn.Parameter(torch.tensor([0.9], dtype=F64)))
    ended = torch.arange(T)[:, None] >= torch.tensor(LENGTHS)
    x = torch.rand(T, B, 1, dtype=F64).masked_fill(ended[..., None], 0)
    x = (x / x.sum(0)).masked_fill(ended[..., None], padding).requires_grad_()
    start = torch.ones(B, 1, dtype=F64, requires_grad=True)
    to = torch.full((1, 1), 1.5, dtype=F64, requires_grad=True)
    masks = (LENGTHS, RESET, to) if resets else (LENGTHS,)
    check_same(
        lambda: fusedrnn.Recurrent(cell, mode=mode)(x, start, *masks),
        lambda: by_rows(cell, x, start, *masks),
        [x, start, *cell.parameters(), *([to] if resets else [])],
    )


def test_reset_without_a_batch() -> None:
    cell, x, to = nn.GRUCell(3, H, dtype=F64), double(T, 3), double(H)

    def expected() -> tuple[Any, Any]:
        start = torch.zeros(1, H, dtype=F64)
        output, state = by_rows(cell, x[:, None], start, [T], RESET[:, :1], to)
        return output[:, 0], state[0]

    rnn = fusedrnn.Recurrent(cell)
    leaves = [x, to, *cell.parameters()]
    check_same(lambda: rnn(x, reset=RESET[:, 0], reset_to=to), expected, leaves)


def test_a_tree_of_packed_sequences() -> None:
    cell, input = Mixed(), mixed_input()
    packed = pytree.tree_map(
        lambda leaf: pack_padded_sequence(leaf, LENGTHS, enforce_sorted=False), input
    )
    output, state = fusedrnn.Recurrent(cell)(packed)
    padded, expected_state = fusedrnn.Recurrent(cell)(input, lengths=LENGTHS)
    own, lengths = pad_packed_sequence(output[0])
    assert lengths.tolist() == LENGTHS
    assert torch.equal(own, padded[0])
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


# batch_first means the same as in the built-in layers


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("to", ["zeros", "state", "sequence"])
@pytest.mark.parametrize(("batch", "seq_len"), [(3, 3), (3, 5)])
def test_resets_of_batches(batch: int, seq_len: int, to: str, is_packed: bool) -> None:
    """With as many steps as rows, a reset that is taken the wrong way round is no error."""
    cell = nn.GRUCell(2, H, dtype=F64)
    ours = fusedrnn.Recurrent(cell, batch_first=True)
    built_in = fusedrnn.GRU(2, H, batch_first=True, dtype=F64)
    weights = {f"{name}_l0": weight for name, weight in cell.named_parameters()}
    x = double(batch, seq_len, 2)
    reset = torch.rand(batch, seq_len, generator=torch.Generator().manual_seed(1)) < 0.4
    shape = {"zeros": (), "state": (batch, H), "sequence": (batch, seq_len, H)}[to]
    value = double(*shape) if shape else None
    rows = None if value is None else value[None]

    def given() -> Any:
        if not is_packed:
            return x
        lengths = torch.tensor([seq_len - 1, seq_len, 2])
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

    def padded(result: Any) -> tuple[Tensor, Tensor]:
        output, state = result
        return pad_packed_sequence(output)[0] if is_packed else output, state.view(batch, H)

    named = {"reset": reset, "reset_to": rows}
    check_same(
        lambda: padded(ours(given(), reset=reset, reset_to=value)),
        lambda: padded(torch.func.functional_call(built_in, weights, (given(),), named)),
        [x, *cell.parameters(), *(() if value is None else (value,))],
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_sequence", [True, False])
def test_no_rows(is_sequence: bool, mode: str) -> None:
    cell = nn.GRUCell(2, H)
    rnn = fusedrnn.Recurrent(cell, batch_first=True, return_sequence=is_sequence, mode=mode)
    x, reset = torch.randn(0, 5, 2, requires_grad=True), torch.zeros(0, 5, dtype=torch.bool)
    output, state = rnn(x, lengths=[], reset=reset, reset_to=torch.zeros(1, H))
    assert output.shape == ((0, 5, H) if is_sequence else (0, H))
    assert state.shape == (0, H)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    with pytest.raises(RuntimeError, match=r"lengths must have shape \(0,\)"):
        rnn(x, lengths=[3])
