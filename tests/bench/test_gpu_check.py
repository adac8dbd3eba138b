"""The check for a GPU survives crashes, hangs, floods of output, a lost GPU, and its own end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


def apart(names: list[str], case: str = "", end_s: float = AMPLE_S) -> dict[str, worker.Row]:
    end = time.monotonic() + end_s
    return worker.measure_apart("fake_contenders", case, names, end=end, stall_s=STALL_S)


def has_ended(pid: int) -> bool:
    """Whether a process that has been killed ends, which takes a moment."""
    end = time.monotonic() + AMPLE_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("case", ["", pytest.param("late", marks=pytest.mark.slow)])
def test_a_fault_costs_its_own_row_alone(case: str, capfd: pytest.CaptureFixture) -> None:
    bad = list(SAID)
    rows = apart([*bad[:4], "first", *bad[4:], "second", "flood"], case)
    assert {name: rows[name]["error"][: len(said)] for name, said in SAID.items()} == SAID
    good = {name for name, row in rows.items() if "ms" in row}
    assert good == {"first", "second", "flood"}
    assert len({rows[name]["process"] for name in good}) == 1, "these share rounds"
    assert has_ended(int(rows["child"]["error"].rpartition(" ")[2])), "its child got away"
    assert len(capfd.readouterr().out) < 20 * worker.SAID_BYTES, "a flood is cut"


def test_what_cannot_be_reached_is_tried_once(capfd: pytest.CaptureFixture) -> None:
    end = time.monotonic() + AMPLE_S
    rows = worker.measure_apart("no_such_module", "", ["first", "second"], end=end)
    said = "exit status 1: ModuleNotFoundError: No module named 'no_such_module'"
    assert rows == {name: {"error": said} for name in ("first", "second")}
    assert capfd.readouterr().out.count("Traceback") == 1
    rows = apart(["first", "hang", "second"], end_s=1.0)
    assert rows == {"hang": {"missing": "stopped after 1 s, when time was over"}}
    assert apart(["first"], end_s=-1.0) == {}


def test_errors_that_cost_a_process_its_gpu() -> None:
    lost = ["CUDA error: an illegal memory access was encountered"]
    lost += ["fusedrnn: persistent_forward failed: unspecified launch failure"]
    lost += [
        "CUDA error: device-side assert triggered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ]
    kept = ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: out of memory"]
    kept += ["fusedrnn: input must be a tensor"]
    assert [text for text in (*lost, *kept) if faults.names_fault(text)] == lost


ABOUT = dict.fromkeys(("gpu", "torch", "nvcc", "commit", "date"), "some") | {"torch_sees_gpu": True}
TARGET = {"what": "time", "where": "here", "value": 2.0, "spread": "", "limit": 1.0}
RESULT = {
    "targets": [TARGET | {"passed": False}],
    "failures": ["fusedrnn failed at T=1: an error"],
    "tables": ["**A table**"],
    "cases": [],
}


def python_part(name: str, code: str, limit_s: float = 60, **options: Any) -> parts.Part:
    return parts.Part(name, limit_s, [sys.executable, "-c", code], **options)


def fake_part(name: str, limit_s: float = 60) -> parts.Part:
    return python_part(name, f"import fake_contenders; fake_contenders.BAD[{name!r}]()", limit_s)


@pytest.fixture
def run_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs stages of parts; whether all passed, and their outcomes by name."""
    monkeypatch.setattr(gpu_check, "ENVIRONMENT_S", 0)
    monkeypatch.setattr(gpu_check, "about", lambda: ABOUT)

    def run(*stages: list[parts.Part]) -> tuple[bool, dict[str, Any]]:
        passed = gpu_check.Check(tmp_path, 600).run(stages)
        outcomes = json.loads((tmp_path / "summary.json").read_text())["parts"]
        return passed, {outcome["part"]: outcome for outcome in outcomes}

    return run


def test_a_check_ends_whatever_its_parts_do(run_check: Any, tmp_path: Path) -> None:
    """A part may crash, hang with its children, flood, lack its command, or lack the time."""
    file = tmp_path / "speed.json"
    write = f"open({str(file)!r}, 'w').write({json.dumps(RESULT)!r})"
    passed, outcomes = run_check(
        [fake_part("hang", 2), fake_part("hang in C", 2)],
        [fake_part("segfault"), fake_part("child")],
        [parts.Part("lacks", 1, ["no-such-command"])],
        [python_part("long", "print('never')", 3600)],
        [fake_part("flood")],
        [python_part("speed", write, verdict=lambda _: parts.results(file))],
        [python_part("denied", "print('fine')", verdict=lambda said: (False, f"{said[:4]}, but"))],
        [python_part("good", "import os; print(os.environ['A'])", env={"A": "fine"})],
    )
    assert not passed
    notes = {name: outcome["note"] for name, outcome in outcomes.items()}
    assert has_ended(int(notes.pop("child").rpartition(" ")[2]))
    assert (
        notes.items()
        >= {
            "hang": "stopped after 2 s",
            "hang in C": "stopped after 2 s",
            "segfault": "ended by SIGSEGV",
            "lacks": "no-such-command: No such file or directory",
            "speed": "0 of 1 targets met; 1 failures, the first: fusedrnn failed at T=1: an error",
            "denied": "fine, but",
            "good": "fine",
        }.items()
    )
    assert notes["long"].startswith("not begun: ")
    assert [name for name, o in outcomes.items() if o["passed"]] == ["environment", "flood", "good"]
    log = (tmp_path / "log.txt").read_bytes()
    assert len(log) < 2 * sum(gpu_check.PART_BYTES), "what floods the log leaves room for others"
    assert b"fine" in log
    text = (tmp_path / "summary.md").read_text()
    for line in ("- **failed**: fusedrnn failed at T=1: an error", "**A table**", "1 of speed."):
        assert line in text
    assert json.loads((tmp_path / "summary.json").read_text())["speed"]["cases"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "summary.md", "log.txt"}


def test_parts_of_a_stage_run_at_the_same_time(run_check: Any, tmp_path: Path) -> None:
    """Two parts wait for each other."""
    code = "import pathlib, time\npathlib.Path({!r}).touch()\n"
    code += "while not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    files = [str(tmp_path / name) for name in "ab"]
    stage = [python_part(str(order), code.format(*files[::order])) for order in (1, -1)]
    assert run_check(stage)[0]


KILLED = """
import sys
from pathlib import Path
from bench import gpu_check, parts

out, about, result = Path(sys.argv[1]), eval(sys.argv[2]), sys.argv[3]
work = f"import time; open({str(out / 'speed.json')!r}, 'w').write({result!r}); print('words');"
known = {"build": "print('built')", "speed": work + "time.sleep(600)", "fit": "print('never')"}
known = {name: parts.Part(name, 60, [sys.executable, "-c", code]) for name, code in known.items()}
gpu_check.about, gpu_check.parts = lambda: about, lambda out: known
sys.argv[2:] = ["--parts", "build,speed,fit"]
gpu_check.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_what_was_measured(tmp_path: Path, number: int) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path), repr(ABOUT), json.dumps(RESULT)]
    process = subprocess.Popen(words, cwd=ROOT)
    end = time.monotonic() + AMPLE_S
    running = tmp_path / gpu_check.RUNNING_LOG
    while not (running.exists() and b"\nwords" in running.read_bytes()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    status = process.wait(AMPLE_S)
    summary = json.loads((tmp_path / "summary.json").read_text())
    notes = {outcome["part"]: outcome["note"] for outcome in summary["parts"]}
    assert notes["build"] == "built"
    if number == signal.SIGTERM:
        assert status == 1
        assert summary["running"] == []
        assert summary["speed"]["failures"] == RESULT["failures"]
        assert notes["fit"] == "not begun: the run was ended by SIGTERM"
        return
    for pid in contain._marked("FUSEDRNN_RUN_"):  # nothing has ended what it ran
        with contextlib.suppress(OSError):
            if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
    assert summary["running"] == ["speed"]
    file = tmp_path / "speed.json"
    assert parts.content_of(file) == RESULT
    file.write_text(file.read_text()[:-9])
    assert parts.results(file) == (False, "speed.json cannot be read")


def test_what_pytest_says_at_its_end() -> None:
    said = ["4 passed, 1 skipped, 2 warnings in 0.52s", "1 failed, 3 passed in 75.00s (0:01:15)"]
    said += ["2 skipped in 0.01s", "1 error in 0.10s"]
    found = [parts.test_results(f"a test passed in 3 steps\n===== {one} =====\n") for one in said]
    assert found == list(zip([True, True, False, False], said, strict=True))


TESTS = """
import pytest

def test_fault():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.parametrize("i", range(34))
def test_after(i):
    line = "a line of the traceback"
    assert i < 4 or not line
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, said",
    [((), "test_it.py::test_fault lost the GPU: CUDA error"), (("-n", "1"), ", 4 passed")],
)
def test_tests_end_or_go_on_where_the_gpu_is_lost(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    """Another process goes on, if pytest-xdist is there; of many failures the first are shown."""
    if options:
        pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "bench.pytest_faults", "--tb=short"]
    command += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull]
    command += [*options, str(tmp_path / "test_it.py")]
    # pytest must not mistake this process for a worker of pytest-xdist.
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert said in run.stdout
    assert run.stdout.count("or not line") <= 20
