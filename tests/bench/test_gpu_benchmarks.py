"""The benchmarks for a GPU, with the same steps on the CPU in its place.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bench_runs import LOOP, LSTM, OURS, OnCpu, load, run_bench

from bench import (
    any_cell,
    any_cell_first,
    calls,
    cases,
    chunks,
    clock,
    kernels,
    memory,
    model,
    numerics,
    report,
    speed,
    sweep,
    worker,
)


def test_a_benchmark_alone_has_no_short_form(on_cpu: OnCpu) -> None:
    assert on_cpu.run().everything


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
    on_cpu.failing = {LOOP: "out of memory\nsecond line", cases.SAVED: "broken"}
    for benchmark in (memory, speed):
        result = benchmark.run_on_cuda(on_cpu.run())
        (case,) = load(on_cpu.out, result.name)["cases"]
        assert case["contenders"][LOOP]["error"] == "RuntimeError: out of memory"
        assert "error" not in case["contenders"][OURS]
        shown = {row[0]: row[1] for row in result.tables[0].rows}
        assert shown[LOOP] == "RuntimeError: out of memory"
        assert not any(LOOP in target.what.split(" / ") for target in result.targets)
        # A failure of another contender is a result; a failure of ours is wrong.
        where = f"{cases.CUDA_QUICK}, float32"
        assert result.failures == [f"{cases.SAVED} failed at {where}: RuntimeError: broken"]


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
    """Groups that no kernel of ours can break come first."""
    speed.run_on_cuda(on_cpu.run())
    names = [names for _, names in on_cpu.measured]
    assert names == [*cases.ON_CUDA_TOGETHER, *((name,) for name in sweep.ON_CUDA_LATER)]
    assert {module for module, _ in on_cpu.measured} == {"bench.speed"}
    together = [name for group in cases.ON_CUDA_TOGETHER for name in group]
    assert len(set(together)) == len(together)
    assert set(together) == set(cases.ON_CUDA)
    assert not {*cases.PERSISTENT, cases.SAVED, cases.CAPTURED} & set(cases.ON_CUDA_TOGETHER[0])


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
    """Restores torch's defaults after a test."""
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
    """Except where the weights are large for the sequence, and the least chunk takes more."""
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
    run = run_bench("bench.model")
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


def test_kernels_of_a_step_and_what_is_left_of_it() -> None:
    """The table has the time in which no kernel runs, and a row that was not measured."""
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


def test_cells_that_users_write_on_a_gpu(monkeypatch: pytest.MonkeyPatch, on_cpu: OnCpu) -> None:
    """Rows of all contenders, and why one of them has no numbers."""
    step, failing = any_cell.Step, any_cell.GRAPHS

    def on_a_cpu(name: str, case: Any, size: Any, device: str) -> Any:
        assert device == "cuda"
        if name == failing:
            raise RuntimeError("CUDA error: an illegal memory access")
        return step(name, case, size, "cpu")

    def first_uses(*given: Any, end: float, **named: Any) -> dict[str, Any]:
        first = {any_cell_first.BY_NVCC: {"seconds": 3.0, "libraries": 1, "step_s": 0.1}}
        return first if time.monotonic() < end else {}

    monkeypatch.setattr(any_cell_first, "measure_apart", first_uses)
    monkeypatch.setattr(any_cell, "measure_apart", on_cpu.measure_apart)
    monkeypatch.setattr(any_cell, "set_up_torch", lambda: None)
    monkeypatch.setattr(any_cell, "Step", on_a_cpu)
    monkeypatch.setattr(any_cell, "cuda_peak_bytes", lambda train: train() or 1000)
    monkeypatch.setattr(any_cell, "cuda_time_ms", clock.time_ms)
    run = on_cpu.run()
    run.options.cell, run.options.compiled = "AttentionDecoder", False
    result = any_cell.run_on_cuda(run)
    rows = load(on_cpu.out, "any_cell")["cells"]["AttentionDecoder"]
    names = (*any_cell.ON_CUDA_FIRST, *any_cell.ON_CUDA_THEN)
    assert list(rows) == [name for name in names if name != any_cell.BUILT_IN]
    assert rows[any_cell.OURS]["peak_ratio"] == 1
    assert rows[any_cell.OURS]["time_ratio"]["median"] > 0
    assert "row" in rows[any_cell.PARALLEL]["unable"]
    assert rows[failing]["error"].startswith("RuntimeError: CUDA error")
    assert [f for f in result.failures if failing in f] == result.failures != []
    assert [target.what for target in result.targets if any_cell.OURS in target.what] != []
    assert result.tables[-1].columns[1:] == [any_cell_first.BY_NVCC]
    assert result.tables[-1].rows == [["AttentionDecoder", "3.00"]]
    run = on_cpu.run(budget_s=-1)
    run.options.cell, run.options.compiled = None, True
    late = any_cell.run_on_cuda(run)
    assert late.targets == late.failures == []
