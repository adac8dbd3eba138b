"""Why a call takes no program, whatever its step does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils._device import DeviceContext

from .. import _helpers as helpers
from .. import _library
from .._step.sequence_call import SequenceCall
from .._step.unusual_tensors import PLAIN, unusual

SWITCHED_OFF = "FUSEDRNN_COMPILE is 0"
DISPATCH_MODE, FUNCTION_MODE = "a TorchDispatchMode is active", "a TorchFunctionMode is active"
EMPTY = "the batch is empty"
PASSING = (SWITCHED_OFF, DISPATCH_MODE, FUNCTION_MODE, EMPTY)
"""What says nothing of the cell, so that nobody is warned of it."""


def obstacle_around(device: torch.device) -> str:
    """Why no call takes a program, by what surrounds it; or nothing."""
    allowed = helpers.variable("FUSEDRNN_COMPILE") or "1"
    if allowed != "1":
        if allowed != "0":
            raise ValueError(f"fusedrnn: FUSEDRNN_COMPILE must be 0 or 1, got {allowed!r}")
        return SWITCHED_OFF
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return "autocast is on"
    if kind != "cpu":
        if kind != "cuda":
            return f"compiled cells run on a CPU or an NVIDIA GPU, and the input is on {device}"
        if _library.cuda is None:
            return _library.cuda_obstacle or "the CUDA kernels are not loaded"
    if torch._C._len_torch_dispatch_stack():
        return DISPATCH_MODE
    if torch._C._len_torch_function_stack() and _has_function_mode():
        return FUNCTION_MODE
    return ""


def obstacle_to_programs(call: SequenceCall) -> str:
    """Why a call takes no program, whatever its step is; or nothing."""
    if obstacle := obstacle_around(call.device):
        return obstacle
    if call.rows == 0 or call.seq_len == 0:
        return EMPTY
    for leaf in (*call.inputs, *call.state, *call.reset_to):
        if type(leaf) not in PLAIN:
            return f"a tensor of the input or the state is a {type(leaf).__name__}"
    for leaf in call.inputs:
        if leaf.shape[:2] != (call.seq_len, call.rows):
            return "an input does not have the batch of the state as its second dimension"
    for leaf in call.state:
        if leaf.shape[:1] != (call.rows,):
            return "not all tensors of the state have the batch as their first dimension"
    return ""


def _has_function_mode() -> bool:
    """Whether one is around that is not torch's own for a default device."""
    count = torch._C._len_torch_function_stack()
    modes = (torch._C._get_function_stack_at(i) for i in range(count))
    return not all(isinstance(mode, DeviceContext) for mode in modes)


def obstacle_of(modules: Iterable[nn.Module]) -> str:
    """Says that a module of the step is scripted, or has a hook, which is to be called in each
    step; or nothing."""
    if nn.modules.module._has_any_global_hook():
        return "a global hook of all modules is registered, which must run in each step"
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            return "a scripted module cannot be traced: pass the module before torch.jit.script"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{type(module).__name__} has a forward hook, which must run in each step"
        if module._backward_hooks or module._backward_pre_hooks:
            return f"{type(module).__name__} has a backward hook"
    return ""


def unusual_weight(modules: Sequence[nn.Module], device: torch.device) -> str:
    """Says that a parameter or a buffer is no plain array on a device, and which; or nothing."""
    for module in modules:
        for name, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is None:
                continue
            if weight.device != device:
                return f"{name} is on {weight.device}, the input on {device}"
            if what := unusual(weight):
                return f"{name} is {what}"
    return ""
