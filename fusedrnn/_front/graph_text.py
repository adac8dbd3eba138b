"""What a graph does, in words: programs and records of earlier processes are found by them."""

from __future__ import annotations

import hashlib
import itertools
import re
import types
from typing import Any

import torch
from torch import Tensor, fx

_MOST_NUMBERS = 1000
"""Of a tensor in the graph that are in its text one by one."""
_ADDRESS = re.compile(r"\bat 0x")
_unique = itertools.count()


def text_of(module: fx.GraphModule) -> tuple[str, bool]:
    """What a graph does, and whether that is all of it."""
    lines, is_whole = list[str](), True
    for name, part in module.named_modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            target = node.target
            if callable(target):
                is_whole &= _is_known(target)
                own = getattr(target, "__qualname__", None) or target
                target = f"{getattr(target, '__module__', '')}.{own}"
            lines.append(f"{name} {node.op} {node.name} {target} {node.args} {node.kwargs}")
            value = node.meta.get("example_value") if node.op == "placeholder" else None
            if isinstance(value, Tensor):
                lines.append(f"{value.dtype} {tuple(value.shape)} {value.requires_grad}")
            if node.op not in ("get_attr", "call_module"):
                continue
            held = getattr(part, node.target, None)
            if isinstance(held, Tensor):
                lines.append(f"{held.dtype} {tuple(held.shape)} {_numbers_of(held)}")
            else:
                is_whole &= isinstance(held, fx.GraphModule)
    text = "\n".join(lines)
    is_whole &= not _ADDRESS.search(text)
    return text if is_whole else f"{text}\n{next(_unique)}", is_whole


_OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def _is_known(function: Any) -> bool:
    """Whether a function's name says what it does: it is torch's or Python's, not the user's."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(function).partition(".")[0] in ("aten", "prims", "prim")
    owner = getattr(function, "__module__", None)
    if owner is None:  # of torch's functions in C++
        return isinstance(function, _OF_C)
    return str(owner).partition(".")[0] in ("torch", "builtins", "_operator", "math")


def _numbers_of(tensor: Tensor) -> str:
    if tensor.numel() <= _MOST_NUMBERS:
        return str(tensor.tolist())
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
