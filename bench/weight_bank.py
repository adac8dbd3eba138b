"""Costs of ``fusedrnn.WeightBank``: ``python -m bench.weight_bank --out bench/results``.

On a CPU: the host's processor time of a training step through a bank, and of optimizers of many
tasks, as ratios to the module and the optimizer of one task; and what ``plan()`` says of 64 LSTMs
with H = 1024. With ``--device cuda``: copies, memory, how far copies are hidden by computation,
steps per second beside other ways to have many tasks, and optimizers on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from fusedrnn._bank import BankPlan
from fusedrnn._bank.bank_plan import break_even

from . import weight_bank_cases as cases
from . import weight_bank_host as host
from .clock import Ratio, ratio, ratio_of_medians
from .report import Report, Run, Table, Target, main, mib
from .sweep import Budget, not_reached, why_none
from .worker import Row, measure_apart

# Bounds of the design; the first one is of medians over rounds.
ON_CPU_LIMIT, CALL_US_LIMIT, MEMORY_LIMIT, OVERLAP_LIMIT = 1.1, 50.0, 1.05, 1.05
GROWTH_LIMIT_MIB = {"device": 0.0, "host": 4.0}
STALL_S = 60.0
GB_PER_S = {"PCIe 4, 25 GB/s": 25.0, "PCIe 5, 55 GB/s": 55.0, "NVLink-C2C, 400 GB/s": 400.0}
ADAM_GB_PER_S = 100.0

Groups = dict[str, dict[str, Row]]


def run(run: Run) -> Report:
    """Measures what can be measured without a GPU."""
    size = host.QUICK if run.quick else host.Size()
    rows: Groups = {}
    plan: BankPlan | None = None
    task = run.progress.add_task("weight_bank", total=len(host.MODULES) + 3)

    def done(name: str, found: dict[str, list[float]], **more: Any) -> None:
        rows[name] = {of: {"processor_ms": ms} | more for of, ms in found.items()}
        run.write(_report(rows, plan))
        run.progress.advance(task)

    with host.one_thread():
        for name in host.MODULES:
            tasks, tensors, found = host.step_times(name, size)
            done(name, found, tasks=tasks, tensors=tensors)
        done("optimizers", host.optimizer_times(size), tasks=size.heads)
        count, found = host.adam_times(size)
        done("adam", found, weights=count)
        plan = host.plan(size)
        run.progress.advance(task)
    return _report(rows, plan)


def run_on_cuda(run: Run) -> Report:
    """Measures groups of rows, each in a process of its own, until the time is over."""
    size = cases.QUICK if run.quick else cases.Size()
    missing = not_reached(run)
    rows: Groups = {group: dict.fromkeys(names, missing) for group, names in cases.GROUPS.items()}
    task = run.progress.add_task("weight_bank", total=len(rows))
    budget = Budget(run)
    for group, names in cases.GROUPS.items():
        if budget.is_spent:
            break
        job = {"group": group, "size": asdict(size), "device": "cuda"}
        rows[group] |= measure_apart(
            "bench.weight_bank_device", job, names, end=budget.end, stall_s=STALL_S
        )
        run.write(_report_on_cuda(rows, size))
        run.progress.advance(task)
        print(f"{budget.seconds:4.0f} s  {group}", flush=True)
    return _report_on_cuda(rows, size)


# --- on a CPU ------------------------------------------------------------------------------------


def _report(rows: Groups, plan: BankPlan | None) -> Report:
    steps = {name: of for name, of in rows.items() if name in host.MODULES}
    targets = []
    for name, of in steps.items():
        found = _over(of, host.ON_CPU, host.MODULE)
        what = f"processor time, {host.ON_CPU} / {host.MODULE}"
        targets.append(Target(what, name, found.median, ON_CPU_LIMIT, found.spread))
    tables = [_steps_table(steps)]
    if "optimizers" in rows:
        of = rows["optimizers"]
        title = (
            f"zero_grad() and step(), {of[host.ONE_TASK]['tasks']:,} tasks of 8 tensors, one in use"
        )
        tables.append(_times_table(title, of, host.ONE_TASK))
        found = _over(of, host.OF_BANK, host.ALL_TASKS)
        what = f"processor time, {host.OF_BANK} / {host.ALL_TASKS}"
        targets.append(Target(what, "optimizers", found.median, 1.0, found.spread))
    if "adam" in rows:
        tables.append(_adam_table(rows["adam"]))
    numbers: dict[str, Any] = {"rows": _flat(rows)}
    if plan is not None:
        tables += [_plan_table(plan), _break_even_table(plan)]
        numbers["plan"] = asdict(plan)
    return Report("weight_bank", numbers, tables, targets)


def _over(rows: dict[str, Row], name: str, base: str) -> Ratio:
    return ratio(rows[name]["processor_ms"], rows[base]["processor_ms"])


def _steps_table(steps: Groups) -> Table:
    columns = ["processor time / module's", "tensors", "tasks", "module, µs", *host.CONTENDERS[1:]]
    lines = []
    for name, of in steps.items():
        alone = of[host.MODULE]
        line = [name, str(alone["tensors"]), f"{alone['tasks']:,}"]
        line.append(f"{1e3 * median(alone['processor_ms']):.0f}")
        lines.append([*line, *(str(_over(of, c, host.MODULE)) for c in host.CONTENDERS[1:])])
    return Table("A training step with few numbers", columns, lines)


def _times_table(title: str, rows: dict[str, Row], base: str) -> Table:
    lines = [
        [name, f"{median(row['processor_ms']):.3f}", str(_over(rows, name, base))]
        for name, row in rows.items()
    ]
    return Table(title, ["", "ms", f"/ {base}"], lines)


def _adam_table(rows: dict[str, Row]) -> Table:
    count = rows[host.COPY]["weights"]
    table = _times_table(f"A step of {count:,} weights, one thread", rows, host.FUSED)
    for line, (name, row) in zip(table.rows, rows.items(), strict=True):
        nbytes = count * (host.COPY_BYTES if name == host.COPY else host.ADAM_BYTES)
        line.append(f"{nbytes / median(row['processor_ms']) / 1e6:.1f}")
    return Table(table.title, [*table.columns, "GB/s"], table.rows)


def _plan_table(plan: BankPlan) -> Table:
    names = {
        "device, weights in slots": plan.device_weight_bytes,
        "device, blocks of gradients": plan.device_gradient_bytes,
        "device, if it had the weights of all tasks": plan.all_tasks_bytes,
        "host, weights": plan.host_weight_bytes,
        "host, gradients of a task in use": plan.host_gradient_bytes_per_task,
        "host, Adam's state of all tasks": plan.host_adam_bytes,
        "to the device, for a call": plan.bytes_to_device,
        "to the host, for a backward pass": plan.bytes_to_host,
    }
    lines = [[name, mib(size_bytes)] for name, size_bytes in names.items()]
    return Table(f"plan() of {plan.tasks:,} LSTMs of {plan.task_bytes:,} bytes", ["", "MiB"], lines)


def _break_even_table(plan: BankPlan) -> Table:
    """Rows from which prefetching hides copies; a step on the device has four times as many."""
    adam = break_even(host.ADAM_BYTES, [ADAM_GB_PER_S], [tflops for tflops, _ in plan.hidden_from])
    columns = ["reached TFLOP/s", *GB_PER_S, f"AdamW on the host at {ADAM_GB_PER_S:.0f} GB/s"]
    lines = [
        [
            f"{tflops:.0f}",
            *(f"{n:,.0f} (device step {4 * n:,.0f})" for n in of),
            f"{of_adam[0]:,.0f}",
        ]
        for (tflops, of), (_, of_adam) in zip(plan.hidden_from, adam, strict=True)
    ]
    return Table("Rows T·B of a training step that take as long as the copies", columns, lines)


# --- on a GPU ------------------------------------------------------------------------------------


def _report_on_cuda(rows: Groups, size: cases.Size) -> Report:
    failures = [
        f"{name} of {group} failed: {row['error']}"
        for group, of in rows.items()
        for name, row in of.items()
        if "error" in row
    ]
    failures += [
        f"{group} has no {name}: {row['missing']}"
        for group, of in rows.items()
        for name, row in of.items()
        if "missing" in row and group in cases.WITH_TARGETS
    ]
    measured = {
        group: {name: row for name, row in of.items() if not why_none(row)}
        for group, of in rows.items()
    }
    numbers = {"size": asdict(size), "rows": _flat(rows)}
    tables = [_group_table(group, of) for group, of in rows.items()]
    return Report("weight_bank", numbers, tables, _targets(measured), failures)


def _targets(rows: Groups) -> list[Target]:
    """What the measured rows have to keep to."""
    found = []
    if bank := rows["copies"].get(cases.REGISTERED):
        found.append(
            Target("µs of the call that begins a copy", "bank", bank["call_us"], CALL_US_LIMIT)
        )
        # Exact: the block is as large as what is in it, and torch's allocator has no part in it.
        for what, limit in (("rss_bytes", 1.02), ("torch_pinned_bytes", 0.0)):
            size = bank[what] / bank["nbytes"]
            found.append(Target(f"{what} of a block / its bytes", "bank", size, limit))
    for name, row in rows["memory"].items():
        if name == cases.ACTIVATIONS:
            for where, limit in GROWTH_LIMIT_MIB.items():
                mebibytes = row[f"{where}_growth_bytes"] / 2**20
                found.append(Target(f"MiB more of the {where}", name, mebibytes, limit))
        else:
            expected = row["plan_bytes"] + row["own_bytes"]
            found.append(
                Target(
                    "peak / (plan() + module's)", name, row["peak_bytes"] / expected, MEMORY_LIMIT
                )
            )
    for name, row in rows["overlap"].items():
        for which in ("train", "forward"):
            found.append(
                Target(
                    f"{'training step' if which == 'train' else which} / max(compute, copy)",
                    name,
                    median(hidden(row, which)),
                    OVERLAP_LIMIT,
                )
            )
    autocast = rows["autocast"]
    if len(autocast) == len(cases.GROUPS["autocast"]):
        few, many = (autocast[cases.calls_in_flight(n)]["saved_bytes"] for n in (1, 3))
        copy_bytes = autocast[cases.calls_in_flight(1)]["copy_bytes"]
        found.append(
            Target("bytes of a call / 16-bit copy", "autocast", (many - few) / 2 / copy_bytes, 1.05)
        )
    return found


def hidden(row: Row, which: str) -> list[float]:
    """A step's time over what it takes if copies are hidden, in each round.

    Forward needs the copy to the device; a training step one in each direction, at the same time.
    """
    copies = [row["copy_in_ms"], row["copy_out_ms"] if which == "train" else 0.0]
    pairs = zip(row[f"{which}_ms"], row[f"{which}_alone_ms"], strict=True)
    return [ms / max(alone, *copies) for ms, alone in pairs]


def _if_any(name: str) -> Callable[[Row], str]:
    """A size that not all rows of a group have."""
    return lambda row: mib(row[name]) if name in row else "-"


COLUMNS: dict[str, dict[str, Callable[[Row], str]]] = {
    "copies": {
        "pinned": lambda row: str(row["is_pinned"]),
        "µs of the call": lambda row: f"{row['call_us']:.1f}",
        "GB/s in": lambda row: f"{row['gb_per_s_in']:.1f}",
        "GB/s out": lambda row: f"{row['gb_per_s_out']:.1f}",
        "GB/s both at once": lambda row: f"{row['gb_per_s_both']:.1f}",
        "MiB": lambda row: mib(row["nbytes"]),
        "more RSS": lambda row: mib(row["rss_bytes"]),
        "of torch's allocator": lambda row: mib(row["torch_pinned_bytes"]),
    },
    "memory": {
        "peak MiB": _if_any("peak_bytes"),
        "plan()": _if_any("plan_bytes"),
        "module's own": _if_any("own_bytes"),
        "all tasks' weights": _if_any("all_tasks_bytes"),
        "growth, device": _if_any("device_growth_bytes"),
        "growth, host": _if_any("host_growth_bytes"),
    },
    "overlap": {
        "T·B": lambda row: f"{row['rows']:,}",
        "copy in, out, ms": lambda row: f"{row['copy_in_ms']:.2f}, {row['copy_out_ms']:.2f}",
        "module, ms": lambda row: f"{median(row['train_alone_ms']):.2f}",
        "bank, ms": lambda row: f"{median(row['train_ms']):.2f}",
        "/ max": lambda row: f"{median(hidden(row, 'train')):.2f}",
        "forward, module": lambda row: f"{median(row['forward_alone_ms']):.2f}",
        "bank": lambda row: f"{median(row['forward_ms']):.2f}",
        "forward / max": lambda row: f"{median(hidden(row, 'forward')):.2f}",
        "µs more at the end of backward": lambda row: f"{row['gap_us']:.0f}",
    },
    "autocast": {
        "saved MiB": lambda row: mib(row["saved_bytes"]),
        "16-bit copy": lambda row: mib(row["copy_bytes"]),
    },
    "adam": {
        "threads": lambda row: str(row["threads"]),
        "ms": lambda row: f"{median(row['step_ms']):.2f}",
        "MiB in and out": lambda row: mib(row["moved_bytes"]),
    },
}
OF_CONTENDERS: dict[str, Callable[[Row], str]] = {
    "steps per second": lambda row: f"{1e3 / median(row['step_ms']):,.0f}",
    "ms": lambda row: f"{median(row['step_ms']):.3f}",
    "host, µs of a forward call": lambda row: f"{row['host_us']:.0f}",
    "device MiB": lambda row: mib(row["device_bytes"]),
}


def _group_table(group: str, rows: dict[str, Row]) -> Table:
    columns = COLUMNS.get(group, OF_CONTENDERS)
    headings, lines = ["", *columns], []
    base = next(iter(rows.values()))
    if columns is OF_CONTENDERS:
        headings.append(f"time / {next(iter(rows))}")
    for name, row in rows.items():
        if reason := why_none(row):
            lines.append([name, reason, *[""] * (len(headings) - 2)])
            continue
        line = [name, *(text(row) for text in columns.values())]
        if columns is OF_CONTENDERS:
            line.append("-" if why_none(base) else str(_compared(row, base)))
        lines.append(line)
    return Table(cases.TITLES[group], headings, lines)


def _compared(row: Row, base: Row) -> Ratio:
    is_same = row.get("process") == base.get("process")
    return (ratio if is_same else ratio_of_medians)(row["step_ms"], base["step_ms"])


def _flat(rows: Groups) -> list[dict[str, Any]]:
    return [
        {"group": group, "name": name} | row
        for group, of in rows.items()
        for name, row in of.items()
    ]


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
