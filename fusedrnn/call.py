"""One call of a recurrent layer, by a module or a functional form: checks, random seeds, layers.

The checks cost more than a step of a small cell. So what they have found is remembered, by all that
they have looked at: a call that is like an earlier one is not checked again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence

from . import _library, checks
from .stack import Stack, States

# A padded batch, a single sequence, or a PackedSequence: the output is of the same kind.
S = TypeVar("S", Tensor, PackedSequence)

_HAVE_STATE = ("lstm", "projected_lstm")  # beside h
_AUTOCAST_DEVICES = ("cpu", "cuda")  # torch raises an error when asked about others, as meta


class Noise(NamedTuple):
    """Where eps comes from; the default is none."""

    eps: Tensor | None = None
    seed: Tensor | None = None
    generator: torch.Generator | None = None
    sample: bool = False


NO_NOISE = Noise()


class Options(NamedTuple):
    """What every cell takes besides tensors: see :class:`fusedrnn.GRU`."""

    num_layers: int = 1
    bias: bool = True
    batch_first: bool = False
    bidirectional: bool = False
    dropout: float = 0.0
    zoneout: float | tuple[float, float] = 0.0
    weight_dropout: float = 0.0
    training: bool = True
    return_sequence: bool = True
    recompute: bool = True
    chunk_size: int | None = None
    workspace_bytes: int | None = None
    backend: str = "auto"
    proj_size: int = 0

    def check(self, has_state: bool) -> None:
        for name in ("bias", "batch_first", "bidirectional"):
            checks.flag(name, getattr(self, name))
        for name in ("training", "return_sequence", "recompute"):
            checks.flag(name, getattr(self, name))
        checks.num_layers(self.num_layers)
        checks.proj_size(self.proj_size)
        checks.probability("dropout", self.dropout)
        checks.probability("weight_dropout", self.weight_dropout)
        checks.zoneout(self.zoneout, has_state)
        checks.chunks(self.chunk_size, self.workspace_bytes)
        checks.backend(self.backend)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def zoneout_pair(self) -> tuple[float, float]:
        """Of h, and of the state beside it."""
        h, state = self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,) * 2
        return h, state


class Sizes(NamedTuple):
    """Features; output is those of h."""

    input: int = 1
    hidden: int = 1
    latent: int = 1
    output: int = 1


class _Place(NamedTuple):
    """Where steps and rows of a batch are in the user's tensors, and where the operators want them.

    These want (seq_len, batch, features), or the data of a PackedSequence as it is.
    """

    seq_len: int
    batch: int
    is_batched: bool
    is_step: bool  # a cell's tensors, without a dimension for steps or layers
    batch_first: bool

    def sequence(self, input: Tensor, packing: checks.Packing | None) -> Tensor:
        if packing is not None:
            return input
        if not self.is_batched:
            input = input.unsqueeze(-2)
        if self.is_step:
            return input.unsqueeze(0)
        return input.transpose(0, 1) if self.batch_first and self.is_batched else input

    def result(self, output: Tensor, packing: checks.Packing | None) -> Any:
        """The output as the user's input was."""
        if packing is not None:
            return packing.pack(output)
        if self.is_step:
            output = output.squeeze(0)
        if not self.is_batched:
            return output.squeeze(-2)
        return output.transpose(0, 1) if self.batch_first else output

    def sorted(self, tensor: Tensor, dim: int, packing: checks.Packing | None) -> Tensor:
        """``dim``: of the batch, in a batched tensor."""
        if self.is_step:
            tensor = tensor[(None,) * dim]
        if packing is not None:
            return packing.sort(tensor, dim)
        return tensor if self.is_batched else tensor.unsqueeze(dim)

    def unsorted(self, tensor: Any, dim: int, packing: checks.Packing | None) -> Tensor:
        if packing is not None:
            return packing.unsort(tensor, dim)
        if self.is_step:
            return _library.reshaped(tensor, tensor.shape[1 if self.is_batched else 2 :])
        return tensor if self.is_batched else tensor.squeeze(dim)

    def mask(
        self,
        lengths: Tensor | Sequence[int] | None,
        reset: Tensor | None,
        input: Tensor,
        packing: checks.Packing | None,
    ) -> _library.Mask:
        """Checked lengths and resets, as the operators take them."""
        if lengths is not None:
            if packing is not None:
                raise ValueError(
                    "fusedrnn: lengths must not be given for a PackedSequence, which has them"
                )
            if not self.is_batched:
                raise ValueError(
                    "fusedrnn: lengths are for a batch of sequences, got input without batch"
                )
            lengths = checks.lengths(lengths, self.seq_len, self.batch)
        if reset is not None:
            steps = (self.seq_len, self.batch) if self.is_batched else (self.seq_len,)
            checks.reset(reset, steps[::-1] if self.batch_first else steps, input)
            if self.batch_first and self.is_batched:
                reset = reset.t()
            reset = self.sorted(reset, 1, packing).contiguous()
        return _library.Mask(lengths, None if packing is None else packing.batch_sizes, reset)


_NO_MASK = _library.Mask()


class _Checked(NamedTuple):
    """What the checks of a call have found, and what else follows from the same."""

    place: _Place
    h_shape: tuple[int, ...]
    c_shape: tuple[int, ...] | None
    """Of all states as the operators want them; None for a cell without a state beside h."""
    names: list[str]
    """Of all weights, in their order."""
    setting: _library.Setting
    """Of the first layer."""
    dropout: _library.Dropout
    """Without a seed."""
    draws_masks: bool
    drops_weights: bool
    has_plans: bool
    """Whether a plan of a layer can fail."""
    is_one_layer: bool
    """And its whole output is wanted."""


_remembered: dict[Hashable, _Checked] = {}
_MOST_REMEMBERED = 256


def run(
    cell: str,
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None,
    cx: Tensor | None,
    options: Options,
    noise: Noise = NO_NOISE,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    step: tuple[int, int, int, int] | None = None,
) -> tuple[S, Tensor, Tensor | None]:
    """Any cell over layers -> output, h_n, c_n if any; everything in one dtype under autocast.

    ``step``: the sizes of a cell as torch.nn has them, whose tensors have no dimension for steps
    or layers.
    """
    if type(weights) is not list and type(weights) is not tuple:
        options.check(cell in _HAVE_STATE)
        weights = list(_check_count(cell, weights, options))
    data: Any = input
    packing = None
    if isinstance(input, PackedSequence) and step is None:  # a cell takes none
        data, packing = input.data, checks.packing(input)
    dtype = _autocast_dtype(data)
    tensors = (data, hx, cx, noise.eps, *weights)
    key = _key(tensors, cell, options, packing, step, dtype)
    try:
        checked = None if key is None else _remembered.get(key)
    except (TypeError, RuntimeError):  # what cannot be looked up, as an option that is a list
        key = checked = None
    if checked is None:
        options.check(cell in _HAVE_STATE)
        _check_count(cell, weights, options)
        checks.types(_named(tensors), optional=("hx", "cx", "eps"))
    if dtype is not None:  # torch itself would not convert the operators' tensors
        tensors = tuple([_autocast(tensor, dtype) for tensor in tensors])
    if checked is None:
        checked = _check(tensors, cell, options, packing, step)
        if key is not None:
            if len(_remembered) >= _MOST_REMEMBERED:
                _remembered.clear()
            _remembered[key] = checked
    if dtype is None:
        return _run(checked, cell, tensors, options, noise, packing, lengths, reset)
    with torch.autocast(data.device.type, enabled=False):
        return _run(checked, cell, tensors, options, noise, packing, lengths, reset)


# Input, hx, cx, eps, and all weights; hx, cx and eps may be None.
_Tensors = tuple[Any, ...]


def _key(
    tensors: _Tensors,
    cell: str,
    options: Options,
    packing: checks.Packing | None,
    step: tuple[int, int, int, int] | None,
    autocast: torch.dtype | None,
) -> Hashable:
    """All that the checks of a call look at and that is no tensor's values; None for no memory."""
    if is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return None  # where sizes may be of any call
    steps = None if packing is None else (len(packing.batch_sizes), packing.batch())
    zoneout = options.zoneout
    try:
        return (
            *(cell, step, steps, autocast, options),
            # 1 is True is 1.0, but not to the checks. Of a cell's options bias alone is the user's.
            tuple(map(type, options)) if step is None else type(options.bias),
            tuple(map(type, zoneout)) if isinstance(zoneout, tuple) else None,
            *[
                None if t is None else (type(t), t.shape, t.dtype, t.device, t.layout)
                for t in tensors
            ],
        )
    except (AttributeError, TypeError, RuntimeError):  # what is no tensor, or has no shape
        return None


def _named(tensors: _Tensors) -> dict[str, Any]:
    """As messages name them."""
    input, hx, cx, eps, *weights = tensors
    named = {"input": input} | {f"weights[{i}]": w for i, w in enumerate(weights)}
    return named | {"hx": hx, "cx": cx, "eps": eps}


def _check(
    tensors: _Tensors,
    cell: str,
    options: Options,
    packing: checks.Packing | None,
    step: tuple[int, int, int, int] | None,
) -> _Checked:
    """All that is to be known of tensors, options being known to be right."""
    checks.dtypes_and_devices(_named(tensors))
    data, hx, cx, eps, *weights = tensors
    names = _names(cell, options)
    sizes = _check_weights(cell, names, weights, options)
    of_step = None if step is None else Sizes(*step)
    place = _place(data, options, of_step or sizes, packing, of_step is not None)
    if of_step not in (None, sizes):
        raise RuntimeError(f"fusedrnn: weights must be of {of_step}, got those of {sizes}")
    rows = options.num_layers * options.directions
    batch = (place.batch,) if place.is_batched else ()
    shapes = {
        "hx": (rows, *batch, sizes.output),
        "cx": (rows, *batch, sizes.hidden),
        "eps": (rows, place.seq_len, *batch, sizes.latent),
    }
    for name, tensor in (("hx", hx), ("cx", cx), ("eps", eps)):
        shape = shapes[name]
        if of_step is not None and tensor is not None:
            checks.rank_of_step(name, tensor, data)
            shape = (*batch, of_step.latent if name == "eps" else of_step.hidden)
        checks.shape(name, tensor, shape)
    if not is_compiling():
        widths = (sizes.input, options.directions * sizes.output)
        for width in widths[: options.num_layers]:
            _library.check_sizes(
                cell=cell,
                input_size=width,
                hidden_size=sizes.hidden,
                latent_size=sizes.latent,
                output_size=sizes.output,
                seq_len=place.seq_len,
                batch=place.batch,
            )
    drops_out = options.dropout > 0 and options.num_layers > 1
    zoneout = options.zoneout_pair()
    return _Checked(
        place,
        (rows, place.batch, sizes.output),
        (rows, place.batch, sizes.hidden) if cell in _HAVE_STATE else None,
        names,
        _library.Setting(
            cell,
            chunk_size=options.chunk_size or 0,
            workspace_bytes=options.workspace_bytes or 0,
            backend=options.backend,
            recompute=options.recompute,
        ),
        _library.Dropout(options.dropout if drops_out and options.training else 0.0, *zoneout),
        draws_masks=options.training and (drops_out or max(zoneout) > 0),
        drops_weights=options.training and options.weight_dropout > 0,
        has_plans=options.workspace_bytes is not None or options.backend == "persistent",
        is_one_layer=options.num_layers == 1 and options.return_sequence,
    )


def _run(
    checked: _Checked,
    cell: str,
    tensors: _Tensors,
    options: Options,
    noise: Noise,
    packing: checks.Packing | None,
    lengths: Tensor | Sequence[int] | None,
    reset: Tensor | None,
) -> tuple[Any, Tensor, Tensor | None]:
    """What is to be checked in every call, then one operator per layer."""
    data, hx, cx, eps, *weights = tensors
    place, seed, dropout, mask = checked.place, noise.seed, checked.dropout, _NO_MASK
    if seed is not None:
        checks.seed(seed, data)
    if lengths is not None or reset is not None or packing is not None:
        mask = place.mask(lengths, reset, data, packing)
    if checked.has_plans and not is_compiling():
        _check_plans(checked, options, noise.sample, data, weights)

    # Nothing can be wrong any more: now what is random may be drawn.
    if noise.sample and eps is None and seed is None:
        seed = _draw_seed(noise.generator, data.device)
    if checked.draws_masks:
        dropout = dropout._replace(seed=_draw_seed(None, data.device))
    if checked.drops_weights:
        p, named = options.weight_dropout, zip(checked.names, weights, strict=True)
        weights = [_drop_if_recurrent(name, weight, p) for name, weight in named]

    if place.is_step and _library.is_plain(tensors):
        return None, *_library.run_step(cell, data, hx, cx, weights, eps, seed)
    sequence = place.sequence(data, packing)
    h = data.new_zeros(checked.h_shape) if hx is None else place.sorted(hx, 1, packing)
    c: Tensor | None = None
    if checked.c_shape is not None:
        c = data.new_zeros(checked.c_shape) if cx is None else place.sorted(cx, 1, packing)
    if eps is not None:
        eps = place.sorted(eps, 2, packing)
    if checked.is_one_layer and reset is None:
        c_n: Tensor | None
        output, h_n, c_n = _library.run_layer(
            checked.setting, sequence, h, c, weights, mask, dropout, eps, seed
        )
    else:
        shape = (options.num_layers, options.directions)
        stack = Stack(checked.setting, *shape, weights, mask, dropout, eps, seed)
        if options.return_sequence:
            output, (h_n, c_n) = stack.run(sequence, States(h, c))
        else:
            h_n, c_n = stack.run_for_last_states(sequence, States(h, c))
            output = torch.cat(h_n[-options.directions :].unbind(), -1)
    if place.is_step:
        result = None  # nobody asks for it: h_n is the same
    elif options.return_sequence:
        result = place.result(output, packing)
    else:
        result = place.unsorted(output, 0, packing)
    h_n = place.unsorted(h_n, 1, packing)
    return result, h_n, None if c is None else place.unsorted(c_n, 1, packing)


def _check_plans(
    checked: _Checked, options: Options, sample: bool, data: Tensor, weights: Sequence[Tensor]
) -> None:
    """Has every layer planned before the first one runs."""
    h_size = checked.h_shape[-1]
    c_size = h_size if checked.c_shape is None else checked.c_shape[-1]
    per_layer = len(weights) // options.num_layers
    for first in range(0, len(weights), per_layer):
        of_layer = weights[first : first + per_layer]
        _library.check_plan(
            data,
            of_layer,
            cell=checked.setting.cell,
            noise=sample,
            input_size=of_layer[0].shape[1],
            hidden_size=c_size,
            latent_size=of_layer[1].shape[1] if checked.setting.cell == "stochastic_gru" else 0,
            output_size=h_size,
            seq_len=checked.place.seq_len,
            batch=checked.place.batch,
            chunk_size=checked.setting.chunk_size,
            workspace_bytes=checked.setting.workspace_bytes,
            backend=checked.setting.backend,
        )


def _place(
    data: Tensor, options: Options, sizes: Sizes, packing: checks.Packing | None, is_step: bool
) -> _Place:
    most = 2 if is_step else 3
    if packing is not None:
        seq_len, batch = len(packing.batch_sizes), packing.batch()
    elif data.dim() not in (most - 1, most):
        raise ValueError(
            f"fusedrnn: input must have {most - 1} or {most} dimensions, got {data.dim()}"
        )
    else:
        # Not in a list, which torch.compile of torch 2.11 takes for a tuple.
        steps = (1, *data.shape[:-1]) if is_step else data.shape[:-1]
        if options.batch_first and not is_step:
            steps = steps[::-1]
        seq_len, batch = (*steps, 1)[:2]
    if data.shape[-1] != sizes.input:
        raise RuntimeError(
            f"fusedrnn: input must have {sizes.input} features (input_size), "
            f"got shape {tuple(data.shape)}"
        )
    checks.rows(seq_len, batch, data.shape)
    is_batched = packing is not None or data.dim() == most
    return _Place(seq_len, batch, is_batched, is_step, options.batch_first)


def _drop_if_recurrent(name: str, weight: Tensor, p: float) -> Tensor:
    """DropConnect on a weight matrix that the state goes through: one mask for a call."""
    is_recurrent = name.startswith("weight") and not name.startswith("weight_ih")
    return F.dropout(weight, p) if is_recurrent else weight


def _autocast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None:
        return None
    # As torch's own autocast: float64 stays what it is, and so does what is no float at all.
    is_eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_eligible else tensor


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    """What autocast wants of a call, or None."""
    device = input.device.type if isinstance(input, Tensor) else ""
    if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    # Drawn in Python, as a tensor: torch's own generators, checkpointing, torch.compile and CUDA
    # graphs then treat it as they treat torch.rand.
    source = device if generator is None else generator.device
    seed = torch.randint(
        -(2**62), 2**62, (1,), dtype=torch.int64, device=source, generator=generator
    )
    return seed if source == device else seed.to(device, non_blocking=True)


def _layout(
    cell: str, sizes: Sizes, options: Options
) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    return _library.layout(cell, *sizes, options.num_layers, options.directions, options.bias)


def _names(cell: str, options: Options) -> list[str]:
    """Those of all weights, in their order."""
    return [name for name, _, _ in _layout(cell, Sizes(), options)]


def _check_count(cell: str, weights: Sequence[Tensor], options: Options) -> Sequence[Tensor]:
    """Counted before anything is made for each layer: there may be said to be a million."""
    is_sized = hasattr(weights, "__len__") and hasattr(weights, "__iter__")  # also a ParameterList
    if isinstance(weights, Tensor | Mapping | Set | str | bytes) or not is_sized:
        raise TypeError(
            f"fusedrnn: weights must be a sequence of tensors, got {type(weights).__name__}"
        )
    per_direction = _library.weights_per_direction(cell, options.bias)
    count = options.num_layers * options.directions * per_direction
    if len(weights) != count:
        raise ValueError(
            f"fusedrnn: {options.num_layers} layer(s) with bias={options.bias} and "
            f"bidirectional={options.bidirectional} take {count} weights, got {len(weights)}"
        )
    return weights


def _check_weights(
    cell: str, names: Sequence[str], weights: Sequence[Tensor], options: Options
) -> Sizes:
    """The sizes, after all shapes are known to fit together."""
    first = dict(zip(names, weights, strict=True))

    def width(name: str) -> int:
        name = f"weight_{name}_l0"
        weight, at = first[name], names.index(name)
        if weight.dim() != 2:
            raise ValueError(f"fusedrnn: weights[{at}] must have 2 dimensions, got {weight.dim()}")
        if weight.shape[1] == 0:
            raise RuntimeError(
                f"fusedrnn: weights[{at}] must have columns, got shape {tuple(weight.shape)}"
            )
        return weight.shape[1]

    input_size = width("ih")
    if cell == "stochastic_gru":
        latent_size, hidden_size = width("zh"), width("hz")
        sizes = Sizes(input_size, hidden_size, latent_size, hidden_size)
    elif cell == "projected_lstm":
        sizes = Sizes(input_size, width("hr"), 0, width("hh"))
    else:
        hidden_size = width("hh")
        sizes = Sizes(input_size, hidden_size, 0, hidden_size)
    for (name, _, shape), weight in zip(_layout(cell, sizes, options), weights, strict=True):
        checks.shape(name, weight, shape)
    if options.proj_size not in (0, sizes.output):
        raise ValueError(
            f"fusedrnn: proj_size must be {sizes.output} as weights have it, "
            f"got {options.proj_size}"
        )
    return sizes
