"""The operators under stress: many steps, many threads, no memory, other processes.

Each experiment runs in a process of its own, so that a crash does not end the others, and gives a
row of a table: what was done, what was measured, and what is wrong. The command
is ``python -m stress`` in the folder tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cases import MASKED, MODULES, Arguments, Case
from torch import Tensor, nn

import fusedrnn

CELLS: dict[str, Case] = {
    "gru": Case("gru", dtype=torch.float32),
    "lstm": Case("lstm", dtype=torch.float32),
    "projected lstm": Case("lstm", proj_size=5, dtype=torch.float32),
    "stochastic gru": Case("stochastic_gru", dtype=torch.float32),
}
# Enough work for several threads in products and stages.
LARGE: dict[str, Any] = {"seq_len": 6, "batch": 65, "input_size": 48, "hidden_size": 80}
LARGE |= {"latent_size": 72, "bidirectional": True}


@dataclass(frozen=True)
class Scale:
    """How much work the experiments do."""

    short: bool = False
    seed: int = 0

    def choose(self, full: int, short: int) -> int:
        """The number of repetitions."""
        return short if self.short else full


@dataclass
class Row:
    """A row of the table: one experiment."""

    done: str
    measured: str = ""
    wrong: list[str] = field(default_factory=list)


def large(case: Case) -> Case:
    """The same cell on a batch that several threads share."""
    return replace(case, **LARGE, proj_size=40 if case.proj_size else 0)


def masked(case: Case) -> Case:
    """The same cell with lengths and resets, in both directions of two layers."""
    return replace(case, **MASKED, num_layers=2)


def module_of(case: Case) -> nn.Module:
    """The module with the case's sizes and options."""
    options: dict[str, Any] = case.options | {"dtype": case.dtype}
    if case.cell == "stochastic_gru":
        options["latent_size"] = case.latent_size
    return MODULES[case.cell](case.input_size, case.hidden_size, **options)


def results_of(case: Case, arguments: Arguments) -> dict[str, Tensor]:
    """Outputs and all gradients of the functional form."""
    return arguments.results(fusedrnn, **case.options)


def module_results(rnn: nn.Module, arguments: Arguments) -> dict[str, Tensor]:
    """Outputs, and gradients of the input, the state and the weights, by name.

    By torch.autograd.grad, which accumulates nothing: threads can share the module.
    """
    state = arguments.hx if arguments.cx is None else (arguments.hx, arguments.cx)
    options = {} if arguments.eps is None else {"eps": arguments.eps}
    output, last = rnn(
        arguments.input, state, lengths=arguments.lengths, reset=arguments.reset, **options
    )
    outputs = [output, *([last] if isinstance(last, Tensor) else last)]
    results = dict(zip(("output", "h_n", "c_n"), outputs, strict=False))
    if not torch.is_grad_enabled():
        return results
    wanted = {"input": arguments.input, "hx": arguments.hx, **dict(rnn.named_parameters())}
    grads = torch.autograd.grad(outputs, list(wanted.values()), arguments.cotangents())
    return results | {f"grad_{n}": g for n, g in zip(wanted, grads, strict=True)}
