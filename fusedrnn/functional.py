"""Functional forms of the recurrent layers, and the one set of checks on what users pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from . import _library
from .stack import Stack, States

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BACKENDS = ("auto", "stepwise", "persistent")
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
        chunk_size: steps per chunk of workspace.  None chooses; more is more memory.  Results are
            the same up to rounding.
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
    noise = _Noise(eps, seed, generator, sample)
    noise.check()
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
    if not isinstance(proj_size, int) or isinstance(proj_size, bool) or proj_size < 0:
        raise ValueError(f"fusedrnn: proj_size must be an int of at least 0, got {proj_size!r}")
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

    def check(self) -> None:
        sources = {"eps": self.eps, "seed": self.seed, "generator": self.generator}
        given = [name for name, source in sources.items() if source is not None]
        if len(given) > 1:
            raise ValueError(
                f"fusedrnn: {' and '.join(given)} exclude each other: give one of them"
            )
        if given and not self.sample:
            raise ValueError(
                f"fusedrnn: sample=False draws no noise, so {given[0]} must not be given"
            )


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

    def check(self, has_state: bool) -> None:
        for name in ("chunk_size", "workspace_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int | None) or isinstance(value, bool):
                raise TypeError(f"fusedrnn: {name} must be an int or None, got {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"fusedrnn: {name} must be at least 1, got {value}")
        check_exclusive(self.chunk_size, self.workspace_bytes)
        check_backend(self.backend)
        layers = self.num_layers
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            raise ValueError(f"fusedrnn: num_layers must be an int of at least 1, got {layers!r}")
        _check_probability("dropout", self.dropout)
        _check_probability("weight_dropout", self.weight_dropout)
        check_zoneout(self.zoneout, has_state)

    def zoneout_pair(self) -> tuple[float, float]:
        """Of h, and of the state beside it."""
        h, state = self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,) * 2
        return h, state


def check_exclusive(chunk_size: int | None, workspace_bytes: int | None) -> None:
    """
    Raises:
        ValueError: Both are given.
    """
    if chunk_size is not None and workspace_bytes is not None:
        raise ValueError(
            f"fusedrnn: chunk_size and workspace_bytes exclude each other, got {chunk_size} and "
            f"{workspace_bytes}"
        )


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """That of new weights: torch's default if None.

    Raises:
        TypeError, RuntimeError: It is no dtype, or not one that is supported.
    """
    if dtype is None:
        dtype = torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"fusedrnn: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if dtype not in _DTYPES:
        names = ", ".join(str(d) for d in _DTYPES)
        raise RuntimeError(f"fusedrnn: dtype must be one of {names}, got {dtype}")
    return dtype


def check_backend(backend: str) -> None:
    """Raises ValueError for what is not the name of one."""
    if backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"fusedrnn: backend must be one of {names}, got {backend!r}")


def check_zoneout(zoneout: float | tuple[float, float], has_state: bool) -> None:
    """Raises ValueError for what is no probability, or a pair without a state beside h."""
    is_pair = isinstance(zoneout, tuple) and len(zoneout) == 2
    if isinstance(zoneout, tuple) and not (is_pair and has_state):
        expected = "a probability, or a pair of them" if has_state else "one probability"
        raise ValueError(f"fusedrnn: zoneout must be {expected}, got {zoneout!r}")
    for p in zoneout if isinstance(zoneout, tuple) else (zoneout,):
        _check_probability("zoneout", p)


def _check_probability(name: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"fusedrnn: {name} must be a probability in [0, 1], got {value!r}")


def _run(cell: str, input: S, *arguments: Any) -> tuple[S, Tensor, Tensor | None]:
    """Any cell over layers -> output, h_n, c_n if any."""
    run = _run_packed if isinstance(input, PackedSequence) else _run_padded
    return cast(Any, run)(cell, input, *arguments)


def _run_padded(
    cell: str,
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor | None,
    cx: Tensor | None,
    options: _Options,
    noise: _Noise,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checks, then one operator per layer."""
    has_state = cell in _HAVE_STATE
    options.check(has_state)
    directions = 2 if options.bidirectional else 1
    rows = options.num_layers * directions  # of hx
    names = _names(cell, options)
    if len(weights) != len(names):
        raise ValueError(
            f"fusedrnn: {options.num_layers} layer(s) with bias={options.bias} and "
            f"bidirectional={options.bidirectional} take {len(names)} weights, got {len(weights)}"
        )
    tensors: dict[str, Tensor | None] = {"input": input}
    tensors |= {f"weights[{i}]": w for i, w in enumerate(weights)}
    tensors |= {"hx": hx, "cx": cx, "eps": noise.eps}
    _check_types(tensors)

    device_type = input.device.type
    if device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return _run_padded(
                cell,
                _autocast(input, dtype),
                [_autocast(w, dtype) for w in weights],
                None if hx is None else _autocast(hx, dtype),
                None if cx is None else _autocast(cx, dtype),
                options,
                noise._replace(eps=None if noise.eps is None else _autocast(noise.eps, dtype)),
            )
    _check_dtypes_and_devices(tensors)

    sizes = _check_weights(cell, names, weights, options)
    if input.dim() not in (2, 3):
        raise ValueError(f"fusedrnn: input must have 2 or 3 dimensions, got {input.dim()}")
    is_batched = input.dim() == 3
    batch_dim = 0 if options.batch_first else 1
    sequence = input if is_batched else input.unsqueeze(1)
    if is_batched and options.batch_first:
        sequence = sequence.transpose(0, 1)
    seq_len, batch, input_size = sequence.shape
    if input_size != weights[0].shape[1]:
        raise RuntimeError(
            f"fusedrnn: input must have {weights[0].shape[1]} features (input_size), "
            f"got shape {tuple(input.shape)}"
        )
    if seq_len == 0:
        raise RuntimeError(
            f"fusedrnn: expected a sequence of at least one step, got shape {tuple(input.shape)}"
        )
    maybe_batch = (batch,) if is_batched else ()
    eps = noise.eps
    _check_shape("hx", hx, (rows, *maybe_batch, sizes.output))
    _check_shape("cx", cx, (rows, *maybe_batch, sizes.hidden))
    _check_shape("eps", eps, (rows, seq_len, *maybe_batch, sizes.latent))
    mask = _mask(options, input, seq_len, batch, is_batched, batch_dim)

    def initial(state: Tensor | None, width: int) -> Tensor:
        if state is None:
            return sequence.new_zeros(rows, batch, width)
        return state if is_batched else state.unsqueeze(1)

    states = States(initial(hx, sizes.output), initial(cx, sizes.hidden) if has_state else None)
    if eps is not None and not is_batched:
        eps = eps.unsqueeze(2)
    seed = _check_seed(noise.seed, input.device)
    if noise.sample and eps is None and seed is None:
        seed = _draw_seed(noise.generator, input.device)

    zoneout = options.zoneout_pair()
    mask_seed = None
    if options.training and (max(zoneout) > 0 or (options.dropout > 0 and options.num_layers > 1)):
        mask_seed = _draw_seed(None, input.device)

    stack = Stack(
        cell,
        options.num_layers,
        directions,
        _drop_recurrent_weights(names, weights, options),
        mask,
        eps,
        seed,
        _library.Dropout(options.dropout if options.training else 0.0, *zoneout, seed=mask_seed),
        options.chunk_size or 0,
        options.workspace_bytes or 0,
        options.recompute,
        options.backend,
    )
    if options.return_sequence:
        output, (h_n, c_n) = stack.run(sequence, states)
        if options.batch_first and is_batched:
            output = output.transpose(0, 1)
        elif not is_batched:
            output = output.squeeze(1)
    else:
        h_n, c_n = stack.run_for_last_states(sequence, states)
        output = torch.cat(h_n[-directions:].unbind(), -1)
        output = output if is_batched else output.squeeze(0)
    if not is_batched:
        h_n, c_n = h_n.squeeze(1), None if c_n is None else c_n.squeeze(1)
    return output, h_n, c_n


def _drop_recurrent_weights(
    names: Sequence[str], weights: Sequence[Tensor], options: _Options
) -> Sequence[Tensor]:
    """DropConnect on every weight matrix that the state goes through: one mask for a call."""
    if options.weight_dropout == 0 or not options.training:
        return weights

    def is_recurrent(name: str) -> bool:
        return name.startswith("weight") and not name.startswith("weight_ih")

    return [
        F.dropout(w, options.weight_dropout) if is_recurrent(name) else w
        for name, w in zip(names, weights, strict=True)
    ]


def _run_packed(
    cell: str,
    input: PackedSequence,
    weights: Sequence[Tensor],
    hx: Tensor | None,
    cx: Tensor | None,
    options: _Options,
    noise: _Noise,
) -> tuple[PackedSequence, Tensor, Tensor | None]:
    """A packed sequence is padded, in its own order of rows, which falls by length."""
    if options.lengths is not None:
        raise ValueError("fusedrnn: lengths must not be given for a PackedSequence, which has them")
    data, batch_sizes, sorted_indices, unsorted_indices = input

    def reorder(tensor: Tensor | None, order: Tensor | None, dim: int) -> Tensor | None:
        return tensor if tensor is None or order is None else tensor.index_select(dim, order)

    padded, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
    batch_dim = 0 if options.batch_first else 1  # of reset, which is padded as the input was
    reset = reorder(options.reset, sorted_indices, batch_dim)
    reset = reset.t() if reset is not None and options.batch_first else reset
    sorted_noise = noise._replace(eps=reorder(noise.eps, sorted_indices, 2))
    output, h_n, c_n = _run_padded(
        cell,
        padded,
        weights,
        reorder(hx, sorted_indices, 1),
        reorder(cx, sorted_indices, 1),
        options._replace(lengths=lengths, reset=reset, batch_first=False),
        sorted_noise,
    )
    packed: Any
    if options.return_sequence:
        packed = pack_padded_sequence(output, lengths)
        packed = PackedSequence(packed.data, packed.batch_sizes, sorted_indices, unsorted_indices)
    else:
        packed = reorder(output, unsorted_indices, 0)
    if unsorted_indices is not None:
        h_n = h_n.index_select(1, unsorted_indices)
    return packed, h_n, reorder(c_n, unsorted_indices, 1)


def _mask(
    options: _Options, input: Tensor, seq_len: int, batch: int, is_batched: bool, batch_dim: int
) -> _library.Mask:
    """Checked lengths and resets, as the operator takes them."""
    lengths, reset = options.lengths, options.reset
    host_lengths = None
    if lengths is not None:
        host_lengths = _check_lengths(lengths, seq_len, batch, is_batched)
        # A copy on the CPU too: torch.compile takes no tensor for two arguments.
        lengths = host_lengths.to(input.device, non_blocking=True, copy=True)
    if reset is not None:
        if not isinstance(reset, Tensor):
            raise TypeError(f"fusedrnn: reset must be a tensor, got {type(reset).__name__}")
        if reset.dtype != torch.bool:
            raise ValueError(f"fusedrnn: reset must be torch.bool, got {reset.dtype}")
        _check_shape("reset", reset, tuple(input.shape[:-1]))
        if reset.device != input.device:
            raise RuntimeError(
                f"fusedrnn: reset must be on {input.device} as input is, got {reset.device}"
            )
        reset = reset if is_batched else reset.unsqueeze(1)
        reset = (reset.t() if is_batched and batch_dim == 0 else reset).contiguous()
    return _library.Mask(lengths, host_lengths, reset)


def _check_lengths(
    lengths: Tensor | Sequence[int], seq_len: int, batch: int, is_batched: bool
) -> Tensor:
    if not is_batched:
        raise ValueError("fusedrnn: lengths are for a batch of sequences, got input without batch")
    if isinstance(lengths, Tensor):
        if lengths.dtype != torch.int64:
            raise ValueError(f"fusedrnn: lengths must be int64, got {lengths.dtype}")
        if not lengths.is_cpu:
            raise RuntimeError(
                "fusedrnn: lengths must be on the CPU, as for pack_padded_sequence, "
                f"got {lengths.device}"
            )
        host = lengths
    else:
        try:  # ints of all kinds, NumPy's too
            if any(isinstance(n, bool) for n in lengths):
                raise TypeError
            host = torch.tensor([operator.index(n) for n in lengths], dtype=torch.int64)
        except TypeError:
            raise TypeError(
                "fusedrnn: lengths must be an int64 tensor or a sequence of ints"
            ) from None
    if tuple(host.shape) != (batch,):
        raise RuntimeError(f"fusedrnn: lengths must have shape {(batch,)}, got {tuple(host.shape)}")
    if torch.compiler.is_compiling():  # no values yet; the operator looks at them, and takes 0
        return host.contiguous()
    least, most = (int(host.min()), int(host.max())) if batch else (1, 1)
    if least < 1 or most > seq_len:
        raise ValueError(
            f"fusedrnn: lengths must be in [1, {seq_len}], got {least if least < 1 else most}"
        )
    return host.contiguous()


def split_lstm_state(hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """(h_0, c_0), both None for none.

    Raises:
        TypeError: ``hx`` is not a pair of tensors.
    """
    if hx is None:
        return None, None
    if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
        raise TypeError(
            f"fusedrnn: hx must be a pair of tensors (h_0, c_0), got {type(hx).__name__}"
        )
    h_0, c_0 = hx
    return h_0, c_0


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
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


def _check_seed(seed: Tensor | None, device: torch.device) -> Tensor | None:
    if seed is None:
        return None
    if not isinstance(seed, Tensor):
        raise TypeError(f"fusedrnn: seed must be a tensor, got {type(seed).__name__}")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(
            f"fusedrnn: seed must be one int64, got {seed.dtype} of shape {tuple(seed.shape)}"
        )
    if seed.device != device:
        raise RuntimeError(f"fusedrnn: seed must be on {device} as input is, got {seed.device}")
    return seed


def _check_types(tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (
            tensor is not None or name not in ("hx", "cx", "eps")
        ):
            raise TypeError(f"fusedrnn: {name} must be a tensor, got {type(tensor).__name__}")


def _check_dtypes_and_devices(tensors: dict[str, Tensor | None]) -> None:
    input = tensors["input"]
    assert input is not None
    if input.dtype not in _DTYPES:
        raise ValueError(
            f"fusedrnn: input must be float32, float64, bfloat16 or float16, got {input.dtype}"
        )
    if input.is_cuda and _library.cuda_obstacle is not None:
        raise RuntimeError(f"fusedrnn: input is on {input.device}, but {_library.cuda_obstacle}")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != input.dtype:
            error = RuntimeError if name in ("hx", "cx") else ValueError  # as in torch.nn
            raise error(f"fusedrnn: {name} must be {input.dtype} as input is, got {tensor.dtype}")
        if tensor.device != input.device:
            raise RuntimeError(
                f"fusedrnn: {name} must be on {input.device} as input is, got {tensor.device}"
            )


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    # Tuples of plain numbers: torch.compile of torch 2.11 compares nothing else with a torch.Size.
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise RuntimeError(
            f"fusedrnn: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}"
        )


class _Sizes(NamedTuple):
    """Features; output is those of h."""

    input: int = 1
    hidden: int = 1
    latent: int = 1
    output: int = 1


def _layout(cell: str, sizes: _Sizes, options: _Options) -> list[tuple[str, int, tuple[int, ...]]]:
    directions = 2 if options.bidirectional else 1
    return _library.layout(cell, *sizes, options.num_layers, directions, options.bias)


def _names(cell: str, options: _Options) -> list[str]:
    """Those of all weights, in their order."""
    return [name for name, _, _ in _layout(cell, _Sizes(), options)]


def _check_weights(
    cell: str, names: Sequence[str], weights: Sequence[Tensor], options: _Options
) -> _Sizes:
    """The sizes, after all shapes are known to fit together."""
    first = dict(zip(names, weights, strict=True))

    def width(name: str) -> int:
        weight = first[f"weight_{name}_l0"]
        if weight.dim() != 2:
            at = names.index(f"weight_{name}_l0")
            raise ValueError(f"fusedrnn: weights[{at}] must have 2 dimensions, got {weight.dim()}")
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
        _check_shape(name, weight, shape)
    return sizes
