"""Persistent kernels alone, under the thread, address and undefined-behaviour sanitizers.

The thread sanitizer also has to notice bugs that are put into the kernels.
"""

import functools
import subprocess
from dataclasses import dataclass, replace

import pytest
from cases import OPERATOR_CELLS
from emulator.persistent import BACKWARD, FLAGS, FORWARD, PACKETS, sanitized

pytestmark = pytest.mark.slow  # compiles programs: a few for CI, and a dozen each night


@dataclass(frozen=True)
class Problem:
    """The chunk that a program computes."""

    program: str
    cell: str
    element: str = "BFloat16"  # type of the tensors
    words: tuple[int, ...] = ()  # for backward: hidden size and direction of time

    def __str__(self) -> str:
        return "-".join(map(str, (self.program, self.cell, self.element, *self.words)))


# Backward exchanges packets through the gradients if they fill whole packets, else through slots.
BACKWARD_PROBLEMS = [
    Problem(BACKWARD, cell, element, words)
    for cell in (*OPERATOR_CELLS, "mean_gru")
    for element, words in (
        ("BFloat16", (40, 1)),
        ("BFloat16", (40, -1)),
        ("BFloat16", (37, 1)),
        ("float", (40, 1)),
        ("float", (37, -1)),
    )
]
FORWARD_PROBLEMS = [Problem(FORWARD, cell) for cell in OPERATOR_CELLS]
FLOAT_PROBLEMS = [Problem(FORWARD, cell, "float") for cell in OPERATOR_CELLS]
# CI has both passes of each cell in bfloat16, and a third of the bugs.
IN_CI = {*FORWARD_PROBLEMS, *(p for p in BACKWARD_PROBLEMS if p.words == (37, 1))}


def each_night(problems):
    return [
        pytest.param(problem, marks=[pytest.mark.nightly] * (problem not in IN_CI), id=str(problem))
        for problem in problems
    ]


def run(problem, kind, exchange, schedule=1, bug=0):
    """The exit status of a program, and what it prints: a hash of all results."""
    path = sanitized(kind, problem.program, problem.element).make()
    command = [path, problem.cell, *map(str, (*problem.words, exchange, schedule, bug))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def watched(problem, exchange, schedule=1, bug=0):
    """Runs a program under the thread sanitizer, which finds accesses that are not ordered."""
    kind = "seeded" if bug else "watched"
    status, printed = run(problem, kind, exchange, schedule, bug)
    if "FATAL: ThreadSanitizer" in printed:  # it does not support the memory layout of some kernels
        pytest.skip(printed.partition("\n")[0])
    return status, printed


@functools.cache
def undisturbed(problem):
    status, printed = watched(problem, PACKETS)
    assert status == 0, printed
    return printed


@pytest.mark.ci_has_every(2)
@pytest.mark.parametrize("problem", each_night(FORWARD_PROBLEMS + BACKWARD_PROBLEMS))
def test_no_access_is_unordered(problem):
    assert "WARNING" not in undisturbed(problem)
    assert watched(problem, FLAGS, schedule=2) == (0, undisturbed(problem))


@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
@pytest.mark.parametrize(
    "problem", each_night(FORWARD_PROBLEMS + FLOAT_PROBLEMS + BACKWARD_PROBLEMS)
)
def test_no_access_is_out_of_bounds(problem, exchange):
    status, printed = run(problem, "bounded", exchange)
    assert status == 0, printed


# The bug's number in emulator/seeded_bugs.py, a cell, and the protocol that the bug breaks.
BUGS = {
    "no barrier before sums are read": (1, "gru", PACKETS),
    "no barrier after flags are seen": (2, "gru", FLAGS),
    "flags are set without release": (3, "gru", FLAGS),
    "no barrier before flags are set": (4, "gru", FLAGS),
    "a warp ends early": (5, "gru", PACKETS),
    "one slot for all steps": (6, "gru", FLAGS),
    "one buffer of sums instead of two": (7, "gru", PACKETS),
    "nothing is sent": (8, "lstm", PACKETS),
    "a tile too early": (9, "stochastic_gru", FLAGS),
    "packets are not waited for": (10, "stochastic_gru", PACKETS),
}
BACKWARD_BUGS = BUGS | {
    "no barrier after weights are turned": (12, "gru", PACKETS),
    "weights are turned by lanes in step": (13, "gru", PACKETS),
}
IN_PLACE_BUGS = BACKWARD_BUGS | {"gradients are not preset": (14, "stochastic_gru", PACKETS)}
FLOAT_BUGS = BACKWARD_BUGS | {"gradients and weights are not rounded": (16, "gru", PACKETS)}
BUGS_OF = {
    Problem(FORWARD, ""): BUGS
    | {
        "input gates are read too early": (18, "gru", PACKETS),
        "input gates are overwritten": (19, "lstm", PACKETS),
    },
    Problem(BACKWARD, "", "BFloat16", (37, 1)): BACKWARD_BUGS,
    Problem(BACKWARD, "", "BFloat16", (40, 1)): IN_PLACE_BUGS,
    Problem(BACKWARD, "", "float", (40, 1)): FLOAT_BUGS,
}


@pytest.mark.ci_has_every(2)
@pytest.mark.parametrize(
    ("problem", "exchange", "bug"),
    [
        pytest.param(
            *(replace(problem, cell=cell), exchange, number),
            marks=[pytest.mark.nightly] * (i % 3 > 0 or replace(problem, cell=cell) not in IN_CI),
            id=f"{problem}-{bug}",
        )
        for problem, bugs in BUGS_OF.items()
        for i, (bug, (number, cell, exchange)) in enumerate(bugs.items())
    ],
)
def test_bugs_are_caught(problem, exchange, bug):
    expected = undisturbed(problem)
    for schedule in (1, 2, 3):
        if watched(problem, exchange, schedule, bug) != (0, expected):
            return
    pytest.fail("nobody has noticed", pytrace=False)
