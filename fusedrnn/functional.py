"""Functional forms of the recurrent layers, and the one set of checks on what users pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _library

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_AUTOCAST_DEVICES = ("cpu", "cuda")  # torch raises an error when asked about others, as meta


def stochastic_gru(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    sample: bool = True,
    recompute: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
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
        eps: the noise, (num_layers, T, B, Z), or (num_layers, T, Z) without batch; differentiable.
        seed: one int64 on ``input``'s device that determines eps; see ``generator``.
        generator: draws the seed if neither ``eps`` nor ``seed`` is given.  None is the default
            generator of ``input``'s device.  The same seed gives the same eps on every device and
            for every chunk size.
        sample: if False, z = loc, and no eps, seed or generator may be given.
        recompute: if False, pre-activations (4H + 2Z numbers per step and batch entry) are kept
            for backward rather than computed again: more memory, less time, same gradients.
        chunk_size: steps per chunk of workspace.  None chooses; more is more memory.

    Returns:
        output: (T, B, H), (B, T, H) or (T, H), the states of the last layer.
        h_n: (num_layers, B, H) or (num_layers, H), the last states of all layers.

    Raises:
        ValueError: for a wrong rank or dtype, or arguments that exclude each other.
        RuntimeError: for a wrong shape or device, or an empty sequence.
        TypeError: for an argument of a wrong type.
    """
    if not isinstance(chunk_size, int | None) or isinstance(chunk_size, bool):
        raise TypeError(f"fusedrnn: chunk_size must be an int or None, got {chunk_size!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"fusedrnn: chunk_size must be at least 1, got {chunk_size}")
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        raise ValueError(f"fusedrnn: num_layers must be an int of at least 1, got {num_layers!r}")
    sources = {"eps": eps is not None, "seed": seed is not None, "generator": generator is not None}
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"fusedrnn: {' and '.join(given)} exclude each other: give one of them")
    if given and not sample:
        raise ValueError(f"fusedrnn: sample=False draws no noise, so {given[0]} must not be given")
    per_layer = 6 if bias else 3
    if len(weights) != num_layers * per_layer:
        raise ValueError(
            f"fusedrnn: {num_layers} layer(s) with bias={bias} take {num_layers * per_layer} "
            f"weights, got {len(weights)}"
        )
    tensors = {"input": input, "hx": hx, "eps": eps}
    tensors |= {f"weights[{i}]": w for i, w in enumerate(weights)}
    _check_types(tensors)

    device_type = input.device.type
    if device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return stochastic_gru(
                _autocast(input, dtype),
                [_autocast(w, dtype) for w in weights],
                None if hx is None else _autocast(hx, dtype),
                num_layers=num_layers,
                bias=bias,
                batch_first=batch_first,
                eps=None if eps is None else _autocast(eps, dtype),
                seed=seed,
                generator=generator,
                sample=sample,
                recompute=recompute,
                chunk_size=chunk_size,
            )
    _check_dtypes_and_devices(tensors)

    hidden_size, latent_size = _check_weights("stochastic_gru", weights, num_layers, bias)
    if input.dim() not in (2, 3):
        raise ValueError(f"fusedrnn: input must have 2 or 3 dimensions, got {input.dim()}")
    is_batched = input.dim() == 3
    sequence = input if is_batched else input.unsqueeze(1)
    if is_batched and batch_first:
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
    _check_shape("hx", hx, (num_layers, *maybe_batch, hidden_size))
    _check_shape("eps", eps, (num_layers, seq_len, *maybe_batch, latent_size))
    if hx is None:
        hx = sequence.new_zeros(num_layers, batch, hidden_size)
    elif not is_batched:
        hx = hx.unsqueeze(1)
    if eps is not None and not is_batched:
        eps = eps.unsqueeze(2)
    seed = _check_seed(seed, input.device)
    if sample and eps is None and seed is None:
        seed = _draw_seed(generator, input.device)

    last_states = []
    for layer in range(num_layers):
        sequence, h_n = _library.run_layer(
            "stochastic_gru",
            sequence,
            hx[layer],
            weights[layer * per_layer : (layer + 1) * per_layer],
            eps=None if eps is None else eps[layer],
            seed=seed,
            layer=layer,
            chunk_size=chunk_size or 0,
            recompute=recompute,
        )
        last_states.append(h_n)
    h_n = torch.stack(last_states) if num_layers > 1 else last_states[0].unsqueeze(0)
    if not is_batched:
        return sequence.squeeze(1), h_n.squeeze(1)
    return sequence.transpose(0, 1) if batch_first else sequence, h_n


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
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in ("hx", "eps")):
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
            raise ValueError(
                f"fusedrnn: {name} must be {input.dtype} as input is, got {tensor.dtype}"
            )
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


def _check_weights(
    cell: str, weights: Sequence[Tensor], num_layers: int, bias: bool
) -> tuple[int, int]:
    """hidden_size and latent_size, after all shapes are known to fit together."""
    for i in range(3):
        if weights[i].dim() != 2:
            raise ValueError(
                f"fusedrnn: weights[{i}] must have 2 dimensions, got {weights[i].dim()}"
            )
    input_size, hidden_size, latent_size = (weights[i].shape[1] for i in (0, 2, 1))
    layout = _library.layout(cell, input_size, hidden_size, latent_size, num_layers, bias)
    for (name, _, shape), weight in zip(layout, weights, strict=True):
        _check_shape(name, weight, shape)
    return hidden_size, latent_size
