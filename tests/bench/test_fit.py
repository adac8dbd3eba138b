"""The fit of costs finds the constants from which times were made."""

from __future__ import annotations

import pytest

from bench import fit
from fusedrnn import _helpers

GPU = "H100"
MODEL = _helpers.MODEL_US


@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_costs_are_those_that_times_were_made_from(noise: float) -> None:
    made = fit.Costs(40.0, 100.0, 4.0)
    times = {
        (t, k): (made.call + t / k * made.chunk + t * made.step) * (1 + (-1) ** i * noise)
        for i, (t, k) in enumerate(fit.PLACES.values())
    }
    found = fit.costs(times)
    assert found.step == pytest.approx(made.step, rel=1e-6 + 7 * noise)
    assert found.chunk == pytest.approx(made.chunk, rel=1e-6 + 70 * noise)


def test_the_model_has_the_constants_that_stand_beside() -> None:
    """A chunk has all that the plan says; a GPU decides how long it takes, and not the CPU."""
    for configuration in fit.CONFIGURATIONS:
        for which in (fit.FORWARD, fit.BACKWARD):
            of_chunk, costs = fit.counts(configuration, which), fit.modelled(configuration, GPU)
            expected = sum(MODEL[name] * of_chunk[name] for name in ("gemm", "launch", "kernel"))
            assert costs[which].chunk == pytest.approx(expected)
            assert costs[which].call == pytest.approx(0, abs=1e-6)
            in_steps = 1 if configuration.is_persistent else 2 * fit.CHUNKS[0]
            assert of_chunk["host"] == of_chunk["gemm"] + of_chunk["launch"] + in_steps
        if fit.ENQUEUEING in configuration.measured:  # CUDA's queue has room for 1,024 launches
            most_chunks = max(fit.LENGTHS) // min(fit.CHUNKS)
            assert most_chunks * fit.counts(configuration, fit.BACKWARD)["host"] < 1024
    assert fit.tiles(fit.ONE_TILE, GPU) == 1 < fit.tiles(fit.SEVERAL_TILES, GPU)


@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_constants_are_those_that_times_were_made_from(scale: float) -> None:
    """The model's, or others."""
    other = {name: us * (1 + scale * (i + 1)) for i, (name, us) in enumerate(MODEL.items())}
    more = {name: us - MODEL[name] for name, us in other.items()}

    def made(configuration: fit.Configuration) -> dict[str, fit.Costs]:
        found = {}
        for which, by_model in fit.modelled(configuration, GPU).items():
            if which == fit.ENQUEUEING:
                host = fit.counts(configuration, fit.BACKWARD)["host"]
                found[which] = fit.Costs(5, host * other["host"], 0)
                continue
            of_chunk = fit.counts(configuration, which)
            chunk = sum(more[name] * of_chunk[name] for name in ("gemm", "launch", "kernel"))
            step = more["launched"]
            if configuration.is_persistent:
                tiles = fit.tiles(configuration, GPU)
                is_lstm = configuration.cell == "lstm"
                gates = 1 if which == fit.FORWARD else 3 + is_lstm
                step = more["exchange"] + more["tile"] * gates * tiles
                if is_lstm and which == fit.BACKWARD:
                    step += more["state"] * tiles
            found[which] = fit.Costs(7, by_model.chunk + chunk, by_model.step + step)
        return found

    times = {c: made(c) for c in fit.CONFIGURATIONS}
    for size in fit.SIZES if scale == 0 else fit.SIZES[:1]:  # a model of its own for each size
        # Single steps are measured at the first size alone.
        missing = {} if size == fit.SIZES[0] else {"launched": other["launched"]}
        assert fit.constants(times, GPU, size) | missing == pytest.approx(other)


def test_what_was_not_measured_is_a_failure_and_no_number() -> None:
    row = {f"{which}_ms": [1.0] * 3 for which in (fit.FORWARD, fit.BACKWARD, fit.ENQUEUEING)}
    rows = {c: dict.fromkeys(fit.PLACES, row) for c in (fit.STEPWISE, fit.ONE_TILE)}
    rows[fit.ONE_TILE] = rows[fit.ONE_TILE] | {"T=256 K=64": {"error": "broken"}}
    report = fit.report(rows, GPU)
    assert report.failures == ["gru, persistent, B=16 H=256, T=256 K=64: broken"]
    assert report.numbers["constants"][256].keys() == {"launched"}
