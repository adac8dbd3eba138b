"""Steps of optimizers whose changes autograd does not see.

Autograd compares versions of weights, and refuses to go back through one that was written in place
since forward. torch's fused optimizers write without counting a version, and so may kernels of
others (apex, bitsandbytes): backward would then use the new weights, and nobody would notice. So
the changes of each step are counted here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._tracers import never_in_graphs

# Packages whose optimizers write by kernels of their own.
_FOREIGN = ("apex", "bitsandbytes", "deepspeed", "transformer_engine")


def _count_changes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "steps_by_others", False):
        return  # each of which comes here
    is_foreign = type(optimizer).__module__.partition(".")[0] in _FOREIGN
    for group in getattr(optimizer, "param_groups", ()):
        if is_foreign or group.get("fused"):
            _count(group["params"])


@never_in_graphs  # which would count once, when they are made
def _count(weights: list[Tensor]) -> None:
    changed = [weight for weight in weights if weight.grad is not None]
    torch.autograd.graph.increment_version(changed)


register_optimizer_step_post_hook(_count_changes)
