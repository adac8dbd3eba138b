"""The benchmarks run, write their files, and give the results that do not depend on time.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import LOOP, LSTM, OURS, OnCpu, load, run_bench

from bench import (
    calls,
    cases,
    chunks,
    memory,
    numerics,
    packed,
    report,
    sweep,
    worker,
)


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
    run = run_bench("bench", "--quick", "--out", str(tmp_path))
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


def test_loop_and_ours_learn_the_same(results: Path) -> None:
    text = load(results, "train_text")
    for loss in text["agreement"].values():
        assert loss["difference"] <= loss["tolerance"]
    loop, ours = (text["cells"][name] for name in (LOOP, OURS))
    assert ours["train_bits"] == pytest.approx(loop["train_bits"], rel=1e-4)
    assert ours["train_bits"][-1] < ours["train_bits"][0]
    assert ours["longest_window"] > loop["longest_window"] > 0


def test_train_one_cell(tmp_path: Path) -> None:
    run = run_bench(
        "bench.train_text", "--quick", "--cell", "ours", "--steps", "2", "--out", str(tmp_path)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    text = load(tmp_path, "train_text")
    assert list(text["cells"]) == [OURS]
    assert text["job"]["steps"] == len(text["cells"][OURS]["train_bits"]) == 2


def test_train_in_bfloat16(tmp_path: Path) -> None:
    run = run_bench(
        "bench.train_text", "--quick", "--dtype", "bfloat16", "--steps", "2", "--out", str(tmp_path)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    text = load(tmp_path, "train_text_bfloat16")
    cells = {name: result["train_bits"] for name, result in text["cells"].items()}
    unable = list(text["unable"])  # if torch lacks an LSTM in 16 bits for this processor
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
    run = run_bench("bench.train_text", "--steps", "0", "--out", str(tmp_path))
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
        cases.SAVED: forward + gradients + chain,
        cases.OURS: forward + forward + gradients + chain,
        cases.LSTM: (4 + 4) + (4 + 4) + 4,
        cases.GRU: (3 + 3) + (3 + 3) + 3,
        cases.SAVED_LSTM: (4 + 4) + (4 + 4) + 4,
        cases.SAVED_GRU: (3 + 3) + (3 + 3) + 3,
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
    assert other(cases.SAVED_GRU) == other(cases.GRU) == other(cases.GRU_BESIDE) == cases.GRU


@pytest.mark.parametrize("name", [cases.CHECKPOINTED, cases.OFFLOADED])
def test_loops_that_save_less_learn_the_same(name: str) -> None:
    def gradients(name: str) -> list[torch.Tensor]:
        step = cases.training_step(name, cases.Shape(10, 2, 4))
        torch.manual_seed(1)
        step.forward().backward(step.grad_output)
        return [weight.grad for weight in step.module.parameters()]

    torch.testing.assert_close(gradients(name), gradients(LOOP))


def test_chunks(tmp_path: Path) -> None:
    run = run_bench("bench.chunks", "--quick", "--out", str(tmp_path))
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
    run = run_bench("bench.packed", "--quick", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (case,) = load(tmp_path, "packed")["cases"]
    rows = case["contenders"]
    assert list(rows) == list(packed.MODULES)
    for ours, (padded, _) in packed.BASES.items():
        assert rows[ours]["peak_bytes"] < rows[padded]["peak_bytes"]
    rows_there = len(packed.packed_input(packed.QUICK, "cpu", torch.float32).data)
    assert f"over {rows_there} packed rows" in run.stdout
    # Half of the rows, and half a row more for each sequence.
    assert rows_there == 17 * 32 // 2


def test_numerics(tmp_path: Path) -> None:
    run = run_bench("bench.numerics", "--quick", "--out", str(tmp_path))
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
