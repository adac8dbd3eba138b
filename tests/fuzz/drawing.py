"""Draws right calls without their tensors: cell, sizes, options, form."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from cases import CELLS, Case
from hostile.oracle import Regularization

import fusedrnn

DTYPES = [torch.float64] * 3 + [torch.float32, torch.bfloat16, torch.float16]
extra_bytes = 0  # red zones, which no plan counts


def size(rng: random.Random, most: int = 40) -> int:
    """A size, mostly small."""
    kind = rng.random()
    return rng.randint(1, 9) if kind < 0.5 else rng.randint(1, most)


def large(rng: random.Random, usual: int) -> int:
    """A size that now and then is larger than a vector, a chunk or a tile."""
    return rng.randint(100, 150) if rng.random() < 0.06 else usual


@dataclass
class Call:
    """Everything random in a case, except how its tensors lie in memory."""

    case: Case
    form: str  # "functional", "module" or "cell"
    rows: str  # "batch", "single" or "packed"
    noise: str  # "eps", "seed", "generator", "default" or "none"
    options: dict[str, Any]
    batch_first: bool
    return_sequence: bool
    has_state: bool
    is_sorted: bool  # only for packed rows
    lengths_as: str  # a "tensor", "list" or "numpy"
    autocast: bool
    threads: int
    mode: str  # "grad", "no_grad", "inference"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        is_cast = self.autocast and self.case.dtype != torch.float64
        return torch.bfloat16 if is_cast else self.case.dtype

    @property
    def directions(self) -> int:
        return 2 if self.case.bidirectional else 1

    @property
    def how(self) -> Regularization:
        """The options in the oracle's form, without the seed."""
        zoneout = self.options.get("zoneout", 0.0)
        pair = zoneout if isinstance(zoneout, tuple) else (zoneout, zoneout)
        training = self.options.get("training", True)
        return Regularization(self.options.get("dropout", 0.0), pair, training)


def draw(rng: random.Random) -> Call:
    """Draws a call."""
    cell = rng.choice(CELLS)
    form = rng.choice(["functional"] * 3 + ["module"] * 3 + ["cell"])
    is_cell, is_lstm = form == "cell", cell == "lstm"

    def some(probability: float) -> bool:
        return rng.random() < probability and not is_cell

    rows = rng.choice(["batch"] * 4 + ["single", "packed"])
    if is_cell and rows == "packed":
        rows = "batch"
    hidden = large(rng, size(rng))
    projects = is_lstm and hidden > 1 and some(0.3)
    noise = "none"
    if cell == "stochastic_gru":
        kinds = ["eps", "generator", "default", "none"] + ["seed"] * 2 * (form == "functional")
        noise = rng.choice(kinds)
    batch = 1 if rows == "single" else large(rng, size(rng, 20))
    if rows == "batch" and rng.random() < 0.02:
        batch = 0
    case = Case(
        cell,
        seq_len=1 if is_cell else large(rng, size(rng, 20)),
        batch=batch,
        input_size=large(rng, size(rng)),
        hidden_size=hidden,
        latent_size=size(rng),
        proj_size=rng.randint(1, hidden - 1) if projects else 0,
        num_layers=rng.choice([2, 3]) if some(0.3) else 1,
        bias=rng.random() < 0.7,
        bidirectional=some(0.3),
        lengths=rows == "packed" or (rows == "batch" and some(0.3)),
        reset=some(0.25),
        noise=noise if noise in ("eps", "none") else "seed",
        recompute=not some(0.4),
        chunk_size=rng.randint(1, 25) if some(0.3) else None,
        dtype=rng.choice(DTYPES),
    )
    options: dict[str, Any] = {}
    if some(0.3):
        options["zoneout"] = rng.choice([0.0, 1.0, rng.random(), rng.random()])
        if is_lstm and rng.random() < 0.5:
            options["zoneout"] = (options["zoneout"], rng.random())
    if some(0.3):
        options["dropout"] = rng.choice([0.1, 0.5, rng.random() * 0.9])
    if some(0.05):
        options["weight_dropout"] = rng.random()
    if some(0.3):
        options["training"] = rng.random() < 0.5
    if case.chunk_size is None and some(0.2):
        least = least_workspace(case, noise)
        if form == "functional":  # its weights may have to be copied
            least += weights_bytes(case)
        options["workspace_bytes"] = int(least * rng.choice([1, 1, 1.5, 4])) + extra_bytes
    if some(0.1):
        options["backend"] = rng.choice(["auto", "stepwise"])
    return Call(
        case,
        form,
        rows,
        noise,
        options,
        batch_first=some(0.4),
        return_sequence=not some(0.2),
        has_state=rng.random() < 0.7,
        is_sorted=rng.random() < 0.5,
        lengths_as=rng.choice(["tensor", "list", "numpy"]),
        autocast=rng.random() < 0.1,
        threads=rng.choice([1, 1, 2]),
        mode=rng.choice(["grad"] * 8 + ["no_grad", "inference"]),
    )


def weights_bytes(case: Case) -> int:
    """The most bytes of a layer's weights, in float64."""
    weights = case.tensors().weights
    return 8 * sum(w.numel() + 64 for w in weights)


def least_workspace(case: Case, noise: str) -> int:
    """The most workspace for chunks of one step, by a plan."""
    sizes = {name: getattr(case, name) for name in ("cell", "input_size", "hidden_size", "bias")}
    sizes |= {name: getattr(case, name) for name in ("num_layers", "bidirectional")}
    if case.cell == "stochastic_gru":
        sizes["latent_size"] = case.latent_size
    if case.proj_size:
        sizes["proj_size"] = case.proj_size
    shape = (case.seq_len, max(case.batch, 1), case.input_size)
    dtypes = {case.dtype, torch.bfloat16}  # under autocast
    plans = [
        fusedrnn.plan(sizes | {"chunk_size": 1}, shape, dtype, "cpu", sample=noise != "none")
        for dtype in dtypes
    ]
    return max(plan.memory.most_workspace_bytes for plan in plans)
