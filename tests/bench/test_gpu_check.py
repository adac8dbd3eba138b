"""The check for a GPU survives crashes, hangs, floods of output, and a lost GPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import contain, faults, gpu_check, parts, worker

ROOT = Path(__file__).parents[2]

STALL_S, AMPLE_S = 1.5, 60.0
SAID = {
    "segfault": "ended by SIGSEGV",
    "abort": "ended by SIGABRT",
    "hang": "stopped after it had said nothing for 2 s",
    "hang in C": "stopped after it had said nothing for 2 s",
    "child": "exit status 3: child",
    "poison": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "fail": "ValueError: an error like any other",
    "exit": "exit status 0",
}
GOOD = ("first", "second", "third")


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


def apart(names: list[str], case: str = "", end_s: float = AMPLE_S) -> dict[str, worker.Row]:
    end = time.monotonic() + end_s
    return worker.measure_apart("fake_contenders", case, names, end=end, stall_s=STALL_S)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("case", ["", "late"])
@pytest.mark.parametrize("bad", SAID)
def test_a_fault_costs_its_own_row_alone(bad: str, case: str) -> None:
    rows = apart(["first", bad, "second"], case)
    assert rows[bad]["error"].startswith(SAID[bad])
    assert all("ms" in rows[name] for name in ("first", "second"))


def test_many_faults_cost_their_own_rows_alone() -> None:
    names = ["poison", "first", "segfault", "abort", "second", "fail", "third"]
    rows = apart(names)
    assert rows.keys() == set(names)
    assert {name for name, row in rows.items() if "error" not in row} == set(GOOD)
    assert len({rows[name]["process"] for name in GOOD}) == 1, "these share rounds"


def test_a_child_that_got_away_is_ended_too(capfd: pytest.CaptureFixture) -> None:
    rows = apart(["child", "first"])
    assert "ms" in rows["first"]
    pid = int(rows["child"]["error"].rpartition(" ")[2])
    assert not is_alive(pid)


def test_a_flood_is_cut(capfd: pytest.CaptureFixture) -> None:
    rows = apart(["flood", "first", "abort"])
    assert {name for name, row in rows.items() if "ms" in row} == {"flood", "first"}
    assert len(capfd.readouterr().out) < 3 * worker.SAID_BYTES


def test_what_cannot_be_imported_is_tried_once(capfd: pytest.CaptureFixture) -> None:
    end = time.monotonic() + AMPLE_S
    rows = worker.measure_apart("no_such_module", "", ["first", "second"], end=end)
    said = "exit status 1: ModuleNotFoundError: No module named 'no_such_module'"
    assert rows == {name: {"error": said} for name in ("first", "second")}
    assert capfd.readouterr().out.count("Traceback") == 1


def test_what_time_does_not_reach_is_not_an_error() -> None:
    rows = apart(["first", "hang", "second"], end_s=1.0)
    assert rows == {"hang": {"missing": "stopped after 1 s, when time was over"}}
    assert apart(["first"], end_s=-1.0) == {}


def test_the_same_in_this_process() -> None:
    def measure(case: None, names: list[str], notes: worker.Notes) -> None:
        for name in names:
            with notes.on(name):
                if name == "broken":
                    raise RuntimeError("CUDA error: unspecified launch failure")
        notes.begin(names[0])
        if names[0] == "bad":
            raise ValueError("late")
        for name in names:
            notes.row(name, {"ms": 1})

    rows = worker.measure_here(measure, None, ["bad", "good", "broken"])
    assert rows == {
        "broken": {"error": "RuntimeError: CUDA error: unspecified launch failure"},
        "bad": {"error": "ValueError: late"},
        "good": {"ms": 1},
    }


@pytest.mark.parametrize(
    "text, is_fault",
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("fusedrnn: persistent_forward failed: unspecified launch failure", True),
        ("CUDA error: device-side assert triggered", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("CUDA error: out of memory", False),
        ("fusedrnn: input must be a tensor", False),
    ],
)
def test_errors_that_cost_a_process_its_gpu(text: str, is_fault: bool) -> None:
    assert faults.names_fault(text) is is_fault


def test_a_log_keeps_its_beginning_and_its_end() -> None:
    file = io.BytesIO()
    log = contain.Log(file, first=100, last=200)
    everything = b"".join(b"%07d\n" % i for i in range(5000))
    for start in range(0, len(everything), 77):
        log.write(everything[start : start + 77])
        assert len(file.getvalue()) < 100 + 2 * 200 + 77 + 50
    log.finish()
    first, note, last = file.getvalue().partition(b"\n... %d bytes are left out here ...\n" % 39700)
    assert note
    assert (first, last) == (everything[:100], everything[-200:])


def test_a_short_log_is_whole() -> None:
    file = io.BytesIO()
    log = contain.Log(file, first=100, last=200)
    log.write(b"x" * 300)
    log.finish()
    assert file.getvalue() == b"x" * 300


@pytest.fixture
def run_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs stages of parts; whether all passed, and their outcomes by name."""
    names = ("gpu", "torch", "nvcc", "commit", "date")
    about = dict.fromkeys(names, "some") | {"torch_sees_gpu": True}
    monkeypatch.setattr(gpu_check, "about", lambda: about)

    def run(*stages: list[parts.Part], seconds: float = 600.0) -> tuple[bool, dict[str, Any]]:
        passed = gpu_check.Check(tmp_path, seconds).run(stages)
        outcomes = json.loads((tmp_path / "summary.json").read_text())["parts"]
        return passed, {outcome["part"]: outcome for outcome in outcomes}

    return run


def fake_part(name: str, limit_s: float = 60.0, **options: Any) -> parts.Part:
    code = f"import fake_contenders; fake_contenders.BAD[{name!r}]()"
    return parts.Part(name, limit_s, [sys.executable, "-c", code], **options)


@pytest.mark.slow
def test_a_check_ends_whatever_its_parts_do(
    run_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ENVIRONMENT_S", 0)
    good = parts.Part("good", 60, [sys.executable, "-c", "print('fine')"])
    passed, outcomes = run_check(
        [fake_part("hang", 3), fake_part("segfault"), fake_part("child")],
        [fake_part("hang in C", 1)],
        [fake_part("flood")],
        [good],
    )
    assert not passed
    notes = {name: outcome["note"] for name, outcome in outcomes.items()}
    assert notes["hang"].startswith("stopped after ")
    assert notes["segfault"] == "ended by SIGSEGV"
    assert notes["hang in C"].startswith("stopped after ")
    assert notes["good"] == "fine"
    assert [name for name, o in outcomes.items() if o["passed"]] == ["environment", "flood", "good"]
    assert not is_alive(int(notes["child"].rpartition(" ")[2]))
    log = (tmp_path / "log.txt").read_bytes()
    assert len(log) < 2 * sum(gpu_check.PART_BYTES), "what floods the log leaves room for others"
    assert b"fine" in log
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "summary.md", "log.txt"}


def test_stages_run_their_parts_at_the_same_time(run_check: Any, tmp_path: Path) -> None:
    """Two parts wait for each other."""
    code = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
    code += "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)"
    files = [str(tmp_path / name) for name in "ab"]
    stage = [
        parts.Part(name, 60, [sys.executable, "-c", code, *files[::order]])
        for name, order in (("one", 1), ("other", -1))
    ]
    passed, _ = run_check(stage)
    assert passed


def test_results_of_a_benchmark_go_into_the_summary(run_check: Any, tmp_path: Path) -> None:
    target = {"what": "time", "where": "here", "value": 2.0, "spread": "", "limit": 1.0}
    content = {
        "targets": [target | {"passed": False}],
        "failures": ["fusedrnn failed at T=1: an error"],
        "tables": ["**A table**"],
        "cases": [],
    }
    file = tmp_path / "speed.json"
    code = f"open({str(file)!r}, 'w').write({json.dumps(content)!r})"
    part = parts.Part(
        "speed", 60, [sys.executable, "-c", code], verdict=lambda _: parts.results(file)
    )
    passed, outcomes = run_check([part])
    assert not passed
    note = "0 of 1 targets met; 1 failures, the first: fusedrnn failed at T=1: an error"
    assert outcomes["speed"]["note"] == note
    text = (tmp_path / "summary.md").read_text()
    assert "- **failed**: fusedrnn failed at T=1: an error" in text
    assert "| time | here | 2  | ≤ 1.0 | missed |" in text
    assert "**A table**" in text
    assert json.loads((tmp_path / "summary.json").read_text())["speed"]["cases"] == []
    assert not file.exists()


TESTS = """
import pytest

@pytest.mark.parametrize("i", range(4))
def test_before(i):
    pass

def test_fault():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.parametrize("i", range(30))
def test_fails_at_length(i):
    line = "a line of the traceback"
    assert not line

@pytest.mark.parametrize("i", range(4))
def test_after(i):
    pass
"""


def pytest_of(tmp_path: Path, *options: str) -> str:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "bench.pytest_faults", "--tb=short"]
    command += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull]
    command += [*options, str(tmp_path / "test_it.py")]
    # pytest must not mistake this process for a worker of pytest-xdist.
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return run.stdout


def test_tests_end_where_the_gpu_is_lost(tmp_path: Path) -> None:
    said = pytest_of(tmp_path)
    assert "test_it.py::test_fault lost the GPU: CUDA error: an illegal memory access" in said
    assert "1 failed, 4 passed" in said


def test_of_many_failures_the_first_are_shown_at_length(tmp_path: Path) -> None:
    said = pytest_of(tmp_path, "-k", "not fault")
    assert said.count('line = "a line') + said.count("assert not line") == 20
    assert "30 failed, 8 passed" in said


def test_tests_go_on_in_a_new_process(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    said = pytest_of(tmp_path, "-n", "1", "--max-worker-restart=4", "-k", "not at_length")
    assert "8 passed" in said
    assert "1 passed" not in said.rpartition("8 passed")[2]
