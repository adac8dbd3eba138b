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


def budget(**parts):
    """Cases of each program: some in CI, and after them many more nightly, in parts of a minute.

    All of them are the same each time. ``make fuzz SEED=`` tries others.
    """
    return [
        pytest.param(
            program, part[0], part[-1] - part[0], marks=mark, id=f"{program} from {part[0]}"
        )
        for program, edges in parts.items()
        for mark, parts in zip((pytest.mark.slow, pytest.mark.nightly), edges, strict=True)
        for part in itertools.pairwise(parts)
    ]


@pytest.mark.parametrize(
    ("program", "first", "count"),
    budget(
        valid=[(0, 60), (60, 200)],
        bad=[(0, 200), (200, 800)],
        steps=[(0, 200), range(200, 2001, 200)],
    ),
)
def test_random_calls(program, first, count):
    check(program, count, first=first)


def test_random_steps_are_wrong_without_verification(monkeypatch):
    """So the judge sees what verification is for; no case is compiled by the C++ compiler."""
    monkeypatch.setattr("fusedrnn._compile.first_use.verify", lambda *given: None)
    monkeypatch.setattr(steps, "BUILT", 10**9)
    monkeypatch.setattr(steps, "TRICKS", {steps.step_tricks.custom_function: 1})
    kinds = (kind for case in range(1, 20) for kind, _ in steps.Trial(case).judged()[2])
    assert "wrong" in kinds


@needs_sanitizer
@pytest.mark.parametrize(
    ("program", "first", "count"),
    budget(valid=[(0, 8), (8, 40)], bad=[(0, 40), (40, 200)]),
)
def test_random_calls_under_sanitizers(program, first, count):
    check(program, count, first=first, is_sanitized=True)


@pytest.mark.slow
def test_every_fault_is_found():
    records = list(batches.run("faults", 0, len(FAULTS), hang_seconds=20))
    assert len(records) == len(FAULTS)
    for record, (_, expected) in zip(records, FAULTS, strict=True):
        kinds = {kind for kind, _ in record.outcome.findings}
        assert kinds == ({expected} if expected else set()), record


@pytest.mark.slow
@needs_sanitizer
def test_red_zones_between_arrays_are_found():
    (record,) = batches.run("faults", OVERRUN, 1, is_sanitized=True)
    ((kind, text),) = record.outcome.findings
    assert kind == "crash" and "use-after-poison" in text and "write_behind" in text
