"""The parts of the check for a GPU, how they end, and the report about them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import load, run_bench

from bench import (
    gpu_check,
    machine,
    parts,
    sweep,
)

ROOT = Path(__file__).parents[2]


def python_part(name: str, code: str, limit_s: float = 60, **options: Any) -> parts.Part:
    return parts.Part(name, limit_s, [sys.executable, "-c", code], **options)


def check(
    stages: list[list[parts.Part]],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    sees_gpu: bool = True,
    seconds: float = 600,
) -> tuple[bool, dict[str, dict[str, Any]]]:
    names = ("gpu", "torch", "nvcc", "commit", "date")
    about = dict.fromkeys(names, "some") | {"torch_sees_gpu": sees_gpu}
    monkeypatch.setattr(gpu_check, "about", lambda: about)
    passed = gpu_check.Check(out, seconds).run(stages)
    outcomes = load(out, "summary")["parts"]
    return passed, {outcome["part"]: outcome for outcome in outcomes}


def test_gpu_check_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [
        [
            python_part(
                "fails", "print('fusedrnn: no GPU'); print('hint: none'); raise SystemExit(3)"
            )
        ],
        [parts.Part("lacks", 1, ["no-such-command"])],
        [python_part("env", "import os; print(os.environ['A'])", env={"A": "b"})],
        [python_part("denied", "print('fine')", verdict=lambda said: (False, f"{said[:4]}, but"))],
    ]
    passed, outcomes = check(stages, tmp_path, monkeypatch)
    assert not passed
    assert {name: (o["passed"], o["note"]) for name, o in outcomes.items()} == {
        "environment": (True, "some"),
        "fails": (False, "fusedrnn: no GPU"),
        "lacks": (False, "no-such-command: No such file or directory"),
        "env": (True, "b"),
        "denied": (False, "fine, but"),
    }
    assert "hint: none" in (tmp_path / "log.txt").read_text()
    assert "| fails | **failed** |" in (tmp_path / "summary.md").read_text()


def test_gpu_check_passes_if_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [[python_part("one", "print(1)")]]
    assert check(stages, tmp_path, monkeypatch)[0]
    passed, outcomes = check(stages, tmp_path, monkeypatch, sees_gpu=False)
    assert not passed
    assert outcomes["environment"]["note"] == "torch sees no GPU"
    assert outcomes["one"]["passed"]


def test_gpu_check_stops_a_part_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ENVIRONMENT_S", 0)
    child = "import time; time.sleep(60); open('late', 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    stages = [[python_part("hangs", code, limit_s=1)], [python_part("after", "print('ran')")]]
    passed, outcomes = check(stages, tmp_path, monkeypatch)
    assert not passed
    assert outcomes["hangs"]["note"] == "stopped after 1 s"
    assert outcomes["after"]["passed"]


def test_gpu_check_begins_no_part_that_may_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"first": 60, "long": 3600, "last": 60}
    stages = [[python_part(name, "print(1)", limit_s)] for name, limit_s in limits.items()]
    passed, outcomes = check(stages, tmp_path, monkeypatch, seconds=600)
    assert not passed
    assert outcomes["first"]["passed"]
    assert outcomes["last"]["passed"]
    assert outcomes["long"]["note"].startswith("not begun: ")
    assert outcomes["long"]["note"].endswith(" s left, and it may take 3600 s")


@pytest.mark.parametrize("group", parts.GROUPS)
def test_a_group_ends_in_time(tmp_path: Path, group: str) -> None:
    known, stages = parts.parts(tmp_path), parts.GROUPS[group]
    limit_s = gpu_check.ENVIRONMENT_S + sum(
        max(known[name].limit_s for name in stage) for stage in stages
    )
    assert limit_s < 60 * gpu_check.MINUTES
    assert stages[0] == ("build",)
    files = {parts.BENCHMARKS[n] for stage in stages for n in stage if n in parts.BENCHMARKS}
    assert len({"summary.json", "summary.md", gpu_check.LOG, *files}) <= 8


def test_parts_of_gpu_check(tmp_path: Path) -> None:
    known = parts.parts(tmp_path)
    in_groups = [name for stages in parts.GROUPS.values() for stage in stages for name in stage]
    assert set(in_groups) | {"packed", "kernels"} == set(known)
    for part in known.values():
        if "--budget-s" in part.command:
            assert float(part.command[-1]) == part.limit_s - parts.SLACK_S > 0
    assert parts.SLACK_S > sweep.OVERTIME_S


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, and would run them")
@pytest.mark.parametrize("name", parts.BENCHMARKS)
def test_commands_of_gpu_check_have_options_that_there_are(tmp_path: Path, name: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    command = parts.parts(tmp_path)[name].command
    assert list(command[1:3]) == ["-m", module.__name__]
    assert module.run_on_cuda
    said = run_bench(*command[2:])
    assert said.returncode == 2
    assert said.stderr.endswith("argument --device: torch sees no GPU\n")


def test_gpu_check_runs_the_parts_that_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ran = []

    class Check:
        def __init__(self, out: Path, seconds: float) -> None:
            self.begin, self.seconds = 0.0, seconds

        def run(self, stages: list[list[parts.Part]]) -> bool:
            ran.append(([tuple(part.name for part in stage) for stage in stages], self.seconds))
            return True

    monkeypatch.setattr(gpu_check, "Check", Check)
    for options in (
        [],
        ["--group", "deep"],
        ["--parts", "memory,build+fit", "--minutes", "2"],
        ["--parts", "built,speed"],
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check", str(tmp_path), *options])
        with pytest.raises(SystemExit):
            gpu_check.main()
    assert ran == [
        ([*parts.GROUPS["first"]], 540),
        ([*parts.GROUPS["deep"]], 540),
        ([("memory",), ("build", "fit")], 120),
    ]
    everything = ", ".join(parts.parts(tmp_path))
    assert capsys.readouterr().err.endswith(f"must be of {everything}, got 'built'\n")


def test_gpu_check_is_told_what_it_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    wrong = {
        "must be above 0, got -1": [str(tmp_path), "--minutes", "-1"],
        "must be a folder": [str(file)],
        "not allowed with argument --group": [str(tmp_path), "--group", "deep", "--parts", "fit"],
    }
    for said, options in wrong.items():
        monkeypatch.setattr(sys, "argv", ["gpu_check", *options])
        with pytest.raises(SystemExit):
            gpu_check.main()
        assert said in capsys.readouterr().err


def test_gpu_check_says_all_in_a_line() -> None:
    outcomes = [gpu_check.Outcome(part, part != "tests", 1.0, "") for part in ("build", "tests")]
    contents = {"speed": {"targets": [{"passed": False}] * 3}, "fit": {"targets": []}}
    assert gpu_check.verdict(outcomes[:1], {}) == "Nothing failed."
    said = gpu_check.verdict(outcomes, contents)
    assert said == "Failed: tests. Targets missed: 3 of speed."


def test_a_tree_without_a_repository_takes_its_commit_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("FUSEDRNN_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    monkeypatch.setenv("FUSEDRNN_COMMIT", "abc")
    assert machine.commit() == "abc"


@pytest.mark.parametrize(
    "said, passed",
    [
        ("4 passed, 1 skipped, 3 deselected, 2 warnings in 0.52s", True),
        ("1 failed, 3 passed in 75.00s (0:01:15)", True),  # the exit status says that it failed
        ("2 skipped in 0.01s", False),
        ("1 error in 0.10s", False),
    ],
)
def test_gpu_check_reads_the_results_of_tests(said: str, passed: bool) -> None:
    tail = f"a test passed in 3 steps\n===== {said} =====\n"
    assert parts.test_results(tail) == (passed, said)
    assert parts.test_results("") == (False, "")


def test_gpu_check_reads_the_results(tmp_path: Path) -> None:
    """A missed target is a result; a failure, or a missing measurement, is not."""
    file = tmp_path / "speed.json"
    assert parts.results(file) == (False, "")
    targets = [{"passed": True}, {"passed": False}]
    rows = {"a": {"ms": 1}, "b": {"missing": "time"}}
    content = {"targets": targets, "failures": [], "cases": [{"contenders": rows}], "tables": []}
    note = "1 of 2 targets met; 1 of 2 rows: missing"
    file.write_text(json.dumps(content))
    assert parts.results(file) == (True, note)
    file.write_text(json.dumps(content | {"failures": ["a failed"]}))
    assert parts.results(file) == (False, f"{note}; 1 failures, the first: a failed")
    file.write_text(json.dumps(content | {"targets": [], "rows": [], "cases": []}))
    assert parts.results(file) == (False, "")
    for broken in ("", "[]", json.dumps(content)[:-9], "{}"):
        file.write_text(broken)
        assert parts.results(file) == (False, "speed.json cannot be read")


def test_evidence_names_parts_that_there_are(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "gpu-evidence.md").read_text()
    named = set(re.findall(r"part `(\w+)`", text))
    assert named == set(parts.parts(tmp_path)) - {"packed"}
