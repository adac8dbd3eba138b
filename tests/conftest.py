"""Fixtures, options and marks that all tests share."""

import gc
from collections import Counter

import pytest
import torch
from cases import allow_tf32
from compiler.caches import cache_of_the_run, compiled_once, folder, interruptible, readable
from emulator import emulated_operators, use

from fusedrnn import _tuning as tuning

__all__ = [  # fixtures
    "cache_of_the_run",
    "compiled_once",
    "folder",
    "interruptible",
    "readable",
]

gc.set_threshold(100_000, 50, 50)  # torch.compile makes many objects that stay
pytest.register_assert_rewrite("checks", "tf32", "flat_weights")
# Otherwise torch.testing, which some tests load, would forbid later tests to set cuDNN's flags.
torch.backends.disable_global_flags = lambda: None
# Several threads add sums in another order: what torch's errors are would depend on the machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _collections_look_at_new_objects():
    """Leaves out what earlier files have left, such as torch.compile's graphs: gigabytes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _float32_is_not_rounded():
    """Forbids TF32, torch's default; tests about TF32 allow it (cases.allow_tf32)."""
    allow_tf32(False)
    yield
    allow_tf32(True)


@pytest.fixture(autouse=True)
def _chunks_are_replayed(monkeypatch):
    """Turns on the replay of chunks, which is off by default, so that tests cover it."""
    monkeypatch.setattr(tuning.switches, "replay_chunks", True)


@pytest.fixture
def steps_in_python(monkeypatch):
    """Compiles no cells."""
    monkeypatch.setenv("FUSEDRNN_COMPILE", "0")


@pytest.fixture
def deterministic():
    """Switches torch's deterministic algorithms, which also fill fresh memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def threads():
    """Sets the number of torch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def emulator(monkeypatch):
    """Computes by the emulation of the GPU backend; some of its operators control it."""
    operators = emulated_operators()
    use(monkeypatch, operators)
    operators.control(False, "")
    yield operators
    operators.control(False, "")


BACKENDS = ["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=BACKENDS)
def device(request):
    """The device to compute on: a test that takes it runs for every backend.

    "emulated" is the backend for GPUs, run on the CPU: see emulator/emulator.cpp.
    """
    if request.param == "emulated":
        request.getfixturevalue("emulator")
        return "cpu"
    return request.param


def is_emulated(item):
    """Whether a test computes by the emulation: by its folder, its fixtures, or its device."""
    device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    in_folder = "emulated" in item.path.parts
    return in_folder or "emulator" in item.fixturenames or device == "emulated"


def leave_for_the_night(items):
    """Marks as nightly all but every nth test of functions that say ``ci_has_every(n)``.

    An n that shares no factor with the number of a parameter's values goes through all of them in
    turn. Tests that need a GPU do not count, since CI has none.
    """
    counts = Counter()
    for item in items:
        mark = item.get_closest_marker("ci_has_every")
        if mark is None or item.get_closest_marker("cuda"):
            continue
        function = item.nodeid.partition("[")[0]
        if counts[function] % mark.args[0]:
            item.add_marker("nightly")
        counts[function] += 1


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by marks
def pytest_collection_modifyitems(items):
    leave_for_the_night(items)
    for item in items:
        if is_emulated(item):
            item.add_marker("emulated")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_addoption(parser):
    parser.addoption("--times", action="store_true", help="show the seconds that each file took")


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--times"):
        return
    reports = [report for some in terminalreporter.stats.values() for report in some]
    seconds = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for file, taken in seconds.most_common():
        terminalreporter.write_line(f"{taken:7.1f} s  {file}")
