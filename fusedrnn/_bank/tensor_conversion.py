"""What ``to()``, ``half()`` and others do to the tensors of a bank: they stay on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Conversion(NamedTuple):
    """What a function of ``nn.Module._apply`` does."""

    device: torch.device
    """Where tensors would be."""
    dtypes: dict[torch.dtype, torch.dtype]
    """Of tensors that have another one afterwards."""
    function: Callable[[Tensor], Tensor] | None
    """Converts a tensor, which stays on the host; None if there is nothing to convert."""


def conversion_of(fn: Callable[[Tensor], Tensor], dtypes: Iterable[torch.dtype]) -> Conversion:
    """Tries ``fn`` on a tensor of each dtype.

    Raises:
        RuntimeError: It would move weights to where no bank can have them.
    """
    # Memory formats differ in four dimensions.
    probes = [torch.empty(2, 2, 2, 2, dtype=dtype, device="cpu") for dtype in dtypes]
    probes = probes or [torch.empty(2, 2, 2, 2, dtype=torch.float32, device="cpu")]
    strides = [probe.stride() for probe in probes]
    results = [fn(probe) for probe in probes]
    if results[0].is_meta:
        raise RuntimeError("fusedrnn: the weights of a WeightBank cannot go to the meta device")
    is_cpu = all(result.is_cpu for result in results)
    if is_cpu and any(result.is_shared() for result in results):
        raise RuntimeError(
            "fusedrnn: the memory of a WeightBank is not shared between processes: each has "
            "weights of its own"
        )
    changed = {
        probe.dtype: result.dtype
        for probe, result in zip(probes, results, strict=True)
        if result.dtype != probe.dtype
    }
    function: Callable[[Tensor], Tensor] | None = None
    if is_cpu:
        function = fn
    elif changed or [result.stride() for result in results] != strides:
        function = lambda tensor: fn(tensor).to("cpu")  # noqa: E731
    return Conversion(results[0].device, changed, function)
