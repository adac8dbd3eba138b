"""Every benchmark runs once at its smallest sizes, and writes whole files.

Those for a GPU get made-up rows, or steps on the CPU. What else is tested here is what measured
numbers mean: ratios, rates of products, and contenders that compute the same.

Longer than 350 lines, because every benchmark has its run here.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import load, run_bench

from bench import (
    any_cell,
    any_cell_first,
    calls,
    cases,
    chunks,
    clock,
    fit,
    kernels,
    memory,
    model,
    numerics,
    packed,
    report,
    speed,
    speed_map,
    steps,
    sweep,
    worker,
)
from bench.any_cell_steps import BUILT_IN, BUILT_IN_LAYERS, Size, Step
from bench.any_cell_steps import LOOP as PLAIN_LOOP
from docs.examples.published_cells import CASES

OURS, LSTM, LOOP = cases.OURS, cases.LSTM, cases.LOOP
BROKEN, LATE = "RuntimeError: broken", "not reached within -1 s"


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(report, "THREADS", torch.get_num_threads())
    validates = torch.distributions.Distribution._validate_args
    yield
    report.set_up_torch(tf32=True)
    torch.distributions.Distribution.set_default_validate_args(validates)


def check_file(out: Path, name: str) -> dict[str, Any]:
    """The results of a benchmark, after a look at what all of them have."""
    content = load(out, name)
    assert content["failures"] == [] != content["tables"]
    for table in content["tables"]:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len(lines) > 2, "a heading, and rows"
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, table
    return content


# --- on the CPU ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results of ``python -m bench --all --quick``."""
    out = tmp_path_factory.mktemp("bench")
    run = run_bench("bench", "--all", "--quick", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "the progress bar shares the terminal with whatever goes here"
    assert "Left out" not in run.stdout + (out / "cpu.md").read_text()
    return out


@pytest.mark.parametrize("name", ["memory", "speed", "calls", "train_text"])
def test_files(results: Path, name: str) -> None:
    content = check_file(results, name)
    about = content["environment"]
    assert about["command"].startswith("python -m bench --all --quick")
    assert all(about[key] for key in ("date", "cpu", "torch", "fusedrnn", "python", "threads"))
    markdown = (results / "cpu.md").read_text()
    assert all(table.strip() in markdown for table in content["tables"])
    assert (results / "memory_over_seq_len.png").read_bytes().startswith(b"\x89PNG")


def test_memory_is_what_the_readme_claims(results: Path) -> None:
    found = load(results, "memory")
    assert found["targets"] and all(target["passed"] for target in found["targets"])
    for result in found["shapes"] + found["over_seq_len"]:
        shape, ours = result["shape"], result["contenders"][OURS]
        hx_bytes, seed_bytes = 4 * shape["batch"] * shape["hidden_size"], 8
        assert ours["largest_saved_bytes"] == [result["output_bytes"], hx_bytes, seed_bytes]
    over = [result["contenders"][OURS] for result in found["over_seq_len"]]
    assert len(over) > 1
    for what in ("allocations", "workspace_bytes"):
        assert len({ours[what] for ours in over}) == 1, "it does not depend on the length"
    (last,) = found["last_state"]
    peak = {name: measured["peak_bytes"] for name, measured in last["contenders"].items()}
    assert max(peak[cases.LAST_GRU], peak[cases.LAST_LSTM]) < peak[LSTM]


def test_ratios_of_speed_are_of_rounds(results: Path) -> None:
    (result,) = load(results, "speed")["shapes"]
    assert f"{OURS} / {LSTM}" in result["ratios"]
    assert len({len(times) for times in result["train_ms"].values()}) == 1
    for of_shape in load(results, "calls")["parts_us"].values():
        for parts_us in of_shape.values():
            whole, _ = parts_us.pop(cases.OUR_GRU), parts_us.pop(cases.GRU)
            assert sum(parts_us.values()) == pytest.approx(whole)


def test_loop_and_ours_learn_the_same(results: Path) -> None:
    text = load(results, "train_text")
    assert all(loss["difference"] <= loss["tolerance"] for loss in text["agreement"].values())
    loop, ours = (text["cells"][name] for name in (LOOP, OURS))
    assert ours["train_bits"][-1] < ours["train_bits"][0]
    assert ours["longest_window"] > loop["longest_window"] > 0


def test_what_the_short_form_leaves_out_is_said() -> None:
    said = [report.Report(name, {}, [], left_out=[name]) for name in ("a", "b")]
    assert report._left_out(said).endswith("measured by python -m bench --all: a, b")


NIGHTLY = pytest.mark.nightly
SPEED_MAP = speed_map.report({}).name  # has the name of the processor
ALONE = [
    ("chunks", [], "chunks", ["automatic", "16", "32", "64", LSTM]),
    ("packed", [], "packed", [*packed.MODULES]),
    ("numerics", [], "numerics", [*numerics.CELLS]),
    ("speed_map", ["--threads", "1"], SPEED_MAP, None),
    ("products", [], "products", None),
    ("train_text", ["--steps", "2", "--cell", "ours"], "train_text", [OURS]),
    # torch lacks an LSTM in 16 bits for some processors
    ("train_text", ["--steps", "2", "--dtype", "bfloat16"], "train_text_bfloat16", None),
    pytest.param("any_cell_calls", [], "any_cell_calls", ["GRUCell"], marks=pytest.mark.slow),
    pytest.param("any_cell_large", [], "any_cell_large", ["ForumCell"], marks=pytest.mark.slow),
    pytest.param("any_cell", ["--cell", "LateResetGRU"], "any_cell", None, marks=NIGHTLY),
]


@pytest.mark.parametrize(("name", "options", "file", "rows"), ALONE)
def test_a_benchmark_alone(
    name: str,
    options: list[str],
    file: str,
    rows: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module(f"bench.{name}")
    command = [str(module.__file__), "--quick", "--out", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", command)
    add_options = getattr(module, "add_options", lambda parser: None)
    with pytest.raises(SystemExit, match="0"):
        report.main([module.run], None, add_options)
    found = check_file(tmp_path, file)
    assert found["environment"]["command"].startswith(f"python -m bench.{name} --quick")
    if rows is not None:
        measured = [row["cell"] for row in found.get("rows", ())]  # of numerics
        measured = measured or found.get("cells") or found["cases"][0]["contenders"]
        assert [*dict.fromkeys(measured)] == rows
    assert name != "numerics" or all(target["passed"] for target in found["targets"])
    if name == "speed_map":
        assert [(of["cell"], of["mode"]) for of in found["maps"]] == [
            *itertools.product(speed_map.CELLS, speed_map.WORST)
        ]
        assert all(len(of["rows"]) == 4 for of in found["maps"])
    if name == "any_cell":
        peaks = found["cells"]["LateResetGRU"]
        assert peaks["Recurrent, loop"]["peak_ratio"] < peaks["plain loop"]["peak_ratio"] == 1
        first = found["first_use"]["LateResetGRU"]
        built, cached = first[any_cell_first.BUILT], first[any_cell_first.CACHED]
        assert built["process"] != cached["process"]
        assert built["libraries"] > 0 == cached["libraries"], "built once"


def test_markdown_stands_for_rich_where_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(report, "rich", None)
    screen = report.Screen()
    with screen.progress() as progress:
        progress.advance(progress.add_task("task", total=1))
    screen.table(report.Table("Title", ["", "a"], [["x", "1|2"]]), mark=True)
    assert capsys.readouterr().out == "**Title**\n\n|  | a |\n|:--|--:|\n| x | 1\\|2 |\n\n"


# --- for a GPU -----------------------------------------------------------------------------------

MS = [4.0, 6.0, 5.0]
EACH_MS = ("train", "forward", "backward", "no_grad", "training", "each", "enqueueing")
# A row with all that any benchmark measures.
ROW: dict[str, Any] = {f"{name}_ms": MS for name in EACH_MS}
ROW |= dict.fromkeys(("train_tflops", "forward_tflops", "seconds", "step_s"), 1.0)
ROW |= dict.fromkeys(("peak_bytes", "saved_bytes", "host_bytes", "output_bytes"), 1000)
ROW |= {"process": 1, "chunk_steps": 4, "libraries": 1}
ROW["errors"] = {name: [1.0, 2.0, 3.0] for cell in numerics.CELLS.values() for name in cell}
ROW["kernels"] = [{"kernel": f"void fusedrnn::k{i}<a>", "count": 1, "us": 100.0} for i in range(8)]
ON_A_GPU = (memory, speed, calls, chunks, packed, numerics, kernels, any_cell, fit)


def on_a_gpu(
    module: Any, monkeypatch: pytest.MonkeyPatch, out: Path, error: str = "", budget_s: float = 60
) -> report.Report:
    """What a benchmark makes of rows; of ours there is none if there is an error."""

    def measure_apart(_: str, job: Any, names: Any, end: float, **named: Any) -> dict[str, Any]:
        is_late = end < time.monotonic() + budget_s - 60
        # Names of the fit and of chunks are of ours alone, as are the lengths of numerics.
        ours = [name for name in names if name.startswith((OURS, "Recurrent", "gru", "16"))]
        return {
            name: {"error": error} if error and name in ours else ROW
            for name in names
            if not is_late
        }

    for each in (module, sweep, any_cell_first):
        monkeypatch.setattr(each, "measure_apart", measure_apart, raising=False)
    for name in ("modelled", "tiles"):  # the fit's, of a GPU that need not be here
        of = getattr(fit, name)
        monkeypatch.setattr(fit, name, lambda c, _, of=of: of(c, "H100"))
    options = argparse.Namespace(
        dtype=None, shape=None, budget_s=budget_s, device="cuda", cell=None, torch_compile=True
    )
    run = report.Run(True, out, report.NoProgress(), options, {"gpu": "none"})
    found = module.run_on_cuda(run)
    run.write(found)
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("module", ON_A_GPU, ids=lambda module: module.__name__)
def test_on_a_gpu(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All rows, rows of ours that fail, and none because the time is over."""
    found = on_a_gpu(module, monkeypatch, tmp_path)
    check_file(tmp_path, found.name)
    failing = on_a_gpu(module, monkeypatch, tmp_path, error=BROKEN)
    assert failing.failures and all(BROKEN in failure for failure in failing.failures)
    assert len(failing.targets) <= len(found.targets)
    if module is packed:  # a single process
        return
    late = on_a_gpu(module, monkeypatch, tmp_path, budget_s=-1)
    assert LATE in str(late.numbers) and late.targets == []


@pytest.mark.parametrize("module", [memory, speed], ids=lambda module: module.__name__)
def test_steps_of_a_gpu_on_the_cpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def training_step(name: str, shape: cases.Shape, device: str, dtype: torch.dtype) -> Any:
        assert device == "cuda"
        if name == LOOP:
            raise RuntimeError("broken\nand a hint")
        return cases.training_step(name, shape, "cpu", dtype)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(steps, "captured", lambda call: argparse.Namespace(replay=call))
    monkeypatch.setattr(module, "training_step", training_step)
    monkeypatch.setattr(speed, "cuda_time_ms", clock.time_ms)
    monkeypatch.setattr(speed, "cuda_kernels", lambda call: [clock.Kernel("k", 0, 1)])
    monkeypatch.setattr(speed, "CUDA_ROUNDS", 3)
    monkeypatch.setattr(memory, "cuda_saved_bytes", lambda forward: (forward().nbytes, 0))
    monkeypatch.setattr(memory, "cuda_peak_bytes", lambda train: train() or 1000)
    monkeypatch.setattr(memory, "release", lambda: None)
    job = sweep.Case(cases.CUDA_QUICK, "float32").numbers()
    names = (*cases.ON_CUDA, cases.CHECKPOINTED, cases.OFFLOADED)
    rows = worker.measure_here(module.measure, job, names)
    assert rows.keys() == {*names}
    assert rows.pop(LOOP) == {"error": BROKEN}
    wanted = {"peak_bytes"} if module is memory else {"train_ms", "forward_ms", "train_tflops"}
    assert all(wanted <= row.keys() for row in rows.values())
    if module is speed:
        by_itself = {name for name, row in rows.items() if "backward_ms" in row}
        assert by_itself == {*cases.PERSISTENT, *cases.PERSISTENT.values()}


def test_the_model_keeps_memory_within_the_targets(capsys: pytest.CaptureFixture) -> None:
    """Except where the weights are large for the sequence, and the least chunk takes more."""
    model.main()
    said = capsys.readouterr().out
    assert all(f"H100, {kind}, time by model" in said for kind in model.KINDS)
    reasons: list[str] = []
    for kind in model.KINDS:
        rows = model.chunk_table(kind, reasons).rows
        assert len(rows) == len(cases.CUDA_SHAPES) * len(model.CELLS)
        for *_, forward, backward, _, why, _, share in rows:
            assert float(share) <= 0.5 or "than the shortest" in reasons[int(why) - 1]
            assert kind != "float32" or (forward, backward) == ("stepwise", "stepwise")


def test_tf32_is_on_in_its_own_rows_alone() -> None:
    for kind in ("tf32", *report.DTYPES):
        sweep.opened(sweep.Case(cases.CUDA_QUICK, kind).numbers())
        assert (torch.backends.cudnn.rnn.fp32_precision == "tf32") == (kind == "tf32")
        assert not torch.backends.cuda.matmul.allow_tf32


# --- what the numbers mean -----------------------------------------------------------------------


def test_times_of_one_process_are_compared_within_rounds() -> None:
    def row(process: int, *times: float) -> worker.Row:
        return {"process": process, "train_ms": list(times)}

    rows = {OURS: row(2, 1, 2, 3), LSTM: row(1, 4, 4, 4), cases.LSTM_BESIDE: row(2, 2, 4, 6)}
    rows[LOOP] = row(1, 10, 20, 40)
    assert speed.compared(rows, OURS, LSTM, "train_ms") == clock.Ratio(0.5, 0.5, 0.5)
    assert speed.compared(rows, OURS, LOOP, "train_ms") == clock.Ratio(0.1, 1 / 40, 0.3)
    rows[cases.LSTM_BESIDE] = {"error": "broken"}
    assert speed.compared(rows, OURS, LSTM, "train_ms") == clock.Ratio(0.5, 0.25, 0.75)
    rows[LSTM] = {"missing": "time"}
    assert speed.compared(rows, OURS, LSTM, "train_ms") is None


def test_gemm_rate_against_a_count_by_hand() -> None:
    # x to 3H, h to 2Z, z to 3H; their three gradients; back from 3H to z and from 2Z to h.
    forward, gradients, chain = 3 + 2 + 3, 3 + 2 + 3, 3 + 2
    counts = {
        LOOP: forward + gradients + chain,
        OURS: forward + forward + gradients + chain,
        LSTM: (4 + 4) + (4 + 4) + 4,
        cases.OUR_LSTM: (4 + 4) + (4 + 4) + (4 + 4) + 4,
        cases.SAVED_GRU: (3 + 3) + (3 + 3) + 3,
        cases.OUR_GRU: (3 + 3) + (3 + 3) + (3 + 3) + 3,
    }
    for name, count in counts.items():
        rate = cases.CONTENDERS[name].tflops(cases.Shape(10, 20, 30), 2.0, training=True)
        assert rate == pytest.approx(10 * 20 * 2 * 30 * 30 * count / 2e-3 / 1e12)


@pytest.mark.parametrize("name", [cases.CHECKPOINTED, cases.OFFLOADED])
def test_loops_that_save_less_learn_the_same(name: str) -> None:
    def gradients(name: str) -> list[torch.Tensor]:
        step = cases.training_step(name, cases.Shape(10, 2, 4))
        torch.manual_seed(1)
        step.forward().backward(step.grad_output)
        return [weight.grad for weight in step.module.parameters()]

    torch.testing.assert_close(gradients(name), gradients(LOOP))


def test_steps_of_cells_and_of_last_states_are_those_of_the_layers() -> None:
    names = {cases.OUR_GRU_CELL: cases.OUR_GRU, cases.OUR_LSTM_CELL: LSTM, cases.LAST_LSTM: LSTM}
    for name, layer in names.items():
        step, whole = (cases.training_step(n, cases.Shape(3, 2, 4)) for n in (name, layer))
        torch.testing.assert_close(step.forward(), whole.forward()[-1])
        step.train()


@pytest.mark.parametrize("name", BUILT_IN_LAYERS)
def test_the_built_in_layer_has_the_weights_of_the_cell(name: str) -> None:
    """So a cell without noise and its layer give the same numbers; both can be trained."""
    case = next(case for case in CASES if case.name == name)
    loop, layer = (Step(how, case, Size(6, 3, 8), "cpu") for how in (PLAIN_LOOP, BUILT_IN))
    weights = {f"{key}_l0": value for key, value in loop.cell.state_dict().items()}
    torch.testing.assert_close(dict(layer.cell.state_dict()), weights, rtol=0, atol=0)
    if name != "ForumCell":
        torch.testing.assert_close(loop.forward(), layer.forward())
    layer.train()
