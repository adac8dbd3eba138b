"""Trains a character-level language model, the job that the package is for.

    python -m bench.train_text --cell ours --window 256
    python -m bench.train_text --dtype bfloat16

An embedding, a recurrent cell and a linear layer learn the source code of Python's standard
library by truncated backpropagation: the state goes on from window to window, its gradient does
not. Without --cell all cells get the same budget of characters, turn by turn. The plain loop and
ours start from the same weights and see the same noise, so that their losses must agree.

With --dtype bfloat16 each cell is trained twice from the same start, in float32 and under
torch.autocast with weights of float32, and the losses at the end are compared. That leaves out the
plain loop unless --cell asks for it: on the CPU it takes minutes.

Longer than 350 lines, because it is one program, to be read from top to bottom.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedrnn
from fusedrnn import reference

from .cases import LOOP, LSTM, OURS, Loop
from .clock import cuda_peak_bytes, measure_memory, time_ms
from .report import Report, Run, Table, Target, main, mib
from .text import CLASSES, standard_library, windows

CELLS = {"lstm": LSTM, "loop": LOOP, "ours": OURS}
State = Any  # the state of a cell: a tensor, or nn.LSTM's pair

# The loop and our module sum the same numbers in different orders. At first only the last bit of
# the loss shows that. But training is chaotic: differences grow with every update, and after some
# hundred updates two runs are on different paths to equally good models. The same happens to the
# loop if one of its weights starts one bit off.
EARLY_UPDATES = 50
EARLY_TOLERANCE, VALIDATION_TOLERANCE = 1e-5, 1e-2

DTYPES = ("float32", "bfloat16")
AUTOCAST_LIMIT = 1.01  # limit of our final loss under autocast over the one in float32


@dataclass(frozen=True)
class Job:
    """The settings of a training run."""

    cell: str | None = None
    steps: int = 240
    window: int = 64
    batch: int = 32
    hidden: int = 256
    lr: float = 5e-3
    seed: int = 0
    memory_mib: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = {name: vars(self)[name] for name in ("steps", "window", "batch", "hidden")}
        for name, size in sizes.items():
            if size < 1:
                raise SystemExit(f"--{name} must be at least 1, got {size}")


SHORT_JOB = Job(steps=60)
QUICK_JOB = Job(steps=12, window=16, hidden=32, memory_mib=4)
VALIDATION_CHARACTERS = 2**16

HELP = {
    "steps": "updates of the weights",
    "window": "characters of truncated backpropagation",
    "batch": "streams of text side by side",
    "hidden": "width of embedding and state",
    "lr": "highest learning rate",
    "seed": "of weights and noise",
    "memory_mib": "budget for the longest window that fits",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of :class:`Job`; None means the default."""
    parser.add_argument("--cell", choices=CELLS, help="train this cell only")
    parser.add_argument("--dtype", choices=DTYPES, help="of autocast; compared with float32")
    for name, what in HELP.items():
        default = getattr(Job, name)
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(default), help=f"{what} ({default})", metavar="N")


def _job(run: Run) -> Job:
    chosen = {k: v for k, v in vars(run.options).items() if k in vars(Job()) and v is not None}
    usual = Job() if run.everything else SHORT_JOB
    return replace(QUICK_JOB if run.quick else usual, **chosen)


class Fused(nn.Module):
    """A StochasticGRU whose forward pass takes the seed of its noise."""

    def __init__(self, rnn: fusedrnn.StochasticGRU) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the module with a seed; draws one if there is none."""
        return fusedrnn.stochastic_gru(input, list(self.rnn.parameters()), hx, seed=seed)


class StdlibModel(nn.Module):
    """An embedding, a cell and a linear layer; under torch.autocast if it has another dtype."""

    def __init__(
        self, cell: str, hidden_size: int, seed: int, autocast: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.autocast = autocast
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(CLASSES, hidden_size)
        self.linear = nn.Linear(hidden_size, CLASSES)
        self.cell_name = cell
        self.rnn: nn.Module
        if cell == "lstm":
            self.rnn = nn.LSTM(hidden_size, hidden_size)
        else:
            rnn = fusedrnn.StochasticGRU(hidden_size, hidden_size)
            self.rnn = Fused(rnn) if cell == "ours" else Loop(rnn)

    def noise(self, seed: int, window: int, batch: int) -> dict[str, Tensor]:
        """The noise of a window as an argument, the same numbers for the plain loop and our module.

        Our module draws them from a seed. The loop gets a tensor, made before time is taken.
        """
        if self.cell_name == "lstm":
            return {}
        drawn_from = torch.tensor([seed], device=self.linear.weight.device)
        if self.cell_name == "ours":
            return {"seed": drawn_from}
        width = self.linear.in_features
        return {"eps": reference.philox_normal(drawn_from, window, batch, width).unsqueeze(0)}

    def loss(
        self, text: Tensor, state: State, noise: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """Mean loss in bits per character, and the state after the window.

        Args:
            text: (window + 1, batch), classes of characters.
            state: The state before; None for the first window.
            noise: See :meth:`noise`; None for what the cell draws if not told.
        """
        changes = self.autocast != torch.float32
        with torch.autocast(text.device.type, self.autocast if changes else None, enabled=changes):
            output, state = self.rnn(self.embedding(text[:-1]), state, **(noise or {}))
            logits = self.linear(output).flatten(0, 1)
        return F.cross_entropy(logits.float(), text[1:].flatten()) / math.log(2), state


class Training:
    """A model with its optimizer, state and measurements."""

    def __init__(self, cell: str, job: Job, dtype: str, device: str) -> None:
        self.job = job
        autocast = getattr(torch, dtype)
        # Made on the CPU, so that every device starts from the same weights.
        self.model = StdlibModel(cell, job.hidden, job.seed, autocast).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=job.lr)
        warm_up = max(1, min(50, job.steps // 4))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda k: min(1.0, (k + 1) / warm_up) * max(0.02, 1 - k / job.steps),
        )
        self.state: State = None
        self.bits: list[float] = []
        self.step_ms: list[float] = []

    def step(self, k: int, text: Tensor) -> None:
        """Update ``k``, on a window of shape (window + 1, batch)."""
        window, batch = text.shape[0] - 1, text.shape[1]
        noise = self.model.noise(self.job.seed + k, window, batch)

        def update() -> None:
            loss, state = self.model.loss(text, self.state, noise)
            self.state = _detach(state)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.bits.append(loss.item())

        self.step_ms.append(time_ms(update))

    @torch.no_grad()
    def validate(self, text: Tensor) -> float:
        """Bits per character over windows (windows, window + 1, batch), with noise."""
        state, bits = None, 0.0
        for k, window in enumerate(text):
            noise = self.model.noise(-1 - k, window.shape[0] - 1, window.shape[1])
            loss, state = self.model.loss(window, state, noise)
            bits += loss.item()
        return bits / len(text)


def _detach(state: State) -> State:
    return tuple(map(torch.Tensor.detach, state)) if isinstance(state, tuple) else state.detach()


def peak_bytes(model: StdlibModel, window: int, batch: int) -> int:
    """Most memory that forward and backward over one window take, in bytes."""
    device = model.linear.weight.device
    text = torch.zeros(window + 1, batch, dtype=torch.int64, device=device)

    def step() -> None:
        model.loss(text, None)[0].backward()

    peak = cuda_peak_bytes(step) if device.type == "cuda" else measure_memory(step).peak_bytes
    model.zero_grad(set_to_none=True)
    return peak


def longest_window(peak: Callable[[int], int], budget_bytes: int, step: int = 8) -> int:
    """The longest window whose peak fits, a multiple of ``step``; 0 if none does."""
    fits, too_long = 0, step
    while peak(too_long) <= budget_bytes:
        fits, too_long = too_long, 2 * too_long
    while too_long - fits > step:
        middle = (fits + too_long) // (2 * step) * step
        if peak(middle) <= budget_bytes:
            fits = middle
        else:
            too_long = middle
    return fits


def run(run: Run) -> Report:
    """Trains all cells, or one of them, and compares."""
    return _run(run, "cpu")


def run_on_cuda(run: Run) -> Report:
    """Trains on a GPU."""
    return _run(run, "cuda")


def _run(run: Run, device: str) -> Report:
    job = _job(run)
    cells = [job.cell] if job.cell else list(CELLS)
    dtypes = list(dict.fromkeys(["float32", job.dtype]))
    if len(dtypes) > 1 and not job.cell:
        cells.remove("loop")
    text = standard_library()
    train = windows(text.train, job.batch, job.window).to(device)
    validation = windows(text.validation[:VALIDATION_CHARACTERS], job.batch, job.window).to(device)
    if run.quick:
        validation = validation[:4]

    trainings = {
        CELLS[cell] + _suffix(dtype): Training(cell, job, dtype, device)
        for cell in cells
        for dtype in dtypes
    }
    task = run.progress.add_task("train_text", total=len(trainings) * (job.steps + 20))
    unable: dict[str, str] = {}
    for k in range(job.steps):
        for name, training in list(trainings.items()):
            try:
                training.step(k, train[k % len(train)])
            except RuntimeError as error:  # torch lacks an LSTM in 16 bits on some processors
                if k > 0 or not name.startswith(f"{LSTM}, "):
                    raise
                unable[name] = str(error).split(". ")[0]
                del trainings[name]
            run.progress.advance(task)
    results = {}
    for name, training in trainings.items():
        results[name] = _result(training, validation)
        run.progress.advance(task, 20)

    numbers: dict[str, Any] = {
        "job": asdict(job),
        "text": {
            "characters": len(text.train) + len(text.validation),
            "files": text.files,
            "sha256": text.sha256,
        },
        "characters": job.steps * job.window * job.batch,
        "cells": results,
        "unable": unable,
    }
    tables, failures = [_table(numbers)], []
    if LOOP in results and OURS in results:
        numbers["agreement"] = agreement = _agreement(results[LOOP], results[OURS])
        tables.append(_agreement_table(agreement))
        failures = [
            f"{LOOP} and {OURS} disagree, {name}: by {a['difference']:.1e} of the loss, more than "
            f"the {a['tolerance']:.0e} that rounding explains"
            for name, a in agreement.items()
            if not a["difference"] <= a["tolerance"]  # NaN fails too
        ]
    targets = []
    if job.dtype != "float32" and OURS in results:
        bits, full = (results[OURS + _suffix(d)]["validation_bits"] for d in (job.dtype, "float32"))
        what = f"validation bits/char, {OURS}, {job.dtype} / float32"
        spread = f"({bits:.4f} / {full:.4f})"
        where = f"{job.steps} updates"
        targets.append(Target(what, where, bits / full, AUTOCAST_LIMIT, spread))
    name = "train_text" + ("" if job.dtype == "float32" else f"_{job.dtype}")
    left_out = [f"training for {Job.steps} updates and not {job.steps}"]
    left_out = [] if run.everything else left_out
    return Report(name, numbers, tables, targets, failures, left_out)


def _suffix(dtype: str) -> str:
    return "" if dtype == "float32" else f", {dtype}"


def _result(training: Training, validation: Tensor) -> dict[str, Any]:
    job = training.job
    step_ms = median(training.step_ms)

    def peak(window: int) -> int:
        return peak_bytes(training.model, window, job.batch)

    return {
        "validation_bits": training.validate(validation),
        "train_bits": training.bits,
        "step_ms": step_ms,
        "characters_per_s": job.window * job.batch / step_ms * 1e3,
        "peak_bytes": peak(job.window),
        "longest_window": longest_window(peak, job.memory_mib * 2**20),
    }


def _agreement(loop: dict[str, Any], ours: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The losses of the loop and of our module, their relative difference, and its bound."""
    early = zip(loop["train_bits"][:EARLY_UPDATES], ours["train_bits"], strict=False)
    worst = max(early, key=lambda pair: abs(pair[0] - pair[1]) / pair[0])
    validation = loop["validation_bits"], ours["validation_bits"]
    compared = {
        f"training, worst of the first {EARLY_UPDATES}": (worst, EARLY_TOLERANCE),
        "validation": (validation, VALIDATION_TOLERANCE),
    }
    return {
        name: {LOOP: a, OURS: b, "difference": abs(a - b) / a, "tolerance": tolerance}
        for name, ((a, b), tolerance) in compared.items()
    }


def _table(numbers: dict[str, Any]) -> Table:
    job = numbers["job"]
    rows = [
        [
            name,
            f"{result['validation_bits']:.4f}",
            f"{result['characters_per_s']:,.0f}",
            mib(result["peak_bytes"]),
            str(result["longest_window"]),
        ]
        for name, result in numbers["cells"].items()
    ]
    rows += [[name, reason, "", "", ""] for name, reason in numbers["unable"].items()]
    title = "Language model, {characters:,} characters, ".format(**numbers)
    title += "window {window}, B={batch}, H={hidden}".format(**job)
    columns = ["", "bits/char", "chars/s", "peak MiB", f"longest window in {job['memory_mib']} MiB"]
    return Table(title, columns, rows)


def _agreement_table(agreement: dict[str, dict[str, float]]) -> Table:
    rows = [
        [
            name,
            f"{a[LOOP]:.7f}",
            f"{a[OURS]:.7f}",
            f"{a['difference']:.1e}",
            f"{a['tolerance']:.0e}",
        ]
        for name, a in agreement.items()
    ]
    columns = ["loss, bits/char", LOOP, OURS, "relative difference", "allowed"]
    return Table("Same weights, same noise", columns, rows)


if __name__ == "__main__":
    main([run], __doc__, add_options, on_cuda=[run_on_cuda], cuda_options=())
