"""Seeds of noise and of masks, drawn from torch's generators."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ._tracers import constant_in_graphs, is_compiling


def draw(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One int64 on ``device``.

    Drawn in Python, as a tensor: torch's generators, checkpointing, torch.compile and CUDA graphs
    then treat the seed as they treat torch.rand.
    """
    if generator is None or not is_compiling():
        return _drawn(generator, device)
    # The number of a place in memory has the graph compiled anew for another generator.
    return _draw_from(_remembered(generator, id(generator)), device)


def _drawn(generator: torch.Generator | None, device: torch.device) -> Tensor:
    source = device if generator is None else generator.device
    seed = torch.randint(
        -(2**62), 2**62, (1,), dtype=torch.int64, device=source, generator=generator
    )
    return seed if source == device else seed.to(device, non_blocking=True)


# A graph cannot hold a generator, so it holds the number of one, and an operator looks it up.
_generators: weakref.WeakValueDictionary[int, torch.Generator] = weakref.WeakValueDictionary()


@constant_in_graphs  # runs when a graph is made
def _remembered(generator: torch.Generator, number: int) -> int:
    _generators[number] = generator
    return number


@torch.library.custom_op(
    "fusedrnn::draw_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _draw_from(generator: int, device: torch.device) -> Tensor:
    found = _generators.get(generator)
    if found is None:
        raise RuntimeError("fusedrnn: the generator that this graph draws from no longer exists")
    return _drawn(found, device)


@_draw_from.register_fake
def _fake_draw_from(generator: int, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)
