"""Functional forms of the recurrent layers; checks.py says what they refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import _library, checks
from .stack import Stack, States

_HAVE_STATE = ("lstm", "projected_lstm")  # beside h
_AUTOCAST_DEVICES = ("cpu", "cuda")  # torch raises an error when asked about others, as meta


# A padded batch, a single sequence, or a PackedSequence: the output is of the same kind.
S = TypeVar("S", Tensor, PackedSequence)


def stochastic_gru(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    weight_dropout: float = 0.0,
    training: bool = True,
    return_sequence: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    sample: bool = True,
    recompute: bool = True,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> tuple[S, Tensor]:
    r"""Applies a stack of stochastic GRU layers; see :class:`fusedrnn.StochasticGRU`.

    Each step draws a latent from the state and updates the state from input and latent::

        loc, logvar = W_hz h + b_hz
        z = loc + eps * exp(logvar / 2)                    eps ~ N(0, 1)
        r = sigmoid(x_r + z_r)       x_r, x_u, x_n = W_ih x + b_ih
        u = sigmoid(x_u + z_u)       z_r, z_u, z_n = W_zh z + b_zh
        n = tanh(x_n + r * z_n)
        h' = n + u * (h - n)

    Only the arguments, the output and the seed are saved for backward.

    Args:
        input: (T, B, I), (B, T, I) if ``batch_first``, or (T, I) for a sequence without batch;
            float32, float64, bfloat16 or float16.
        weights: for each layer weight_ih (3H, I), weight_zh (3H, Z), weight_hz (2Z, H), and with
            ``bias`` bias_ih (3H), bias_zh (3H), bias_hz (2Z).  Layers after the first have I = H.
        hx: initial states (num_layers, B, H), or (num_layers, H) without batch.  Zeros if None.
        num_layers: number of stacked layers.
        bias: whether ``weights`` holds biases.
        batch_first: whether ``input`` and ``output`` are (B, T, ...).  Never changes hx and eps.
        bidirectional, dropout, zoneout, weight_dropout, return_sequence: see :class:`fusedrnn.GRU`.
            With D = 2 directions, weights, hx, eps and h_n have those of each layer one after the
            other, and output has 2H features.
        training: whether dropout, zoneout and weight_dropout draw anything.
        lengths, reset: see :meth:`fusedrnn.GRU.forward`.
        eps: the noise, (num_layers, T, B, Z), or (num_layers, T, Z) without batch; differentiable.
        seed: one int64 on ``input``'s device that determines eps; see ``generator``.
        generator: draws the seed if neither ``eps`` nor ``seed`` is given.  None is the default
            generator of ``input``'s device.  The same seed gives the same eps on every device and
            for every chunk size.
        sample: if False, z = loc, and no eps, seed or generator may be given.
        recompute: if False, pre-activations (4H + 2Z numbers per step and batch entry) are kept
            for backward rather than computed again: more memory, less time, and the same gradients
            up to rounding.  See :class:`fusedrnn.GRU` for when that pays.
        chunk_size: steps per chunk of workspace.  None chooses; see :class:`fusedrnn.GRU`.  Results
            are the same up to rounding.
        workspace_bytes: most bytes of workspace, in the place of ``chunk_size``; see
            :class:`fusedrnn.GRU`.
        backend: see :class:`fusedrnn.GRU`.

    Returns:
        output: (T, B, H), (B, T, H) or (T, H), the states of the last layer.
        h_n: (num_layers, B, H) or (num_layers, H), the last states of all layers.

    Raises:
        ValueError: for a wrong rank or dtype, or arguments that exclude each other.
        RuntimeError: for a wrong shape or device, an empty sequence, or ``workspace_bytes`` that
            are too few for one step.
        TypeError: for an argument of a wrong type.
    """
    checks.noise(eps, seed, generator, sample)
    noise = _Noise(eps, seed, generator, sample)
    options = _Options(
        num_layers,
        bias,
        batch_first,
        bidirectional,
        dropout,
        zoneout,
        weight_dropout,
        training,
        return_sequence,
        lengths,
        reset,
        recompute,
        chunk_size,
        workspace_bytes,
        backend,
    )
    output, h_n, _ = _run("stochastic_gru", input, weights, hx, None, options, noise)
    return output, h_n


def gru(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    weight_dropout: float = 0.0,
    training: bool = True,
    return_sequence: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    recompute: bool = True,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> tuple[S, Tensor]:
    r"""Applies a stack of gated recurrent units, as torch.nn.GRU; see :class:`fusedrnn.GRU`.

    Args:
        weights: for each layer and direction weight_ih (3H, I), weight_hh (3H, H), and with
            ``bias`` bias_ih (3H), bias_hh (3H).  Layers after the first have I = D * H.

    The other arguments, the results and the errors are those of :func:`stochastic_gru`.
    """
    options = _Options(
        num_layers,
        bias,
        batch_first,
        bidirectional,
        dropout,
        zoneout,
        weight_dropout,
        training,
        return_sequence,
        lengths,
        reset,
        recompute,
        chunk_size,
        workspace_bytes,
        backend,
    )
    output, h_n, _ = _run("gru", input, weights, hx, None, options, _Noise())
    return output, h_n


def lstm(
    input: S,
    weights: Sequence[Tensor],
    hx: tuple[Tensor, Tensor] | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0,
    weight_dropout: float = 0.0,
    training: bool = True,
    return_sequence: bool = True,
    proj_size: int = 0,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    recompute: bool = True,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> tuple[S, tuple[Tensor, Tensor]]:
    r"""Applies a stack of long short-term memories, as torch.nn.LSTM; see :class:`fusedrnn.LSTM`.

    Args:
        weights: for each layer and direction weight_ih (4H, I), weight_hh (4H, P), with ``bias``
            bias_ih (4H), bias_hh (4H), and with ``proj_size`` weight_hr (P, H).  P is
            ``proj_size`` if that is not 0, and else H.  Layers after the first have I = D * P.
        hx: initial states h (num_layers * D, B, P) and cell states c (num_layers * D, B, H), both
            without their B for input without batch.  Zeros if None.
        proj_size: features of h if they are projected, or 0.

    Returns:
        output: (T, B, D * P), (B, T, D * P) or (T, D * P), the states h of the last layer.
        (h_n, c_n): the last states and cell states of all layers, shaped as ``hx``.

    The other arguments and the errors are those of :func:`stochastic_gru`.
    """
    checks.proj_size(proj_size)
    h_0, c_0 = split_lstm_state(hx)
    options = _Options(
        num_layers,
        bias,
        batch_first,
        bidirectional,
        dropout,
        zoneout,
        weight_dropout,
        training,
        return_sequence,
        lengths,
        reset,
        recompute,
        chunk_size,
        workspace_bytes,
        backend,
        proj_size,
    )
    cell = "projected_lstm" if proj_size else "lstm"
    output, h_n, c_n = _run(cell, input, weights, h_0, c_0, options, _Noise())
    assert c_n is not None
    return output, (h_n, c_n)


class _Noise(NamedTuple):
    """Where eps comes from; the default is none."""

    eps: Tensor | None = None
    seed: Tensor | None = None
    generator: torch.Generator | None = None
    sample: bool = False


class _Options(NamedTuple):
    """What every cell takes besides tensors of its own."""

    num_layers: int
    bias: bool
    batch_first: bool
    bidirectional: bool
    dropout: float
    zoneout: float | tuple[float, float]
    weight_dropout: float
    training: bool
    return_sequence: bool
    lengths: Tensor | Sequence[int] | None
    reset: Tensor | None
    recompute: bool
    chunk_size: int | None
    workspace_bytes: int | None
    backend: str
    proj_size: int = 0

    def check(self, has_state: bool) -> None:
        for name in ("bias", "batch_first", "bidirectional"):
            checks.flag(name, getattr(self, name))
        for name in ("training", "return_sequence", "recompute"):
            checks.flag(name, getattr(self, name))
        checks.num_layers(self.num_layers)
        checks.probability("dropout", self.dropout)
        checks.probability("weight_dropout", self.weight_dropout)
        checks.zoneout(self.zoneout, has_state)
        checks.chunks(self.chunk_size, self.workspace_bytes)
        checks.backend(self.backend)

    def zoneout_pair(self) -> tuple[float, float]:
        """Of h, and of the state beside it."""
        h, state = self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,) * 2
        return h, state


def _run(
    cell: str,
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None,
    cx: Tensor | None,
    options: _Options,
    noise: _Noise,
) -> tuple[S, Tensor, Tensor | None]:
    """Any cell over layers -> output, h_n, c_n if any; everything in one dtype under autocast."""
    options.check(cell in _HAVE_STATE)
    weights = _check_count(cell, weights, options)
    data: Tensor = input.data if isinstance(input, PackedSequence) else input
    tensors: dict[str, Tensor | None] = {"input": data}
    tensors |= {f"weights[{i}]": w for i, w in enumerate(weights)}
    tensors |= {"hx": hx, "cx": cx, "eps": noise.eps}
    checks.types(tensors, optional=("hx", "cx", "eps"))

    device = data.device.type
    without_autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        without_autocast = torch.autocast(device, enabled=False)
        tensors = {name: _autocast(tensor, dtype) for name, tensor in tensors.items()}
    checks.dtypes_and_devices(tensors)
    with without_autocast:
        return _run_stack(cell, input, tensors, options, noise._replace(eps=tensors["eps"]))


def _run_stack(
    cell: str, input: S, tensors: dict[str, Tensor | None], options: _Options, noise: _Noise
) -> tuple[S, Tensor, Tensor | None]:
    """The rest of the checks, then one operator per layer."""
    data, hx, cx, eps = (tensors[name] for name in ("input", "hx", "cx", "eps"))
    weights = [w for name, w in tensors.items() if name.startswith("weights") and w is not None]
    assert data is not None
    directions = 2 if options.bidirectional else 1
    rows = options.num_layers * directions  # of hx
    names = _names(cell, options)
    sizes = _check_weights(cell, names, weights, options)
    place = _place(input, data, options, sizes)
    maybe_batch: tuple[int, ...] = (place.batch,) if place.is_batched else ()
    checks.shape("hx", hx, (rows, *maybe_batch, sizes.output))
    checks.shape("cx", cx, (rows, *maybe_batch, sizes.hidden))
    checks.shape("eps", eps, (rows, place.seq_len, *maybe_batch, sizes.latent))
    checks.seed(noise.seed, data)
    mask = place.mask(options, data)

    def initial(state: Tensor | None, width: int) -> Tensor:
        if state is None:
            return data.new_zeros(rows, place.batch, width)
        return place.sorted(state, 1)

    has_state = cell in _HAVE_STATE
    states = States(initial(hx, sizes.output), initial(cx, sizes.hidden) if has_state else None)
    zoneout = options.zoneout_pair()
    stack = Stack(
        cell,
        options.num_layers,
        directions,
        weights,
        mask,
        None if eps is None else place.sorted(eps, 2),
        noise.seed,
        _library.Dropout(options.dropout if options.training else 0.0, *zoneout),
        options.chunk_size or 0,
        options.workspace_bytes or 0,
        options.recompute,
        options.backend,
    )
    sequence = place.sequence(data)
    stack.check(sequence, states, noise.sample)
    stack = _draw(stack, names, options, noise, data.device)
    if options.return_sequence:
        output, (h_n, c_n) = stack.run(sequence, states)
        result = place.result(output)
    else:
        h_n, c_n = stack.run_for_last_states(sequence, states)
        result = place.unsorted(torch.cat(h_n[-directions:].unbind(), -1), 0)
    return result, place.unsorted(h_n, 1), None if c_n is None else place.unsorted(c_n, 1)


class _Place(NamedTuple):
    """Where steps and rows of a batch are in the user's tensors, and where the operators want them.

    These want (seq_len, batch, features), or the data of a PackedSequence as it is.
    """

    seq_len: int
    batch: int
    is_batched: bool
    batch_first: bool
    packing: checks.Packing | None

    def sequence(self, input: Tensor) -> Tensor:
        if self.packing is not None:
            return input
        if not self.is_batched:
            return input.unsqueeze(1)
        return input.transpose(0, 1) if self.batch_first else input

    def result(self, output: Tensor) -> Any:
        """The output as the user's input was."""
        if self.packing is not None:
            return self.packing.pack(output)
        if not self.is_batched:
            return output.squeeze(1)
        return output.transpose(0, 1) if self.batch_first else output

    def sorted(self, tensor: Tensor, dim: int) -> Tensor:
        """``dim``: of the batch, in a batched tensor."""
        if self.packing is not None:
            return self.packing.sort(tensor, dim)
        return tensor if self.is_batched else tensor.unsqueeze(dim)

    def unsorted(self, tensor: Tensor, dim: int) -> Tensor:
        if self.packing is not None:
            return self.packing.unsort(tensor, dim)
        return tensor if self.is_batched else tensor.squeeze(dim)

    def mask(self, options: _Options, input: Tensor) -> _library.Mask:
        """Checked lengths and resets, as the operators take them."""
        lengths, batch_sizes, reset = options.lengths, None, options.reset
        if lengths is not None:
            if self.packing is not None:
                raise ValueError(
                    "fusedrnn: lengths must not be given for a PackedSequence, which has them"
                )
            if not self.is_batched:
                raise ValueError(
                    "fusedrnn: lengths are for a batch of sequences, got input without batch"
                )
            lengths = checks.lengths(lengths, self.seq_len, self.batch)
        if self.packing is not None:
            batch_sizes = self.packing.batch_sizes
        steps = (self.seq_len, self.batch) if self.is_batched else (self.seq_len,)
        checks.reset(reset, steps[::-1] if self.batch_first else steps, input)
        if reset is not None:
            if self.batch_first and self.is_batched:
                reset = reset.t()
            reset = self.sorted(reset, 1).contiguous()
        return _library.Mask(lengths, batch_sizes, reset)


def _place(
    input: Tensor | PackedSequence, data: Tensor, options: _Options, sizes: _Sizes
) -> _Place:
    packing = None
    if isinstance(input, PackedSequence):
        packing = checks.packing(input)
        seq_len, batch = len(packing.batch_sizes), packing.batch()
    elif data.dim() not in (2, 3):
        raise ValueError(f"fusedrnn: input must have 2 or 3 dimensions, got {data.dim()}")
    elif data.dim() == 2:
        seq_len, batch = data.shape[0], 1
    else:
        seq_len, batch = data.shape[:2][::-1] if options.batch_first else data.shape[:2]
    if data.shape[-1] != sizes.input:
        raise RuntimeError(
            f"fusedrnn: input must have {sizes.input} features (input_size), "
            f"got shape {tuple(data.shape)}"
        )
    checks.rows(seq_len, batch, data.shape)
    is_batched = packing is not None or data.dim() == 3
    return _Place(seq_len, batch, is_batched, options.batch_first, packing)


def _draw(
    stack: Stack, names: Sequence[str], options: _Options, noise: _Noise, device: torch.device
) -> Stack:
    """Everything random of a call, once nothing can be wrong any more."""
    if noise.sample and stack.eps is None and stack.seed is None:
        stack = stack._replace(seed=_draw_seed(noise.generator, device))
    if not options.training:
        return stack
    drops_out = options.dropout > 0 and options.num_layers > 1
    if drops_out or max(options.zoneout_pair()) > 0:
        stack = stack._replace(dropout=stack.dropout._replace(seed=_draw_seed(None, device)))
    return stack._replace(weights=_drop_recurrent_weights(names, stack.weights, options))


def _drop_recurrent_weights(
    names: Sequence[str], weights: Sequence[Tensor], options: _Options
) -> Sequence[Tensor]:
    """DropConnect on every weight matrix that the state goes through: one mask for a call."""
    if options.weight_dropout == 0:
        return weights

    def is_recurrent(name: str) -> bool:
        return name.startswith("weight") and not name.startswith("weight_ih")

    return [
        F.dropout(w, options.weight_dropout) if is_recurrent(name) else w
        for name, w in zip(names, weights, strict=True)
    ]


def split_lstm_state(hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """(h_0, c_0), both None for none.

    Raises:
        TypeError: ``hx`` is not a pair of tensors.
    """
    if hx is None:
        return None, None
    if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
        got = type(hx).__name__
        if isinstance(hx, tuple | list):
            got += f" of {', '.join(type(t).__name__ for t in hx[:9])}"
        raise TypeError(f"fusedrnn: hx must be a pair of tensors (h_0, c_0), got {got}")
    h_0, c_0 = hx
    return h_0, c_0


def _autocast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None:
        return None
    # As torch's own autocast: float64 stays what it is, and so does what is no float at all.
    is_eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_eligible else tensor


def _draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    # Drawn in Python, as a tensor: torch's own generators, checkpointing, torch.compile and CUDA
    # graphs then treat it as they treat torch.rand.
    source = device if generator is None else generator.device
    seed = torch.randint(
        -(2**62), 2**62, (1,), dtype=torch.int64, device=source, generator=generator
    )
    return seed.to(device, non_blocking=True)


class _Sizes(NamedTuple):
    """Features; output is those of h."""

    input: int = 1
    hidden: int = 1
    latent: int = 1
    output: int = 1


def _layout(
    cell: str, sizes: _Sizes, options: _Options
) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    directions = 2 if options.bidirectional else 1
    return _library.layout(cell, *sizes, options.num_layers, directions, options.bias)


def _names(cell: str, options: _Options) -> list[str]:
    """Those of all weights, in their order."""
    return [name for name, _, _ in _layout(cell, _Sizes(), options)]


def _check_count(cell: str, weights: Sequence[Tensor], options: _Options) -> Sequence[Tensor]:
    """Counted before anything is made for each layer: there may be said to be a million."""
    is_sized = hasattr(weights, "__len__") and hasattr(weights, "__iter__")  # also a ParameterList
    if isinstance(weights, Tensor | Mapping | Set | str | bytes) or not is_sized:
        raise TypeError(
            f"fusedrnn: weights must be a sequence of tensors, got {type(weights).__name__}"
        )
    directions = 2 if options.bidirectional else 1
    per_direction = _library.weights_per_direction(cell, options.bias)
    count = options.num_layers * directions * per_direction
    if len(weights) != count:
        raise ValueError(
            f"fusedrnn: {options.num_layers} layer(s) with bias={options.bias} and "
            f"bidirectional={options.bidirectional} take {count} weights, got {len(weights)}"
        )
    return weights


def _check_weights(
    cell: str, names: Sequence[str], weights: Sequence[Tensor], options: _Options
) -> _Sizes:
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
        sizes = _Sizes(input_size, hidden_size, latent_size, hidden_size)
    elif cell == "projected_lstm":
        sizes = _Sizes(input_size, width("hr"), 0, width("hh"))
    else:
        hidden_size = width("hh")
        sizes = _Sizes(input_size, hidden_size, 0, hidden_size)
    for (name, _, shape), weight in zip(_layout(cell, sizes, options), weights, strict=True):
        checks.shape(name, weight, shape)
    if options.proj_size not in (0, sizes.output):
        raise ValueError(
            f"fusedrnn: proj_size must be {sizes.output} as weights have it, "
            f"got {options.proj_size}"
        )
    return sizes
