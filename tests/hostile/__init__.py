"""Calls with numbers of hostile scales, and the errors that they lead to.

A case is a call of a cell with an option, whose arguments one *change* has made hostile. The errors
of its outputs and gradients against float64 may be at most twice those of torch's own module, or of
the loop where torch has none, in the same dtype on the same numbers (judge.py). The command is
``python -m hostile`` in the folder tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Arguments, Case, TorchLibrary, variants
from emulator import emulated_operators, use
from torch import Tensor

import fusedrnn
from fusedrnn import _seeds

from . import oracle
from .changes import changes
from .oracle import Regularization

BATCH, SIZE = 8, 24

NAMES = ["gru", "lstm", "projected lstm"]
NAMES += [f"stochastic gru, {noise}" for noise in ("drawn", "eps", "no noise")]
CELLS = dict(zip(NAMES, variants(proj_size=13), strict=True))


@dataclass(frozen=True)
class Option:
    """The options of a call, apart from its numbers."""

    case: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    last_only: bool = False


OPTIONS = {
    "none": Option(),
    "recompute=False": Option({"recompute": False}),
    "chunks": Option({"chunk_size": 2}),
    "lengths": Option({"lengths": True, "chunk_size": 2}),
    "reset": Option({"reset": True}),
    "two directions": Option({"bidirectional": True}),
    "no bias": Option({"bias": False}),  # no gate is saturated by a bias then
    "two layers": Option({"num_layers": 2}),
    "dropout": Option({"num_layers": 2}, {"dropout": 0.3}),
    "zoneout": Option({}, {"zoneout": (0.3, 0.6)}),
    "zoneout in evaluation": Option({}, {"zoneout": (0.3, 0.6), "training": False}),
    "zoneout of 1": Option({}, {"zoneout": (1.0, 1.0)}),
    "last state": Option({}, last_only=True),
    "everything": Option(
        {"num_layers": 2, "bidirectional": True, "lengths": True, "reset": True, "chunk_size": 2},
        {"dropout": 0.2, "zoneout": (0.2, 0.1)},
    ),
}


@dataclass(frozen=True)
class Hostile:
    """A case, named by its parts, which also determine its random numbers."""

    cell: str
    dtype: torch.dtype
    change: str
    option: str

    def __str__(self) -> str:
        return f"{self.cell}, {str(self.dtype)[6:]}, {self.change}, option: {self.option}"

    @property
    def case(self) -> Case:
        base = Case(seq_len=5, batch=BATCH, input_size=6, hidden_size=SIZE, latent_size=11)
        return replace(base, **CELLS[self.cell], **OPTIONS[self.option].case, dtype=self.dtype)

    @property
    def how_options(self) -> dict[str, Any]:
        return OPTIONS[self.option].how

    @property
    def how(self) -> Regularization:
        how = self.how_options
        if self.case.cell != "lstm" and "zoneout" in how:
            how = how | {"zoneout": (how["zoneout"][0], 0.0)}
        return Regularization(**how)

    def arguments(self, dtype: torch.dtype | None = None) -> Arguments:
        """Arguments with numbers of the case's dtype, as leaves in this or another dtype."""
        case = self.case
        arguments = case.tensors()
        with torch.no_grad():
            changes(case.cell)[self.change](case, arguments)
        return arguments.to(dtype or self.dtype)

    def ours(self, backend: str = "cpu") -> dict[str, Tensor]:
        """Results of fusedrnn, on a backend of ``BACKENDS``."""
        case, how, last_only = self.case, self.how, OPTIONS[self.option].last_only
        zoneout = how.zoneout if case.cell == "lstm" else how.zoneout[0]
        device = "cuda" if backend == "cuda" else "cpu"
        arguments = self.arguments().on(device)
        # Masks have a seed of their own, which is not an argument.
        drawn = mock.Mock(return_value=torch.tensor([how.seed], device=device))
        with mock.patch.object(_seeds, "draw", drawn), computing(backend):
            outputs = arguments.call(
                fusedrnn,
                **case.options,
                zoneout=zoneout,
                dropout=how.dropout,
                training=how.training,
                return_sequence=not last_only,
            )
            return _gradients(arguments, outputs[1:] if last_only else outputs, last_only)

    def loop(self, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
        """Results of the oracle, with its options."""
        last_only = OPTIONS[self.option].last_only
        arguments = self.arguments(dtype)
        outputs = oracle.call(self.case, arguments, self.how, **options)
        return _gradients(arguments, outputs[1:] if last_only else outputs, last_only)

    def torchs(self) -> dict[str, Tensor] | None:
        """Results of torch's own kernel, if it has one for the case."""
        case, option = self.case, OPTIONS[self.option]
        if case.cell == "stochastic_gru" or option.how or case.lengths or case.reset:
            return None
        arguments = self.arguments()
        outputs = arguments.call(TorchLibrary, **case.sizes)
        return _gradients(arguments, outputs[1:] if option.last_only else outputs, option.last_only)


# The backends, and the arguments that set up the emulation for each.
BACKENDS: dict[str, dict[str, int]] = {
    "cpu": {},
    "emulated": {},
    "emulated, denormals flushed": {},
    "emulated, persistent kernels": {"multiprocessors": 132, "schedule": 1},
    "cuda": {},
}
# Backends that share most code with another one try only each so many-th change.
EVERY = {"emulated, denormals flushed": 2, "emulated, persistent kernels": 3}


def has_case(backend: str, dtype: torch.dtype) -> bool:
    """Whether a backend has the dtype: persistent kernels are tried in 16 bits only."""
    return "persistent" not in backend or dtype.itemsize == 2


@contextlib.contextmanager
def computing(backend: str) -> Iterator[None]:
    """Has fusedrnn compute by a backend, as long as the context lasts."""
    if not backend.startswith("emulated"):
        yield
        return
    operators = emulated_operators()
    operators.control(False, "", **BACKENDS[backend])
    try:
        torch.set_flush_denormal("flushed" in backend)
        with pytest.MonkeyPatch.context() as patch:
            use(patch, operators)
            yield
    finally:
        torch.set_flush_denormal(False)
        operators.control(False, "")


def cases(cell: str, dtype: torch.dtype, backend: str, is_exhaustive: bool) -> list[Hostile]:
    """All changes with all options, or each with one option; slow backends skip some changes."""
    found = []
    for i, change in enumerate(changes(CELLS[cell]["cell"])):
        if cell == "stochastic gru, drawn" and "logvar" in change:
            continue  # noise in float32 and float64 differs by rounding, which a scale enlarges
        options = list(OPTIONS)
        if not is_exhaustive:
            options = [options[(i + len(cell) + dtype.itemsize) % len(options)]]
            if i % EVERY.get(backend, 1):
                continue
        found += [Hostile(cell, dtype, change, option) for option in options]
    return found


def _gradients(
    arguments: Arguments, outputs: tuple[Tensor, ...], last_only: bool
) -> dict[str, Tensor]:
    wanted = arguments.named()
    cotangents = arguments.cotangents()[1 if last_only else 0 :]
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, materialize_grads=True)
    names = ("output", "h_n", "c_n")[1 if last_only else 0 :]
    found = dict(zip(names, outputs, strict=False))
    found |= {f"grad_{n}": g for n, g in zip(wanted, grads, strict=True)}
    return {name: tensor.detach().double().cpu() for name, tensor in found.items()}
