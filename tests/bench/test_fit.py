"""The fit of costs finds the constants from which times were made."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cases, clock, fit, worker
from bench.report import NoProgress, Run
from bench.worker import Row
from fusedrnn import _helpers

GPU = "H100"
MODEL = _helpers.MODEL_US
FORWARD, BACKWARD = fit.Costs(20.0, 9.0, 1.5), fit.Costs(40.0, 100.0, 4.0)
ENQUEUEING = fit.Costs(30.0, 26.0, 0.0)
# Made-up microseconds of a step of forward, by configuration.
STEP_US = {fit.STEPWISE: 7.0, fit.ONE_TILE: 0.9, fit.SEVERAL_TILES: 1.7}
STEP_US |= {fit.SAVED: 0.9, fit.HAS_STATE: 0.9}


def time_us(costs: fit.Costs, place: fit.Place) -> float:
    seq_len, chunk_size = place
    return costs.call + seq_len / chunk_size * costs.chunk + seq_len * costs.step


def rows_of(step_us: dict[fit.Configuration, float]) -> dict[fit.Configuration, dict[str, Row]]:
    def row(configuration: fit.Configuration, place: fit.Place) -> Row:
        forward = fit.Costs(FORWARD.call, FORWARD.chunk, step_us[configuration])
        of = {fit.FORWARD: forward, fit.BACKWARD: BACKWARD, fit.ENQUEUEING: ENQUEUEING}
        return {
            f"{which}_ms": [time_us(of[which], place) / 1e3] * 3 for which in configuration.measured
        }

    return {
        configuration: {name: row(configuration, place) for name, place in fit.PLACES.items()}
        for configuration in step_us
    }


def products_us(configuration: fit.Configuration) -> float:
    """Time of GEMMs over chunks per step of forward; it grows with the steps."""
    step_us = fit.plan(configuration, fit.PLACES["T=1024 K=64"], GPU).forward.modelled_step_us
    return fit.modelled(configuration, GPU)[fit.FORWARD].step - step_us


def test_costs_are_those_that_times_were_made_from() -> None:
    found = fit.costs({place: time_us(BACKWARD, place) for place in fit.PLACES.values()})
    assert vars(found) == pytest.approx(vars(BACKWARD))


def test_costs_of_noisy_times_are_near() -> None:
    noise = iter((1.003, 0.997, 1.002, 0.998))
    times = {place: next(noise) * time_us(BACKWARD, place) for place in fit.PLACES.values()}
    found = fit.costs(times)
    assert found.step == pytest.approx(BACKWARD.step, rel=0.02)
    assert found.chunk == pytest.approx(BACKWARD.chunk, rel=0.2)


def test_the_model_has_the_constants_that_stand_beside() -> None:
    def step_us(configuration: fit.Configuration) -> float:
        place = fit.PLACES["T=1024 K=64"]
        return fit.plan(configuration, place, GPU).forward.modelled_step_us

    assert step_us(fit.STEPWISE) == pytest.approx(MODEL["launched"])
    assert fit.tiles(fit.ONE_TILE, GPU) == 1 < fit.tiles(fit.SEVERAL_TILES, GPU)
    assert step_us(fit.ONE_TILE) == pytest.approx(MODEL["exchange"] + MODEL["tile"])
    for configuration in fit.CONFIGURATIONS:
        for which in (fit.FORWARD, fit.BACKWARD):
            costs = fit.modelled(configuration, GPU)[which]
            of_chunk = fit.counts(configuration, which)
            expected = sum(MODEL[name] * of_chunk[name] for name in ("gemm", "launch", "kernel"))
            assert costs.chunk == pytest.approx(expected), "the GPU decides, and not the CPU"
            assert costs.call == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("configuration", fit.CONFIGURATIONS, ids=str)
def test_a_chunk_has_all_that_the_plan_says(configuration: fit.Configuration) -> None:
    """The CPU enqueues only GEMMs, the kernel and other launches, apart from single steps."""
    for which in (fit.FORWARD, fit.BACKWARD):
        of_chunk = fit.counts(configuration, which)
        in_steps = 1 if configuration.is_persistent else 2 * fit.CHUNKS[0]
        assert of_chunk["host"] == of_chunk["gemm"] + of_chunk["launch"] + in_steps
    assert fit.counts(configuration, fit.FORWARD)["gemm"] == 1
    assert fit.plan(configuration, (256, 64), GPU).backward.backend == configuration.backend


def test_the_cpu_keeps_a_gpu_s_queue_short() -> None:
    """CUDA's queue has room for 1,024 launches; the CPU waits if it is full."""
    most_chunks = max(fit.LENGTHS) // min(fit.CHUNKS)
    for configuration in fit.CONFIGURATIONS:
        if fit.ENQUEUEING in configuration.measured:
            assert most_chunks * fit.counts(configuration, fit.BACKWARD)["host"] < 1024


def test_constants_of_times_by_the_model_are_the_model_s() -> None:
    found = {c: fit.modelled(c, GPU) for c in fit.CONFIGURATIONS}
    assert fit.constants(found, GPU) == pytest.approx(MODEL)


def test_constants_of_times_by_other_constants_are_these() -> None:
    other = {name: us * (1.1 + 0.1 * i) for i, (name, us) in enumerate(MODEL.items())}
    more = {name: us - MODEL[name] for name, us in other.items()}

    def made(configuration: fit.Configuration) -> dict[str, fit.Costs]:
        costs, tiles = fit.modelled(configuration, GPU), 0
        if configuration.is_persistent:
            tiles = fit.tiles(configuration, GPU)
        found = {}
        for which, by_model in costs.items():
            if which == fit.ENQUEUEING:
                host = fit.counts(configuration, fit.BACKWARD)["host"]
                found[which] = fit.Costs(5, host * other["host"], 0)
                continue
            of_chunk = fit.counts(configuration, which)
            chunk = sum(more[name] * of_chunk[name] for name in ("gemm", "launch", "kernel"))
            step = more["launched"]
            if configuration.is_persistent:
                is_lstm = configuration.cell == "lstm"
                gates = 1 if which == fit.FORWARD else 3 + is_lstm
                step = more["exchange"] + more["tile"] * gates * tiles
                if is_lstm and which == fit.BACKWARD:
                    step += more["state"] * tiles
            found[which] = fit.Costs(7, by_model.chunk + chunk, by_model.step + step)
        return found

    assert fit.constants({c: made(c) for c in fit.CONFIGURATIONS}, GPU) == pytest.approx(other)


def test_report_has_what_was_measured_beside_the_model() -> None:
    tiles = fit.tiles(fit.SEVERAL_TILES, GPU)
    steps = STEP_US | {fit.SEVERAL_TILES: 0.7 + 0.2 * tiles}
    report = fit.report(rows_of({c: us + products_us(c) for c, us in steps.items()}), GPU)
    costs, constants = report.tables
    assert {len(row) for table in report.tables for row in table.rows} == {7, 3}
    assert costs.rows[1][:4] == ["gru, stepwise, B=16", "backward", "40.0", "100.0"]
    assert costs.rows[4][:4] == ["gru, persistent, B=16", "enqueueing", "30.0", "26.0"]
    assert [row[0] for row in constants.rows] == list(MODEL)
    assert all(all(row) for row in constants.rows), "every constant has been measured"
    measured = report.numbers["constants"]
    assert measured["launched"] == pytest.approx(7.0)
    assert measured["exchange"] == pytest.approx(0.7)
    assert measured["tile"] == pytest.approx(0.2)
    assert measured["host"] == pytest.approx(26 / fit.counts(fit.ONE_TILE, fit.BACKWARD)["host"])
    assert report.failures == []


def test_what_was_not_measured_is_a_failure_and_no_number() -> None:
    rows = rows_of(STEP_US)
    rows[fit.ONE_TILE]["T=256 K=64"] = {"error": "broken"}
    report = fit.report(rows, GPU)
    assert report.failures == ["gru, persistent, B=16, T=256 K=64: broken"]
    assert report.numbers["constants"].keys() == {"launched"}
    rows = rows_of(STEP_US)
    rows[fit.HAS_STATE]["T=256 K=64"] = {"error": "broken"}
    known = fit.report(rows, GPU).numbers["constants"].keys()
    assert known == MODEL.keys() - {"state", "gemm", "launch", "kernel"}


def test_rows_are_of_the_configuration_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds even if a process breaks after some of its rows."""
    of_all = rows_of(STEP_US)

    def measure_apart(module: str, job: int, names: list[str], **_: float) -> dict[str, Row]:
        of_job = {f"{c}, {place}": row for c in fit.JOBS[job] for place, row in of_all[c].items()}
        assert (module, set(names)) == ("bench.fit", set(of_job))
        return {name: of_job[name] for name in names[: -1 if job else None]}

    monkeypatch.setattr(fit, "measure_apart", measure_apart)
    monkeypatch.setattr(fit, "modelled", partial(_modelled, fit.modelled))
    monkeypatch.setattr(fit, "tiles", partial(_modelled, fit.tiles))
    options = argparse.Namespace(device="cuda", budget_s=100.0)
    run = Run(False, tmp_path, NoProgress(), options, {})
    report = fit.run_on_cuda(run)
    assert report.failures == [f"{fit.HAS_STATE}, T=1024 K=256: not reached within 100 s"]
    assert report.numbers["constants"].keys() >= {"launched", "exchange", "tile", "host"}
    assert (tmp_path / "fit.json").exists()


def test_what_is_measured_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a GPU; it has only single steps, whose queue a GPU could not hold."""

    class Step(cases.TrainingStep):
        def __init__(self, make: Any, shape: cases.Shape, device: str, dtype: torch.dtype) -> None:
            assert device == "cuda"
            super().__init__(make, shape, "cpu", dtype)

    job = (fit.STEPWISE, fit.Configuration("lstm", "stepwise", 2, recompute=False))
    monkeypatch.setattr(fit, "JOBS", (job,))
    monkeypatch.setattr(fit, "PLACES", {"T=4 K=2": (4, 2)})
    monkeypatch.setattr(fit, "ROUNDS", clock.LEAST_ROUNDS)
    monkeypatch.setattr(fit, "TrainingStep", Step)
    monkeypatch.setattr(fit, "set_up_torch", lambda: None)
    monkeypatch.setattr(fit, "cuda_time_ms", clock.time_ms)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    names = [f"{configuration}, T=4 K=2" for configuration in job]
    for measured in ((fit.FORWARD, fit.BACKWARD), (fit.FORWARD, fit.BACKWARD, fit.ENQUEUEING)):
        monkeypatch.setattr(fit.Configuration, "measured", measured)
        rows = worker.measure_here(fit.measure, 0, names)
        assert list(rows) == names
        for row in rows.values():
            assert list(row) == [f"{which}_ms" for which in measured]
            assert {len(times_ms) for times_ms in row.values()} == {clock.LEAST_ROUNDS}


def _modelled(of: Any, configuration: fit.Configuration, device: str) -> Any:
    """The modelled costs of a GPU that need not be in this machine."""
    assert device == "cuda"
    return of(configuration, GPU)
