"""The clocks of persistent kernels change nothing and leave nothing out; and their tables."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import pytest
from emulator.persistent import PHASES, PLAIN_PHASES, VARIANTS_OF_PHASES
from nvcc import NVCC, needs_nvcc

from bench import phase_programs, phases, ways
from bench.phase_programs import CELLS, CLOCKS, PASSES, PLAIN, PROBES, VARIANTS, Programs
from bench.phases import PACKAGE, POINTS, VARIANT_NAMES, Case
from bench.report import NoProgress, Run

STEPS, BATCH, HIDDEN = 6, 11, 40  # two groups, one of a tile that is not full
CASES = tuple(Case(cell, direction, BATCH, HIDDEN) for cell in CELLS for direction in PASSES)


def script(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@pytest.fixture
def emulated(tmp_path: Path) -> Programs:
    """All programs, with the emulation in the place of a GPU."""
    builds = {CLOCKS: PHASES, PLAIN: PLAIN_PHASES, VARIANTS: VARIANTS_OF_PHASES}
    for schedule, (kind, build) in enumerate(builds.items()):
        made = build.make()
        for case in CASES:
            name = phase_programs.name_of(case.cell, case.direction, kind)
            command = f"exec {made} {case.cell} {case.direction} $1 $2 $3 {schedule}"
            script(tmp_path / name, command)
    for name in {*PROBES.values()}:
        script(tmp_path / name, "echo found $1")
    return Programs(tmp_path)


def a_run(out: Path, *, quick: bool = False) -> Run:
    options = argparse.Namespace(device="cuda", budget_s=600)
    return Run(quick, out, NoProgress(), options, about={})


@pytest.mark.slow  # compiles three programs
def test_clocks_change_no_result_and_phases_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, emulated: Programs
) -> None:
    monkeypatch.setattr(phases, "CASES", CASES)
    monkeypatch.setattr(phases, "chunk_steps", lambda case, device: STEPS)
    monkeypatch.setattr(phases, "nvidia_smi", lambda field: "9.0")
    monkeypatch.setattr(phases, "ready", lambda architecture: emulated)
    assert phases.run_on_cuda(a_run(tmp_path)).failures == []
    rows = json.loads((tmp_path / "phases.json").read_text())["rows"]
    assert len(rows) == 2 * len(CASES) + len(PROBES)
    for case, row in zip(CASES, rows, strict=False):
        assert (row["cell"], row["direction"], row["steps"]) == (case.cell, case.direction, STEPS)
        assert row["us_per_step_without_clocks"] == 0, "the emulation has no time"
        observers = {(of["block"], of["warp"]): of for of in row["observers"]}
        assert list(observers) == [(b, w) for b in (0, 1, 3, 5) for w in (0, 7)]
        for (_, warp), observer in observers.items():
            stages = observer["stages"]
            total = sum(stage[point] for stage in stages for point in POINTS)
            assert total == pytest.approx(observer["cycles"], rel=1e-12)
            for number, stage in enumerate(stages):
                # h before the chunk is not waited for; backward also makes the gradient of that h
                waits = STEPS - (case.direction == "forward" and number == 0)
                assert stage["questions"] >= waits / STEPS
                passed = [point for point in POINTS if stage[point] > 0]
                assert passed == list(POINTS if warp == 0 else POINTS[:5])
    for case, row in zip(CASES, rows[len(CASES) :], strict=False):
        assert (row["cell"], row["direction"]) == (case.cell, case.direction)
        names = VARIANT_NAMES if case.direction == "backward" else VARIANT_NAMES[:2]
        assert row["us_per_step_of_variants"] == dict.fromkeys(names, 0)
    assert {row["probe"]: row["said"] for row in rows[2 * len(CASES) :]} == {
        name: [f"found {name}"] for name in PROBES
    }


def test_a_variant_with_other_results_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = CASES[0]
    runs = [
        {"name": name, "hash": hash_of, "us": us}
        for name, hash_of, us in (
            (PACKAGE, "1", [6, 12]),
            ("ring", "2", [6]),
            (PACKAGE, "1", [18]),
            ("ring", "1", [24]),
        )
    ]
    name = phase_programs.name_of(case.cell, case.direction, VARIANTS)
    script(tmp_path / name, f"echo '{json.dumps({'variants': runs})}'")
    monkeypatch.setattr(phases, "chunk_steps", lambda case, device: STEPS)
    row = phases.compared(case, Programs(tmp_path), time.monotonic() + 600)
    assert row["us_per_step_of_variants"] == {PACKAGE: 2, "ring": 2.5}
    assert row["wrong"] == "other results than the package: ring"


def test_an_error_costs_one_row(tmp_path: Path) -> None:
    end = time.monotonic() + 600
    programs = Programs(tmp_path, {"other": "does not compile"})
    script(tmp_path / "one", "echo CUDA error: no; exit 1")
    assert programs.run("one", end=end) == {"error": "exit status 1: CUDA error: no"}
    assert programs.run("other", end=end) == {"error": "does not compile"}
    assert programs.run("none", end=end)["error"].startswith("FileNotFoundError")
    script(tmp_path / "one", "sleep 600")
    assert programs.run("one", end=0)["missing"].startswith("stopped after")


def test_tables(tmp_path: Path) -> None:
    cases = phases.CASES[:4]
    observers = [
        {
            "block": 0,
            "warp": warp,
            "cycles": 28.0,
            "stages": [{"stage": "gru", "questions": 1.5} | dict.fromkeys(POINTS, 3.5)],
        }
        for warp in (0, 7)
    ]
    measured = {"steps": 176, "tiles": 1, "depth": 1, "us_per_step": 1.3, "observers": observers}
    rows = {
        cases[0]: measured | {"us_per_step_without_clocks": 1.25, "wrong": "other results"},
        cases[1]: measured | {"without_clocks": "not compiled"},
        cases[2]: {"error": "exit status 1"},
        cases[3]: {"missing": "not reached"},
    }
    found = phases.Found(a_run(tmp_path))
    found.rows = rows
    found.probes = {"clock": {"said": ["clock: 1980 MHz"]}}
    found.variants = {
        cases[0]: {"us_per_step_of_variants": dict.fromkeys(VARIANT_NAMES[:2], 1.5)},
        cases[1]: {"missing": "not reached"},
    }
    report = found.report()
    assert report.failures == [f"{cases[0]}: other results", f"{cases[2]}: exit status 1"]
    cycles, variants, probes = report.tables
    assert [row[1:] for row in variants.rows] == [
        ["1.50", "1.50", "", ""],
        ["not reached", "", "", ""],
    ]
    first, last, *others = cycles.rows
    chunk = ["176, 1, 1", *["4"] * 8, "28", "1.50", "1.30", "1.25"]
    assert first == ["gru forward, B=16 H=256: gru, warp 0", *chunk]
    assert last == ["gru, warp 7", "", *["4"] * 8, "28", "1.50", "", ""]
    assert [row[1] for row in others[2:]] == ["exit status 1", "not reached"]
    assert {len(row) for row in cycles.rows} == {len(cycles.columns)}
    assert probes.rows == [["clock", "clock: 1980 MHz"]]


def test_tables_of_the_documents_are_those_that_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways.main()
    document = (ways.ROOT / "docs" / "gpu.md").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 * 2 + 5 + 5 + 20 + 15
    assert [line for line in lines if line not in document] == []


def test_programs_are_built_for_the_sources_and_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = tmp_path / "nvcc"
    script(nvcc, 'for name; do :; done; printf "#!/bin/sh\necho built" >"$name"')
    monkeypatch.setattr(phase_programs, "cuda_tool", lambda name: str(nvcc))
    folder = tmp_path / "programs"
    assert phase_programs.build(folder, "90") == Programs(folder)
    assert all((folder / name).exists() for name in phase_programs.commands())
    assert phase_programs.fits(folder, "90") and not phase_programs.fits(folder, "80")
    monkeypatch.setattr(phase_programs, "BUILT_BEFORE", folder)
    assert phase_programs.ready("90") == Programs(folder)
    assert Programs(folder).run("smoke", end=time.monotonic() + 600) == {"said": ["built"]}

    script(nvcc, 'echo "error: $*"; case "$*" in *lstm*) exit 1; esac; ' + nvcc.read_text())
    found = phase_programs.build(folder, "90")
    assert not phase_programs.fits(folder, "90")
    assert set(found.errors) == {name for name in phase_programs.commands() if "lstm" in name}
    assert "does not compile: exit status 1: error:" in found.errors["lstm_forward_plain"]


@needs_nvcc
@pytest.mark.nightly
@pytest.mark.parametrize("name", phase_programs.commands())
def test_programs_compile_without_spills(tmp_path: Path, name: str) -> None:
    """And without FUSEDRNN_PHASE_CLOCKS nothing is left of the clocks."""
    arguments = [NVCC, *phase_programs.FLAGS, "-arch=sm_90", *phase_programs.commands()[name]]
    output = ["-Xptxas=-v", "--keep", f"--keep-dir={tmp_path}", "-o", str(tmp_path / name)]
    root = phase_programs.ROOT
    done = subprocess.run([*arguments, *output], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bytes spill stores" in done.stderr
    assert done.stderr.count("bytes spill stores") == done.stderr.count(" 0 bytes spill stores")
    (ptx,) = tmp_path.glob("*.ptx")
    if name not in PROBES.values():
        assert ("%clock64" in ptx.read_text()) == name.endswith(CLOCKS)
    assert subprocess.run([tmp_path / name, "no such probe"]).returncode in (1, 2)
