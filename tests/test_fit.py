"""The fit of costs finds the constants that times were made from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusedrnn import _helpers

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last, so that fusedrnn is the installed one
from bench import fit  # noqa: E402
from bench.worker import Row  # noqa: E402

GPU = "H100"
MODEL = _helpers.MODEL_US
FORWARD, BACKWARD = fit.Costs(20.0, 9.0, 1.5), fit.Costs(40.0, 100.0, 4.0)


def time_us(costs: fit.Costs, place: fit.Place) -> float:
    seq_len, chunk_size = place
    return costs.call + seq_len / chunk_size * costs.chunk + seq_len * costs.step


def rows_of(step_us: dict[fit.Configuration, float]) -> dict[fit.Configuration, dict[str, Row]]:
    """As if each configuration had this time for a step of forward."""

    def row(step: float, place: fit.Place) -> Row:
        forward = time_us(fit.Costs(FORWARD.call, FORWARD.chunk, step), place) / 1e3
        return {"forward_ms": [forward] * 3, "backward_ms": [time_us(BACKWARD, place) / 1e3] * 3}

    return {
        configuration: {name: row(step, place) for name, place in fit.PLACES.items()}
        for configuration, step in step_us.items()
    }


def test_costs_are_those_that_times_were_made_from() -> None:
    found = fit.costs({place: time_us(BACKWARD, place) for place in fit.PLACES.values()})
    assert vars(found) == pytest.approx(vars(BACKWARD))


def test_costs_of_noisy_times_are_near() -> None:
    noise = iter((1.01, 0.99, 1.005, 0.995))
    times = {place: next(noise) * time_us(BACKWARD, place) for place in fit.PLACES.values()}
    found = fit.costs(times)
    assert found.step == pytest.approx(BACKWARD.step, rel=0.1)
    assert found.chunk == pytest.approx(BACKWARD.chunk, rel=0.2)


def test_the_model_has_the_constants_that_stand_beside() -> None:
    forward = fit.modelled(fit.STEPWISE, GPU)["forward"]
    assert forward.step == pytest.approx(MODEL["launched"])
    assert forward.call == pytest.approx(0, abs=1e-6)
    tiles = fit.tiles(fit.ONE_TILE, GPU)
    assert tiles == 1 < fit.tiles(fit.SEVERAL_TILES, GPU)
    forward = fit.modelled(fit.ONE_TILE, GPU)["forward"]
    assert forward.step == pytest.approx(MODEL["exchange"] + MODEL["tile"])
    gemms = fit.modelled(fit.STEPWISE, GPU)["backward"].chunk / MODEL["gemm"]
    assert gemms == pytest.approx(round(gemms))
    assert round(gemms) > 1


def test_constants_of_times_by_the_model_are_the_model_s() -> None:
    found = {c: fit.modelled(c, GPU) for c in fit.CONFIGURATIONS}
    assert fit.constants(found, GPU) == pytest.approx(MODEL)


def test_report_has_what_was_measured_beside_the_model() -> None:
    tiles = fit.tiles(fit.SEVERAL_TILES, GPU)
    step_us = {fit.STEPWISE: 7.0, fit.ONE_TILE: 0.9, fit.SEVERAL_TILES: 0.7 + 0.2 * tiles}
    report = fit.report(rows_of(step_us), GPU)
    costs, constants = report.tables
    assert {len(row) for table in report.tables for row in table.rows} == {7, 3}
    assert costs.rows[1][:4] == ["stepwise, B=16", "backward", "40.0", "100.0"]
    assert [row[0] for row in constants.rows] == list(MODEL)
    measured = report.numbers["constants"]
    assert measured["launched"] == pytest.approx(7.0)
    assert measured["exchange"] == pytest.approx(0.7)
    assert measured["tile"] == pytest.approx(0.2)
    assert report.failures == []


def test_what_was_not_measured_is_a_failure_and_no_number() -> None:
    rows = rows_of({fit.STEPWISE: 7.0, fit.ONE_TILE: 0.9, fit.SEVERAL_TILES: 1.7})
    rows[fit.ONE_TILE]["T=64 K=16"] = {"error": "broken"}
    report = fit.report(rows, GPU)
    assert report.failures == ["persistent, B=16, T=64 K=16: broken"]
    assert report.numbers["constants"].keys() == {"launched", "gemm"}
