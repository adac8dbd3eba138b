"""Programs of cells as a GPU runs them: their texts, and the emulation of the GPU's backend."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler.interpreted import have_own_programs
from compiler.stage_library import COMPILER, CSRC, FLAGS, HERE, built
from emulator import EMULATED, emulated_operators, use
from nvcc import compiled
from recurrent.registry import Case

import fusedrnn
from fusedrnn import _library
from fusedrnn._compiler import pipeline, step_to_compile, unused_results
from fusedrnn._compiler.build import CannotBuild, Library


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Has programs for CPU tensors run by the GPU's driver, on the emulation of its kernels."""
    take(patch, emulated_operators(), EMULATED.make(), library_of)


def take(
    patch: pytest.MonkeyPatch, operators: Any, path: Path, library_of: Callable[[str], Path]
) -> None:
    """Has programs for CPU tensors run by operators for GPUs.

    Args:
        path: The library of the operators.
        library_of: Makes the library of a text.
    """

    def build(text: str, *, device: str, capability: str | None) -> Library:
        assert device == "cuda"
        made = library_of(text)
        function = ctypes.cast(ctypes.CDLL(str(made)).fusedrnn_stage_launch, ctypes.c_void_p).value
        assert function is not None
        return Library(function, made, made.stem, False, 0.0, made.stat().st_size)

    use(patch, operators)
    have_own_programs(patch, str(path))
    patch.setattr(_library, "cuda", ctypes.CDLL(str(path)))
    _print_for_gpus(patch)
    patch.setattr(pipeline, "build", build)


def _print_for_gpus(patch: pytest.MonkeyPatch) -> None:
    for module in (pipeline, step_to_compile, unused_results):
        patch.setattr(module, "kind_of", lambda device: "cuda")


def library_of(text: str) -> Path:
    """What is printed for a GPU, on the emulation of a GPU's threads."""
    flags = [*FLAGS, "-Wno-psabi", "-shared", "-fPIC"]
    includes = ["-iquote", str(CSRC), f"-I{HERE.parent / 'emulator'}"]
    return built("program", [str(COMPILER), *flags, *includes], text)


def gpu_text(case: Case, dtype: torch.dtype) -> str:
    """What is printed of a cell for a GPU."""
    texts: list[str] = []

    def taken(text: str, *, device: str, capability: str | None) -> Library:
        texts.append(text)
        raise CannotBuild("it has been taken")

    module, inputs = case.cell(dtype), case.inputs(2, 2, dtype)
    with pytest.MonkeyPatch.context() as patch:
        have_own_programs(patch)
        _print_for_gpus(patch)
        patch.setattr(pipeline, "build", taken)
        with pytest.raises(RuntimeError, match="it has been taken"):
            fusedrnn.Recurrent(module, compile="require")(inputs, case.state(module, 2))
    return texts[0]


def ptxas_says(text: str, architecture: str) -> str:
    """Of all kernels of a text, with the flags of fusedrnn._compiler.build."""
    return compiled(text, "-O3", f"-arch={architecture}", "-cubin", "-Xptxas=-v").said
