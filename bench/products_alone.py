"""The CPU kernels' products by themselves, beside torch.mm: for ``bench.products``.

They are compiled into a library of their own, since no operator is a product alone.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.utils.cpp_extension import get_cxx_compiler

SOURCE = Path(__file__).parent / "products.cpp"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno")
TARGETS = {"AVX512": "avx512", "AVX2": "avx2"}  # of torch's names, as the package chooses
PANEL = 64  # columns to which packed weights are rounded up

Call = Callable[[], object]


def why_not() -> str | None:
    """Why products cannot be measured here; None if they can."""
    if _target() is None:
        return "products are torch's here: this processor has neither AVX2 nor AVX-512"
    if shutil.which(get_cxx_compiler()) is None:
        return "no C++ compiler"
    return None


def _target() -> str | None:
    if platform.machine() == "aarch64":
        return "baseline"
    return TARGETS.get(torch.backends.cpu.get_cpu_capability())


def step(batch: int, hidden: int) -> dict[str, Call]:
    """The product of one step of an LSTM: h (B, H) by a weight (4 H, H), packed before."""
    library = _library()
    weight, h = torch.randn(4 * hidden, hidden), torch.randn(batch, hidden)
    panels = torch.empty(hidden * -(-4 * hidden // PANEL) * PANEL)
    out, of_torch = torch.empty(2, batch, 4 * hidden).unbind()
    library.pack(*_matrix(weight.T), _data(panels))

    def ours() -> object:
        return library.packed(_data(out), *_matrix(h), _data(panels), ctypes.c_int64(4 * hidden))

    return _checked(ours, out, lambda: torch.mm(h, weight.T, out=of_torch), of_torch)


def chunk(rows: int, hidden: int) -> dict[str, dict[str, Call]]:
    """The products of a chunk of an LSTM: of the input, of its gradient, of a weight's gradient."""
    weight, x = torch.randn(4 * hidden, hidden), torch.randn(rows, hidden)
    gates = torch.randn(rows, 4 * hidden)
    products = {
        "gates": (x, weight.T),
        "gradient of the input": (gates, weight),
        "gradient of the weight": (gates.T, x),
    }
    return {name: _chunk(a, b) for name, (a, b) in products.items()}


def _chunk(a: Tensor, b: Tensor) -> dict[str, Call]:
    library = _library()
    out, of_torch = torch.empty(2, len(a), b.shape[1]).unbind()

    def ours() -> object:
        return library.product(_data(out), *_matrix(a), *_matrix(b))

    return _checked(ours, out, lambda: torch.mm(a, b, out=of_torch), of_torch)


def _checked(ours: Call, out: Tensor, torchs: Call, of_torch: Tensor) -> dict[str, Call]:
    ours()
    torchs()
    torch.testing.assert_close(out, of_torch, rtol=1e-3, atol=1e-3)
    return {"ours": ours, "torch.mm": torchs}


def _data(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _matrix(matrix: Tensor) -> tuple[ctypes.c_void_p, ctypes.Array[ctypes.c_int64]]:
    return _data(matrix), (ctypes.c_int64 * 4)(*matrix.shape, *matrix.stride())


@cache
def _library() -> ctypes.CDLL:
    isa = _target()
    assert isa is not None
    macros = (f"-DFUSEDRNN_ISA={isa}", f"-DFUSEDRNN_HAS_{isa.upper()}=1", "-Wno-psabi")
    with TemporaryDirectory() as folder:
        library = Path(folder, "products.so")
        command = [get_cxx_compiler(), *FLAGS, *macros, str(SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
