"""Installing: what the build backend decides, how it fails, and that the wheel works elsewhere.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from nvcc import NVCC

from fusedrnn import _library

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "build_backend"

# An install from a wheel without the sources has nothing to build.
pytestmark = pytest.mark.skipif(not BACKEND.exists(), reason="needs the source tree")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # so that the change by the import is undone
    monkeypatch.setattr(sys, "path", [str(BACKEND), *sys.path])
    import fusedrnn_build

    return fusedrnn_build


def call_hook(hook: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Calls a build hook as pip does: in its own process, from the root of the sources."""
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [environment.get("PYTHONPATH"), str(BACKEND)])
    )
    return subprocess.run(
        [sys.executable, "-c", f"import fusedrnn_build; fusedrnn_build.{hook}"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def fake_toolkit(folder: Path, release: str, codes: str = "") -> Path:
    """A folder with the parts of a CUDA toolkit that the build backend looks at."""
    nvcc = folder / "bin/nvcc"
    header = folder / "include/cuda_runtime.h"
    for file in (nvcc, header):
        file.parent.mkdir(parents=True)
    answers = {"--version": f"Cuda compilation tools, release {release}, V{release}.48"}
    answers["--list-gpu-code"] = codes
    cases = " ".join(f"{question}) echo {answer};;" for question, answer in answers.items())
    nvcc.write_text(f"#!/bin/sh\ncase $1 in {cases} esac\n")
    nvcc.chmod(0o755)
    header.touch()
    return folder


def fake_distribution(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_version_key(backend: ModuleType) -> None:
    assert backend.version_key("2.13.0+cpu") == (2, 13)
    assert backend.version_key("2.9.1") < backend.version_key("2.11") < backend.version_key("3.0a1")


def test_only_what_is_missing_is_asked_for(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = {"setuptools": "65.5.0", "torch": "2.11.0+cpu", "ninja": None, "pybind11": "3.1.0"}
    monkeypatch.setattr(backend, "installed_version", have.__getitem__)
    assert backend.get_requires_for_build_wheel() == ["setuptools>=77", "ninja>=1.10"]


def test_cuda_obstacles(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert backend.cuda_obstacle(None) == "torch is a CPU build"

    monkeypatch.setattr(backend, "find_cuda_toolkit", lambda: None)
    assert (
        backend.cuda_obstacle("13.0") == "no CUDA toolkit was found; name its folder in CUDA_HOME"
    )

    toolkit = fake_toolkit(tmp_path / "cuda", "12.8")
    monkeypatch.setattr(backend, "find_cuda_toolkit", lambda: toolkit)
    assert backend.cuda_obstacle("13.0").startswith("nvcc is of CUDA 12.8 and torch of CUDA 13.0")

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert backend.cuda_obstacle("12.9").startswith("cublasLt.h was not found")
    beside_torch = tmp_path / "nvidia/cublas/include"
    beside_torch.mkdir(parents=True)
    (beside_torch / "cublasLt.h").touch()
    assert backend.cuda_obstacle("12.9") is None
    assert backend.cuda_headers(toolkit) == [str(toolkit / "include"), str(beside_torch)]


def test_cuda_toolkit_needs_compiler_and_headers(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = fake_toolkit(tmp_path / "whole", "13.0")
    wrapper_only = fake_toolkit(tmp_path / "wrapper", "13.0")
    (wrapper_only / "include/cuda_runtime.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(wrapper_only))
    monkeypatch.setenv("CUDA_PATH", str(whole))
    assert backend.find_cuda_toolkit() == whole

    by_target = wrapper_only / "targets/x86_64-linux/include"
    by_target.mkdir(parents=True)
    (by_target / "cuda_runtime.h").touch()
    assert backend.find_cuda_toolkit() == wrapper_only
    assert backend.cuda_headers(wrapper_only)[0] == str(by_target)


def test_cuda_choice(backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = "fusedrnn: building for the CPU only, because torch is a CPU build"
    assert backend.choose_cuda("0", None) == (None, None)
    assert backend.choose_cuda("auto", None) == (None, note)
    with pytest.raises(SystemExit, match="FUSEDRNN_CUDA=1, but torch is a CPU build"):
        backend.choose_cuda("1", None)

    toolkit = fake_toolkit(tmp_path / "cuda", "13.0")
    (toolkit / "include/cublasLt.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert backend.choose_cuda("0", "13.2") == (None, None)
    assert backend.choose_cuda("auto", "13.2") == (toolkit, None)
    assert backend.choose_cuda("1", "13.2") == (toolkit, None)


@pytest.mark.parametrize(
    ("given", "sees_gpu", "codes", "expected"),
    [
        ("9.0a", False, "sm_80 sm_90", "9.0a"),
        (None, True, "sm_80 sm_90", None),  # torch asks the GPUs
        (None, False, "sm_75 sm_80 sm_86 sm_89 sm_90 sm_90a", "8.0;8.6;8.9;9.0+PTX"),
        ("", False, "sm_80 sm_90 sm_100 sm_103 sm_120", "8.0;9.0;10.0;12.0+PTX"),
        (None, False, "", "8.0;8.6;8.9;9.0;10.0;12.0+PTX"),  # nvcc does not list GPUs
    ],
)
def test_cuda_architectures(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str | None,
    sees_gpu: bool,
    codes: str,
    expected: str | None,
) -> None:
    environment = {} if given is None else {"TORCH_CUDA_ARCH_LIST": given}
    monkeypatch.setattr(os, "environ", os.environ.copy() | environment)
    if given is None:
        os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    toolkit = fake_toolkit(tmp_path / "cuda", "13.0", codes)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: sees_gpu))
    backend.prepare_cuda(toolkit, torch)
    assert os.environ["CUDA_HOME"] == str(toolkit)
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == expected


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        pytest.param(
            {"FUSEDRNN_CUDA": "1"},
            "fusedrnn: FUSEDRNN_CUDA=1, but torch is a CPU build",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA"),
        ),
        ({"FUSEDRNN_CUDA": "yes"}, "fusedrnn: FUSEDRNN_CUDA must be auto, 0 or 1, got 'yes'"),
        ({"CXX": "/nowhere/c++ -pipe"}, "fusedrnn: no C++ compiler: '/nowhere/c++ -pipe' was not"),
    ],
)
def test_failure_is_one_sentence(
    environment: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    done = call_hook(f"prepare_metadata_for_build_wheel({str(tmp_path)!r})", **environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stderr


def test_old_torch_is_named(tmp_path: Path) -> None:
    fake_distribution(tmp_path, "torch", "2.9.1+cpu")
    done = call_hook("get_requires_for_build_wheel()", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "fusedrnn: torch 2.11 or newer is needed, found 2.9.1+cpu\n"


def test_missing_tool_is_named_without_isolation(tmp_path: Path) -> None:
    fake_distribution(tmp_path, "pybind11", "2.9.0")
    done = call_hook("build_wheel('unused')", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("fusedrnn: building needs pybind11>=2.12; install")


@pytest.mark.slow
def test_sdist_holds_all_that_compiling_needs(tmp_path: Path) -> None:
    done = call_hook(f"build_sdist({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert sources | {"build_backend/fusedrnn_build.py", "fusedrnn/py.typed"} <= packed
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]


# An error's text from the library's own function, and from a stream, as in torch's headers.
BY_CHECKED_H = """
#include "base/checked.h"
static void throw_error(long n) { fusedrnn::fail(n, " steps of ", 0.5, ", ", size_t(7)); }
"""
BY_A_STREAM = """
#include <sstream>
#include <stdexcept>
static void throw_error(long n) {
  std::ostringstream text;
  text << "fusedrnn: " << n << " steps of " << 0.5 << ", " << size_t(7);
  throw std::runtime_error(text.str());
}
"""
SAY = """
#include <cstring>
extern "C" __attribute__((visibility("default"))) void say(char* text) {
  try {
    throw_error(-12);
  } catch (const std::exception& error) {
    std::strcpy(text, error.what());
  }
}
"""
LOAD = """
import ctypes, sys
import torch  # and with it another libstdc++
text = ctypes.create_string_buffer(200)
ctypes.CDLL(sys.argv[1]).say(text)
print(text.value.decode())
"""


@pytest.mark.parametrize("how", ["fail", "stream"])
def test_errors_have_their_numbers_where_libstdcxx_is_linked_in(
    backend: ModuleType, tmp_path: Path, how: str
) -> None:
    """Messages by streams need a libstdc++ that is not shared; the package's own do not."""
    source, library = tmp_path / "say.cpp", tmp_path / "say.so"
    source.write_text((BY_A_STREAM if how == "stream" else BY_CHECKED_H) + SAY)
    flags = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]
    flags += ["-static-libstdc++", *(backend.LINK_FLAGS if how == "stream" else [])]
    subprocess.run(["c++", *flags, str(source), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True
    )
    assert done.stdout == "fusedrnn: -12 steps of 0.5, 7\n", done.stderr


@pytest.mark.parametrize("name", ["_core", "_helpers", "_cuda"])
def test_libraries_have_no_locales_of_their_own(name: str) -> None:
    """Libraries export no locales that other libraries would see; see LINK_FLAGS."""
    files = list(Path(_library.__file__).parent.glob(f"{name}.*.so"))
    if not files:
        pytest.skip("not built")
    found = subprocess.run(
        ["nm", "-DC", *map(str, files)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    # A facet is found by its id. Some inline functions may be there, as in any library.
    ids = [s for s in found if " U " not in s and re.search(r" std::.*::id$", s)]
    assert not ids and not [s for s in found if " T std::locale" in s]
    if name == "_helpers":  # torch's headers in the others use streams
        assert not [s for s in found if "std::ostream" in s or "stringstream" in s]


# Root may write everywhere, so the backend is told what other users would find.
READ_ONLY = """
import os
may = os.access
os.access = lambda path, mode, **options: mode != os.W_OK and may(path, mode, **options)
import fusedrnn_build
"""


@pytest.mark.slow
def test_a_read_only_tree_is_built_from_a_copy(tmp_path: Path) -> None:
    """Only sources are copied. Making metadata takes the same way as a wheel, but not minutes."""
    tree, made = tmp_path / "tree", tmp_path / "made"
    made.mkdir()
    ignored = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, tree, ignore=ignored)
    (tree / "build").mkdir()
    folders = [tree, *(p for p in tree.rglob("*") if p.is_dir())]
    before = sorted(tree.rglob("*"))
    for folder in folders:
        folder.chmod(0o555)
    environment = os.environ | {"PYTHONPATH": str(tree / "build_backend"), "FUSEDRNN_CUDA": "0"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"

    def call(hook: str) -> subprocess.CompletedProcess[str]:
        code = f"{READ_ONLY}fusedrnn_build.{hook}({str(made)!r})"
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True
        )

    try:
        done = call("prepare_metadata_for_build_wheel")
        assert done.returncode == 0, done.stderr
        assert list(made.glob("fusedrnn-*.dist-info/METADATA"))
        assert sorted(tree.rglob("*")) == before
        done = call("build_editable")
        assert done.returncode == 1
        assert done.stderr.strip() == (
            "fusedrnn: an editable install writes into the source tree, which is read-only"
        )
    finally:
        for folder in folders:
            folder.chmod(0o755)


def check_headers(folder: Path) -> None:
    """All that generated code includes is there and compiles, without anything of the sources."""
    names = sorted(path.name for path in (ROOT / "csrc/program").glob("stage_*.h"))
    assert names and names == sorted(path.name for path in folder.glob("program/stage_*.h"))
    for name in names:
        command = ["c++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
        if name == "stage_kernel.h":  # for GPUs
            if NVCC is None:
                continue
            command = [NVCC, "-std=c++17", "-ptx", "-I.", "-x", "cu", "-o", os.devnull, "-"]
        text = f'#include "program/{name}"\n'
        subprocess.run(command, input=text, cwd=folder, text=True, check=True)


@pytest.mark.slow
def test_headers_for_generated_code_are_shipped(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "build_py", "--build-lib", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(BACKEND), "FUSEDRNN_CUDA": "0"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    check_headers(tmp_path / "fusedrnn/include")


FORWARD_BACKWARD = """
import sys, fusedrnn, torch
print(fusedrnn.__file__)
rnn = fusedrnn.StochasticGRU(3, 4, 2)
output = rnn(torch.randn(5, 2, 3))[0]
output.sum().backward()
assert output.shape == (5, 2, 4)
assert all(p.grad is not None and p.grad.isfinite().all() for p in rnn.parameters())
"""


BUILD = """
import os, sys
os.environ["FUSEDRNN_CACHE"] = sys.argv[1]
from fusedrnn._compiler import build, headers
print(headers.folder(), build.build('''
#include "program/stage_loop.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const int64_t fusedrnn_abi = fusedrnn::program::kAbi;
EXPORT void fusedrnn_stage() {}
''').function != 0)
"""


@pytest.mark.slow
def test_wheel_works_in_another_environment(tmp_path: Path) -> None:
    """pip builds it offline; it is installed in a venv that sees this one's packages."""
    pytest.importorskip("pip")
    on_cpu_torch = torch.version.cuda is None  # otherwise the build is told to be for the CPU
    offline = os.environ | {"PIP_NO_INDEX": "1", "FUSEDRNN_CUDA": "auto" if on_cpu_torch else "0"}
    pip = [sys.executable, "-m", "pip"]
    venv = tmp_path / "venv"

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=offline,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = run(*pip, "wheel", ROOT, "--no-deps", "--wheel-dir", tmp_path, "--verbose")
    assert said.count("fusedrnn: building for the CPU only") == on_cpu_torch
    (wheel,) = tmp_path.glob("*.whl")
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert {name.partition(".")[0] for name in packed} == {"fusedrnn/_core", "fusedrnn/_helpers"}
    assert len(packed) == 2  # no library of earlier builds, for other Pythons or CUDA

    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin/python"
    # Only the paths: the hook of an editable install, in a .pth file there, must not run.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    packages = [folder for folder in sys.path if folder.endswith("-packages")]
    Path(site, "packages.pth").write_text("\n".join(packages) + "\n")
    run(*pip, "--python", python, "install", "--no-deps", "--force-reinstall", wheel)

    imported_from = run(python, "-c", FORWARD_BACKWARD).splitlines()[0]
    assert imported_from.startswith(site)
    check_headers(Path(site, "fusedrnn/include"))
    built = run(python, "-c", BUILD, tmp_path / "cache").split()
    assert built == [str(Path(site, "fusedrnn/include")), "True"]
