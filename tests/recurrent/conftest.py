"""The tests of this folder are of steps in Python; those of compiled cells are in compiled/."""

import pytest
from recorders import Repeated

from fusedrnn._recurrent import layer_call
from fusedrnn._runtime import cuda_graphs


@pytest.fixture(autouse=True)
def _steps_in_python(monkeypatch):
    monkeypatch.setenv("FUSEDRNN_COMPILE", "0")


@pytest.fixture
def recorder(monkeypatch):
    """Records what a CUDA graph would, on the CPU; counts from 0."""
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", Repeated)
    Repeated.count = Repeated.replays = 0
    layer_call.have_run.clear()
    return Repeated
