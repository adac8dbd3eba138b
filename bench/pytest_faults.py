"""A plugin of pytest, ``-p bench.pytest_faults``, for tests on a GPU that may fail in many ways.

Ends a process of tests after an error that costs it its GPU, so that pytest-xdist goes on with
another one; without pytest-xdist the tests end there, since what would follow says nothing. And of
many failures it shows the first ones at length.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from .faults import names_fault

SHOWN = 20  # failures with their tracebacks


class Faults:
    """What a session of tests has seen."""

    def __init__(self) -> None:
        self.failures = 0
        self.fault = ""

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Notes the first fault."""
        if call.excinfo is not None and not self.fault:
            error = str(call.excinfo.value)
            if names_fault(error):
                self.fault = f"{item.nodeid} lost the GPU: {error.strip().splitlines()[0]}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Ends the process after the test, of which all has been told by then."""
        done = yield
        if self.fault and "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        if self.fault:
            item.session.shouldfail = self.fault
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Leaves a line of a traceback, once there have been enough of them."""
        self.failures += report.failed
        if report.failed and self.failures > SHOWN:
            report.longrepr = (report.longreprtext.strip().splitlines() or [""])[-1]


def pytest_configure(config: pytest.Config) -> None:
    """Begins."""
    config.pluginmanager.register(Faults())
