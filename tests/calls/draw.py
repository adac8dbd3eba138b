"""Draws calls, without their tensors, from three distributions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from cases import CELLS, Case, variants

import fusedrnn

from . import Call
from .changes import changes

extra_bytes = 0  # red zones, which no plan counts

# --- usual calls ---------------------------------------------------------------------------------

SHARES = [torch.float64] * 3 + [torch.float32, torch.bfloat16, torch.float16]


def usual(rng: random.Random, most: int = 40) -> Call:
    """A call as users make them. ``most``: the largest size, but for a few; below 10 for all."""
    cell = rng.choice(CELLS)
    form = rng.choice(["functional"] * 3 + ["module"] * 3 + ["cell"])
    is_cell, is_lstm = form == "cell", cell == "lstm"

    def some(probability: float) -> bool:
        return rng.random() < probability and not is_cell

    def size(most: int = most) -> int:
        """Mostly small."""
        return rng.randint(1, min(9, most) if rng.random() < 0.5 else most)

    def large(most: int = most) -> int:
        """Now and then larger than a vector, a chunk or a tile."""
        return rng.randint(100, 150) if most > 9 and rng.random() < 0.06 else size(most)

    rows = rng.choice(["batch"] * 4 + ["single", "packed"])
    if is_cell and rows == "packed":
        rows = "batch"
    hidden = large()
    projects = is_lstm and hidden > 1 and some(0.3)
    noise = "none"
    if cell == "stochastic_gru":
        kinds = ["eps", "generator", "default", "none"] + ["seed"] * 2 * (form == "functional")
        noise = rng.choice(kinds)
    batch = 1 if rows == "single" else large(min(most, 20))
    if rows == "batch" and rng.random() < 0.02:
        batch = 0
    case = Case(
        cell,
        seq_len=1 if is_cell else large(min(most, 20)),
        batch=batch,
        input_size=large(),
        hidden_size=hidden,
        latent_size=size(),
        proj_size=rng.randint(1, hidden - 1) if projects else 0,
        num_layers=rng.choice([2, 3]) if some(0.3) else 1,
        bias=rng.random() < 0.7,
        bidirectional=some(0.3),
        lengths=rows == "packed" or (rows == "batch" and some(0.3)),
        reset=some(0.25),
        noise=noise if noise in ("eps", "none") else "seed",
        recompute=rng.choice([None, True, False]),
        chunk_size=rng.randint(1, 25) if some(0.4) else None,
        dtype=rng.choice(SHARES),
    )
    options: dict[str, Any] = {}
    if some(0.4):
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
            least += sum(8 * (w.numel() + 64) for w in case.tensors().weights)
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
        return_sequence=not some(0.4),
        has_state=rng.random() < 0.7,
        is_sorted=rng.random() < 0.5,
        lengths_as=rng.choice(["tensor", "list", "numpy"]),
        autocast=rng.random() < 0.1,
        threads=rng.choice([1, 1, 2]),
        mode=rng.choice(["grad"] * 8 + ["no_grad", "inference"]),
    )


def least_workspace(case: Case, noise: str) -> int:
    """The most workspace for chunks of one step, by a plan."""
    shape = (case.seq_len, max(case.batch, 1), case.input_size)
    sizes = sizes_of(case) | {"cell": case.cell, "chunk_size": 1}
    dtypes = {case.dtype, torch.bfloat16}  # under autocast
    plans = [fusedrnn.plan(sizes, shape, dtype, "cpu", sample=noise != "none") for dtype in dtypes]
    return max(plan.memory.most_workspace_bytes for plan in plans)


def sizes_of(case: Case) -> dict[str, Any]:
    """The arguments of a constructor that are sizes, and of a plan."""
    sizes = {"input_size": case.input_size, "hidden_size": case.hidden_size} | case.sizes
    own = {"lstm": "proj_size", "stochastic_gru": "latent_size"}.get(case.cell)
    return sizes | ({own: getattr(case, own)} if own else {})


# --- any sizes -----------------------------------------------------------------------------------


def any_sizes(rng: random.Random) -> Call:
    """A call in float64 whose error is a few roundings."""
    case = Case(
        rng.choice(CELLS),
        seq_len=rng.randint(1, 20),
        batch=rng.randint(1, 40),
        input_size=rng.randint(1, 40),
        hidden_size=rng.randint(1, 80),
        latent_size=rng.randint(1, 80),
        num_layers=rng.randint(1, 2),
        noise=rng.choice(["seed", "eps", "none"]),
        chunk_size=rng.choice([None, rng.randint(1, 25)]),
        **{name: rng.random() < 0.5 for name in ("bias", "bidirectional", "lengths", "reset")},
        recompute=rng.choice([None, True, False]),
    )
    return Call(case, noise=case.noise, is_plain=True, exact=1e-12)


# --- hostile scales ------------------------------------------------------------------------------

NAMES = ["gru", "lstm", "projected lstm"]
NAMES += [f"stochastic gru, {noise}" for noise in ("drawn", "eps", "no noise")]
HOSTILE = dict(zip(NAMES, variants(proj_size=13), strict=True))
# By name, what each changes of a case, and what of a call.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "recompute=False": ({"recompute": False}, {}),
    "chunks": ({"chunk_size": 2}, {}),
    "lengths": ({"lengths": True, "chunk_size": 2}, {}),
    "reset": ({"reset": True}, {}),
    "two directions": ({"bidirectional": True}, {}),
    "no bias": ({"bias": False}, {}),  # no gate is saturated by a bias then
    "two layers": ({"num_layers": 2}, {}),
    "dropout": ({"num_layers": 2}, {"dropout": 0.3}),
    "zoneout": ({}, {"zoneout": (0.3, 0.6)}),
    "zoneout in evaluation": ({}, {"zoneout": (0.3, 0.6), "training": False}),
    "zoneout of 1": ({}, {"zoneout": (1.0, 1.0)}),
    "last state": ({}, {}),
    "everything": (
        {"num_layers": 2, "bidirectional": True, "lengths": True, "reset": True, "chunk_size": 2},
        {"dropout": 0.2, "zoneout": (0.2, 0.1)},
    ),
}


def hostile(cell: str, dtype: torch.dtype, change: str, option: str) -> Call:
    """The call of these names."""
    of_case, options = OPTIONS[option]
    case = Case(seq_len=5, batch=8, input_size=6, hidden_size=24, latent_size=11, dtype=dtype)
    case = replace(case, **HOSTILE[cell], **of_case)
    if "zoneout" in options and case.cell != "lstm":
        options = options | {"zoneout": options["zoneout"][0]}
    return Call(
        case,
        noise=case.noise,
        options=options,
        return_sequence=option != "last state",
        is_plain=True,
        change=change,
        name=f"{cell}, {str(dtype)[6:]}, {change}, option: {option}",
    )


def scales(
    cell: str, dtype: torch.dtype, backends: list[str], is_exhaustive: bool = False
) -> Iterator[tuple[Call, list[str]]]:
    """Each change, with one option or all, and the backends that try it.

    Persistent kernels are tried in 16 bits only.
    """
    some = [b for b in backends if "persistent" not in b or dtype.itemsize == 2]
    for i, change in enumerate(changes(HOSTILE[cell]["cell"])):
        if cell == "stochastic gru, drawn" and "logvar" in change:
            continue  # noise in float32 and float64 differs by rounding, which a scale enlarges
        options = list(OPTIONS)
        if not is_exhaustive:
            options = [options[(i + len(cell) + dtype.itemsize) % len(options)]]
        for option in options:
            yield hostile(cell, dtype, change, option), some
