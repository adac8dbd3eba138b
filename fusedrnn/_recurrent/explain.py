"""What a call would do, found out by a few steps."""

from __future__ import annotations

import torch
from torch import nn

from .. import _modules as modules
from .._front.torch_refusals import way_out
from .._runtime.chunk_size import measure_graph
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves, Structure, flatten
from .explanation import Explanation
from .layer_call import OneLayerCall, why_no_program
from .layers_call import LayersCall, joined
from .running_call import NoProgram, PlannedCall, ProgramOptions, in_order
from .settings import Settings

_STEPS = 3

_LAYERS = {
    nn.RNNCell: "torch.nn.RNN",
    nn.GRUCell: "fusedrnn.GRU",
    nn.LSTMCell: "fusedrnn.LSTM",
    modules.GRUCell: "fusedrnn.GRU",
    modules.LSTMCell: "fusedrnn.LSTM",
    modules.StochasticGRUCell: "fusedrnn.StochasticGRU",
}
"""From a cell to the layer that computes the same."""
_FASTER_THAN_COMPILED = {"fusedrnn.GRU", "fusedrnn.LSTM", "fusedrnn.StochasticGRU"}
"""Not torch.nn.RNN, which takes longer to train than a compiled RNNCell."""


def explanation(call: LayersCall) -> Explanation:
    """Of all cells of a call: sums, or the largest number where one cell runs at a time."""
    sequence = call.sequence
    leaves, structure, names = sequence.leaves, sequence.structure, sequence.names
    parts: list[Explanation] = []
    layers = len(call.cells) // call.directions
    for layer in range(layers):
        outputs = []
        for i in range(layer * call.directions, (layer + 1) * call.directions):
            one = call.cell(i, leaves, structure, names)
            parts.append(explained(one, _layer_like(call.cells[i])))
            if layers > 1 or call.directions > 1:
                outputs.append(_first_outputs(one))
        if outputs:
            leaves, structure = joined(layer, outputs, has_steps=True)
            names = structure.names(f"output of layer {layer}")
    least = min(parts, key=lambda part: part.chunk_steps)
    in_python = [part.program for part in parts if not part.is_compiled]
    program = "; ".join(dict.fromkeys(in_python or [part.program for part in parts]))
    if 0 < len(in_python) < len(parts):
        program += f" ({len(parts) - len(in_python)} of {len(parts)} cells are compiled)"

    return Explanation(
        is_compiled=not in_python,
        program=program,
        chunk_steps=least.chunk_steps,
        chunk_reason=least.chunk_reason,
        step_bytes=max(part.step_bytes for part in parts),
        kept_bytes_per_step=sum(part.kept_bytes_per_step for part in parts),
        workspace_bytes=max(part.workspace_bytes for part in parts),
        faster=tuple(dict.fromkeys(advice for part in parts for advice in part.faster)),
        traces=max(part.traces for part in parts),
    )


def explained(one: OneLayerCall, layer: str = "") -> Explanation:
    """Of one layer and direction. ``layer``: which computes the same as the cell, or nothing."""
    call, settings = one.call, one.settings
    planned: PlannedCall | str = why_no_program(settings)
    if not planned:
        options = ProgramOptions(
            settings.chunk_size, settings.workspace_bytes, not settings.recompute
        )
        try:
            planned = one.memory.compiling.plan(one.user, call, options)
        except NoProgram as error:
            planned = one.refused(error)
    if not isinstance(planned, str):
        return _of_program(settings, call, planned, layer)
    in_python = one.in_python()
    step_bytes = in_python.step_bytes()
    if not (why := in_python.keeps_graph):
        steps, chunk_reason = in_python.choose_chunk()
        kept = -(-sum(leaf.nbytes for leaf in call.state) // steps)
        workspace = step_bytes * steps
    else:
        steps, chunk_reason = call.seq_len, f"the whole sequence, since {why}"
        kept, workspace = step_bytes, 0
    faster = []

    if way := way_out(planned):
        faster.append(f"to have the cell compiled, {way}")
    if layer:
        faster.append(f"{layer} computes the same")
    return Explanation(
        is_compiled=False,
        program=planned,
        chunk_steps=steps,
        chunk_reason=chunk_reason,
        step_bytes=step_bytes,
        kept_bytes_per_step=kept,
        workspace_bytes=workspace,
        faster=tuple(faster),
    )


def _layer_like(cell: nn.Module) -> str:
    """The layer that computes what a cell does; "" if there is none, or hooks change the cell."""
    has_hooks = cell._forward_hooks or cell._forward_pre_hooks or "forward" in vars(cell)
    return "" if has_hooks else _LAYERS.get(type(cell), "")


def _of_program(
    settings: Settings, call: SequenceCall, planned: PlannedCall, layer: str
) -> Explanation:
    program, parts, chunk, workspace, graph, given, traces, order = planned
    if order is not None:
        call = call._replace(inputs=in_order(call.inputs, order))
    form, size = program.form, program.dtype.itemsize
    longest = max(part.steps for part in parts)
    steps, why = longest, "the whole sequence"
    if chunk < longest:
        steps = chunk
        why = (
            "set by chunk_size"
            if settings.chunk_size is not None
            else "the most that fit into workspace_bytes"
            if settings.workspace_bytes is not None
            else "at least 256 rows (steps x batch); longer chunks are not faster on a CPU"
            if call.device.type == "cpu"
            else "at least 8 steps and 1024 rows (steps x batch), which keep a GPU busy"
        )
    elif len(parts) > 1:
        why = f"one of {len(parts)} parts of the sequence; backward recomputes them one by one"
    if len(parts) > 1:
        states = sum(carry.width for carry in form.carries) * size * (len(parts) - 1)
        kept = call.rows * -(-states // call.seq_len)
        workspace += call.rows * longest * sum(form.sequences) * size
    else:
        kept = program.kept_bytes_per_step(
            call.rows,
            steps,
            returns_sequence=call.returns_sequence,
            saves_sums=not settings.recompute,
        )
    return Explanation(
        is_compiled=True,
        program=program.summary(),
        chunk_steps=steps,
        chunk_reason=why,
        step_bytes=measure_graph(graph, given, call),
        kept_bytes_per_step=kept,
        workspace_bytes=workspace,
        faster=(f"{layer} computes the same",) if layer in _FASTER_THAN_COMPILED else (),
        traces=traces,
    )


@torch.no_grad()
def _first_outputs(one: OneLayerCall) -> tuple[Leaves, Structure]:
    """Outputs of the first steps repeated: only their kinds matter."""
    few = one.of_first_steps(_STEPS)
    output, _ = few.results(aside=True)
    outputs, structure = flatten(output, "output")
    seq_len, more = one.call.seq_len, -(-one.call.seq_len // few.call.seq_len)
    return tuple(torch.cat([leaf] * more)[:seq_len] for leaf in outputs), structure
