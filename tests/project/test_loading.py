"""The library that is loaded is this package's, or an error says so; an import of it is small."""

import shutil
import subprocess
import sys
from pathlib import Path

import fusedrnn

# An editable install would find the compiled modules, wherever the sources are.
IMPORT = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
import fusedrnn
"""


def test_the_names_of_the_package_are_what_users_call():
    found = [name for name in dir(fusedrnn) if not name.startswith("__")]
    assert found == sorted(name for name in fusedrnn.__all__ if not name.startswith("__"))


def test_the_library_says_when_it_is_not_built(tmp_path):
    source = Path(fusedrnn.__file__).parent
    (tmp_path / "fusedrnn").mkdir()
    for file in source.glob("*.py"):
        shutil.copy(file, tmp_path / "fusedrnn")
    shutil.copytree(source / "_modules", tmp_path / "fusedrnn" / "_modules")
    run = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    error = run.stderr.splitlines()[-1]
    assert "fusedrnn is not built" in error and "pip install ." in error


def test_a_leftover_library_is_not_loaded(tmp_path):
    """A library of another build has another name, so it is not loaded."""
    source = Path(fusedrnn.__file__).parent
    shutil.copytree(source, tmp_path / "fusedrnn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_core.so", "_core.0.so", "_core_old.abi3.so", "_cuda.0.so"):
        (tmp_path / "fusedrnn" / name).write_text("no library at all")
    code = "import fusedrnn; fusedrnn.GRU(2, 3); print(fusedrnn.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(tmp_path / "fusedrnn/__init__.py")


def test_imports_and_calls_leave_the_compiler_alone():
    """torch's compiler takes most of a second to import, and many users never need it."""
    code = "import sys, torch; before = set(sys.modules); import fusedrnn\n"
    code += "rnn = fusedrnn.GRU(2, 3)\n"
    code += "with torch.autocast('cpu'): rnn(torch.randn(4, 1, 2))[0].sum().backward()\n"
    code += "print([n for n in set(sys.modules) - before if n.startswith('torch._dynamo')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
