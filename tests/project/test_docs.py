"""The documents: numbers are from the benchmarks' results, examples run, links are valid."""

from __future__ import annotations

import argparse
import doctest
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that fusedrnn is the installed one
from bench import operations, readme, report  # noqa: E402

RESULTS = ROOT / "bench" / "results"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md")])
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|h|cpp|cu|md|json))`")
TOPS = (".", "csrc", "fusedrnn")  # folders that paths in documents are relative to
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", readme.DOCUMENTS)
def test_measured_blocks_are_those_of_the_benchmark(name: str) -> None:
    make, document = readme.DOCUMENTS[name]
    written = (RESULTS / f"{name}.md").read_text()
    assert make(RESULTS) == written, "run python -m bench.readme"
    assert readme.between(document.read_text(), name) == written, "run python -m bench.readme"


def test_full_benchmark_writes_the_block_of_the_readme(tmp_path: Path) -> None:
    of_others = [path.relative_to(RESULTS) for path in RESULTS.glob("*/speed.json")]
    for name in ("memory.json", "speed.json", "gpu-h100.json", *of_others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS / name, tmp_path / name)
    for quick, everything in ((True, True), (False, False), (False, True)):
        options = argparse.Namespace(all=everything, device="cpu")
        readme.afterwards(report.Run(quick, tmp_path, report.NoProgress(), options, {}))
        assert (tmp_path / "readme.md").exists() == (everything and not quick)
    assert (tmp_path / "readme.md").read_text() == (RESULTS / "readme.md").read_text()


def test_performance_shows_the_results_of_calls() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    shown = text.split("<!-- calls")[1].split("<!-- end of calls")[0].split("\n", 1)[1]
    printed = json.loads((RESULTS / "calls.json").read_text())
    assert f"`{printed['environment']['command']}` on " in shown
    assert "\n".join(printed["tables"]).strip() in shown


def test_operations_are_those_that_compile() -> None:
    shown = readme.between(operations.DOCUMENT.read_text(), operations.NAME)
    assert shown == operations.table(), "run python -m bench.operations"


def test_lines_that_contributing_adds_are_in_the_code() -> None:
    diffs = [
        block
        for language, block in FENCED.findall((ROOT / "CONTRIBUTING.md").read_text())
        if language == "diff"
    ]
    assert diffs
    for diff in diffs:
        for part in diff.split("+++ b/")[1:]:
            name, *lines = part.splitlines()
            text = (ROOT / name).read_text()
            added = [line[1:] for line in lines if line.startswith("+") and "..." not in line]
            assert added and [line for line in added if line not in text] == []


REFERENCE = re.compile(r":(?:class|func|meth|mod|data):`~?([\w.]+)`")
PYTHON_FILE = re.compile(r"(?<![\w/-])(\w+\.py)\b")


def test_what_comments_and_the_design_name_exists() -> None:
    """Names that docstrings refer to, and files of Python; a renaming leaves neither behind."""
    sources = {path: path.read_text() for path in (ROOT / "fusedrnn").rglob("*.py")}
    words = {
        word for text in sources.values() for word in re.findall(r"\w+", REFERENCE.sub("", text))
    }
    folders = ("fusedrnn", "tests", "bench", "docs", "build_backend")
    files = {"setup.py"} | {path.name for top in folders for path in (ROOT / top).rglob("*.py")}
    for path, text in [*sources.items(), (ROOT / "docs" / "design.md", "")]:
        text = text or path.read_text()
        for name in REFERENCE.findall(text):
            assert set(filter(None, name.split("."))) <= words, f"{path}: {name}"
        for name in PYTHON_FILE.findall(text):
            assert name in files, f"{path}: {name}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 100


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", document.read_text())):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    assert broken == []


def headings(document: Path) -> list[str]:
    """Anchors of headings as GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    text = FENCED.sub("", document.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_files_that_are_named_exist(document: Path) -> None:
    named = FILE.findall(document.read_text())
    assert [name for name in named if not any((ROOT / top / name).exists() for top in TOPS)] == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# What it's for\n")
    document = tmp_path / "document.md"
    for link in ("other.md", "other.md#what-its-for", "#here"):
        document.write_text(f"# Here\n[text]({link})\n")
        test_links_lead_to_files_and_headings(document)
    for link in ("another.md", "other.md#what-for", "#there"):
        document.write_text(f"# Here\n[text]({link})\n")
        with pytest.raises(AssertionError):
            test_links_lead_to_files_and_headings(document)


WITH_EXAMPLES = [document for document in DOCUMENTS if "```python" in document.read_text()]


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda document: document.name)
def test_examples_run(document: Path) -> None:
    """The examples of a document run in order; each sees the names of the ones before."""
    names: dict[str, Any] = {}
    for language, example in FENCED.findall(document.read_text()):
        if language != "python":
            continue
        if ">>>" in example:
            test = doctest.DocTestParser().get_doctest(example, names, document.name, None, None)
            results = doctest.DocTestRunner().run(test, clear_globs=False)
            assert results.failed == 0 and results.attempted > 0
            names |= test.globs
        else:
            exec(example, names)
