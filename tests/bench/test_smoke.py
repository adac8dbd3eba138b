"""The first probes of the check for a GPU, on the emulation, find and name a wrong number."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import allow_tf32
from emulator import emulated_operators, use
from emulator.persistent import SMOKE
from nvcc import needs_nvcc

from bench import smoke, step_probe, worker
from bench.step_probe import Step
from fusedrnn import _library

CELLS = ["gru", "lstm", "projected_lstm"]
CELLS += [("stochastic_gru", noise) for noise in ("seed", "eps", "none")]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Computes by the emulation of a GPU; the operators."""
    operators = emulated_operators()
    use(monkeypatch, operators)
    operators.control(False, "", 132, 1)
    allow_tf32(True)
    yield operators
    operators.control(False, "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_right_kernel_has_no_wrong_number(emulated: Any, cell: Any, dtype: Any) -> None:
    name, noise = cell if isinstance(cell, tuple) else (cell, "seed")
    step = Step(name, noise=noise, dtype=dtype, seq_len=2, device="cpu")
    assert step_probe.persistent(step) == []
    assert emulated.counts()[2:4] == (1, 1), "a kernel for each pass"


ROWS, UNITS, INPUT = step_probe.BATCH, step_probe.SIZES[1], step_probe.INPUT
T, ROW, UNIT = 1, 3, 17
AT = T * ROWS + ROW


@pytest.mark.parametrize(
    ("operator", "result", "index", "said"),
    [
        ("forward", 0, AT * UNITS + UNIT, "output: 1 of 1320 .* t=1 row=3 unit=17: "),
        (
            *("forward", 3, (AT * 4 + 1) * UNITS + UNIT),
            "pre-activations of the GRU: 1 of 5280 .* t=1 row=3 gate=u unit=17: ",
        ),
        ("backward", 0, AT * INPUT + 2, "gradient of input: 1 of 165 .* t=1 row=3 feature=2: "),
        (
            *("backward", 4, (2 * UNITS + UNIT) * INPUT + 4),
            "gradient of weight_ih_l0: 1 of 600 .* gate=n unit=17 column=4: ",
        ),
    ],
)
def test_a_wrong_number_is_named(
    monkeypatch: pytest.MonkeyPatch,
    emulated: Any,
    operator: str,
    result: int,
    index: int,
    said: str,
) -> None:
    """It is named before the numbers that are wrong because of it."""
    planted = [operator]

    class Planted:
        """Operators of which one gives a wrong number in its first call."""

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                results = getattr(emulated, name)(*arguments, **named)
                if name in planted:
                    planted.remove(name)
                    results[result].view(-1)[index] += 1
                return results

            return call

    monkeypatch.setattr(_library, "operators", Planted())
    first, *_ = step_probe.persistent(Step(seq_len=3, device="cpu"))
    assert re.match(said.replace(".*", "numbers are wrong, the first at"), first), first


def test_what_is_not_a_number_is_wrong() -> None:
    def values(*numbers: float) -> dict[str, step_probe.Values]:
        return {"output": step_probe.Values(torch.tensor(numbers), ("t",))}

    expected = values(1.0, 2.0, 3.0)
    assert step_probe.differences(values(1.0, 2.0, 3.0), expected, 1e-3) == []
    said = "output: 2 of 3 numbers are wrong, the first at t=1: nan instead of 2"
    assert step_probe.differences(values(1.0, float("nan"), 4.0), expected, 1e-3) == [said]


@pytest.mark.parametrize("layout", step_probe.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_products_over_any_strides(emulated: Any, layout: str, dtype: torch.dtype) -> None:
    emulated.control(False, "")
    assert step_probe.strided(Step(dtype=dtype, seq_len=3, device="cpu"), layout) == []
    tensor = torch.randn(6, 5)
    found = [step_probe.laid_out(tensor, layout) for layout in step_probe.LAYOUTS]
    assert all(torch.equal(one, tensor) for one in found)
    assert [one.stride() for one in found] == [(5, 1), (1, 6), (8, 1), (10, 2), (5, 1)]


def test_a_probe_has_a_row_for_each_call_and_a_report_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, emulated: Any
) -> None:
    monkeypatch.setitem(smoke.CELLS, "gru", Step("gru", device="cpu"))
    monkeypatch.setattr(smoke, "set_up_torch", lambda: None)  # for a process of its own
    name = next(iter(smoke.trials("gru")))
    assert worker.measure_here(smoke.measure, "gru", [name]) == {name: {"wrong": []}}
    probes = {
        "mma": {"mma": {"said": ["mma bfloat16: right"], "wrong": []}},
        "flags": {"flags": {"error": "exit status 1: CUDA error"}},
        "gru": {f"call {i}": {"wrong": ["output: t=1"]} for i in range(7)},
    }
    report = smoke.report(probes)
    assert report.failures[:2] == ["flags: exit status 1: CUDA error", "call 0: output: t=1"]
    assert report.failures[-1] == "gru: and 2 more"


@pytest.mark.parametrize(
    ("said", "status", "row"),
    [
        ("hop by flags: 430 ns", 0, {"wrong": [], "hop_ns": 430}),
        ("wrong: hop 3", 1, {"wrong": ["wrong: hop 3"]}),
        ("CUDA error: no", 1, {"wrong": [], "error": "exit status 1: CUDA error: no"}),
    ],
)
def test_what_the_program_says(tmp_path: Path, said: str, status: int, row: dict[str, Any]) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
    program.chmod(0o755)
    assert smoke.program_row(program, "flags", time.monotonic() + 60) == {"said": [said]} | row


def test_probes_in_cpp_run_on_the_emulation() -> None:
    probes = SMOKE.make()
    done = subprocess.run([probes], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@needs_nvcc
@pytest.mark.slow
def test_probes_in_cpp_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smoke, "COMPILE_S", 300)
    program = tmp_path / "smoke"
    smoke.compile_program(program, "sm_90a")
    done = subprocess.run([program, "hop"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "expected mma, packets or flags\n")
