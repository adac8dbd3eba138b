"""Installing: what the build backend decides, how it fails, and that the wheel works elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
BACKEND = ROOT / "build_backend"

# An install from a wheel without the sources has nothing to build.
pytestmark = pytest.mark.skipif(not BACKEND.exists(), reason="needs the source tree")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restores what the import changes
    monkeypatch.setattr(sys, "path", [str(BACKEND), *sys.path])
    import fusedrnn_build

    return fusedrnn_build


def call_hook(hook: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Calls a hook as pip does: in a process of its own, from the root of the sources."""
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


def fake_toolkit(folder: Path, release: str) -> Path:
    """A CUDA toolkit as far as the backend looks at it."""
    nvcc = folder / "bin/nvcc"
    header = folder / "include/cuda_runtime.h"
    for file in (nvcc, header):
        file.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.48\n")
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
    monkeypatch.setattr(backend, "cuda_headers", lambda toolkit: [str(toolkit / "include")])
    assert backend.cuda_obstacle("12.9").startswith("cublasLt.h was not found")
    (toolkit / "include/cublasLt.h").touch()
    assert backend.cuda_obstacle("12.9") is None
    assert backend.choose_cuda("auto", "12.9") == (toolkit, None)


def test_cuda_toolkit_needs_compiler_and_headers(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = fake_toolkit(tmp_path / "whole", "13.0")
    wrapper_only = fake_toolkit(tmp_path / "wrapper", "13.0")
    (wrapper_only / "include/cuda_runtime.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(wrapper_only))
    monkeypatch.setenv("CUDA_PATH", str(whole))
    assert backend.find_cuda_toolkit() == whole


def test_cuda_choice(backend: ModuleType) -> None:
    assert backend.choose_cuda("0", None) == (None, None)
    note = "fusedrnn: building for the CPU only, because torch is a CPU build"
    assert backend.choose_cuda("auto", None) == (None, note)
    with pytest.raises(SystemExit, match="FUSEDRNN_CUDA=1, but torch is a CPU build"):
        backend.choose_cuda("1", None)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"FUSEDRNN_CUDA": "1"}, "fusedrnn: FUSEDRNN_CUDA=1, but "),
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


def test_sdist_holds_all_that_compiling_needs(tmp_path: Path) -> None:
    done = call_hook(f"build_sdist({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert sources | {"build_backend/fusedrnn_build.py", "fusedrnn/py.typed"} <= packed
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]


FORWARD_BACKWARD = """
import sys, fusedrnn, torch
print(fusedrnn.__file__)
rnn = fusedrnn.StochasticGRU(3, 4, 2)
output = rnn(torch.randn(5, 2, 3))[0]
output.sum().backward()
assert output.shape == (5, 2, 4)
assert all(p.grad is not None and p.grad.isfinite().all() for p in rnn.parameters())
"""


@pytest.mark.slow
def test_wheel_works_in_another_environment(tmp_path: Path) -> None:
    """Built offline by pip, installed in a venv that sees this one's packages, used elsewhere."""
    pytest.importorskip("pip")
    offline = os.environ | {"PIP_NO_INDEX": "1"}
    pip = [sys.executable, "-m", "pip"]
    venv = tmp_path / "venv"

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(*pip, "wheel", ROOT, "--no-deps", "--wheel-dir", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin/python"
    # The paths alone: the hook of an editable install, in a .pth file there, stays asleep.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    packages = [folder for folder in sys.path if folder.endswith("-packages")]
    Path(site, "packages.pth").write_text("\n".join(packages) + "\n")
    run(*pip, "--python", python, "install", "--no-deps", "--force-reinstall", wheel)

    imported_from = run(python, "-c", FORWARD_BACKWARD).splitlines()[0]
    assert imported_from.startswith(site)
