"""One call of a layer or a cell, by a module or a functional form: checks, seeds, layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import _autocast, _plans, _seeds, _single_steps
from . import _call_arguments as arguments
from . import _checks as checks
from . import _tuning as tuning
from ._batch_forms import BatchForm, Mask
from ._buffers import version_of
from ._call_arguments import CallTensors, Checked
from ._cells import Sizes
from ._options import Options
from ._stack import Stack, States
from ._tracers import is_alone, is_compiling

# A padded batch, a single sequence, or a PackedSequence: the output has the form of the input.
S = TypeVar("S", Tensor, PackedSequence)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Where eps comes from. With ``sample=False`` no noise is used."""

    eps: Tensor | None = None
    seed: Tensor | None = None
    generator: torch.Generator | None = None
    sample: bool = True

    def __post_init__(self) -> None:
        checks.noise(self.eps, self.seed, self.generator, self.sample)


NO_NOISE = Noise(sample=False)


class Masks(NamedTuple):
    """Which rows take which steps and where they start anew, as the user gives it."""

    lengths: Tensor | Sequence[int] | None = None
    reset: Tensor | None = None
    reset_to: tuple[Tensor | None, Tensor | None] | None = None
    """Of h, and of c if the cell has a cell state."""


NO_MASKS = Masks()
_NO_MASK = Mask()


_remembered: dict[Hashable, Checked] = {}
_MOST_REMEMBERED = 256


def run(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None,
    cx: Tensor | None,
    options: Options,
    noise: Noise = NO_NOISE,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    reset_to: tuple[Tensor | None, Tensor | None] | None = None,
    flat_version: Tensor | None = None,
) -> tuple[S, Tensor, Tensor | None]:
    """Layers over a sequence -> output, h_n, and c_n if the cell has a cell state.

    Args:
        reset_to: Of h, and of c if the cell has a cell state.
        flat_version: Of a module's flat buffer; a call without one asks for that of the weights.
    """
    data: Any = input
    packing = None
    if isinstance(input, PackedSequence):
        data, packing = input.data, checks.packing(input)
    tensors = CallTensors(data, hx, cx, noise.eps, _as_list(weights, options), flat_version)
    masks = Masks(lengths, reset, reset_to)
    return _run(tensors, options, noise, packing, masks)


def run_cell(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor | None,
    cx: Tensor | None,
    options: Options,
    sizes: Sizes,
    noise: Noise = NO_NOISE,
    flat_version: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One step, on tensors without a dimension for steps and layers -> h, and c if there is one."""
    tensors = CallTensors(input, hx, cx, noise.eps, weights, flat_version)
    _, h, c = _run(tensors, options, noise, None, cell_sizes=sizes)
    return h, c


def _as_list(weights: Sequence[Tensor], options: Options) -> Sequence[Tensor]:
    if type(weights) is list or type(weights) is tuple:
        return weights
    return arguments.count_weights(weights, options)


def _run(
    tensors: CallTensors,
    options: Options,
    noise: Noise,
    packing: checks.Packing | None,
    masks: Masks = NO_MASKS,
    cell_sizes: Sizes | None = None,
) -> tuple[Any, Tensor, Tensor | None]:
    """Checks a call, converts its tensors under autocast, and runs it."""
    dtype = _autocast.dtype_for(tensors.input)
    key = _key(tensors, options, packing, cell_sizes, dtype)
    try:
        checked = None if key is None else _remembered.get(key)
    except (TypeError, RuntimeError):  # not hashable, such as a shape of symbols
        key = checked = None
    if checked is None:
        arguments.count_weights(tensors.weights, options)
        checks.types(tensors.named(), optional=("hx", "cx", "eps"))
    if dtype is not None:  # torch does not convert the tensors of operators that it does not know
        tensors = _converted(tensors, dtype)
    if checked is None:
        checked = arguments.check(tensors, options, packing, cell_sizes)
        if key is not None:
            if len(_remembered) >= _MOST_REMEMBERED:
                _remembered.clear()
            _remembered[key] = checked
    if dtype is None:
        return _run_checked(checked, tensors, options, noise, packing, masks)
    if masks.reset_to is not None:
        to = [None if t is None else _autocast.converted(t, dtype) for t in masks.reset_to]
        masks = masks._replace(reset_to=(to[0], to[1]))
    with torch.autocast(tensors.input.device.type, enabled=False):
        return _run_checked(checked, tensors, options, noise, packing, masks)


def _key(
    tensors: CallTensors,
    options: Options,
    packing: checks.Packing | None,
    cell_sizes: Sizes | None,
    autocast: torch.dtype | None,
) -> Hashable:
    """All that the checks look at, but for values of tensors; None if it must not be remembered."""
    if is_compiling() or torch._C._is_tracing():  # torch.jit's function takes longer
        return None  # sizes may be those of any call
    steps = None if packing is None else (len(packing.batch_sizes), packing.batch())
    try:
        return (
            *(options, cell_sizes, steps, autocast),
            *[
                None if t is None else (type(t), t.shape, t.dtype, t.device, t.layout)
                for t in tensors.flat()
            ],
        )
    except (AttributeError, TypeError, RuntimeError):  # an argument is no tensor, or has no shape
        return None


def _run_checked(
    checked: Checked,
    tensors: CallTensors,
    options: Options,
    noise: Noise,
    packing: checks.Packing | None,
    masks: Masks,
) -> tuple[Any, Tensor, Tensor | None]:
    """What depends on values is checked in every call; then one operator runs for each layer."""
    if checked.form.is_step and is_alone():
        return None, *_run_step(checked.call.cell, tensors, noise)
    input, hx, cx, eps, weights, flat_version = tensors
    form, call, seed, mask, mask_seed = checked.form, checked.call, noise.seed, _NO_MASK, None
    lengths, reset, to = masks
    reset_to = None
    if seed is not None:
        seed = checks.seed(seed, input)
    if lengths is not None or reset is not None or packing is not None:
        mask = form.mask(lengths, reset, input, packing)
    if to is not None:
        if reset is None:
            raise ValueError("fusedrnn: reset_to must be given together with reset")
        h_to, c_to = to
        assert h_to is not None
        reset_to = States(
            _checked_reset_to("reset_to", h_to, checked.h_shape, form, input, packing),
            None
            if c_to is None or checked.c_shape is None
            else _checked_reset_to("reset_to[1]", c_to, checked.c_shape, form, input, packing),
        )
    if flat_version is None and torch.is_grad_enabled() and not is_compiling():
        flat_version = version_of(weights[0])
    tuned = tuning.number_for(input)
    if checked.can_lack_plan and not form.is_any():
        _check_plans(checked, options, noise.sample, input, weights, tuned)

    # From here on nothing is refused, so random numbers may be drawn.
    if noise.sample and eps is None and seed is None:
        seed = _seeds.draw(noise.generator, input.device)
    if checked.draws_masks:
        mask_seed = _seeds.draw(None, input.device)
    if checked.drops_weights:
        p, named = options.weight_dropout, zip(checked.names, weights, strict=True)
        weights = [_drop_if_recurrent(name, weight, p) for name, weight in named]

    sequence = form.sequence(input, packing)
    h = input.new_zeros(checked.h_shape) if hx is None else form.state(hx, packing)
    c: Tensor | None = None
    if checked.c_shape is not None:
        c = input.new_zeros(checked.c_shape) if cx is None else form.state(cx, packing)
    if eps is not None:
        eps = form.state(eps, packing, dim=2)
    stack = Stack(
        call=replace(call, tuning=tuned) if tuned != call.tuning else call,
        num_layers=options.num_layers,
        directions=options.directions,
        weights=weights,
        mask=mask,
        eps=eps,
        seed=seed,
        mask_seed=mask_seed,
        flat_version=flat_version,
        reset_to=reset_to,
    )
    result: Any = None  # a cell's step returns h_n as its output
    if options.return_sequence:
        output, last = stack.run(sequence, States(h, c))
        if not form.is_step:
            result = form.output(output, packing)
    else:
        last = stack.run_for_last_states(sequence, States(h, c))
        output = torch.cat(last.h[-options.directions :].unbind(), -1)
        result = form.result_state(output, packing, dim=0)
    h_n = form.result_state(last.h, packing)
    return result, h_n, None if last.c is None else form.result_state(last.c, packing)


def _run_step(cell: str, tensors: CallTensors, noise: Noise) -> tuple[Tensor, Tensor | None]:
    """The same for a cell where nothing but autograd looks: it has none of what sequences have."""
    input, _, _, eps, weights, flat_version = tensors
    seed = None if noise.seed is None else checks.seed(noise.seed, input)
    if flat_version is None and torch.is_grad_enabled():
        flat_version = version_of(weights[0])
    if noise.sample and eps is None and seed is None:
        seed = _seeds.draw(noise.generator, input.device)
    tuned = tuning.number_for(input)
    return _single_steps.run_step(cell, tensors[:4], weights, seed, flat_version, tuned)


def _checked_reset_to(
    name: str,
    to: Tensor,
    shape: tuple[int, ...],
    form: BatchForm,
    input: Tensor,
    packing: checks.Packing | None,
) -> Tensor:
    """What states become at resets, as layers take it.

    Args:
        shape: Of the states, (L * D, B, features).

    Raises:
        TypeError, ValueError, RuntimeError: It is wrong.
    """
    checks.types({name: to})
    if to.dtype != input.dtype:
        raise ValueError(f"fusedrnn: {name} must be {input.dtype} as input is, got {to.dtype}")
    checks.on_device(name, to, input)
    rows, batch, features = shape
    is_first = form.batch_first and form.is_batched
    steps = (batch, form.seq_len) if is_first else (form.seq_len, batch)
    if form.is_batched:
        allowed = [shape, (rows, 1, features), (rows, *steps, features)]
    else:
        allowed = [(rows, features), (rows, form.seq_len, features)]
    if tuple(to.shape) not in allowed:
        texts = ", ".join(map(str, allowed[:-1]))
        raise RuntimeError(
            f"fusedrnn: {name} must have shape {texts} or, for each step, {allowed[-1]}, "
            f"got {tuple(to.shape)}"
        )
    if not form.is_batched:
        return to.unsqueeze(-2)
    if to.dim() == 4:
        to = to.transpose(1, 2) if is_first else to
        return to if packing is None else packing.sort(to, 2)
    return to if packing is None or to.shape[1] == 1 else packing.sort(to, 1)


def _check_plans(
    checked: Checked,
    options: Options,
    sample: bool,
    input: Tensor,
    weights: Sequence[Tensor],
    tuned: int,
) -> None:
    """Has every layer planned before the first one runs."""
    sizes, form = checked.sizes, checked.form
    per_layer = len(weights) // options.num_layers
    for first in range(0, len(weights), per_layer):
        of_layer = weights[first : first + per_layer]
        _plans.check_plan(
            input.device,
            cell=options.cell,
            noise=sample,
            input_size=of_layer[0].shape[1],
            hidden_size=sizes.hidden,
            latent_size=sizes.latent,
            output_size=sizes.output,
            bias=options.bias,
            seq_len=form.seq_len,
            batch=form.batch,
            dtype=_plans.name_of(input.dtype),
            chunk_size=checked.call.chunk_size,
            workspace_bytes=checked.call.workspace_bytes,
            backend=options.backend,
            tuning=tuned,
            strides=_plans.strides_of(of_layer),
        )


def _drop_if_recurrent(name: str, weight: Tensor, p: float) -> Tensor:
    """DropConnect on a recurrent weight matrix, with one mask for all steps of a call."""
    is_recurrent = name.startswith("weight") and not name.startswith("weight_ih")
    return F.dropout(weight, p) if is_recurrent else weight


def _converted(tensors: CallTensors, dtype: torch.dtype) -> CallTensors:
    """All tensors in the dtype of autocast."""
    input, hx, cx, eps = [_autocast.converted(t, dtype) for t in tensors[:4]]
    weights = _autocast.weights_in(dtype, tensors.weights)
    # Copies do not change with the flat buffer.
    is_buffer = len(weights) > 0 and weights[0] is tensors.weights[0]
    return CallTensors(input, hx, cx, eps, weights, tensors.flat_version if is_buffer else None)
