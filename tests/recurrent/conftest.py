"""The tests of this folder are of steps in Python; those of compiled cells are in compiled/."""

import pytest


@pytest.fixture(autouse=True)
def _steps_in_python(monkeypatch):
    monkeypatch.setenv("FUSEDRNN_COMPILE", "0")
