"""``batch_first`` means the same as in the built-in layers, packed sequences included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import check_same
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fusedrnn

F64 = torch.float64


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("to", ["zeros", "state", "sequence"])
@pytest.mark.parametrize(("batch", "seq_len"), [(3, 3), (3, 5)])
def test_resets(batch: int, seq_len: int, to: str, is_packed: bool) -> None:
    """With as many steps as rows, a reset that is taken the wrong way round is no error."""
    cell = nn.GRUCell(2, 4, dtype=F64)
    ours = fusedrnn.Recurrent(cell, batch_first=True)
    built_in = fusedrnn.GRU(2, 4, batch_first=True, dtype=F64)
    weights = {f"{name}_l0": weight for name, weight in cell.named_parameters()}
    x = torch.randn(batch, seq_len, 2, dtype=F64, requires_grad=True)
    reset = torch.rand(batch, seq_len, generator=torch.Generator().manual_seed(1)) < 0.4
    shape = {"zeros": (), "state": (batch, 4), "sequence": (batch, seq_len, 4)}[to]
    value = torch.randn(shape, dtype=F64, requires_grad=True) if shape else None
    rows = None if value is None else value[None]

    def given() -> Any:
        if not is_packed:
            return x
        lengths = torch.tensor([seq_len - 1, seq_len, 2])
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

    def padded(result: Any) -> tuple[Tensor, Tensor]:
        output, state = result
        return pad_packed_sequence(output)[0] if is_packed else output, state.view(batch, 4)

    leaves = [x, *cell.parameters(), *(() if value is None else (value,))]
    check_same(
        lambda: padded(ours(given(), reset=reset, reset_to=value)),
        lambda: padded(
            torch.func.functional_call(
                built_in, weights, (given(),), {"reset": reset, "reset_to": rows}
            )
        ),
        leaves,
    )


@pytest.mark.parametrize("return_sequence", [True, False])
def test_no_rows(return_sequence: bool) -> None:
    rnn = fusedrnn.Recurrent(
        nn.GRUCell(2, 4), batch_first=True, return_sequence=return_sequence, mode="parallel"
    )
    x, reset = torch.randn(0, 5, 2, requires_grad=True), torch.zeros(0, 5, dtype=torch.bool)
    output, state = rnn(x, lengths=[], reset=reset, reset_to=torch.zeros(1, 4))
    assert output.shape == ((0, 5, 4) if return_sequence else (0, 4))
    assert state.shape == (0, 4)
    output.sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match=r"lengths must have shape \(0,\)"):
        rnn(x, lengths=[3])
