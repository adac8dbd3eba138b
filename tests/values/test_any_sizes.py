"""The cells against the plain loop, at random sizes."""

import random

import pytest
from calls.draw import any_sizes
from calls.judge import judge
from calls.trial import Trial


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 150), marks=pytest.mark.slow)], ids=str
)
def test_equals_the_loop(device, seeds):
    for seed in seeds:
        trial = Trial(call := any_sizes(random.Random(seed)), seed)
        wrong = [str(finding) for finding in judge(trial, trial.ours(device)) if finding.is_wrong]
        assert not wrong, (seed, call.case, wrong)
