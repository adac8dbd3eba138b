"""What a call is checked for apart from the values of its tensors, and what follows from that.

The checks take longer than a step of a small cell. So _call.py remembers a Checked, and does not
check a call again that is like an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from . import _checks as checks
from . import _helpers as helpers
from ._batch_forms import BatchForm
from ._cells import Layout, Sizes, layout, weights_per_direction
from ._ops import LayerCall
from ._options import Options


class CallTensors(NamedTuple):
    """The tensors of a call that share dtype and device, as the user gives them."""

    input: Tensor
    """Of a PackedSequence, its data."""
    hx: Tensor | None
    cx: Tensor | None
    eps: Tensor | None
    weights: Sequence[Tensor]
    flat_version: Tensor | None = None
    """See LayerTensors."""

    def flat(self) -> tuple[Tensor | None, ...]:
        return (self.input, self.hx, self.cx, self.eps, *self.weights)

    def named(self, names: Sequence[str] = ()) -> dict[str, Tensor | None]:
        """By the names that messages have for them. ``names``: of the weights, if known."""
        names = names or [f"weights[{i}]" for i in range(len(self.weights))]
        weights = dict(zip(names, self.weights, strict=True))
        return {"input": self.input, **weights, "hx": self.hx, "cx": self.cx, "eps": self.eps}


class Checked(NamedTuple):
    """What the checks of a call have found out."""

    form: BatchForm
    sizes: Sizes
    names: list[str]
    """Of all weights, in their order."""
    h_shape: tuple[int, ...]
    """Of hx as layers take it."""
    c_shape: tuple[int, ...] | None
    """The same of cx, if the cell has a cell state."""
    call: LayerCall
    """Of the first layer. In it, dropout is that of the other layers."""
    draws_masks: bool
    """Whether dropout or zoneout draws something."""
    drops_weights: bool
    can_lack_plan: bool
    """Whether a plan of a layer can fail."""


def count_weights(weights: Any, options: Options) -> list[Tensor]:
    """The weights as a list, once there are as many as there must be.

    They are counted before anything is made for each layer: num_layers may be a million.

    Raises:
        TypeError: ``weights`` is no sequence.
        ValueError: Their number is wrong.
    """
    is_sized = hasattr(weights, "__len__") and hasattr(weights, "__iter__")  # also a ParameterList
    if isinstance(weights, Tensor | Mapping | Set | str | bytes) or not is_sized:
        raise TypeError(
            f"fusedrnn: weights must be a sequence of tensors, got {type(weights).__name__}"
        )
    per_direction = weights_per_direction(options.cell, options.bias)
    count = options.layer_directions * per_direction
    if len(weights) != count:
        raise ValueError(
            f"fusedrnn: {options.num_layers} layer(s) with bias={options.bias} and "
            f"bidirectional={options.bidirectional} take {count} weights, got {len(weights)}"
        )
    return list(weights)


def check(
    tensors: CallTensors,
    options: Options,
    packing: checks.Packing | None,
    cell_sizes: Sizes | None,
) -> Checked:
    """Everything that a call can be checked for before the values of its tensors.

    Args:
        cell_sizes: Of a cell that takes one step, whose tensors have no dimension for steps and
            layers; None for layers.

    Raises:
        TypeError, ValueError, RuntimeError: Something is wrong.
    """
    names = [name for name, _, _ in _layout(options, Sizes())]
    checks.dtypes_and_devices(tensors.named(names))
    sizes = _check_weights(names, tensors.weights, options)
    is_step = cell_sizes is not None
    input_size = (cell_sizes or sizes).input
    form = BatchForm.of(tensors.input, input_size, options.batch_first, packing, is_step)
    if cell_sizes not in (None, sizes):
        raise RuntimeError(f"fusedrnn: weights must be of {cell_sizes}, got those of {sizes}")
    _check_states(tensors, form, sizes, options)
    if not form.is_any():
        _check_sizes(form, sizes, options)
    drops_out = options.dropout > 0 and options.num_layers > 1
    zoneout, cell_zoneout = options.zoneout_pair
    has_cell_state = options.facts.has_cell_state
    return Checked(
        form=form,
        sizes=sizes,
        names=names,
        h_shape=(options.layer_directions, form.batch, sizes.output),
        c_shape=(options.layer_directions, form.batch, sizes.hidden) if has_cell_state else None,
        call=LayerCall(
            cell=options.cell,
            chunk_size=options.chunk_size or 0,
            workspace_bytes=options.workspace_bytes or 0,
            backend=options.backend,
            recompute=options.recompute,
            layer_directions=options.layer_directions,
            dropout=options.dropout if drops_out and options.training else 0.0,
            zoneout=zoneout,
            cell_zoneout=cell_zoneout,
        ),
        draws_masks=options.training and (drops_out or max(zoneout, cell_zoneout) > 0),
        drops_weights=options.training and options.weight_dropout > 0,
        can_lack_plan=options.workspace_bytes is not None or options.backend == "persistent",
    )


def _layout(options: Options, sizes: Sizes) -> Layout:
    return layout(options.cell, sizes, options.num_layers, options.directions, options.bias)


def _check_weights(names: Sequence[str], weights: Sequence[Tensor], options: Options) -> Sizes:
    """The sizes of a layer, once all shapes are known to fit together."""
    columns = {}
    for name, size in options.facts.weights:
        at = names.index(f"{name}_l0")
        weight = weights[at]
        if weight.dim() != 2:
            raise ValueError(f"fusedrnn: weights[{at}] must have 2 dimensions, got {weight.dim()}")
        if weight.shape[1] == 0:
            raise RuntimeError(
                f"fusedrnn: weights[{at}] must have columns, got shape {tuple(weight.shape)}"
            )
        columns[size] = weight.shape[1]
    hidden_size = columns["hidden"]
    sizes = Sizes(
        input=columns["input"],
        hidden=hidden_size,
        latent=columns.get("latent", 0),
        output=columns.get("output", hidden_size),
    )
    for (name, _, shape), weight in zip(_layout(options, sizes), weights, strict=True):
        checks.shape(name, weight, shape)
    if options.proj_size not in (0, sizes.output):
        raise ValueError(
            f"fusedrnn: proj_size must be {sizes.output} as weights have it, "
            f"got {options.proj_size}"
        )
    return sizes


def _check_states(tensors: CallTensors, form: BatchForm, sizes: Sizes, options: Options) -> None:
    count = options.layer_directions
    batch = (form.batch,) if form.is_batched else ()
    features = {"hx": sizes.output, "cx": sizes.hidden, "eps": sizes.latent}
    given = {"hx": tensors.hx, "cx": tensors.cx, "eps": tensors.eps}
    for name, tensor in given.items():
        leading: tuple[int, ...] = (count, form.seq_len) if name == "eps" else (count,)
        if form.is_step:
            leading = ()
            if tensor is not None:
                checks.rank_of_step(name, tensor, tensors.input)
        checks.shape(name, tensor, (*leading, *batch, features[name]))


def _check_sizes(form: BatchForm, sizes: Sizes, options: Options) -> None:
    """Refuses a layer that is too large to be counted."""
    widths = (sizes.input, options.directions * sizes.output)  # of the first layer and the others
    for width in widths[: options.num_layers]:
        helpers.check_sizes(
            cell=options.cell,
            input_size=width,
            hidden_size=sizes.hidden,
            latent_size=sizes.latent,
            output_size=sizes.output,
            seq_len=form.seq_len,
            batch=form.batch,
        )
