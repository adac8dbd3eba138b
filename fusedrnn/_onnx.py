"""Layers as ONNX's standard operators GRU and LSTM, for both exporters of torch.onnx.

Shapes there are W (D, gates * H, I), R (D, gates * H, H), B (D, 2 * gates * H), states (D, B, H),
and Y (T, D, B, H).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._cells import CELLS
from ._ops import LayerCall, LayerTensors
from ._tracers import constant_in_graphs, is_compiling

# Places of ONNX's gates among ours: u, r, n of a GRU; i, o, f, g of an LSTM.
_GATES = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


def is_exporting() -> bool:
    """Whether torch.onnx.export is under way."""
    # torch.onnx takes microseconds to answer, so it is not asked in eager calls.
    is_traced = is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return is_traced and _is_in_onnx_export()


@constant_in_graphs  # which torch.compile would take for False
def _is_in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


def run_layer(call: LayerCall, tensors: LayerTensors) -> tuple[Tensor, Tensor, Tensor]:
    """One layer over a sequence, as :func:`fusedrnn._autograd.run_layer` describes it.

    Raises:
        RuntimeError: ONNX's operators lack what the call asks for.
    """
    _check(call, tensors)
    input, hx, weights, cx = tensors[:4]
    operator = "GRU" if cx is None else "LSTM"
    size = len(CELLS[call.cell].weights) * (2 if weights[-1].dim() == 1 else 1)
    of_directions = [
        _of_direction(call.cell, _GATES[operator], weights[i : i + size])
        for i in range(0, len(weights), size)
    ]
    w, r, *biases = (torch.stack(parts) for parts in zip(*of_directions, strict=True))
    b = biases[0] if biases else None
    lengths = None if tensors.lengths is None else tensors.lengths.to(torch.int32)
    direction = "reverse" if call.reverse else "forward"
    if len(of_directions) == 2:
        direction = "bidirectional"
    run = _in_exported_program if is_compiling() else _InTrace.apply
    states = (hx,) if cx is None else (hx, cx)
    y, h_n, *c_n = run(operator, direction, input, w, r, b, lengths, *states)
    output = y.squeeze(1) if len(of_directions) == 1 else y.transpose(1, 2).flatten(2)
    return output, h_n, c_n[0] if c_n else hx[:0]


def _check(call: LayerCall, tensors: LayerTensors) -> None:
    zoneout = max(call.zoneout, call.cell_zoneout)
    problems = {
        "sample=False, got noise": tensors.eps is not None or tensors.seed is not None,
        "proj_size=0, got a projected LSTM": CELLS[call.cell].is_projected,
        "no reset, got one": tensors.reset is not None,
        "padded sequences, got a PackedSequence": tensors.batch_sizes is not None,
        f"zoneout=0, got {zoneout}": zoneout > 0,
        f"no dropout or evaluation mode, got dropout={call.dropout}": call.dropout > 0,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise RuntimeError(f"fusedrnn: ONNX needs {problem}")


def _of_direction(cell: str, gates: Sequence[int], weights: Sequence[Tensor]) -> list[Tensor]:
    """A direction's rows of W, R and, with biases, of B."""
    if CELLS[cell].has_latent:
        # Without noise the latent is linear in h, and so are the hidden gates.
        weight_ih, weight_zh, weight_hz, *biases = weights
        loc = _parts(weight_hz, 2)[0]
        weights = [weight_ih, weight_zh @ loc]
        if biases:
            bias_ih, bias_zh, bias_hz = biases
            weights += [bias_ih, weight_zh @ _parts(bias_hz, 2)[0] + bias_zh]
    matrix_ih, matrix_hh, *biases = (_in_order(gates, weight) for weight in weights)
    return [matrix_ih, matrix_hh, *([torch.cat(biases)] if biases else [])]


def _in_order(gates: Sequence[int], weight: Tensor) -> Tensor:
    of_gates = _parts(weight, len(gates))
    return torch.cat([of_gates[gate] for gate in gates])


def _parts(weight: Tensor, count: int) -> list[Tensor]:
    # Slices, because the exporters compute those of weights once, but not a chunk.
    size = int(weight.shape[0]) // count
    return [weight[i * size : (i + 1) * size] for i in range(count)]


def _shapes(input: Tensor, hx: Tensor, *cx: Tensor) -> list[tuple[int, ...]]:
    """Of the results."""
    directions, batch, hidden_size = hx.shape
    y = (input.shape[0], directions, batch, hidden_size)
    return [y, *(tuple(state.shape) for state in (hx, *cx))]


def _attributes(operator: str) -> dict[str, int]:
    """A GRU's reset gate comes after the projection of h."""
    return {"linear_before_reset": 1} if operator == "GRU" else {}


def _in_exported_program(operator: str, direction: str, *inputs: Any) -> Sequence[Tensor]:
    """The operator as a node that torch.export records."""
    input, _, _, _, _, *states = inputs
    shapes = _shapes(input, *states)
    return torch.onnx.ops.symbolic_multi_out(
        operator,
        inputs,
        {"direction": direction, "hidden_size": shapes[0][3], **_attributes(operator)},
        dtypes=[input.dtype] * len(shapes),
        shapes=shapes,
    )


class _InTrace(torch.autograd.Function):
    """The operator as a node of torch.jit.trace, with results of zeros."""

    @staticmethod
    def forward(ctx: Any, operator: str, direction: str, *inputs: Any) -> tuple[Tensor, ...]:
        input, _, _, _, _, *states = inputs
        return tuple(input.new_zeros(shape) for shape in _shapes(input, *states))

    @staticmethod
    def symbolic(graph: Any, operator: str, direction: str, *inputs: Any) -> Any:
        absent = graph.op("prim::Constant")
        absent.setType(torch._C.OptionalType.ofTensor())
        _, _, r, _, _, *states = inputs
        return graph.op(
            operator,
            *(absent if value is None else value for value in inputs),
            outputs=1 + len(states),
            direction_s=direction,
            hidden_size_i=r.type().sizes()[2],
            **{f"{name}_i": value for name, value in _attributes(operator).items()},
        )
