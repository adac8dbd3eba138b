"""The layers of the code (docs/design.md), checked on every #include and import.

A new file fails here until it has its place in the table: its layer is part of its design.
"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A file includes files of its own layer's folders and of lower ones.
CPP_LAYERS = {
    # numbers, memory, what a cell computes, and the form in which programs say it
    0: ["base/*", "cell/*", "program/program.h", "program/stage.h"],
    # one step, as plain data, and its body; what happens between two steps of a program
    1: ["step/*", "program/carries.h"],
    2: ["cpu/*", "persistent/*", "cuda/*"],  # steps carried out
    # all steps of a layer, and its plan; what Python asks besides
    3: ["driver/*", "program/*", "module_guard.h"],
    4: ["ops/*"],  # the binding
}
TORCH_LAYER = 4  # the only one that sees torch
HELPERS = "helpers.cpp"  # free of torch, and includes all layers below the binding
CUDA_FREE = "persistent/"  # the emulation compiles it, so it includes nothing of cuda/
# Headers that bring in the locales of libstdc++; checked.h says why they are forbidden.
STREAMS = ["iomanip", "ios", "iostream", "istream", "fstream", "locale", "ostream", "regex"]
STREAMS += ["sstream", "streambuf"]
CELL_MATH = [
    "base/math.h",
    "base/philox.h",
    "cell/stages.h",
    "program/functions.h",
    "program/rare_functions.h",
]  # the only places of exp, tanh and the like

# A module imports modules of lower layers.
PYTHON_LAYERS = {
    0: [
        "_buffers",
        "_duals",
        "_held_outside",
        "_helpers",
        "_locks",
        "_philox",
        "_pieces",
        "_tracers",
        "_warnings",
    ],
    1: ["_cells", "_library", "_optimizers", "reference"],
    2: ["_flat_weights", "_options", "_plans", "_tuning"],
    3: ["_checks", "_ops"],
    4: ["_batch_forms", "_fakes", "_flops", "_onnx", "_plain_layer", "_seeds", "_vmap"],
    5: ["_autograd"],
    6: ["_autocast", "_call_arguments", "_last_states", "_single_steps"],
    7: ["_kernels", "_stack"],
    8: ["_call"],
    9: ["functional"],
    10: ["_bank", "_bank/*", "_modules", "_modules/*"],
    # The five rooms of cells that users write, in the order in which a call goes through them.
    11: ["_step", "_step/*"],  # one step of a cell, and what is known of a call
    12: ["_front", "_front/*"],  # what torch.compile says of a step: its graph
    13: ["_compiler", "_compiler/*"],  # from a graph to a program with a library
    14: ["_runtime", "_runtime/*"],  # all steps of a sequence, by a program or in Python
    15: ["_recurrent", "_recurrent/*"],  # what users call
    16: ["_conversion", "_planner"],
    17: ["__init__"],
}
TORCH_OPS_USERS = ["_library", "_ops", "_autocast"]  # the only users of torch.ops
COMPILER = ("_front/", "_compiler/")  # but for these, which know the operators of users' steps


def layer_of(name: str, layers: dict[int, list[str]]) -> int | None:
    for layer, patterns in layers.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            return layer
    return None


def without_comments(code: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", code, flags=re.DOTALL)


def cpp_violations(csrc: Path) -> list[str]:
    """All breaches of the rules in a folder of C++ files, one sentence each."""
    found = []
    for path in sorted(path for path in csrc.rglob("*") if path.is_file()):
        name = path.relative_to(csrc).as_posix()
        layer = 3 if name == HELPERS else layer_of(name, CPP_LAYERS)
        if layer is None:
            found.append(f"csrc/{name} has no layer: give it one in CPP_LAYERS")
            continue
        code = without_comments(path.read_text())
        for quote, included in re.findall(r'^\s*#\s*include\s*(["<])([^">]+)', code, re.MULTILINE):
            if quote == "<":
                if included.startswith(("torch/", "ATen/", "c10/")) and layer != TORCH_LAYER:
                    found.append(f"csrc/{name} includes <{included}>: only layer 4 sees torch")
                if included in STREAMS:
                    found.append(f"csrc/{name} includes <{included}>: nothing here needs locales")
                continue
            target = (path.parent / included).resolve()
            if not target.is_relative_to(csrc.resolve()) or not target.exists():
                found.append(f'csrc/{name} includes "{included}", which is not in csrc')
                continue
            target_name = target.relative_to(csrc.resolve()).as_posix()
            target_layer = layer_of(target_name, CPP_LAYERS)
            if name.startswith(CUDA_FREE) and target_name.startswith("cuda/"):
                found.append(f"csrc/{name} includes {target_name}: {CUDA_FREE} is free of CUDA")
            if target_layer is not None and target_layer > layer:
                found.append(
                    f"csrc/{name} (layer {layer}) includes {target_name} (layer {target_layer})"
                )
        for call in re.findall(r"\b(exp|expm1|tanh|sigmoid|softplus|log1p)f?\s*\(", code):
            if name not in CELL_MATH:
                found.append(f"csrc/{name} calls {call}(): cell math stands in {CELL_MATH} only")
    return found


def imported_siblings(tree: ast.AST) -> set[str]:
    """Modules of the package that a module imports, in whatever form."""
    dotted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, ["fusedrnn" if node.level else "", node.module]))
            dotted |= {f"{origin}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in dotted if name.startswith("fusedrnn.")}


def imports_of_files(package: Path) -> dict[str, set[str]]:
    """For each file of the package the files that it imports, also for types and in functions."""
    paths = [path for kind in ("*.py", "*.pyi") for path in package.rglob(kind)]
    names = {path.relative_to(package).with_suffix("").as_posix() for path in paths}
    found: dict[str, set[str]] = {}
    for path in paths:
        name = path.relative_to(package).with_suffix("").as_posix()
        folder = name.split("/")[:-1]
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [*folder[: len(folder) - node.level + 1], *module]
            elif module[:1] == ["fusedrnn"]:
                base = module[1:]
            else:
                continue
            for alias in node.names:  # a file, or what a file or a folder's __init__ has
                ways = [[*base, alias.name], [*base, alias.name, "__init__"], base]
                ways.append([*base, "__init__"])
                imported |= set(list(filter(names.__contains__, map("/".join, ways)))[:1])
        found[name] = imported - {name}
    return found


def circles(imports: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Files that import each other, directly or by way of others."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        seen, left = set[str](), list(imports[name])
        while left:
            one = left.pop()
            if one not in seen:
                seen.add(one)
                left += imports[one]
        reached[name] = seen
    found = {
        tuple(sorted(one for one in imports if one in reached[name] and name in reached[one]))
        for name in imports
    }
    return sorted(found - {()})


def hidden_imports(package: Path) -> list[str]:
    """Imports of the package's own files within functions, where they would hide a circle."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (
                    node.level or (node.module or "").startswith("fusedrnn")
                ):
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    return found


def python_violations(package: Path) -> list[str]:
    """All breaches of the rules in a folder of Python files, one sentence each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).with_suffix("").as_posix()
        layer = layer_of(name, PYTHON_LAYERS)
        if layer is None:
            found.append(f"fusedrnn/{name}.py has no layer: give it one in PYTHON_LAYERS")
            continue
        tree = ast.parse(path.read_text())
        for sibling in sorted(imported_siblings(tree)):
            if sibling == name.split("/")[0]:
                continue
            sibling_layer = layer_of(sibling, PYTHON_LAYERS)
            if sibling_layer is not None and sibling_layer >= layer:
                found.append(
                    f"fusedrnn/{name}.py (layer {layer}) imports {sibling} (layer {sibling_layer})"
                )
        uses_torch_ops = any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops"
            for node in ast.walk(tree)
        )
        if uses_torch_ops and name not in TORCH_OPS_USERS and not name.startswith(COMPILER):
            found.append(f"fusedrnn/{name}.py uses torch.ops: only {TORCH_OPS_USERS} do")
    return found


def test_cpp_keeps_its_layers() -> None:
    if violations := cpp_violations(ROOT / "csrc"):
        pytest.fail("\n".join(violations), pytrace=False)


def test_python_keeps_its_layers() -> None:
    if violations := python_violations(ROOT / "fusedrnn"):
        pytest.fail("\n".join(violations), pytrace=False)


def test_no_file_imports_one_that_imports_it() -> None:
    assert circles(imports_of_files(ROOT / "fusedrnn")) == []
    assert hidden_imports(ROOT / "fusedrnn") == []


def test_no_two_files_have_one_name() -> None:
    names = [path.stem.lstrip("_") for path in (ROOT / "fusedrnn").rglob("*.py")]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"init__"}


def test_circles_are_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    for name, code in {
        "a": "from .room.b import x",
        "room/b": "def f():\n    from . import c",
        "room/c": "from fusedrnn import a",
        "d": "from . import a",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    assert circles(imports_of_files(tmp_path)) == [("a", "room/b", "room/c")]
    assert hidden_imports(tmp_path) == ["room/b.py:2"]


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("new.h", "", " has no layer: give it one in CPP_LAYERS"),
        ("new/a.h", "", " has no layer: give it one in CPP_LAYERS"),
        ("base/hd.h", '#include "../step/step.h"', " (layer 0) includes step/step.h (layer 1)"),
        ("cpu/a.cpp", '#include "../ops/ops.cpp"', " (layer 2) includes ops/ops.cpp (layer 4)"),
        ("helpers.cpp", '#include "ops/ops.cpp"', " (layer 3) includes ops/ops.cpp (layer 4)"),
        (
            "persistent/a.h",
            '#include "../cuda/kernels.h"',
            " includes cuda/kernels.h: persistent/ is free of CUDA",
        ),
        ("step/step.h", "#include <torch/x.h>", " includes <torch/x.h>: only layer 4 sees torch"),
        ("ops/ops.h", "#include <sstream>", " includes <sstream>: nothing here needs locales"),
        ("step/step.h", '#include "gone.h"', ' includes "gone.h", which is not in csrc'),
        ("cpu/a.cpp", "y = std::exp(x);", " calls exp(): cell math stands in"),
        ("cpu/a.cpp", '// exp(x)\n#include "../base/hd.h"', None),
        ("base/math.h", "y = std::exp(x);", None),
    ],
)
def test_cpp_rules_catch(tmp_path: Path, name: str, code: str, expected: str | None) -> None:
    for file in ("base/hd.h", "step/step.h", "ops/ops.cpp", "cuda/kernels.h", name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code if file == name else "")
    found = cpp_violations(tmp_path)
    assert len(found) == (expected is not None)
    assert expected is None or found[0].startswith(f"csrc/{name}{expected}")


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("new", "", "fusedrnn/new.py has no layer: give it one in PYTHON_LAYERS"),
        ("_call", "import fusedrnn.functional", "(layer 8) imports functional (layer 9)"),
        ("_call", "from .functional import gru", "(layer 8) imports functional (layer 9)"),
        ("_call", "from . import functional", "(layer 8) imports functional (layer 9)"),
        ("_call", "from ._modules import GRU", "(layer 8) imports _modules (layer 10)"),
        ("_call", "from ._modules.gru import GRU", "(layer 8) imports _modules (layer 10)"),
        ("functional", "torch.ops.fusedrnn.gru()", "uses torch.ops: only ["),
        ("functional", "from fusedrnn import _call", None),
        ("_library", "torch.ops.fusedrnn.gru()", None),
    ],
)
def test_python_rules_catch(tmp_path: Path, name: str, code: str, expected: str | None) -> None:
    (tmp_path / f"{name}.py").write_text(code)
    found = python_violations(tmp_path)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


LONG = 350  # lines
SOURCES = ("csrc/**/*", "fusedrnn/**/*.py", "bench/*.py", "tests/**/*.py", "tests/**/*.h")


def test_long_files_say_why_they_are_long() -> None:
    paths = [path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()]
    assert len(paths) > 150
    for path in paths:
        lines = path.read_text().splitlines() if path.suffix != ".so" else []
        if len(lines) > LONG:
            top = " ".join(lines[:60])
            assert "Longer than 350 lines, because" in top, f"{path} is long: split it, or say why"
