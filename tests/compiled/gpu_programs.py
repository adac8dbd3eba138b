"""Programs of cells as a GPU runs them: their texts, and the emulation of the GPU's backend."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from asked import recurrent
from emulator import BUILD, emulated_operators, use
from nvcc import NVCC
from registry import Case
from stage_library import COMPILER, CSRC, FLAGS, HERE, built

from fusedrnn import _library
from fusedrnn._compile import cell
from fusedrnn._compile.build import CannotBuild, Library


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Has programs for CPU tensors run by the GPU's driver, on the emulation of its kernels."""
    use(patch, emulated_operators())
    library = BUILD / "fusedrnn_emulated/fusedrnn_emulated.so"
    patch.setattr(_library, "cuda", ctypes.CDLL(str(library)))
    patch.setattr(cell, "kind_of", lambda device: "cuda")
    patch.setattr(cell, "build", _emulated)


def _emulated(text: str, *, device: str, capability: str | None) -> Library:
    assert device == "cuda"
    flags = [*FLAGS, "-Wno-psabi", "-shared", "-fPIC"]
    includes = ["-iquote", str(CSRC), f"-I{HERE.parent / 'emulator'}"]
    path = built("program", [str(COMPILER), *flags, *includes], text)
    function = ctypes.cast(ctypes.CDLL(str(path)).fusedrnn_stage_launch, ctypes.c_void_p).value
    assert function is not None
    return Library(function, path, path.stem, False, 0.0, path.stat().st_size)


def gpu_text(case: Case, dtype: torch.dtype) -> str:
    """What is printed of a cell for a GPU."""
    texts: list[str] = []

    def taken(text: str, *, device: str, capability: str | None) -> Library:
        texts.append(text)
        raise CannotBuild("it has been taken")

    module = case.cell(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cell, "kind_of", lambda device: "cuda")
        patch.setattr(cell, "build", taken)
        with pytest.raises(RuntimeError, match="it has been taken"):
            recurrent(module, compile="require")(case.inputs(2, 2, dtype), case.state(module, 2))
    return texts[0]


def ptxas_says(text: str, architecture: str, folder: Path) -> str:
    """Of all kernels of a text, with the flags of fusedrnn._compile.build."""
    source = folder / "stages.cu"
    source.write_text(text)
    flags = ["-std=c++17", "-O3", f"-arch={architecture}", "-cubin", "-Xptxas=-v", f"-I{CSRC}"]
    command = [str(NVCC), *flags, str(source), "-o", str(folder / "stages.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr
