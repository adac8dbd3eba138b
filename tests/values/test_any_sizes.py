"""The cells against the plain loop, at random sizes."""

import random

from calls.draw import any_sizes
from calls.judge import judge
from calls.trial import Trial


def test_equals_the_loop(device):
    for seed in range(150):
        trial = Trial(call := any_sizes(random.Random(seed)), seed)
        wrong = [str(finding) for finding in judge(trial, trial.ours(device)) if finding.is_wrong]
        assert not wrong, (seed, call.case, wrong)
