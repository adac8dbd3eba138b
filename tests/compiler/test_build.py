"""Libraries built at run time: what they are, for a CPU and for a GPU, and who builds them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compiler.build_cases import (
    ABI,
    CUDA_TEXT,
    EXPORT,
    GXX,
    SIGNATURE,
    in_child,
    instruction_sets,
    lanes,
    prepare,
    python,
    refused,
    runs,
    script,
    status_in_child,
    text,
)
from nvcc import needs_nvcc

from fusedrnn._compiler import build as building
from fusedrnn._compiler import headers
from fusedrnn._compiler.build import build

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

Patch = pytest.MonkeyPatch


def assert_built(folder: Path) -> None:
    assert lanes(build(text())) and build(text()).path.parent == folder


def test_a_library_is_built_and_called(folder: Path) -> None:
    library = build(text())
    assert lanes(library) in (4, 8, 16)
    assert not library.is_cached and library.seconds > 0
    assert library.path.parent == folder and library.path.stem == library.key
    assert library.bytes == library.path.stat().st_size < 50_000
    assert text() in library.path.with_suffix(".cpp").read_text()  # to read and to debug
    assert sorted(p.suffix for p in folder.iterdir()) == [".cpp", ".so"]
    assert build(text()) is library


@pytest.mark.slow
def test_the_next_process_finds_it(folder: Path) -> None:
    code = "import time; t = time.perf_counter(); b = build(text())\n"
    code += "lanes(b); print(b.is_cached, b.seconds, time.perf_counter() - t)"
    is_cached, *_ = python(code).stdout.split()
    assert is_cached == "False"
    for _ in range(3):  # the machine may be busy
        is_cached, compiling, seconds = python(code).stdout.split()
        assert (is_cached, compiling) == ("True", "0.0")
        if float(seconds) < 0.1:
            return
    pytest.fail(f"{seconds} s to find a library")


@pytest.mark.slow
def test_loops_around_stages_compile_on_each_instruction_set(folder: Path) -> None:
    stage = f"""#include "program/stage_loop.h"
{ABI}
using namespace fusedrnn;
using namespace fusedrnn::program;
struct Twice {{
  static constexpr int kIns = 1, kOuts = 1;
  static constexpr In kIn[] = {{In::Column}};
  static constexpr Out kOut[] = {{Out::Column}};
  template <class A> FUSEDRNN_HD static void forward(const A* in, A* out) {{
    out[0] = in[0] + in[0];
  }}
  template <class A> FUSEDRNN_HD static void backward(const A*, const A* dout, A* din) {{
    din[0] = dout[0] + dout[0];
  }}
}};
extern "C" {EXPORT} {SIGNATURE} {{ run<float, Twice>(backward, *args, first, last); }}
"""
    assert build(stage).function != 0
    assert len(prepare(stage)) == len(instruction_sets())


def test_the_key_is_of_the_content(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    shutil.copytree(headers.folder(), tmp_path / "headers", ignore=shutil.ignore_patterns("*.cu"))
    (tmp_path / "bin").mkdir()
    assert GXX is not None
    (tmp_path / "bin" / "elsewhere").symlink_to(GXX)
    first = build(text())
    keys = {first.key, build(text("another")).key}
    monkeypatch.setattr(headers, "folder", lambda: tmp_path / "headers")
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "elsewhere"))
    elsewhere = build(text())
    assert elsewhere.key.partition("-")[0] == first.key.partition("-")[0]

    monkeypatch.setenv("CXX", GXX + " -DMORE")
    keys.add(build(text()).key)
    monkeypatch.delenv("CXX")
    changed = tmp_path / "headers2"
    shutil.copytree(tmp_path / "headers", changed)
    with (changed / "program/stage.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(headers, "folder", lambda: changed)
    keys.add(build(text()).key)
    monkeypatch.setattr(headers, "folder", lambda: tmp_path / "headers")
    monkeypatch.setattr(building, "_ask_core", lambda question: 0 if "isa" in question else 1)
    keys.add(building._name(building._sources(text(), "cpu", ["baseline"])[0], None))
    assert len(keys) == 5


def test_headers_count_that_headers_include(tmp_path: Path) -> None:
    names = headers.needed(["program/stage_loop.h"], headers.folder())
    assert {"program/stage.h", "cpu/vector.h", "base/hd.h"} < names.keys()
    assert names.keys() <= set(headers.shipped(headers.folder()))
    assert "ops/ops.h" not in names and "driver/driver.h" not in names


def test_no_path_is_in_a_library(folder: Path) -> None:
    content = build(text()).path.read_bytes()
    for path in (folder, headers.folder(), Path.home(), Path("/tmp"), Path.cwd()):
        assert path == Path("/") or os.fsencode(path) not in content


def test_headers_outside_of_the_package_are_refused(folder: Path) -> None:
    for name in ("/etc/passwd", "../setup.py", "base/../../x.h"):
        with pytest.raises(ValueError, match="fusedrnn: generated code must include headers"):
            build(f'#include "{name}"')
    refused("a header of fusedrnn is missing: .*base/none.h", '#include "base/none.h"')


def test_a_wrong_limit_of_time(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FUSEDRNN_COMPILE_SECONDS", "soon")
    with pytest.raises(ValueError, match=r"fusedrnn: FUSEDRNN_COMPILE_SECONDS must .*'soon'"):
        build(text())
    assert not list(folder.glob("*"))


def test_threads_build_once(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    compiler = script(tmp_path / "script", f'exec {GXX} "$@"')
    monkeypatch.setenv("CXX", compiler)
    with ThreadPoolExecutor(8) as pool:
        libraries = list(pool.map(lambda _: build(text()), range(8)))
    assert len({id(library) for library in libraries}) == 1 and runs(compiler) == 1


def test_processes_build_at_once(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Each compiles, since there are no locks; the first library stays, and all use it."""
    compiler = script(tmp_path / "script", f'sleep 0.5; exec {GXX} "$@"')
    monkeypatch.setenv("CXX", compiler)
    with ThreadPoolExecutor(3) as pool:
        done = pool.map(status_in_child, [lambda: assert_built(folder)] * 3)
    assert list(done) == [0, 0, 0] and runs(compiler) == 3
    assert len(list(folder.iterdir())) == 2
    assert build(text()).is_cached


def test_a_fork_knows_what_was_built_and_waits_for_no_thread(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    library = build(text())

    def use() -> None:
        assert build(text()) is library and lanes(library)

    in_child(use)

    slow = script(tmp_path / "script", f'sleep 1; exec {GXX} "$@"')
    monkeypatch.setenv("CXX", slow)
    thread = threading.Thread(target=lambda: build(text()))
    thread.start()
    while not runs(slow):
        time.sleep(0.01)
    in_child(lambda: assert_built(folder))  # the thread holds the lock all the while
    thread.join()
    assert runs(slow) == 2


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90a"])
def test_a_library_for_a_gpu(folder: Path, capability: str) -> None:
    library = build(CUDA_TEXT, device="cuda", capability=capability)
    assert library.function and not library.is_cached
    content = library.path.read_bytes()
    assert os.fsencode(folder) not in content and os.fsencode(headers.folder()) not in content
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", library.path], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in exported.splitlines()} == {
        "fusedrnn_abi",
        "fusedrnn_stage_launch",
    }


@needs_nvcc
def test_a_gpu_that_nvcc_does_not_know(folder: Path) -> None:
    refused("nvcc failed with status 1: .*compute_11", CUDA_TEXT, device="cuda", capability="11")


def test_no_compiler_for_a_gpu(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    which = shutil.which
    monkeypatch.setattr(
        building.find.__globals__["shutil"],
        "which",
        lambda name, path=None: None if path and "/usr/local" in path else which(name, path=path),
    )
    refused(
        "there is no CUDA compiler: nvcc is neither in CUDA_HOME",
        CUDA_TEXT,
        device="cuda",
        capability="80",
    )


@pytest.mark.cuda
@needs_nvcc
def test_a_library_runs_on_the_gpu(folder: Path) -> None:
    capability = building.capability_of(torch.device("cuda"))
    library = build(CUDA_TEXT, device="cuda", capability=capability)
    launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(library.function)
    result = torch.zeros(1, dtype=torch.int64, device="cuda")
    assert launch(result.data_ptr(), torch.cuda.current_stream().cuda_stream) == 0
    assert result.item() == 7
