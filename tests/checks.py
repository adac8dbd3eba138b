"""Comparisons and counts that several tests share."""

import itertools
import platform

import torch
from cases import relative_errors
from torch.profiler import ProfilerActivity, profile

from fusedrnn import _library

# Whether products on the CPU are the package's own, and not torch's: cpu::multiplies().
HAS_OWN_PRODUCTS = platform.machine() == "aarch64" or _library.core.fusedrnn_isa() != 0


def allocations(function):
    """Sizes in bytes of what torch's allocator gave out while ``function`` ran."""
    return [size for size in _changes_of_memory(function) if size > 0]


def peak_bytes(function):
    """The most that torch's allocator had given out at a time while ``function`` ran."""
    return max(itertools.accumulate(_changes_of_memory(function)))


def _changes_of_memory(function):
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def assert_same(these, those):
    for name, tensor in these.items():
        assert torch.equal(tensor, those[name]), name


def assert_no_worse(ours, theirs, exact, or_those=None):
    """Asserts errors of at most twice the other's, or of a few roundings."""
    exact = {name: exact[name] for name in ours}
    errors = [relative_errors(others, exact) for others in (theirs, or_those) if others]
    for name, error in relative_errors(ours, exact).items():
        allowed = max(of[name] for of in errors)
        assert error <= 2 * allowed + 1e-4, (name, error, allowed)


def with_bits(tensor, *index):
    """Sets a number of the tensor to the NaN whose bits are all set."""
    tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)[index] = -1
