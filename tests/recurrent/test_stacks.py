"""Several cells: how many there may be, and what two directions make together."""

from __future__ import annotations

import pytest
import torch
from test_bad_steps import START, Cell, H, X, notes_of
from torch import Tensor, nn

import fusedrnn

pytestmark = pytest.mark.usefixtures("steps_in_python")


def test_outputs_of_two_directions() -> None:
    """They are concatenated in a dimension of their own, never in that of the batch."""
    for keeps, shape in ((True, r"\(6, 3\)"), (False, r"\(3,\)")):
        cells = [Cell(lambda x, h, w: ({"h": h, "kl": h.sum(-1)}, x @ w)) for _ in range(2)]
        rnn = fusedrnn.Recurrent(cells, bidirectional=True, return_sequence=keeps)
        message = rf"output\['kl'\] of layer 0 must have a dimension besides.*{shape}"
        with pytest.raises(ValueError, match=message):
            rnn(X, (START, START))
        with pytest.raises(ValueError, match=r"output\['kl'\] of layer 0"):
            rnn.explain(X, (START, START))
    cells = [Cell(lambda x, h, w: ((h, h), x @ w)), Cell(lambda x, h, w: (h, x @ w))]
    with pytest.raises(ValueError, match=r"both cells of layer 0.*\(tensor, tensor\) and tensor"):
        fusedrnn.Recurrent(cells, bidirectional=True)(X, (START, START))


def test_outputs_of_two_directions_are_matched_by_their_keys() -> None:
    cells = [
        Cell(lambda x, h, w: ({"one": h, "two": 2 * h}, x @ w)),
        Cell(lambda x, h, w: ({"two": 2 * h, "one": h}, x @ w)),
    ]
    output, _ = fusedrnn.Recurrent(cells, bidirectional=True)(X, (START, START))
    torch.testing.assert_close(output["two"], 2 * output["one"])


def test_a_number_of_cells_that_changes() -> None:
    """What was right for the constructor is checked again."""
    rnn = fusedrnn.Recurrent([nn.GRUCell(H, H)])
    assert isinstance(rnn.cell, nn.ModuleList)
    rnn.cell.append(nn.GRUCell(H, H))
    output, state = rnn(X)
    expected = fusedrnn.Recurrent(rnn.cell[1])(fusedrnn.Recurrent(rnn.cell[0])(X)[0])
    torch.testing.assert_close((output, state[1]), expected)
    rnn.cell.append(nn.GRUCell(H, H))
    rnn.bidirectional = True
    alone = fusedrnn.Recurrent(nn.GRUCell(H, H))
    alone.bidirectional = True
    for wrong, got in ((rnn, 3), (alone, 1)):
        with pytest.raises(ValueError, match=f"must have two cells per layer, got {got}"):
            wrong(X)
    del rnn.cell[:]
    rnn.bidirectional = False
    with pytest.raises(ValueError, match="must have at least one cell, got 0"):
        rnn.explain(X)


@pytest.mark.parametrize(
    ("directions", "wrong", "place"),
    [
        (1, 1, " of layer 1"),
        (2, 0, " of the forward cell of layer 0"),
        (2, 3, " of the reverse cell of layer 1"),
    ],
)
def test_the_cell_of_an_error(directions: int, wrong: int, place: str) -> None:
    def fails(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        raise LookupError("a word")

    cells: list[nn.Module] = [nn.GRUCell(H, H), nn.GRUCell(H, H)]
    cells += [nn.GRUCell(directions * H, H) for _ in range(2)]
    cells[wrong] = Cell(fails)
    cells = cells[: 2 * directions]
    rnn = fusedrnn.Recurrent(cells, bidirectional=directions == 2)
    time = len(X) - 1 if "reverse" in place else 0
    with pytest.raises(LookupError, match="a word") as raised:
        rnn(X, (START,) * len(cells))
    assert notes_of(raised.value).endswith(f"fusedrnn: in the step at time {time}{place}")
