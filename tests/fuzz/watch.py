"""Watches everything that a call must not change, and checks the text of its error."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LONGEST_MESSAGE = 600
MOST_BYTES = 1 << 26  # the largest tensor whose values are compared
PATH = re.compile(r"csrc\b|(?:^|[\s\"'(=,])/\w+/[\w/.-]*\.\w+")  # but not an address of a web page
# torch's own messages about arguments that do not fit an operator's schema or device.
OF_SCHEMA = re.compile(r"fusedrnn::\w+\(\) |Could not run 'fusedrnn::|Overflow when unpacking")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in containers, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | torch.Size):
        for one in value:
            yield from tensors_in(one)


def contents(tensor: Tensor) -> bytes | None:
    """The bytes of all memory behind a tensor, where there is such a thing."""
    if tensor.layout != torch.strided or not tensor.is_cpu or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() > MOST_BYTES:
        return None
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return bytes(memory.numpy())


def settings() -> dict[str, Any]:
    """Settings of torch for the process or the thread."""
    denormal = torch.tensor([1e-310], dtype=torch.float64)
    return {
        "number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "denormals": bool((denormal * 1).any()),
    }


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


class Watch:
    """Remembers the state of everything, to find changes later."""

    def __init__(self, arguments: Any, generators: Sequence[torch.Generator] = ()):
        self.tensors = [(t, contents(t), version(t)) for t in tensors_in(arguments)]
        self.generators = [(g, g.get_state()) for g in (torch.default_generator, *generators)]
        self.settings = settings()
        self.begin = time.process_time()

    def seconds(self) -> float:
        """Processor time of this process, since others may keep it waiting."""
        return time.process_time() - self.begin

    def changes(self, may_draw: bool) -> list[str]:
        """Lists the changes. ``may_draw``: whether generators may have drawn."""
        found = []
        for i, (tensor, bytes_before, version_before) in enumerate(self.tensors):
            if contents(tensor) != bytes_before:
                found.append(f"values of tensor {i} of those passed")
            if version(tensor) != version_before:
                found.append(f"version of tensor {i} of those passed")
        if not may_draw:
            for generator, state in self.generators:
                if not torch.equal(generator.get_state(), state):
                    is_default = generator is torch.default_generator
                    found.append(f"state of {'the default' if is_default else 'a'} generator")
        now = settings()
        found += [f"{k}: {v} -> {now[k]}" for k, v in self.settings.items() if now[k] != v]
        return found


def faults_of(error: BaseException, is_raw: bool) -> list[tuple[str, str]]:
    """What is wrong with an error. ``is_raw``: whether an operator was called directly."""
    text, name = str(error), type(error).__name__
    shown = f"{name}: {text[:300]}"
    if not isinstance(error, ValueError | TypeError | RuntimeError):
        return [("foreign type", shown)]
    # A tensor that is None by name is refused by torch's stable ABI, before the operator.
    if is_raw and (OF_SCHEMA.search(text) or "Not yet supported ScalarType" in text):
        return []
    # A subclass of tensors that does not know the operator says its name.
    if is_raw and isinstance(error, NotImplementedError) and text.startswith("fusedrnn."):
        return []
    if not ("fusedrnn: " in text if is_raw else text.startswith("fusedrnn: ")):
        return [("foreign message", shown)]
    found = []
    if PATH.search(text):
        found.append(("path in message", f"{name}: {text[:100]} ... {text[-200:]}"))
    elif len(text) > LONGEST_MESSAGE:
        found.append(("long message", f"{len(text)} characters: {shown}"))
    return found
