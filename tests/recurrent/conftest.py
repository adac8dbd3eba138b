"""The tests of this folder are of steps in Python; those of compiled cells are in compiled/."""

import pytest
from recorders import Repeated

from fusedrnn.recurrent import calls, graphs


@pytest.fixture(autouse=True)
def _steps_in_python(monkeypatch):
    monkeypatch.setenv("FUSEDRNN_COMPILE", "0")


@pytest.fixture
def recorder(monkeypatch):
    """Records what a CUDA graph would, on the CPU; counts from 0."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Repeated)
    Repeated.count = Repeated.replays = 0
    calls.have_run.clear()
    return Repeated
