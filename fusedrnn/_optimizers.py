"""Steps of optimizers whose changes autograd does not see.

Autograd compares versions of weights, and refuses to go back through one that was written in place
since forward. torch's fused optimizers write without counting a version, and so may kernels of
others (apex, bitsandbytes): backward would then use the new weights, and nobody would notice. So
the changes of each step are counted here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


def _count_changes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # the compiled graph counts
        return
    is_foreign = not type(optimizer).__module__.startswith("torch.optim.")
    for group in optimizer.param_groups:
        if is_foreign or group.get("fused"):
            changed = [weight for weight in group["params"] if weight.grad is not None]
            torch.autograd.graph.increment_version(changed)


register_optimizer_step_post_hook(_count_changes)
