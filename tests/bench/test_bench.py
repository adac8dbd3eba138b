"""The benchmark runs, its files have their structure, and what does not depend on time holds."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that fusedrnn is the installed one
from bench import (  # noqa: E402
    calls,
    cases,
    chunks,
    clock,
    gpu_check,
    kernels,
    machine,
    memory,
    model,
    numerics,
    packed,
    parts,
    report,
    speed,
    sweep,
    worker,
)

OURS, LSTM, LOOP = "fusedrnn", "nn.LSTM", "plain loop"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results of ``python -m bench --all --quick``."""
    out = tmp_path_factory.mktemp("bench")
    run = bench("bench", "--all", "--quick", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "the progress bar shares the terminal with whatever goes here"
    assert "Left out" not in run.stdout + (out / "cpu.md").read_text()
    return out


def bench(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *options]
    # Threads that wait for each other are slow beside other tests.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)


def load(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", ["memory", "speed", "calls", "train_text"])
def test_results_say_where_they_come_from(results: Path, name: str) -> None:
    about = load(results, name)["environment"]
    assert about["command"].startswith("python -m bench --all --quick")
    assert about["threads"] == 1
    assert all(about[key] for key in ("date", "cpu", "torch", "fusedrnn", "python"))


def test_files(results: Path) -> None:
    assert (results / "memory_over_seq_len.png").read_bytes().startswith(b"\x89PNG")
    markdown = (results / "cpu.md").read_text()
    assert "`python -m bench --all --quick" in markdown
    assert "| " + OURS + " |" in markdown


def test_what_the_short_form_leaves_out_is_said(results: Path, tmp_path: Path) -> None:
    run = bench("bench", "--quick", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    line = (tmp_path / "cpu.md").read_text().splitlines()[-1]
    said = "Left out, with their targets, and measured by python -m bench --all: "
    assert line.startswith(said)
    assert line in " ".join(map(str.strip, run.stdout.splitlines()))  # wrapped
    what = line.removeprefix(said)
    short, full = (
        {name: load(folder, name) for name in ("memory", "speed", "calls", "train_text")}
        for folder in (tmp_path, results)
    )

    def contenders(found: dict[str, Any]) -> set[str]:
        return {
            *found["memory"]["shapes"][0]["contenders"],
            *found["speed"]["shapes"][0]["train_ms"],
        }

    kept = {name for name in cases.CONTENDERS if name.endswith(", recompute=False")}
    assert contenders(full) - contenders(short) == kept
    assert set(cases.ON_CPU) - set(cases.ON_CPU_SHORT) == {*kept, cases.COMPILED}
    assert "recompute=False" in what
    assert "compiled loop" in what
    assert full["memory"]["over_seq_len"] and full["memory"]["last_state"]
    assert not short["memory"]["over_seq_len"] and not short["memory"]["last_state"]
    assert "memory of the compiled loop, of recompute=False, over T, and of last states" in what
    assert "training for 240 updates and not 12" in what
    assert full["calls"].keys() == short["calls"].keys()
    assert len(full["calls"]["targets"]) == len(short["calls"]["targets"])


def test_a_benchmark_alone_has_no_short_form(on_cpu: OnCpu) -> None:
    assert on_cpu.run().everything


def test_saved_for_backward_is_the_output(results: Path) -> None:
    memory = load(results, "memory")
    for result in memory["shapes"] + memory["over_seq_len"]:
        shape = result["shape"]
        hx_bytes, seed_bytes = 4 * shape["batch"] * shape["hidden_size"], 8
        ours = result["contenders"][OURS]
        assert ours["largest_saved_bytes"] == [result["output_bytes"], hx_bytes, seed_bytes]


def test_workspace_and_allocations_do_not_depend_on_the_length(results: Path) -> None:
    over = [result["contenders"][OURS] for result in load(results, "memory")["over_seq_len"]]
    assert len(over) > 1
    assert len({ours["allocations"] for ours in over}) == 1
    assert len({ours["workspace_bytes"] for ours in over}) == 1


def test_memory_target(results: Path) -> None:
    memory = load(results, "memory")
    assert memory["targets"]
    assert all(target["passed"] for target in memory["targets"])
    peak = {name: m["peak_bytes"] for name, m in memory["shapes"][0]["contenders"].items()}
    assert peak[OURS] <= 0.20 * peak[LSTM]
    assert peak[OURS] < peak[LOOP]
    pairs = [f"peak memory, {ours} / {other}" for ours, other in cases.MEMORY_LIMITS[cases.SMALL]]
    assert [target["what"] for target in memory["targets"]] == pairs


def test_memory_of_the_last_state_is_measured_once_modules_give_it(results: Path) -> None:
    memory = load(results, "memory")
    assert len(memory["last_state"]) == cases.HAS_LAST_STATE_ONLY
    for result in memory["last_state"]:
        peak = {name: measured["peak_bytes"] for name, measured in result["contenders"].items()}
        assert max(peak[cases.LAST_GRU], peak[cases.LAST_LSTM]) < peak[LSTM]


def test_last_state_has_a_gradient() -> None:
    class LastState(torch.nn.GRU):
        def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output, h_n = super().forward(input)
            return output[-1], h_n

    step = cases.LastStateStep(lambda width: LastState(width, width), cases.Shape(10, 2, 4))
    output = step.forward()
    assert step.grad_output.shape == output.shape == (2, 4)
    step.backward(output)


def test_speed_has_all_ratios(results: Path) -> None:
    speed = load(results, "speed")
    (result,) = speed["shapes"]
    assert {f"{OURS} / {other}" for other in (LSTM, LOOP, "GEMMs alone")} <= set(result["ratios"])
    drop_ins = {a: b for a, b in cases.DROP_INS.items() if a in cases.ON_CPU}
    assert {f"{ours} / {other}" for ours, other in drop_ins.items()} <= set(result["ratios"])
    assert set(drop_ins) <= set(result["train_ms"])
    rounds = {len(times) for times in result["train_ms"].values()}
    assert len(rounds) == 1, "ratios need all times of a round"
    assert set(speed["denormals"]["slowdown"]) == {OURS, LOOP}


def test_calls_have_every_cell_beside_torch_s(results: Path) -> None:
    content = load(results, "calls")
    rows = {
        (case["shape"]["seq_len"], case["shape"]["hidden_size"]): case["contenders"]
        for case in content["cases"]
    }
    modules = {OURS, cases.OUR_GRU, cases.OUR_LSTM}
    cells = {cases.OUR_CELL, cases.OUR_GRU_CELL, cases.OUR_LSTM_CELL}
    ours = {
        at: {name for name in of_case if name.startswith("fusedrnn")}
        for at, of_case in rows.items()
    }
    assert ours == {(1, 64): modules | cells, (8, 128): modules}
    assert all(LOOP in of_case for of_case in rows.values())
    for of_case in rows.values():
        for row in of_case.values():
            assert row.keys() == {"no_grad_ms", "training_ms"}
            assert {len(times) for times in row.values()} == {calls.ROUNDS_QUICK}


def test_targets_of_calls() -> None:
    row = {"no_grad_ms": [2.0, 4.0, 3.0], "training_ms": [5.0, 5.0, 5.0]}

    def targets(shape: cases.Shape, compiled: bool) -> dict[str, tuple[float, float]]:
        rows = dict.fromkeys(calls._names(shape, compiled), row)
        rows[LSTM + calls.SUFFIX * compiled] = {name: [1.0] * 3 for name in row}
        report = calls._report({sweep.Case(shape, "float32"): rows})
        assert {len(line) for table in report.tables for line in table.rows} == {5}
        return {target.what: (target.value, target.limit) for target in report.targets}

    one_step = targets(cases.ONE_STEP, False)
    for ours, other in (
        ("fusedrnn.GRU", "nn.GRU"),
        ("fusedrnn.GRUCell", "nn.GRUCell"),
        ("fusedrnn.LSTMCell", "nn.LSTMCell"),
        (OURS, "nn.GRU"),
        ("fusedrnn.StochasticGRUCell", LOOP),
    ):
        assert one_step.pop(f"one step, under no_grad, {ours} / {other}") == (1, 1.2)
        assert one_step.pop(f"one step, training step, {ours} / {other}") == (1, 1.5)
    assert one_step == {
        "one step, under no_grad, fusedrnn.LSTM / nn.LSTM": (3, 1.2),
        "one step, training step, fusedrnn.LSTM / nn.LSTM": (5, 1.5),
    }
    for compiled in (False, True):
        suffix = ", compiled" * compiled
        assert targets(cases.SHORT_CALL, compiled) == {
            f"short call, {what}, {ours}{suffix} / {other}{suffix}": (value, 1.1)
            for ours, other, values in (
                ("fusedrnn.GRU", "nn.GRU", (1, 1)),
                ("fusedrnn.LSTM", LSTM, (3, 5)),
                (OURS, "nn.GRU", (1, 1)),
            )
            for what, value in zip(("under no_grad", "training step"), values, strict=True)
        }


def test_parts_of_a_call_sum_up_to_the_whole(results: Path) -> None:
    found = load(results, "calls")["parts_us"]
    assert list(found) == ["one step", "short call"]
    for of_shape in found.values():
        for kind, parts_us in of_shape.items():
            whole, torchs = parts_us.pop(cases.OUR_GRU), parts_us.pop(cases.GRU)
            assert list(parts_us) == list(calls.PARTS[: 4 if kind == "no_grad" else None])
            assert sum(parts_us.values()) == pytest.approx(whole)
            assert torchs > 0


def test_operators_are_called_on_what_a_training_step_gives_them() -> None:
    step = cases.training_step(cases.OUR_GRU, cases.ONE_STEP)
    forward, backward = calls.operator_calls(step)
    output = step.forward()
    torch.testing.assert_close(forward()[0], output, rtol=0, atol=0)
    output.backward(step.grad_output)
    flat = torch.cat([weight.grad.flatten() for weight in step.weights])
    torch.testing.assert_close(backward()[-1], flat, rtol=0, atol=0)


def test_cells_go_from_step_to_step() -> None:
    shape = cases.Shape(3, 2, 4)
    for cell, module in ((cases.OUR_GRU_CELL, cases.OUR_GRU), (cases.OUR_LSTM_CELL, LSTM)):
        steps = [cases.training_step(name, shape) for name in (cell, module)]
        torch.testing.assert_close(steps[0].forward(), steps[1].forward()[-1])
        steps[0].infer()
        steps[0].train()
        assert all(weight.grad is None for weight in steps[0].weights)


@pytest.mark.parametrize("obstacle", [None, "does not compile: no compiler"])
def test_calls_go_on_without_a_compiler(
    obstacle: str | None, monkeypatch: pytest.MonkeyPatch, on_cpu: OnCpu
) -> None:
    measured = []

    def measure_here(measure: Any, job: dict[str, Any], names: list[str]) -> dict[str, worker.Row]:
        measured.append((job["shape"]["seq_len"], job["compiled"]))
        return {name: {"no_grad_ms": [1.0], "training_ms": [1.0]} for name in names}

    monkeypatch.setattr(calls, "measure_here", measure_here)
    monkeypatch.setattr(calls, "why_nothing_compiles", lambda: obstacle)
    monkeypatch.setattr(calls, "ROUNDS", 3)
    run = on_cpu.run()
    result = calls.run(report.Run(False, run.out, run.progress, run.options, run.about))
    assert measured == [(1, False), (8, False), *([(8, True)] if obstacle is None else [])]
    said = {row[1] for row in result.tables[1].rows if row[0].endswith(calls.SUFFIX)}
    assert said == {obstacle or "1000.0"}
    assert result.failures == []


def test_torch_compile_compiles_what_calls_do_with_it() -> None:
    if obstacle := calls.why_nothing_compiles():
        pytest.skip(obstacle)
    case = sweep.Case(cases.SHORT_CALL, "float32")
    names = [name + calls.SUFFIX for name in (cases.OUR_GRU, OURS)]
    rows = worker.measure_here(calls.measure, calls._job(case, True, "cpu", 3), names)
    assert {len(row["training_ms"]) for row in rows.values()} == {3}


def test_calls_on_a_gpu_are_eager_before_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch, on_cpu: OnCpu
) -> None:
    measured = []

    def measure_apart(module: str, job: Any, names: Any, **_: float) -> dict[str, worker.Row]:
        measured.append((module, sweep.Case.of_numbers(job), job["device"], job["compiled"]))
        return {name: {"no_grad_ms": [1.0], "training_ms": [1.0], "process": 1} for name in names}

    monkeypatch.setattr(calls, "measure_apart", measure_apart)
    run = on_cpu.run()
    run.options.dtype = None
    result = calls.run_on_cuda(run)
    one_step, short_call = (sweep.Case(shape, "tf32") for shape in cases.CALLS)
    assert measured == [
        ("bench.calls", one_step, "cuda", False),
        ("bench.calls", short_call, "cuda", False),
        ("bench.calls", short_call, "cuda", True),
    ]
    assert {target.value for target in result.targets} == {1}
    assert len(result.targets) == 2 * (6 + 3 + 3)
    run = on_cpu.run(budget_s=-1)
    assert {row[1] for table in calls.run_on_cuda(run).tables for row in table.rows} == {
        "not reached within -1 s"
    }


def test_loop_and_ours_learn_the_same(results: Path) -> None:
    text = load(results, "train_text")
    for loss in text["agreement"].values():
        assert loss["difference"] <= loss["tolerance"]
    loop, ours = (text["cells"][name] for name in (LOOP, OURS))
    assert ours["train_bits"] == pytest.approx(loop["train_bits"], rel=1e-4)
    assert ours["train_bits"][-1] < ours["train_bits"][0]
    assert ours["longest_window"] > loop["longest_window"] > 0


def test_train_one_cell(tmp_path: Path) -> None:
    run = bench(
        "bench.train_text", "--quick", "--cell", "ours", "--steps", "2", "--out", str(tmp_path)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    text = load(tmp_path, "train_text")
    assert list(text["cells"]) == [OURS]
    assert text["job"]["steps"] == len(text["cells"][OURS]["train_bits"]) == 2


def test_train_in_bfloat16(tmp_path: Path) -> None:
    run = bench(
        "bench.train_text", "--quick", "--dtype", "bfloat16", "--steps", "2", "--out", str(tmp_path)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    text = load(tmp_path, "train_text_bfloat16")
    cells = {name: result["train_bits"] for name, result in text["cells"].items()}
    unable = list(text["unable"])  # where torch has no LSTM of 16 bits for the processor
    assert unable in ([], [f"{LSTM}, bfloat16"])
    assert {*cells, *unable} == {LSTM, f"{LSTM}, bfloat16", OURS, f"{OURS}, bfloat16"}
    for name in (OURS,) if unable else (LSTM, OURS):
        assert cells[f"{name}, bfloat16"] != cells[name]
        assert cells[f"{name}, bfloat16"] == pytest.approx(cells[name], rel=1e-3)
    (target,) = text["targets"]
    assert target["what"] == "validation bits/char, fusedrnn, bfloat16 / float32"
    assert target["limit"] == 1.01
    assert target["passed"]


def test_sizes_are_checked(tmp_path: Path) -> None:
    run = bench("bench.train_text", "--steps", "0", "--out", str(tmp_path))
    assert run.returncode != 0
    assert run.stderr.strip() == "--steps must be at least 1, got 0"


@pytest.mark.parametrize(
    "options, said",
    [
        (["--device", "tpu"], "argument --device: must be cpu or cuda, got tpu"),
        (["--dtype", "bfloat16"], "--dtype, --shape, --budget-s need --device cuda"),
        (["--budget-s", "0"], "--dtype, --shape, --budget-s need --device cuda"),
        (["--shape", "1,2"], "argument --shape: must be T,B,H, got 1,2"),
        pytest.param(
            ["--all", "--device", "cuda"],
            "--all needs --device cpu",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="has no GPU"),
        ),
        pytest.param(
            ["--device", "cuda"],
            "argument --device: torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_options_are_checked(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    with pytest.raises(SystemExit) as stopped:
        report.main(
            [memory.run],
            None,
            lambda parser: parser.add_argument("--all", action="store_true"),
            on_cuda=[memory.run_on_cuda],
        )
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_gemm_rate_against_a_count_by_hand() -> None:
    shape = cases.Shape(10, 20, 30)
    rows, square = 10 * 20, 2 * 30 * 30
    # x to 3H, h to 2Z, z to 3H; their three gradients; back from 3H to z and from 2Z to h.
    forward, gradients, chain = 3 + 2 + 3, 3 + 2 + 3, 3 + 2
    counts = {
        cases.LOOP: forward + gradients + chain,
        cases.KEPT: forward + gradients + chain,
        cases.OURS: forward + forward + gradients + chain,
        cases.LSTM: (4 + 4) + (4 + 4) + 4,
        cases.GRU: (3 + 3) + (3 + 3) + 3,
        cases.KEPT_LSTM: (4 + 4) + (4 + 4) + 4,
        cases.KEPT_GRU: (3 + 3) + (3 + 3) + 3,
        cases.OUR_LSTM: (4 + 4) + (4 + 4) + (4 + 4) + 4,
        cases.OUR_GRU: (3 + 3) + (3 + 3) + (3 + 3) + 3,
    }
    for name, count in counts.items():
        rate = cases.CONTENDERS[name].tflops(shape, 2.0, training=True)
        assert rate == pytest.approx(rows * square * count / 2e-3 / 1e12)
    rate = cases.CONTENDERS[cases.OURS].tflops(shape, 2.0, training=False)
    assert rate == pytest.approx(rows * square * forward / 2e-3 / 1e12)


def test_every_contender_stands_in_one_table_with_what_it_is_compared_with() -> None:
    names = (*cases.ON_CUDA, *cases.ON_CUDA_LATER)
    stochastic, drop_ins = cases.groups(names)
    assert {*stochastic.names, *drop_ins.names} == set(names)
    assert not set(cases.DROP_INS) & set(stochastic.names)
    beside = cases.BESIDE.values()
    assert {*cases.DROP_INS, *cases.DROP_INS.values(), *beside} == set(drop_ins.names)
    (other,) = drop_ins.over.values()
    assert other(cases.KEPT_GRU) == other(cases.GRU) == other(cases.GRU_BESIDE) == cases.GRU


@pytest.mark.parametrize("name", [cases.CHECKPOINTED, cases.OFFLOADED])
def test_loops_that_save_less_learn_the_same(name: str) -> None:
    def gradients(name: str) -> list[torch.Tensor]:
        step = cases.training_step(name, cases.Shape(10, 2, 4))
        torch.manual_seed(1)
        step.forward().backward(step.grad_output)
        return [weight.grad for weight in step.module.parameters()]

    torch.testing.assert_close(gradients(name), gradients(LOOP))


class OnCpu:
    """Stands for a GPU: the same steps without one, as far as that goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        later = (cases.CHECKPOINTED, cases.OFFLOADED)
        monkeypatch.setattr(sweep, "ON_CUDA_LATER", later)
        monkeypatch.setattr(sweep, "measure_apart", self.measure_apart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        # Threads that wait for each other are slow beside other tests.
        monkeypatch.setattr(sweep, "set_up_torch", lambda tf32: None)
        monkeypatch.setattr(cases, "_captured", lambda call: argparse.Namespace(replay=call))
        for benchmark in (memory, speed):
            monkeypatch.setattr(benchmark, "training_step", self.training_step)
        monkeypatch.setattr(speed, "cuda_time_ms", clock.time_ms)
        monkeypatch.setattr(speed, "CUDA_ROUNDS", 3)
        monkeypatch.setattr(memory, "cuda_saved_bytes", lambda forward: (forward().nbytes, 0))
        monkeypatch.setattr(memory, "cuda_peak_bytes", lambda train: train() or 1000)
        self.failing: dict[str, str] = {}
        self.out = out
        self.measured: list[tuple[str, tuple[str, ...]]] = []

    def measure_apart(self, module: str, case: Any, names: Any, **_: float) -> dict[str, Any]:
        """Not apart, for what is replaced here is replaced in this process alone."""
        self.measured.append((module, tuple(names)))
        return worker.measure_here(importlib.import_module(module).measure, case, names)

    def training_step(self, name: str, shape: cases.Shape, device: str, dtype: torch.dtype) -> Any:
        assert device == "cuda"
        if name in self.failing:
            raise RuntimeError(self.failing[name])
        return cases.training_step(name, shape, "cpu", dtype)

    def run(self, budget_s: float = 100) -> report.Run:
        options = argparse.Namespace(dtype=["float32"], shape=None, budget_s=budget_s)
        return report.Run(True, self.out, report.NoProgress(), options, {"gpu": "none"})


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OnCpu:
    return OnCpu(monkeypatch, tmp_path)


def test_gpu_benchmark_has_all_rows(on_cpu: OnCpu) -> None:
    for benchmark, targets in ((memory, 3), (speed, 2)):
        result = benchmark.run_on_cuda(on_cpu.run())
        (case,) = load(on_cpu.out, result.name)["cases"]
        assert case["shape"] == vars(cases.CUDA_QUICK)
        assert case["dtype"] == "float32"
        beside = cases.BESIDE.values() if benchmark is memory else ()
        names = [name for name in cases.ON_CUDA if name not in beside]
        assert list(case["contenders"]) == [*names, *sweep.ON_CUDA_LATER]
        assert not any(map(sweep.why_none, case["contenders"].values()))
        assert len(result.tables) == 2 + (benchmark is speed)
        for table in result.tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}
        assert len(result.targets) == targets
        assert result.failures == []


def test_gpu_benchmark_goes_on_after_a_failure(on_cpu: OnCpu) -> None:
    on_cpu.failing = {LOOP: "out of memory\nsecond line", cases.KEPT: "broken"}
    for benchmark in (memory, speed):
        result = benchmark.run_on_cuda(on_cpu.run())
        (case,) = load(on_cpu.out, result.name)["cases"]
        assert case["contenders"][LOOP] == {"error": "RuntimeError: out of memory"}
        assert "error" not in case["contenders"][OURS]
        shown = {row[0]: row[1] for row in result.tables[0].rows}
        assert shown[LOOP] == "RuntimeError: out of memory"
        assert not any(LOOP in target.what.split(" / ") for target in result.targets)
        # What others cannot do is a result; what we cannot do is wrong.
        where = f"{cases.CUDA_QUICK}, float32"
        assert result.failures == [f"{cases.KEPT} failed at {where}: RuntimeError: broken"]


def test_gpu_benchmark_says_what_time_did_not_reach(on_cpu: OnCpu) -> None:
    result = speed.run_on_cuda(on_cpu.run(budget_s=-1))
    assert {row[1] for row in result.tables[0].rows} == {"not reached within -1 s"}
    assert result.targets == result.failures == []


def test_gpu_benchmark_writes_as_it_goes(on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def measure_apart(module: str, case: Any, names: Any, **_: float) -> dict[str, worker.Row]:
        file = on_cpu.out / "name.json"
        shown.append(json.loads(file.read_text())["cases"] if file.exists() else None)
        return {name: {"peak_bytes": 1} for name in names}

    monkeypatch.setattr(sweep, "measure_apart", measure_apart)

    def make(results: sweep.Results) -> report.Report:
        return report.Report("name", sweep.numbers(results), [])

    sweep.sweep(on_cpu.run(), "module", cases.ON_CUDA_TOGETHER, make)
    before, (after_first,), *_ = shown
    assert before is None
    rows = after_first["contenders"]
    measured = {name for name in rows if "missing" not in rows[name]}
    assert measured == set(cases.ON_CUDA_TOGETHER[0])


def test_groups_of_contenders_are_measured_apart(on_cpu: OnCpu) -> None:
    """Those that no kernel of ours can break come first."""
    speed.run_on_cuda(on_cpu.run())
    names = [names for _, names in on_cpu.measured]
    assert names == [*cases.ON_CUDA_TOGETHER, *((name,) for name in sweep.ON_CUDA_LATER)]
    assert {module for module, _ in on_cpu.measured} == {"bench.speed"}
    together = [name for group in cases.ON_CUDA_TOGETHER for name in group]
    assert len(set(together)) == len(together)
    assert set(together) == set(cases.ON_CUDA)
    assert not {*cases.PERSISTENT, cases.KEPT, cases.CAPTURED} & set(cases.ON_CUDA_TOGETHER[0])


def test_memory_is_to_be_a_half_of_nn_lstm_s_or_a_quarter_of_much() -> None:
    def targets(lstm_bytes: int) -> dict[str, tuple[float, float]]:
        ours = {"peak_bytes": 1 << 28, "saved_bytes": 1, "host_bytes": 0}
        rows = {name: ours for name in cases.ON_CUDA} | {LSTM: ours | {"peak_bytes": lstm_bytes}}
        case = sweep.Case(cases.CUDA_SHAPES[0], "tf32")
        measured = memory._report_on_cuda({case: rows}).targets
        return {target.what: (target.value, target.limit) for target in measured}

    names = [f"peak memory, {name} / nn.LSTM" for name in (OURS, cases.OUR_GRU, cases.OUR_LSTM)]
    assert targets(1 << 29) == dict.fromkeys(names, (0.5, 0.5))
    assert targets((1 << 30) - 1) == dict.fromkeys(names, (pytest.approx(0.25), 0.5))
    assert targets(1 << 30) == dict.fromkeys(names, (0.25, 0.25))


@pytest.fixture
def torch_set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves torch with its defaults, whatever a test has set up."""
    monkeypatch.setattr(report, "THREADS", torch.get_num_threads())
    yield
    report.set_up_torch(tf32=True)


@pytest.mark.usefixtures("torch_set_up")
def test_tf32_is_on_in_its_own_rows_alone() -> None:
    for kind in ("tf32", *report.DTYPES):
        case = sweep.Case(cases.CUDA_QUICK, kind)
        assert sweep.opened(case.numbers()) == case
        assert (torch.backends.cudnn.rnn.fp32_precision == "tf32") == (kind == "tf32")
        assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.usefixtures("torch_set_up")
def test_the_model_predicts_memory_within_the_targets() -> None:
    """But where the least chunk takes more: the weights are large for the sequence."""
    reasons: list[str] = []
    tables = {kind: model.chunk_table(kind, reasons) for kind in model.KINDS}
    for kind, table in tables.items():
        assert len(table.rows) == len(cases.CUDA_SHAPES) * len(model.CELLS)
        for *_, forward, backward, steps, why, us, share in table.rows:
            assert int(steps) > 0
            assert float(us) > 0
            assert float(share) <= 0.5 or "than the least" in reasons[int(why) - 1]
            assert kind != "float32" or (forward, backward) == ("stepwise", "stepwise")
    assert len(reasons) == len(set(reasons))
    times = [[float(row[6]) for row in tables[kind].rows] for kind in ("tf32", "float32")]
    assert all(rounded < full for rounded, full in zip(*times, strict=True))


def test_model_prints_its_tables() -> None:
    run = bench("bench.model")
    assert run.returncode == 0, run.stderr
    assert all(f"H100, {kind}, time by model" in run.stdout for kind in model.KINDS)


def test_times_of_one_process_are_compared_within_rounds() -> None:
    def row(process: int, *times: float) -> worker.Row:
        return {"process": process, "train_ms": list(times)}

    rows = {OURS: row(2, 1, 2, 3), LSTM: row(1, 4, 4, 4), cases.LSTM_BESIDE: row(2, 2, 4, 6)}
    rows[LOOP] = row(1, 10, 20, 40)
    beside = speed.compared(rows, OURS, LSTM, "train_ms")
    assert beside == clock.Ratio(0.5, 0.5, 0.5)
    assert speed.compared(rows, OURS, LOOP, "train_ms") == clock.Ratio(0.1, 1 / 40, 0.3)
    rows[cases.LSTM_BESIDE] = {"error": "broken"}
    assert speed.compared(rows, OURS, LSTM, "train_ms") == clock.Ratio(0.5, 0.25, 0.75)
    rows[LSTM] = {"missing": "time"}
    assert speed.compared(rows, OURS, LSTM, "train_ms") is None


def test_rows_of_ours_that_targets_need_must_not_be_missing() -> None:
    missing = {"missing": "not reached within 1 s"}
    rows = {OURS: missing, LSTM: missing}
    shapes = {cases.CUDA_QUICK: [], cases.CUDA_SHAPES[0]: [OURS]}
    for shape, expected in shapes.items():
        case = sweep.Case(shape, "bfloat16")
        said = [f"{name} is missing at {case}: not reached within 1 s" for name in expected]
        assert sweep.failures({case: rows}) == said


def test_gpu_benchmark_begins_where_times_have_targets(on_cpu: OnCpu) -> None:
    run = on_cpu.run()
    run.options.dtype, run.options.shape = ["all"], cases.CUDA_SHAPES
    order = sweep._cases(run)
    assert len(set(order)) == len(order) == 4 * len(cases.CUDA_SHAPES)
    limits = cases.CUDA_TRAINING_LIMITS
    first = [sweep.Case(shape, kind) for kind in limits for shape in limits[kind]]
    assert order[: len(first)] == first
    assert first[-2:] == [
        sweep.Case(cases.CUDNN_PERSISTENT, "float16"),
        sweep.Case(cases.CUDA_SHAPES[0], "tf32"),
    ]


def test_targets_of_time_on_a_gpu() -> None:
    row = {"train_ms": [4.0, 6.0, 5.0], "forward_ms": [2.0, 1.0, 1.5]}
    rows = dict.fromkeys(cases.ON_CUDA, row)

    def targets(shape: cases.Shape, kind: str) -> dict[str, tuple[float, float]]:
        measured = speed._targets(sweep.Case(shape, kind), rows)
        assert len({target.what for target in measured}) == len(measured)
        return {target.what: (target.value, target.limit) for target in measured}

    loops = {"time, fusedrnn / plain loop", "time, fusedrnn / plain loop, CUDA graph"}
    drop_ins = {"time, fusedrnn.GRU / nn.GRU": (1, 0.5), "time, fusedrnn.LSTM / nn.LSTM": (1, 0.5)}
    ours = "time, fusedrnn / nn.LSTM"
    gru, lstm = "time, fusedrnn.GRU / nn.LSTM", "time, fusedrnn.LSTM / nn.LSTM"
    smallest = targets(cases.Shape(1024, 16, 256), "bfloat16")
    assert smallest.items() >= {ours: (1, 0.45), gru: (1, 0.3), lstm: (1, 0.35)}.items()
    at_256 = targets(cases.Shape(1024, 64, 256), "bfloat16")
    assert at_256.items() >= {ours: (1, 0.45), **drop_ins}.items()
    assert at_256["microseconds per step of forward, fusedrnn"] == (pytest.approx(1500 / 1024), 2)
    at_1024 = targets(cases.Shape(256, 128, 1024), "bfloat16")
    assert at_1024.keys() == {*loops, *drop_ins, ours}
    assert at_1024[ours] == (1, 1)
    assert targets(cases.CUDNN_PERSISTENT, "bfloat16").keys() == {*loops, *drop_ins}
    in_float16 = targets(cases.CUDNN_PERSISTENT, "float16")
    forward = "forward time, fusedrnn.LSTM / nn.LSTM"
    assert in_float16.keys() == {*loops, forward, lstm}
    assert in_float16[forward] == in_float16[lstm] == (1, 1)
    assert targets(cases.Shape(256, 64, 2048), "bfloat16").keys() == loops
    in_tf32 = targets(cases.Shape(1024, 16, 256), "tf32")
    assert in_tf32.items() >= {ours: (1, 1), gru: (1, 1), lstm: (1, 1)}.items()
    assert in_tf32.keys() == {*loops, ours, gru, lstm}
    assert targets(cases.Shape(1024, 16, 256), "float32").keys() == loops
    for shape in cases.GEMM_BOUND:
        assert targets(shape, "float32").keys() == set()
        assert targets(shape, "tf32").keys() == loops


def test_backward_of_persistent_kernels_stands_beside_stepwise(on_cpu: OnCpu) -> None:
    result = speed.run_on_cuda(on_cpu.run())
    (case,) = load(on_cpu.out, "speed")["cases"]
    measured = {name for name, row in case["contenders"].items() if "backward_ms" in row}
    assert measured == {*cases.PERSISTENT, *cases.PERSISTENT.values()}
    (row,) = result.tables[-1].rows
    assert result.tables[-1].columns == ["", *cases.PERSISTENT]
    assert row[0] == f"{cases.CUDA_QUICK}, float32"
    assert all(row)


def test_chunks(tmp_path: Path) -> None:
    run = bench("bench.chunks", "--quick", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (case,) = load(tmp_path, "chunks")["cases"]
    rows = case["contenders"]
    assert list(rows) == ["automatic", "16", "32", "64", LSTM]
    assert [rows[name]["chunk_steps"] for name in ("16", "32", "64")] == [16, 32, 64]
    assert rows["16"]["peak_bytes"] < rows["32"]["peak_bytes"] < rows["64"]["peak_bytes"]
    assert len({len(row["train_ms"]) for row in rows.values()}) == 1


def test_a_benchmark_in_a_process_of_its_own() -> None:
    case = sweep.Case(chunks.QUICK, "float32")
    numbers = case.numbers() | {"device": "cpu", "rounds": 3}
    end = time.monotonic() + 250
    rows = worker.measure_apart("bench.chunks", numbers, ["16", LSTM], end=end)
    assert rows.keys() == {"16", LSTM}
    assert {len(row["train_ms"]) for row in rows.values()} == {3}
    assert len({row["process"] for row in rows.values()}) == 1


def test_packed(tmp_path: Path) -> None:
    run = bench("bench.packed", "--quick", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (case,) = load(tmp_path, "packed")["cases"]
    rows = case["contenders"]
    assert list(rows) == list(packed.MODULES)
    for ours, (padded, _) in packed.BASES.items():
        assert rows[ours]["peak_bytes"] < rows[padded]["peak_bytes"]
    rows_there = len(packed.packed_input(packed.QUICK, "cpu", torch.float32).data)
    assert f"over {rows_there} packed rows" in run.stdout
    # Half of them, and half a row more for each sequence.
    assert rows_there == 17 * 32 // 2


def test_chunks_on_a_gpu_are_those_of_the_shapes_and_dtypes_asked_for(
    monkeypatch: pytest.MonkeyPatch, on_cpu: OnCpu
) -> None:
    measured = []

    def measure_apart(module: str, numbers: Any, names: Any, **_: float) -> dict[str, worker.Row]:
        case = sweep.Case.of_numbers(numbers)
        measured.append((module, case.shape, case.kind, numbers["device"]))
        return {name: {"missing": "none"} for name in names}

    monkeypatch.setattr(chunks, "measure_apart", measure_apart)
    run = on_cpu.run()
    chunks.run_on_cuda(run)
    run.options.dtype, run.options.shape = None, [cases.Shape(300, 2, 4)]
    (table,) = chunks.run_on_cuda(run).tables
    assert measured == [
        ("bench.chunks", cases.CUDA_QUICK, "float32", "cuda"),
        ("bench.chunks", cases.Shape(300, 2, 4), "bfloat16", "cuda"),
    ]
    names = ["automatic", "16", "32", "64", "128", "256", "300", LSTM]
    assert [row[0] for row in table.rows] == names
    (table,) = chunks.run_on_cuda(on_cpu.run(budget_s=-1)).tables
    assert {row[1] for row in table.rows} == {"not reached within -1 s"}
    assert len(measured) == 2


def test_the_best_chunk_is_one_that_takes_little_memory() -> None:
    def row(ms: float, peak_bytes: int) -> worker.Row:
        return {"train_ms": [ms] * 3, "peak_bytes": peak_bytes, "chunk_steps": 4}

    case = sweep.Case(cases.Shape(64, 2, 2), "bfloat16")
    rows = {"automatic": row(11, 20), "16": row(12, 10), "32": row(10, 50), "64": row(5, 52)}
    rows |= {"128": {"error": "RuntimeError: broken"}, LSTM: row(1, 100)}
    result = chunks._report({case: rows}, "cuda")
    (target,) = result.targets
    assert target.value == pytest.approx(1.1)
    assert target.limit == 1.03
    assert result.failures == [f"chunk_size 128 failed at {case}: RuntimeError: broken"]
    table = {row[0]: row[1:] for row in result.tables[0].rows}
    assert table["64"] == ["4", "5.00", "0.50 (0.50–0.50)", "0.0", "0.520"]
    assert table["128"][0] == "RuntimeError: broken"
    for other in rows.values():
        other["peak_bytes"] = 2**24 * other.get("peak_bytes", 0)
    (target,) = chunks._report({case: rows}, "cuda").targets
    assert target.value == 1, "a quarter of a GiB or more: of these, the automatic one is the best"
    assert chunks._report({case: rows}, "cpu").targets == []
    rows[LSTM] = {"missing": "time"}
    assert chunks._report({case: rows}, "cuda").targets == []


def test_numerics(tmp_path: Path) -> None:
    run = bench("bench.numerics", "--quick", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    content = load(tmp_path, "numerics")
    places = [(row["cell"], row["dtype"], row["seq_len"]) for row in content["rows"]]
    assert places == list(
        itertools.product(numerics.CELLS, numerics.ON_CPU, numerics.LENGTHS_QUICK)
    )
    assert len(content["targets"]) == len(places)
    for row, target in zip(content["rows"], content["targets"], strict=True):
        assert row["errors"].keys() == numerics.CELLS[row["cell"]].keys()
        for found in row["errors"].values():
            assert len(found) == len(numerics.RESULTS)
            assert all(0 < error < 1 for error in found)
        assert target["limit"] == 2
        assert target["passed"]


def test_numerics_on_a_gpu_has_tf32_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, on_cpu: OnCpu
) -> None:
    def errors(name: str, seq_len: int, kind: str, device: str) -> dict[str, list[float]]:
        assert device == "cuda"
        if kind == numerics.TF32:
            raise RuntimeError("broken")
        found = {contender: [1.0, 2.0, 3.0] for contender in numerics.CELLS[name]}
        return found | {numerics.OURS: [1.0, 5.0, 3.0]}

    monkeypatch.setattr(numerics, "errors", errors)
    monkeypatch.setattr(numerics, "measure_apart", on_cpu.measure_apart)
    result = numerics.run_on_cuda(on_cpu.run())
    kinds = ("float32", "bfloat16", "float16", "tf32")
    for table in result.tables:
        assert [row[0] for row in table.rows] == [kind for kind in kinds for _ in range(2)]
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert {target.value for target in result.targets} == {2.5}
    assert not any(target.passed for target in result.targets)
    assert len(result.failures) == 3 * 2
    result = numerics.run_on_cuda(on_cpu.run(budget_s=-1))
    assert {row[2] for table in result.tables for row in table.rows} == {"not reached within -1 s"}
    assert result.targets == []
    assert len(result.failures) == 24


def test_markdown_stands_for_rich_where_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(report, "rich", None)
    screen = report.Screen()
    with screen.progress() as progress:
        progress.advance(progress.add_task("task", total=1))
    screen.table(report.Table("Title", ["", "a"], [["x", "1|2"]]), mark=True)
    screen.line("[text]", style="red")
    assert capsys.readouterr().out.split("\n") == [
        *("**Title**", "", "|  | a |", "|:--|--:|", "| x | 1\\|2 |", "", "[text]", "")
    ]


def python_part(name: str, code: str, limit_s: float = 60, **options: Any) -> parts.Part:
    return parts.Part(name, limit_s, [sys.executable, "-c", code], **options)


def check(
    stages: list[list[parts.Part]],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    sees_gpu: bool = True,
    seconds: float = 600,
) -> tuple[bool, dict[str, dict[str, Any]]]:
    names = ("gpu", "torch", "nvcc", "commit", "date")
    about = dict.fromkeys(names, "some") | {"torch_sees_gpu": sees_gpu}
    monkeypatch.setattr(gpu_check, "about", lambda: about)
    passed = gpu_check.Check(out, seconds).run(stages)
    outcomes = load(out, "summary")["parts"]
    return passed, {outcome["part"]: outcome for outcome in outcomes}


def test_gpu_check_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [
        [
            python_part(
                "fails", "print('fusedrnn: no GPU'); print('hint: none'); raise SystemExit(3)"
            )
        ],
        [parts.Part("lacks", 1, ["no-such-command"])],
        [python_part("env", "import os; print(os.environ['A'])", env={"A": "b"})],
        [python_part("denied", "print('fine')", verdict=lambda said: (False, f"{said[:4]}, but"))],
    ]
    passed, outcomes = check(stages, tmp_path, monkeypatch)
    assert not passed
    assert {name: (o["passed"], o["note"]) for name, o in outcomes.items()} == {
        "environment": (True, "some"),
        "fails": (False, "fusedrnn: no GPU"),
        "lacks": (False, "no-such-command: No such file or directory"),
        "env": (True, "b"),
        "denied": (False, "fine, but"),
    }
    assert "hint: none" in (tmp_path / "log.txt").read_text()
    assert "| fails | **failed** |" in (tmp_path / "summary.md").read_text()


def test_gpu_check_passes_if_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [[python_part("one", "print(1)")]]
    assert check(stages, tmp_path, monkeypatch)[0]
    passed, outcomes = check(stages, tmp_path, monkeypatch, sees_gpu=False)
    assert not passed
    assert outcomes["environment"]["note"] == "torch sees no GPU"
    assert outcomes["one"]["passed"]


def test_gpu_check_stops_a_part_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ENVIRONMENT_S", 0)
    child = "import time; time.sleep(60); open('late', 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    stages = [[python_part("hangs", code, limit_s=1)], [python_part("after", "print('ran')")]]
    passed, outcomes = check(stages, tmp_path, monkeypatch)
    assert not passed
    assert outcomes["hangs"]["note"] == "stopped after 1 s"
    assert outcomes["after"]["passed"]


def test_gpu_check_begins_no_part_that_may_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"first": 60, "long": 3600, "last": 60}
    stages = [[python_part(name, "print(1)", limit_s)] for name, limit_s in limits.items()]
    passed, outcomes = check(stages, tmp_path, monkeypatch, seconds=600)
    assert not passed
    assert outcomes["first"]["passed"]
    assert outcomes["last"]["passed"]
    assert outcomes["long"]["note"].startswith("not begun: ")
    assert outcomes["long"]["note"].endswith(" s left, and it may take 3600 s")


@pytest.mark.parametrize("group", parts.GROUPS)
def test_a_group_ends_in_time(tmp_path: Path, group: str) -> None:
    known, stages = parts.parts(tmp_path), parts.GROUPS[group]
    limit_s = gpu_check.ENVIRONMENT_S + sum(
        max(known[name].limit_s for name in stage) for stage in stages
    )
    assert limit_s < 60 * gpu_check.MINUTES
    assert stages[0] == ("build",)
    files = {parts.BENCHMARKS[n] for stage in stages for n in stage if n in parts.BENCHMARKS}
    assert len({"summary.json", "summary.md", gpu_check.LOG, *files}) <= 8


def test_parts_of_gpu_check(tmp_path: Path) -> None:
    known = parts.parts(tmp_path)
    in_groups = [name for stages in parts.GROUPS.values() for stage in stages for name in stage]
    assert set(in_groups) | {"packed", "kernels"} == set(known)
    for part in known.values():
        if "--budget-s" in part.command:
            assert float(part.command[-1]) == part.limit_s - parts.SLACK_S > 0
    assert parts.SLACK_S > sweep.OVERTIME_S


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, and would run them")
@pytest.mark.parametrize("name", parts.BENCHMARKS)
def test_commands_of_gpu_check_have_options_that_there_are(tmp_path: Path, name: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    command = parts.parts(tmp_path)[name].command
    assert list(command[1:3]) == ["-m", module.__name__]
    assert module.run_on_cuda
    said = bench(*command[2:])
    assert said.returncode == 2
    assert said.stderr.endswith("argument --device: torch sees no GPU\n")


def test_gpu_check_runs_the_parts_that_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ran = []

    class Check:
        def __init__(self, out: Path, seconds: float) -> None:
            self.begin, self.seconds = 0.0, seconds

        def run(self, stages: list[list[parts.Part]]) -> bool:
            ran.append(([tuple(part.name for part in stage) for stage in stages], self.seconds))
            return True

    monkeypatch.setattr(gpu_check, "Check", Check)
    for options in (
        [],
        ["--group", "deep"],
        ["--parts", "memory,build", "--minutes", "2"],
        ["--parts", "built,speed"],
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check", str(tmp_path), *options])
        with pytest.raises(SystemExit):
            gpu_check.main()
    assert ran == [
        ([*parts.GROUPS["first"]], 540),
        ([*parts.GROUPS["deep"]], 540),
        ([("memory",), ("build",)], 120),
    ]
    everything = ", ".join(parts.parts(tmp_path))
    assert capsys.readouterr().err.endswith(f"must be of {everything}, got 'built'\n")


def test_gpu_check_is_told_what_it_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    wrong = {
        "must be above 0, got -1": [str(tmp_path), "--minutes", "-1"],
        "must be a folder": [str(file)],
        "not allowed with argument --group": [str(tmp_path), "--group", "deep", "--parts", "fit"],
    }
    for said, options in wrong.items():
        monkeypatch.setattr(sys, "argv", ["gpu_check", *options])
        with pytest.raises(SystemExit):
            gpu_check.main()
        assert said in capsys.readouterr().err


def test_gpu_check_says_all_in_a_line() -> None:
    outcomes = [gpu_check.Outcome(part, part != "tests", 1.0, "") for part in ("build", "tests")]
    contents = {"speed": {"targets": [{"passed": False}] * 3}, "fit": {"targets": []}}
    assert gpu_check.verdict(outcomes[:1], {}) == "Nothing failed."
    said = gpu_check.verdict(outcomes, contents)
    assert said == "Failed: tests. Targets missed: 3 of speed."


def test_a_tree_without_a_repository_takes_its_commit_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("FUSEDRNN_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    monkeypatch.setenv("FUSEDRNN_COMMIT", "abc")
    assert machine.commit() == "abc"


@pytest.mark.parametrize(
    "said, passed",
    [
        ("4 passed, 1 skipped, 3 deselected, 2 warnings in 0.52s", True),
        ("1 failed, 3 passed in 75.00s (0:01:15)", True),  # its exit status says the rest
        ("2 skipped in 0.01s", False),
        ("1 error in 0.10s", False),
    ],
)
def test_gpu_check_reads_the_results_of_tests(said: str, passed: bool) -> None:
    tail = f"a test passed in 3 steps\n===== {said} =====\n"
    assert parts.test_results(tail) == (passed, said)
    assert parts.test_results("") == (False, "")


def test_gpu_check_reads_the_results(tmp_path: Path) -> None:
    """A target that is missed is a result; what failed, or was not measured, is none."""
    file = tmp_path / "speed.json"
    assert parts.results(file) == (False, "")
    targets = [{"passed": True}, {"passed": False}]
    rows = {"a": {"ms": 1}, "b": {"missing": "time"}}
    content = {"targets": targets, "failures": [], "cases": [{"contenders": rows}], "tables": []}
    note = "1 of 2 targets met; 1 of 2 rows: missing"
    file.write_text(json.dumps(content))
    assert parts.results(file) == (True, note)
    file.write_text(json.dumps(content | {"failures": ["a failed"]}))
    assert parts.results(file) == (False, f"{note}; 1 failures, the first: a failed")
    file.write_text(json.dumps(content | {"targets": [], "rows": [], "cases": []}))
    assert parts.results(file) == (False, "")
    for broken in ("", "[]", json.dumps(content)[:-9], "{}"):
        file.write_text(broken)
        assert parts.results(file) == (False, "speed.json cannot be read")


def test_evidence_names_parts_that_there_are(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "gpu-evidence.md").read_text()
    named = set(re.findall(r"part `(\w+)`", text))
    assert named == set(parts.parts(tmp_path)) - {"packed"}


def test_kernels_of_a_step_and_what_is_left_of_it() -> None:
    """The time in which no kernel runs, and a row that there is not."""
    case = sweep.Case(cases.CUDA_QUICK, "bfloat16")
    of_step = [{"kernel": f"void fusedrnn::k{i}<a>", "count": 1, "us": 100.0} for i in range(8)]
    rows = {name: {"train_ms": [1.0], "kernels": of_step} for name in kernels.NAMES}
    rows[cases.OURS] = {"error": "RuntimeError: no"}
    found = kernels.report({case: rows})
    assert found.failures == [f"fusedrnn failed at {case}: RuntimeError: no"]
    (table,) = found.tables
    of_lstm = table.rows[: kernels.SHOWN + 3]
    assert of_lstm[1] == ["", "k0<a>", "1", "100", "0.10"]
    assert of_lstm[-2:] == [
        ["", "2 other kernels", "2", "200", "0.20"],
        ["", "none", "0", "200", "0.20"],
    ]
