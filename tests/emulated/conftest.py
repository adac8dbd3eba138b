"""Calls by the persistent kernels in the emulation, with or without a seeded bug."""

import pytest
from cases import allow_tf32
from emulator import emulated_operators, seeded_operators, use
from emulator.persistent import FLAGS, PACKETS

from fusedrnn import _tuning as tuning

# What the emulation counts.
COUNTS = (
    *("launches", "replays", "forward_kernels", "backward_kernels", "splits"),
    *("error_is_pending", "presets"),
)
FORWARD, BACKWARD, PRESETS = map(COUNTS.index, ("forward_kernels", "backward_kernels", "presets"))


@pytest.fixture
def gpu(monkeypatch):
    """Calls functions on an emulated GPU with the given options; has the latest call's counts."""
    operators = emulated_operators()

    def call(
        function, *arguments, multiprocessors=132, failing_kernel="", overlap=False, **options
    ):
        operators.control(False, failing_kernel, multiprocessors, **options)
        with monkeypatch.context() as patch:
            use(patch, operators)
            patch.setattr(tuning.switches, "overlap_chunks", overlap)
            try:
                return function(*arguments)
            finally:
                call.counts = dict(zip(COUNTS, operators.counts(), strict=True))

    yield call
    operators.control(False, "")


class PersistentCalls:
    """Calls a function while modules compute by persistent kernels, and checks that they do.

    The options are those of the emulation: multiprocessors, schedule (the seed of the order of
    threads), seeded_bug, backward_bug, and spin_limit.

    Attributes:
        presets: The number of presets of memory in the latest call.
    """

    def __init__(self, monkeypatch, *kernels):
        self.monkeypatch, self.kernels = monkeypatch, kernels
        self.presets = 0

    def __call__(self, function, *arguments, is_on=True, exchange=PACKETS, tf32=True, **options):
        """Calls the function and returns its result. is_on: whether to use persistent kernels."""
        allow_tf32(tf32)
        has_bug = not {"seeded_bug", "backward_bug"}.isdisjoint(options)
        operators = seeded_operators() if has_bug else emulated_operators()
        options = {"multiprocessors": 132, "schedule": 1} | options
        operators.control(False, "", **(options if is_on else {}))
        try:
            with self.monkeypatch.context() as patch:
                use(patch, operators)
                patch.setattr(tuning.switches, "exchange_by_flags", exchange == FLAGS)
                results = function(*arguments)
            counts = operators.counts()
        finally:
            operators.control(False, "")
        for kernel in self.kernels:
            assert (counts[kernel] > 0) == is_on, "the kernels have not been called"
        self.presets = counts[PRESETS]
        return results


@pytest.fixture
def persistent(monkeypatch):
    """Calls functions with the persistent kernels of forward."""
    return PersistentCalls(monkeypatch, FORWARD)


@pytest.fixture
def chain(monkeypatch):
    """Calls functions with the persistent kernels of both passes."""
    return PersistentCalls(monkeypatch, FORWARD, BACKWARD)
