"""A cell as a user writes it, and Recurrent around it: the column of users' own cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedrnn


class OwnCell(nn.Module):
    """A step of a GRU, written by hand. Its parameters are those of torch.nn.GRUCell."""

    def __init__(
        self, input_size: int, hidden_size: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        made = nn.GRUCell(input_size, hidden_size, bias=bias, dtype=dtype)
        self.weight_ih, self.weight_hh = made.weight_ih, made.weight_hh
        self.bias_ih, self.bias_hh = made.bias_ih, made.bias_hh

    def initial_state(self, batch: int) -> Tensor:
        """Zeros."""
        return self.weight_hh.new_zeros(batch, self.weight_hh.shape[1])

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """-> the state after the step."""
        of_x = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        of_h = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
        reset, update = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
        new = torch.tanh(of_x[2] + reset * of_h[2])
        return new + update * (h - new)


class OfOwnCells(fusedrnn.Recurrent):
    """A Recurrent of own cells, whose states are one tensor as those of torch.nn.GRU are.

    Its cells must be compiled, unless ``compile`` is another one.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        num_layers: int = 1,
        bias: bool = True,
        bidirectional: bool = False,
        compile: str = "require",
        **options: Any,
    ) -> None:
        directions = 2 if bidirectional else 1
        sizes = [input_size] + [hidden_size * directions] * (num_layers - 1)
        cells = [
            OwnCell(size, hidden_size, bias=bias, dtype=dtype)
            for size in sizes
            for _ in range(directions)
        ]
        one_or_all: Any = cells if len(cells) > 1 else cells[0]
        super().__init__(one_or_all, bidirectional, compile=compile, **options)

    def forward(
        self, input: Any, state: Any = None, *args: Any, **arguments: Any
    ) -> tuple[Any, Any]:
        """As torch.nn.GRU, with the further arguments of Recurrent."""
        has_layers = isinstance(self.cell, nn.ModuleList)
        if isinstance(state, Tensor):
            state = state.unbind(0) if has_layers else state.squeeze(0)
        output, last = super().forward(input, state, *args, **arguments)
        return output, torch.stack(last) if has_layers else last.unsqueeze(0)
