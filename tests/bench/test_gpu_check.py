"""The check for a GPU survives crashes, hangs, floods of output, a lost GPU, and its own end."""

from __future__ import annotations

import io
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


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("case", ["", pytest.param("late", marks=pytest.mark.slow)])
def test_a_fault_costs_its_own_row_alone(case: str, capfd: pytest.CaptureFixture) -> None:
    bad = list(SAID)
    rows = apart([*bad[:4], "first", *bad[4:], "second", "flood"], case)
    assert {name: rows[name]["error"][: len(said)] for name, said in SAID.items()} == SAID
    good = {name for name, row in rows.items() if "ms" in row}
    assert good == {"first", "second", "flood"}
    assert len({rows[name]["process"] for name in good}) == 1, "these share rounds"
    assert not is_alive(int(rows["child"]["error"].rpartition(" ")[2])), "it got away"
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
    assert not is_alive(int(notes.pop("child").rpartition(" ")[2]))
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
    for line in ("- **failed**: fusedrnn failed at T=1: an error", "**A table**", "| missed |"):
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
        if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    assert summary["running"] == ["speed"]
    assert parts.content_of(tmp_path / "speed.json") == RESULT


@pytest.mark.parametrize(
    "said, passed",
    [
        ("4 passed, 1 skipped, 3 deselected, 2 warnings in 0.52s", True),
        ("1 failed, 3 passed in 75.00s (0:01:15)", True),  # the exit status says that it failed
        ("2 skipped in 0.01s", False),
        ("1 error in 0.10s", False),
    ],
)
def test_what_pytest_says_at_its_end(said: str, passed: bool) -> None:
    assert parts.test_results(f"a test passed in 3 steps\n===== {said} =====\n") == (passed, said)


TESTS = """
import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, said",
    [
        ((), "test_it.py::test_fault lost the GPU: CUDA error: an illegal memory access"),
        (("-n", "1", "--max-worker-restart=4", "-k", "not at_length"), "4 passed"),
        (("-k", "not fault"), "30 failed, 4 passed"),
    ],
)
def test_tests_end_or_go_on_where_the_gpu_is_lost(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    """Another process goes on, if pytest-xdist is there; of many failures the first are shown."""
    if "-n" in options:
        pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "bench.pytest_faults", "--tb=short"]
    command += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull]
    command += [*options, str(tmp_path / "test_it.py")]
    # pytest must not mistake this process for a worker of pytest-xdist.
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert said in run.stdout
    assert run.stdout.count('line = "a line') + run.stdout.count("assert not line") <= 20
