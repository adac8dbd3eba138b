"""Costs of a call, a chunk and a step on a GPU, next to the model's: ``python -m bench.fit``.

A pass over T steps in chunks of K takes about  call + T / K · chunk + T · step.  Two lengths and
two chunks give these three numbers: for a GRU stepwise, and in a persistent kernel with one tile of
rows, with several, and without recompute; and for an LSTM. These again give what the constants of
csrc/driver/time_model.h stand for, at three sizes (stepwise at the first one, since a launch takes
as long at any). They are values, to set the model right by, and no targets.

Chunks are long enough that the GPU decides how long they take, and not the CPU, which enqueues them
meanwhile; so what one costs besides its steps is taken from persistent kernels, where it is much of
the time. How long the CPU takes is measured by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

import fusedrnn
from fusedrnn import _helpers

from .cases import Shape, TrainingStep
from .clock import cuda_enqueue_ms, cuda_time_ms, interleaved_ms
from .report import Report, Run, Table, main, set_up_torch
from .sweep import Budget, not_reached, why_none
from .worker import Notes, Row, measure_apart

SIZES, DTYPE = (256, 512, 1024), torch.bfloat16
LENGTHS, CHUNKS = (256, 1024), (64, 256)
ROUNDS, BUDGET_S = 20, 1.5
FORWARD, BACKWARD = "forward", "backward"
# The time that the CPU takes to enqueue backward, while the GPU's queue has room.
ENQUEUEING = "enqueueing"
UNIT_TILE, ROW_TILE = 16, 8  # the shape of mma: see csrc/persistent/arguments.h
COLUMNS = 256  # of weights, for each of which a tile takes the model's time
CELLS = {"gru": fusedrnn.GRU, "lstm": fusedrnn.LSTM}
LSTM_GATES = 4  # their gradients are exchanged in backward


@dataclass(frozen=True)
class Configuration:
    """A cell, its backend, the rows of its batch, and its size."""

    cell: str
    backend: str
    batch: int
    recompute: bool = True
    size: int = SIZES[0]

    def __str__(self) -> str:
        option = "" if self.recompute else ", recompute=False"
        return f"{self.cell}, {self.backend}, B={self.batch} H={self.size}{option}"

    @property
    def is_persistent(self) -> bool:
        """Whether a chunk's steps are one kernel."""
        return self.backend == "persistent"

    @property
    def measured(self) -> tuple[str, ...]:
        """The passes that are measured: a GPU's queue has no room for all single steps."""
        return (FORWARD, BACKWARD, *([ENQUEUEING] if self.is_persistent else []))


STEPWISE = Configuration("gru", "stepwise", 16)
ONE_TILE = Configuration("gru", "persistent", 16)
SEVERAL_TILES = Configuration("gru", "persistent", 256)
SAVED = Configuration("gru", "persistent", 16, recompute=False)
HAS_STATE = Configuration("lstm", "persistent", 16)
OF_A_SIZE = (ONE_TILE, SEVERAL_TILES, SAVED, HAS_STATE)
# The configurations of each process; those that cannot break a process come first.
JOBS = ((STEPWISE,), *(tuple(replace(c, size=size) for c in OF_A_SIZE) for size in SIZES))
CONFIGURATIONS = tuple(itertools.chain(*JOBS))
# Configurations whose chunks cost little in addition to the counted items: with more rows, the
# time of the products themselves changes with the length of a chunk.
SMALL_CHUNKS = (ONE_TILE, SAVED, HAS_STATE)

# (T, K)
Place = tuple[int, int]
PLACES: dict[str, Place] = {f"T={t} K={k}": (t, k) for t, k in itertools.product(LENGTHS, CHUNKS)}


@dataclass(frozen=True)
class Costs:
    """Microseconds of a call, a chunk and a step."""

    call: float
    chunk: float
    step: float


# The costs of each pass that was measured of a configuration.
Found = Mapping[Configuration, Mapping[str, Costs]]


def costs(times_us: Mapping[Place, float]) -> Costs:
    """Costs from times of a pass by steps and chunk, by least squares of relative errors."""
    measured = torch.tensor(list(times_us.values()), dtype=torch.float64)
    counts = torch.tensor([[1.0, t / k, t] for t, k in times_us], dtype=torch.float64)
    relative = counts / measured.unsqueeze(1)
    found = torch.linalg.lstsq(relative, torch.ones(len(measured), 1, dtype=torch.float64))
    return Costs(*found.solution.flatten().tolist())


def plan(configuration: Configuration, place: Place, device: str) -> fusedrnn.Plan:
    """The plan of a configuration."""
    seq_len, chunk_size = place
    size = configuration.size
    sizes = {"input_size": size, "hidden_size": size, "chunk_size": chunk_size, "recompute": True}
    options = sizes | {"cell": configuration.cell, "backend": configuration.backend}
    return fusedrnn.plan(options, (seq_len, configuration.batch, size), DTYPE, device)


def modelled(configuration: Configuration, device: str) -> dict[str, Costs]:
    """The costs by the model, in which a call itself costs nothing."""
    plans = {place: plan(configuration, place, device) for place in PLACES.values()}
    us = "modelled_us" if configuration.recompute else "modelled_us_without_recompute"
    forward = {place: p.forward.modelled_us for place, p in plans.items()}
    backward = {place: getattr(p.backward, us) for place, p in plans.items()}
    found = {FORWARD: costs(forward), BACKWARD: costs(backward)}
    if ENQUEUEING in configuration.measured:
        host_us = _helpers.MODEL_US["host"] * counts(configuration, BACKWARD)["host"]
        found[ENQUEUEING] = Costs(0, host_us, 0)
    return found


def counts(configuration: Configuration, which: str) -> dict[str, int]:
    """How often a chunk takes each item of the model in a pass, apart from its steps."""
    found = _helpers.chunk_counts(
        cell=configuration.cell,
        backward=which == BACKWARD,
        persistent=configuration.is_persistent,
        element_bytes=DTYPE.itemsize,
        steps=CHUNKS[0],
        recompute=configuration.recompute,
    )
    return found | {"kernel": int(configuration.is_persistent)}


def tiles(configuration: Configuration, device: str) -> int:
    """Tiles of rows that a block of the persistent kernel goes through in a step."""
    groups = plan(configuration, (LENGTHS[0], CHUNKS[0]), device).forward.grid // (
        configuration.size // UNIT_TILE
    )
    return -(-configuration.batch // ROW_TILE // groups)


def constants(found: Found, device: str, size: int = SIZES[0]) -> dict[str, float]:
    """The values that measurements at a size give for the model's constants, where there are any.

    Each is the model's constant plus the difference to the measurement.
    """
    found = {replace(c, size=SIZES[0]): costs for c, costs in found.items() if c.size == size}
    model = {c: modelled(replace(c, size=size), device) for c in found}

    def lacks(configuration: Configuration, which: str, part: str) -> float:
        measured, by_model = found[configuration][which], model[configuration][which]
        return float(getattr(measured, part) - getattr(by_model, part))

    more: dict[str, float] = {}
    if STEPWISE in found:
        more["launched"] = lacks(STEPWISE, FORWARD, "step")
    if ONE_TILE in found and SEVERAL_TILES in found:
        one, several = (lacks(c, FORWARD, "step") for c in (ONE_TILE, SEVERAL_TILES))
        depth = size // COLUMNS
        few, many = (
            depth * tiles(replace(c, size=size), device) for c in (ONE_TILE, SEVERAL_TILES)
        )
        more["tile"] = (several - one) / (many - few)
        more["exchange"] = one - few * more["tile"]
        if HAS_STATE in found:
            rest = lacks(HAS_STATE, BACKWARD, "step") - more["exchange"]
            of_state = tiles(replace(HAS_STATE, size=size), device)
            more["state"] = rest / of_state - LSTM_GATES * depth * more["tile"]
    if all(configuration in found for configuration in SMALL_CHUNKS):
        passes = list(itertools.product(SMALL_CHUNKS, (FORWARD, BACKWARD)))
        names = ("gemm", "launch", "kernel")
        of_chunk = [[counts(*which)[name] for name in names] for which in passes]
        solved = torch.linalg.lstsq(
            torch.tensor(of_chunk, dtype=torch.float64),
            torch.tensor([[lacks(*which, "chunk")] for which in passes], dtype=torch.float64),
        )
        more |= dict(zip(names, solved.solution.flatten().tolist(), strict=True))
    if ONE_TILE in found:
        more["host"] = lacks(ONE_TILE, ENQUEUEING, "chunk") / counts(ONE_TILE, BACKWARD)["host"]
    return {name: us + more[name] for name, us in _helpers.MODEL_US.items() if name in more}


def run_on_cuda(run: Run) -> Report:
    """Measures all configurations."""
    rows = {c: dict.fromkeys(PLACES, not_reached(run)) for c in CONFIGURATIONS}
    budget = Budget(run)
    task = run.progress.add_task("fit", total=len(JOBS))
    for job, configurations in enumerate(JOBS):
        if budget.is_spent:
            break
        names = {f"{c}, {place}": (c, place) for c in configurations for place in PLACES}
        found = measure_apart("bench.fit", job, list(names), end=budget.end)
        for name, row in found.items():
            configuration, place = names[name]
            rows[configuration][place] = row
        run.write(report(rows, "cuda"))
        run.progress.advance(task)
    return report(rows, "cuda")


def measure(job: int, names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a job; see worker.py."""
    set_up_torch()
    places = {f"{c}, {place}": (c, PLACES[place]) for c in JOBS[job] for place in PLACES}
    calls: dict[str, dict[str, Callable[[], object]]] = {
        which: {} for which in (FORWARD, BACKWARD, ENQUEUEING)
    }
    for name in names:
        with notes.on(name):
            configuration, place = places[name]
            step = _step(configuration, place)
            backward = _backward(step, step.forward())
            for _ in range(2):  # loads kernels, and allocates the memory that libraries keep
                step.infer()
                backward()
            torch.cuda.synchronize()
            for which in configuration.measured:
                calls[which][name] = step.infer if which == FORWARD else backward
    times = {
        which: interleaved_ms(
            of,
            rounds=ROUNDS,
            budget_s=BUDGET_S,
            before=notes.begin,
            timer=cuda_enqueue_ms if which == ENQUEUEING else cuda_time_ms,
        )
        for which, of in calls.items()
    }
    for name in calls[FORWARD]:
        notes.row(name, {f"{which}_ms": of[name] for which, of in times.items() if name in of})


def _step(configuration: Configuration, place: Place) -> TrainingStep:
    seq_len, chunk_size = place
    options = {"backend": configuration.backend, "recompute": configuration.recompute}

    def make(size: int) -> fusedrnn.GRU | fusedrnn.LSTM:
        return CELLS[configuration.cell](size, size, chunk_size=chunk_size, **options)

    shape = Shape(seq_len, configuration.batch, configuration.size)
    step = TrainingStep(make, shape, "cuda", DTYPE)
    step.input.requires_grad_()  # because the model counts all gradients
    return step


def _backward(step: TrainingStep, output: torch.Tensor) -> Callable[[], None]:
    wanted = [step.input, *step.module.parameters()]

    def backward() -> None:
        torch.autograd.grad(output, wanted, step.grad_output, retain_graph=True)

    return backward


def report(rows: Mapping[Configuration, Mapping[str, Row]], device: str) -> Report:
    """Tables and constants from the rows that were measured."""
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
            for which in configuration.measured
        }
        model = modelled(configuration, device)
        for which, cost in found[configuration].items():
            texts = [f"{cost.call:.1f}", f"{cost.chunk:.1f}", f"{model[which].chunk:.1f}"]
            texts += [f"{cost.step:.2f}", f"{model[which].step:.2f}"]
            lines.append([str(configuration), which, *texts])
            numbers.append({"configuration": str(configuration), "pass": which, **asdict(cost)})
    columns = ["bfloat16", "", "call", "chunk", "by the model", "step", "by the model"]
    fitted = {size: constants(found, device, size) for size in SIZES}
    constant_lines = [
        [name, *(f"{of[name]:.2f}" if name in of else "" for of in fitted.values()), f"{us:.2f}"]
        for name, us in _helpers.MODEL_US.items()
    ]
    constant_columns = ["", *(f"H={size}" for size in SIZES), "model"]
    tables = [
        Table("Microseconds of a call, a chunk and a step", columns, lines),
        Table("Constants of the model, in microseconds", constant_columns, constant_lines),
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
