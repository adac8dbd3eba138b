"""Why a call takes no program, whatever its step does."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from .. import _library
from .runs import Run
from .trees import Leaves
from .unusual import unusual


def obstacle_to_programs(run: Run, inputs: Leaves, state: Leaves) -> str:
    """Why a call takes no program, whatever its step is; or nothing."""
    allowed = os.environ.get("FUSEDRNN_COMPILE") or "1"
    if allowed not in ("0", "1"):
        raise ValueError(f"fusedrnn: FUSEDRNN_COMPILE must be 0 or 1, got {allowed!r}")
    if allowed == "0":
        return "FUSEDRNN_COMPILE=0 says so"
    if run.masks is None:
        return "programs are for Recurrent"
    if run.autocast[0]:
        return "autocast is on"
    if run.device.type not in ("cpu", "cuda"):
        return f"programs run on a CPU or a GPU of NVIDIA's, and the input is on {run.device}"
    if run.device.type == "cuda" and _library.cuda is None:
        return _library.cuda_obstacle or "the CUDA kernels are not loaded"
    if run.rows == 0 or run.seq_len == 0:
        return "there is nothing to compute"
    if torch._C._len_torch_dispatch_stack():
        return "a mode of torch looks at all operations"
    hook = _hook(run)
    if hook:
        return hook
    frozen = run.weights.frozen()
    for name, buffer in frozen.items():
        if buffer.requires_grad:
            return f"the buffer {name.split('.', 2)[-1]} has a gradient"
    leaves = (*inputs, *state, *run.weights.trained().values(), *frozen.values())
    for leaf in leaves:
        if type(leaf) not in (Tensor, nn.Parameter, nn.Buffer):
            return f"a tensor is a {type(leaf).__name__}"
        if leaf.device != run.device:
            return f"a weight is on {leaf.device}"
    return ""


def unusual_weight(run: Run) -> str:
    """Says that a parameter or a buffer is no plain array, and which; or nothing."""
    weights = run.weights.trained() | run.weights.frozen()
    whats = ((name.split(".", 2)[-1], unusual(weight)) for name, weight in weights.items())
    return next((f"{name} is {what}" for name, what in whats if what), "")


def _hook(run: Run) -> str:
    """Says that a module of the step has a hook, which is to be called in each step; or nothing."""
    if nn.modules.module._has_any_global_hook():
        return "a hook of all modules is to be called in each step"
    for module in run.weights.used.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{type(module).__name__} has a hook, which is to be called in each step"
        if module._backward_hooks or module._backward_pre_hooks:
            return f"{type(module).__name__} has a hook for backward"
    return ""
