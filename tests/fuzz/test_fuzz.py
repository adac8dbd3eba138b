"""Some random calls, and a check that the programs find every kind of fault."""

import itertools

import pytest

from fuzz import batches, sanitized, steps
from fuzz.faults import FAULTS, OVERRUN

needs_sanitizer = pytest.mark.skipif(
    not sanitized.is_possible(), reason="there is no address sanitizer for this compiler and torch"
)


def check(program, count, is_sanitized=False, first=0):
    records = list(batches.run(program, first, count, is_sanitized=is_sanitized))
    assert [record.case for record in records] == list(range(first, first + count))
    wrong = [
        f"python -m fuzz {program} --case {r.case}{' --sanitized' * is_sanitized}: {r.outcome}"
        for r in records
        if r.outcome.findings
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:20]])


# Some in CI and many more nightly. They are the same each time; `make fuzz SEED=` tries others.
CI, LATER = pytest.mark.slow, pytest.mark.nightly


def cases(mark, program, *edges):
    pairs = itertools.pairwise(edges)
    return [pytest.param(program, a, b - a, marks=mark, id=f"{program} {a}") for a, b in pairs]


CALLS = cases(CI, "valid", 0, 50) + cases(LATER, "valid", 50, 200)
CALLS += cases(CI, "bad", 0, 400) + cases(LATER, "bad", 400, 800)
CALLS += cases(CI, "steps", 0, 30) + cases(LATER, "steps", 30, *range(200, 2001, 200))
CALLS += cases(CI, "scans", 0, 15) + cases(LATER, "scans", 15, *range(200, 1001, 200))
# By a library that takes minutes to build, for which CI has no time.
SANITIZED = cases(LATER, "valid", 0, 40) + cases(LATER, "bad", 0, 80, 200)


@pytest.mark.parametrize(("program", "first", "count"), CALLS)
def test_random_calls(program, first, count):
    check(program, count, first=first)


def test_random_steps_are_wrong_without_verification(monkeypatch):
    """So the judge sees what verification is for; no case is compiled by the C++ compiler.

    The compiler has a fault: what is detached keeps its derivative.
    """
    monkeypatch.setattr("fusedrnn._front.flat_step.stop", lambda tensor: tensor.clone())
    monkeypatch.setattr("fusedrnn._compiler.pipeline.verify", lambda *given: None)
    monkeypatch.setattr(steps, "BUILT", 10**9)
    monkeypatch.setattr(steps, "TRICKS", {steps.step_tricks.without_gradient: 1})
    kinds = (kind for case in range(1, 20) for kind, _ in steps.Trial(case).judged()[2])
    assert "wrong" in kinds


@needs_sanitizer
@pytest.mark.parametrize(("program", "first", "count"), SANITIZED)
def test_random_calls_under_sanitizers(program, first, count):
    check(program, count, first=first, is_sanitized=True)


@pytest.mark.slow
def test_every_fault_is_found():
    records = list(batches.run("faults", 0, len(FAULTS), hang_seconds=20))
    assert len(records) == len(FAULTS)
    for record, (_, expected) in zip(records, FAULTS, strict=True):
        kinds = {kind for kind, _ in record.outcome.findings}
        assert kinds == ({expected} if expected else set()), record


@pytest.mark.nightly
@needs_sanitizer
def test_red_zones_between_arrays_are_found():
    (record,) = batches.run("faults", OVERRUN, 1, is_sanitized=True)
    ((kind, text),) = record.outcome.findings
    assert kind == "crash" and "use-after-poison" in text and "write_behind" in text
