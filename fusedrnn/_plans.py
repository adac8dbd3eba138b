"""Plans of layers, as csrc/driver/planner.h makes them: which backend runs, in which chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import NotRequired, Unpack

from . import _helpers as helpers
from . import _library
from ._tracers import is_compiling


class Problem(TypedDict):
    """What a plan follows from: one layer and direction, and how it is called."""

    cell: str
    noise: bool
    """Whether a latent is drawn, or its noise is given."""
    input_size: int
    hidden_size: int
    latent_size: int
    output_size: int
    bias: bool
    seq_len: int
    batch: int
    dtype: str
    chunk_size: int
    workspace_bytes: int
    backend: str
    tuning: int
    strides: NotRequired[Sequence[Sequence[int]]]
    """Strides of all weights of all directions; without them they are taken for contiguous."""


def plan_layer(gpu: helpers.Gpu | None, **problem: Unpack[Problem]) -> dict[str, Any]:
    """The plan of a layer, by names of its parts: see plan() in csrc/helpers.cpp."""
    return helpers.plan(gpu=gpu, **problem)


def require_backend(backend: str, made: dict[str, Any]) -> None:
    """Refuses a plan that does not have the backend that the caller demands.

    Raises:
        RuntimeError: ``backend`` is "persistent", and that is not possible.
    """
    if backend == "persistent" != made["forward"]["backend"]:
        raise RuntimeError(f"fusedrnn: backend='persistent' is not possible here: {made['reason']}")


def check_plan(device: torch.device, **problem: Unpack[Problem]) -> None:
    """Refuses what the operator would refuse, before anything is computed or drawn.

    Raises:
        RuntimeError: ``workspace_bytes`` are too few, or the backend is not possible.
    """
    require_backend(problem["backend"], plan_layer(gpu_facts(device), **problem))


def gpu_facts(device: torch.device) -> helpers.Gpu | None:
    """What plans need to know of a device; None if it is no GPU."""
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():  # a tracer may speak of a GPU that is not there
        return "", 0, 0, 0, 0, 0
    facts = torch.cuda.get_device_properties(device)
    capability = 10 * facts.major + facts.minor
    shared_bytes = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    index = torch.cuda.current_device() if device.index is None else device.index
    multiprocessors = facts.multi_processor_count
    return facts.name, capability, multiprocessors, shared_bytes, index, _library.most_blocks


SMALL_STATES = 2**19
"""Numbers of all states of a call, of all layers in all directions, up to which pre-activations are
saved: 8 MiB in all."""


def are_cheap_to_save(
    seq_len: int, batch: int, features: int, hidden_size: int, layer_directions: int
) -> bool:
    """Whether saved pre-activations take little memory: of all layers, or beside a layer's weights.

    With one row (step x batch) for each of the features of input and h they are as many numbers as
    the weights of an LSTM, and four for three of a GRU. A call of one step saves nothing: loops in
    Python make such calls in large numbers, and their memory adds up.

    A graph that has symbols for sizes is one for all of them, and recomputes.
    """
    rows = seq_len * batch
    states = rows * hidden_size * layer_directions
    if isinstance(states, int) and not is_compiling():
        return seq_len > 1 and (rows <= features or states <= SMALL_STATES)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes 0.4 s

    return statically_known_true(seq_len > 1) and (
        statically_known_true(rows <= features) or statically_known_true(states <= SMALL_STATES)
    )


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in plans."""
    return str(dtype).removeprefix("torch.")


def strides_of(weights: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The strides of weights and biases, as plans take them."""
    return [weight.stride() for weight in weights]
