"""The groups of the check for a GPU fit their minutes, and its commands and libraries fit too."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench import build, cell_graphs, gpu_check, parts, sanitize, speed, sweep

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("group", parts.GROUPS)
def test_a_group_ends_in_time(tmp_path: Path, group: str) -> None:
    known, stages = parts.parts(tmp_path), parts.GROUPS[group]
    assert gpu_check.limit_s(known, stages) <= 60 * parts.MINUTES[group]
    assert stages[0] == ("build",)
    named = [name for stage in stages for name in stage]
    assert len(set(named)) == len(named)
    files = {parts.BENCHMARKS[name] for name in named if name in parts.BENCHMARKS}
    assert len({"summary.json", "summary.md", gpu_check.LOG, gpu_check.RUNNING_LOG, *files}) <= 10


def test_a_sanitizer_that_fails_itself_says_so() -> None:
    said = (
        "========= COMPUTE-SANITIZER",
        "masked GRU",
        "========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception.",
        "RuntimeError: an illegal memory access",
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    )
    assert parts.sanitizer_results("\n".join(said)) == (
        True,
        "Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception.; "
        "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    )


def test_each_part_can_be_run_and_is_named_by_the_evidence(tmp_path: Path) -> None:
    known = parts.parts(tmp_path)
    assert {name for stages in parts.GROUPS.values() for s in stages for name in s} <= set(known)
    assert all(set(of_tool) <= set(known) for of_tool in parts.SANITIZERS.values())
    for part in known.values():
        assert parts.BUDGET not in part.command or part.limit_s > parts.SLACK_S
    assert parts.SLACK_S > sweep.OVERTIME_S
    text = (ROOT / "docs" / "gpu-evidence.md").read_text()
    of_tools = {name for of_tool in parts.SANITIZERS.values() for name in of_tool}
    shown = set(re.findall(r"parts? `(\w+)`", text)) | set(re.findall(r"`(\w+)`", text))
    assert set(known) - of_tools <= shown
    assert set(parts.SANITIZERS) <= shown
    assert set(re.findall(r"part `(\w+)`", text)) <= {*known, *parts.SANITIZERS}
    assert set(re.findall(r"GROUP=(\w+)", text)) - {"name"} == set(parts.GROUPS)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", parts.BENCHMARKS)
def test_commands_have_options_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    words = parts.parts(tmp_path)[name].command[2:]
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if action.dest == "device":  # of a type that asks for the GPU, before all else
                action.type = str
        raise SystemExit(str(parse(parser).device))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    monkeypatch.setattr(sys, "argv", ["1" if word == parts.BUDGET else word for word in words])
    with pytest.raises(SystemExit, match=r"^cuda$"):
        runpy.run_module(words[0], run_name="__main__")


@pytest.mark.parametrize(
    "options, stages, seconds",
    [
        ([], parts.GROUPS["glance"], 240),
        (["--group", "proof"], parts.GROUPS["proof"], 720),
        (["--parts", "memory,build+fit"], [("memory",), ("build", "fit")], 15 + 75 + 95),
        (["--parts", "memcheck", "--minutes", "2"], [parts.SANITIZERS["memcheck"]], 120),
        (["--minutes", "-1"], "must be above 0, got -1", 0),
        (["--group", "proof", "--parts", "fit"], "not allowed with argument --group", 0),
        (["--parts", "built"], f"{', '.join(parts.SANITIZERS)}, got 'built'", 0),
    ],
)
def test_what_is_chosen_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    options: list[str],
    stages: Any,
    seconds: float,
) -> None:
    check = mock.Mock(return_value=mock.Mock(begin=0.0))
    monkeypatch.setattr(gpu_check, "Check", check)
    monkeypatch.setattr(gpu_check.signal, "signal", mock.Mock())
    monkeypatch.setattr(sys, "argv", ["gpu_check", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        gpu_check.main()
    if not seconds:
        assert stages in capsys.readouterr().err
        return
    assert check.call_args.args[1] == seconds
    (ran,) = check.return_value.run.call_args.args
    assert [tuple(part.name for part in stage) for stage in ran] == [*stages]


def test_a_kind_of_kernels_has_calls_of_its_own() -> None:
    for kind in parts.KINDS:
        calls = sanitize.calls_of(kind)
        assert len(calls) >= 2
        if kind == "stepwise" or kind in parts.PERSISTENT:
            assert all(kind.partition("_")[0] in said for said in calls)


def test_rows_that_are_chosen_and_where_a_step_goes() -> None:
    case = speed.ONLY["lstm"][1][1]
    row = {"train_ms": [4.0] * 3, "forward_ms": [2.048] * 3, "busy_ms": 1.024, "process": 1}
    row |= {"train_tflops": 1.0, "forward_tflops": 1.0}
    rows = dict.fromkeys(speed.ONLY["lstm"][0], row)
    result = speed._report_on_cuda({case: rows}, name="lstm")
    assert (result.name, result.failures) == ("lstm", [])
    (steps,) = (table for table in result.tables if "Microseconds per step" in table.title)
    assert [line[2:] for line in steps.rows] == [["2.00", "1.00", "1.00"]] * 3
    (target,) = (t for t in result.targets if t.what.startswith("microseconds"))
    assert target.spread == "(2.00–2.00), kernels 1.00, host 1.00"


def test_cells_launched_and_as_a_graph_stand_side_by_side() -> None:
    times = {"forward_ms": [2.56], "train_ms": [5.12]}
    half = {which: [ms[0] / 2] for which, ms in times.items()}
    rows = {cell: {"launched": times, "CUDA graph": half} for cell in cell_graphs.CELLS}
    rows["PlaNet"] = {"launched": times, "CUDA graph": {"error": "RuntimeError: no"}}
    result = cell_graphs.report(rows, {}, cell_graphs.SIZE)
    assert result.failures == ["PlaNet, CUDA graph: RuntimeError: no"]
    assert result.tables[0].rows[0] == ["PlaNet", "10.0", "-", "-", "20.0", "-", "-"]
    assert result.tables[0].rows[1][1:] == ["10.0", "5.0", "0.50", "20.0", "10.0", "0.50"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with libraries for compute capability 9.0, in which nothing is compiled."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "libraries")
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "fusedrnn")
    for folder in ("csrc", "fusedrnn", "libraries", f"libraries/{build.METADATA}"):
        (tmp_path / folder).mkdir()
    (tmp_path / "csrc" / "a.h").write_text("source")
    for name in build.COPIED:
        (tmp_path / "libraries" / name).write_text(name)
    manifest = {"sources": build.digest_of_sources(), "architecture": "9.0"}
    manifest["files"] = build._digests()
    (tmp_path / "libraries" / build.MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr(build, "compile_helpers", lambda: True)
    monkeypatch.setattr(build, "_loads", lambda: True)
    monkeypatch.setattr(sys, "argv", ["build"])
    return tmp_path


REFUSED = ("other sources", "the GPU's is 8.0", "no libraries", "cannot be loaded", "damaged")
REFUSED += ("another version",)


@pytest.mark.parametrize("why", ["", *REFUSED])
def test_libraries_are_copied_or_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, why: str
) -> None:
    """What does not fit is built, with a word why, and the second time nothing is done."""
    run = mock.Mock(return_value=mock.Mock(returncode=0))
    monkeypatch.setattr(build.subprocess, "run", run)
    monkeypatch.setattr(build, "nvidia_smi", lambda field: "8.0" if "8.0" in why else "9.0")
    monkeypatch.setattr(build, "_loads", lambda: "loaded" not in why or run.called)
    if why == "other sources":
        (tree / "csrc" / "a.h").write_text("other")
    if why == "damaged":
        (tree / "libraries" / build.COPIED[1]).write_text("half")
    if why == "another version":
        (tree / "libraries" / build.MANIFEST).write_text("{}")
    if why == "no libraries":
        (tree / "libraries" / build.MANIFEST).unlink()
    build.main()
    said = capsys.readouterr().out
    assert [call.args[0][1:] for call in run.call_args_list] == [[*build.PIP]] * bool(why)
    assert ("built here, because" in said) == bool(why)
    assert why in said
    copied = [(tree / "fusedrnn" / name).exists() for name in build.COPIED]
    assert copied == [why in ("", "cannot be loaded")] * 2
    build.main()
    assert "before" in capsys.readouterr().out
    assert run.call_count == bool(why)


def test_without_a_gpu_nothing_is_built(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "nvidia_smi", lambda field: "")
    with pytest.raises(SystemExit, match="names no GPU"):
        build.main()
