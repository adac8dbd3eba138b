"""What a call, a chunk and a step cost on a GPU, beside what plans reckon: ``python -m bench.fit``.

A pass over T steps in chunks of K takes about  call + T / K · chunk + T · step.  Two lengths and
two chunks give these three numbers, for a GRU stepwise, and in a persistent kernel with one tile of
rows and with several; and these again what the constants of the model in csrc/planner.h stand for.
They are values, to set the model right by, and no targets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

import fusedrnn
from fusedrnn import _helpers

from .cases import Shape, TrainingStep
from .clock import cuda_time_ms, interleaved_ms
from .report import Report, Run, Table, main, set_up_torch
from .sweep import Budget, not_reached, why_none
from .worker import Notes, Row, measure_apart

SIZE, DTYPE = 256, torch.bfloat16
LENGTHS, CHUNKS = (64, 1024), (16, 64)
ROUNDS, BUDGET_S = 20, 2.0
PASSES = ("forward", "backward")
UNIT_TILE, ROW_TILE = 16, 8  # of an mma: see csrc/cuda/persistent_step.h


@dataclass(frozen=True)
class Configuration:
    """A way to compute, and rows of the batch."""

    backend: str
    batch: int

    def __str__(self) -> str:
        return f"{self.backend}, B={self.batch}"


STEPWISE = Configuration("stepwise", 16)
ONE_TILE, SEVERAL_TILES = Configuration("persistent", 16), Configuration("persistent", 256)
CONFIGURATIONS = (STEPWISE, ONE_TILE, SEVERAL_TILES)  # what cannot break a process first

# (T, K)
Place = tuple[int, int]
PLACES: dict[str, Place] = {f"T={t} K={k}": (t, k) for t, k in itertools.product(LENGTHS, CHUNKS)}


@dataclass(frozen=True)
class Costs:
    """Microseconds of each."""

    call: float
    chunk: float
    step: float


def costs(times_us: Mapping[Place, float]) -> Costs:
    """From times of a pass by steps and chunk: the least relative errors, in squares."""
    measured = torch.tensor(list(times_us.values()), dtype=torch.float64)
    counts = torch.tensor([[1.0, t / k, t] for t, k in times_us], dtype=torch.float64)
    relative = counts / measured.unsqueeze(1)
    found = torch.linalg.lstsq(relative, torch.ones(len(measured), 1, dtype=torch.float64))
    return Costs(*found.solution.flatten().tolist())


def plan(configuration: Configuration, place: Place, device: str) -> fusedrnn.Plan:
    """What the model says."""
    seq_len, chunk_size = place
    sizes = {"cell": "gru", "input_size": SIZE, "hidden_size": SIZE, "chunk_size": chunk_size}
    shape = (seq_len, configuration.batch, SIZE)
    return fusedrnn.plan(sizes | {"backend": configuration.backend}, shape, DTYPE, device)


def modelled(configuration: Configuration, device: str) -> dict[str, Costs]:
    """The costs in each pass by the model, which has none of a call, nor of a chunk of forward."""
    plans = {place: plan(configuration, place, device) for place in PLACES.values()}
    forward = {place: place[0] * p.modelled_step_us for place, p in plans.items()}
    backward = {place: p.modelled_backward_us_with_recompute for place, p in plans.items()}
    return {"forward": costs(forward), "backward": costs(backward)}


def tiles(configuration: Configuration, device: str) -> int:
    """Tiles of rows that a block of the persistent kernel goes through in a step."""
    groups = plan(configuration, (LENGTHS[0], CHUNKS[0]), device).grid // (SIZE // UNIT_TILE)
    return -(-configuration.batch // ROW_TILE // groups)


def constants(found: Mapping[Configuration, Mapping[str, Costs]], device: str) -> dict[str, float]:
    """What the model's constants would have to be, by name, as far as there are measurements."""
    by_name = {}
    if STEPWISE in found:
        by_name["launched"] = found[STEPWISE]["forward"].step
        gemms = modelled(STEPWISE, device)["backward"].chunk / _helpers.MODEL_US["gemm"]
        by_name["gemm"] = found[STEPWISE]["backward"].chunk / gemms
    if ONE_TILE in found and SEVERAL_TILES in found:
        one, several = (found[c]["forward"].step for c in (ONE_TILE, SEVERAL_TILES))
        more = tiles(SEVERAL_TILES, device) - tiles(ONE_TILE, device)
        by_name["tile"] = (several - one) / more
        by_name["exchange"] = one - tiles(ONE_TILE, device) * by_name["tile"]
    return by_name


def run_on_cuda(run: Run) -> Report:
    """All configurations."""
    rows = {c: dict.fromkeys(PLACES, not_reached(run)) for c in CONFIGURATIONS}
    budget = Budget(run)
    task = run.progress.add_task("fit", total=len(rows))
    for configuration in CONFIGURATIONS:
        if budget.is_spent:
            break
        case = asdict(configuration)
        rows[configuration] |= measure_apart("bench.fit", case, list(PLACES), end=budget.end)
        run.write(report(rows, "cuda"))
        run.progress.advance(task)
    return report(rows, "cuda")


def measure(case: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Rows of a configuration; see worker.py."""
    set_up_torch()
    configuration = Configuration(**case)
    calls: dict[str, dict[str, Callable[[], object]]] = {name: {} for name in PASSES}
    for name in names:
        with notes.on(name):
            step = _step(configuration, PLACES[name])
            step.train()  # loads kernels, and allocates what libraries keep for good
            calls["backward"][name] = _backward(step, step.forward())
            calls["forward"][name] = step.infer
            torch.cuda.synchronize()
    times = {
        name: interleaved_ms(
            of, rounds=ROUNDS, budget_s=BUDGET_S, before=notes.begin, timer=cuda_time_ms
        )
        for name, of in calls.items()
    }
    for name in calls["forward"]:
        notes.row(name, {f"{which}_ms": times[which][name] for which in PASSES})


def _step(configuration: Configuration, place: Place) -> TrainingStep:
    seq_len, chunk_size = place

    def make(size: int) -> fusedrnn.GRU:
        return fusedrnn.GRU(size, size, chunk_size=chunk_size, backend=configuration.backend)

    return TrainingStep(make, Shape(seq_len, configuration.batch, SIZE), "cuda", DTYPE)


def _backward(step: TrainingStep, output: torch.Tensor) -> Callable[[], None]:
    weights = list(step.module.parameters())

    def backward() -> None:
        torch.autograd.grad(output, weights, step.grad_output, retain_graph=True)

    return backward


def report(rows: Mapping[Configuration, Mapping[str, Row]], device: str) -> Report:
    """What follows from the rows that there are."""
    lines, numbers = [], []
    failures = [
        f"{c}, {name}: {reason}"
        for c, of in rows.items()
        for name, row in of.items()
        if (reason := why_none(row))
    ]
    found: dict[Configuration, dict[str, Costs]] = {}
    for configuration, of in rows.items():
        if any(map(why_none, of.values())):
            continue
        found[configuration] = {
            which: costs(
                {PLACES[name]: 1e3 * median(row[f"{which}_ms"]) for name, row in of.items()}
            )
            for which in PASSES
        }
        model = modelled(configuration, device)
        for which, cost in found[configuration].items():
            texts = [f"{cost.call:.1f}", f"{cost.chunk:.1f}", f"{model[which].chunk:.1f}"]
            texts += [f"{cost.step:.2f}", f"{model[which].step:.2f}"]
            lines.append([str(configuration), which, *texts])
            numbers.append({"configuration": str(configuration), "pass": which, **asdict(cost)})
    columns = ["GRU, bfloat16, H=256", "", "call", "chunk", "by the model", "step", "by the model"]
    fitted = constants(found, device) if found else {}
    constant_lines = [
        [name, f"{fitted[name]:.2f}" if name in fitted else "", f"{us:.2f}"]
        for name, us in _helpers.MODEL_US.items()
    ]
    tables = [
        Table("Microseconds of a call, a chunk and a step", columns, lines),
        Table("Constants of the model, in microseconds", ["", "measured", "model"], constant_lines),
    ]
    content = {
        "rows": [
            {"configuration": str(c), "place": name} | row
            for c, of in rows.items()
            for name, row in of.items()
        ],
        "costs": numbers,
        "constants": fitted,
        "model": _helpers.MODEL_US,
    }
    return Report("fit", content, tables, [], failures)


if __name__ == "__main__":
    main([], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
