"""What is compiled and how. pyproject.toml has the metadata; build_backend/ checks the needs."""

import os
import runpy
import shutil
import sys
from pathlib import Path

import pybind11
import torch
from fusedrnn_build import LINK_FLAGS, choose_cuda, cuda_headers, fail, prepare_cuda
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

toolkit, note = choose_cuda(os.environ.get("FUSEDRNN_CUDA", "auto"), torch.version.cuda)
if toolkit:
    prepare_cuda(toolkit, torch)  # torch.utils.cpp_extension reads the environment when imported
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

# Objects of another Python or torch must not be linked, so every combination has its own folder.
# Finished files are thrown away first: a stale one would end up in the next wheel.
variant = f"cuda{torch.version.cuda}" if toolkit else "cpu"
build_base = Path("build", f"{sys.implementation.cache_tag}-torch{torch.__version__}-{variant}")
shutil.rmtree(build_base / "lib", ignore_errors=True)


class Build(BuildExtension):
    def finalize_options(self):
        super().finalize_options()
        # An editable install would use a temporary folder, and so compile everything each time.
        self.build_temp = str(build_base / "objects")

    def run(self):
        if note:  # here and not above, because pip runs this file several times
            print(note, file=sys.stderr)
        if self.editable_mode or self.inplace:
            for stale in Path("fusedrnn").glob("_cuda*.so"):  # this build may be for the CPU only
                stale.unlink()
        try:
            super().run()
        except (RuntimeError, ValueError) as error:  # a traceback would bury the compiler's words
            fail(f"{error}; FUSEDRNN_CUDA=0 builds for the CPU only" if toolkit else str(error))


class BuildPython(build_py):
    """Ships the headers that are compiled at run time; a source tree uses those of csrc."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for name in runpy.run_path("fusedrnn/_compiler/headers.py")["shipped"](Path("csrc")):
            target = Path(self.build_lib, "fusedrnn/include", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("csrc", name), target)


# torch chooses the C++ standard, since its headers decide what is needed. csrc is no include
# folder: its files find each other by relative names, and its math.h must not become <math.h>.
cxx_flags = [
    # Errors of torch's headers name the file they are in: without the folders of this machine.
    f"-fmacro-prefix-map={Path.cwd()}/=",
    f"-fmacro-prefix-map={Path(torch.__file__).parent}/=torch/",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # torch 2.11: nothing newer than its ABI is used
    # Let multiply-adds fuse and loops vectorize; NaN, infinity and signed zero stay exact.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]

extensions = [
    CppExtension(
        "fusedrnn._core",
        ["csrc/ops/ops.cpp", *map(str, sorted(Path("csrc/cpu").glob("*.cpp")))],
        extra_compile_args={"cxx": cxx_flags},
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,  # no Python in it at all: one binary for every version
    ),
    Extension(
        "fusedrnn._helpers",
        ["csrc/helpers.cpp"],
        include_dirs=[pybind11.get_include()],
        extra_compile_args={"cxx": ["-O2", "-g0", "-fvisibility=hidden"]},
        extra_link_args=LINK_FLAGS,
    ),
]
if toolkit:
    extensions.append(
        CUDAExtension(
            "fusedrnn._cuda",
            ["csrc/ops/ops_cuda.cpp", *map(str, sorted(Path("csrc/cuda").rglob("*.cu")))],
            include_dirs=cuda_headers(toolkit),
            extra_compile_args={
                "cxx": [*cxx_flags, "-DUSE_CUDA"],  # shows the CUDA part of torch's stable ABI
                "nvcc": [
                    "-O3",
                    "-std=c++17",
                    *(f"-Xcompiler={flag}" for flag in cxx_flags if "prefix-map" in flag),
                    "-Xcompiler=-fvisibility=hidden",
                    f"--threads={os.environ.get('MAX_JOBS') or 0}",  # architectures in parallel
                ],
            },
            extra_link_args=LINK_FLAGS,
            py_limited_api=True,  # cuBLAS is not linked: torch has loaded its own
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": Build, "build_py": BuildPython},
    options={"build": {"build_base": str(build_base), "build_lib": str(build_base / "lib")}},
)
