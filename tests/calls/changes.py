"""Changes that make the arguments of a call hostile: scales, saturated gates, poison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from cases import Arguments, Case
from torch import Tensor

GATES = {"gru": 3, "lstm": 4, "stochastic_gru": 3}
Change = Callable[[Case, Arguments], None]  # changes the arguments' tensors in place
ROWS = torch.tensor([1e-6, 1e-4, 1e-2, 1.0, 1e2, 300.0, 1e4, 1e6], dtype=torch.float64)[:, None]
# Biases at and around which sigmoid and its derivatives leave the range of float32.
BIASES = (8.0, 16.7, 40.0, 86.9, 87.1, 87.3, 87.5, 88.4, 88.8, 89.1, 104.0, 1e4)
STATES = (1e-30, 1e-3, 10.0, 1e3, 6e4, 1e10, 1e30, math.inf)  # inf: the largest number
NOT_FINITE = (math.nan, math.inf, -math.inf)
HUGE = (6e4, -6e4, 1e30, -1e30)


def put(tensor: Tensor, values: Tensor) -> None:
    """Writes values as numbers of the tensor's dtype; finite ones stay finite."""
    limit = torch.finfo(tensor.dtype).max
    tensor.copy_(torch.where(values.isfinite(), values.clamp(-limit, limit), values))


def scale(tensor: Tensor, factor: float | Tensor) -> None:
    put(tensor, tensor.double() * factor)


def blocks(case: Case, a: Arguments, gate: int) -> Iterator[Tensor]:
    """A gate's block of the first bias in every layer; 3 and 4 are loc and logvar."""
    if not case.bias:
        return
    gates, matrices = GATES[case.cell], 3 if case.cell == "stochastic_gru" else 2
    per_row = 2 * matrices + bool(case.proj_size)
    for first in range(0, len(a.weights), per_row):
        place, part = (matrices, gate) if gate < gates else (matrices + 2, gate - gates)
        bias = a.weights[first + place]
        yield bias.chunk(gates if gate < gates else 2)[part]


def saturate(gate: int, values: tuple[float, ...]) -> Change:
    def change(case: Case, a: Arguments) -> None:
        for bias in blocks(case, a, gate):
            every = torch.tensor(values, dtype=torch.float64)
            put(bias, bias.double() + every.repeat(len(bias) // len(values) + 1)[: len(bias)])

    return change


def inputs(factor: float | Tensor) -> Change:
    return lambda case, a: scale(a.input, factor)


def weights(factor: float, which: Callable[[int], bool] = lambda place: True) -> Change:
    """Scales weights. ``which``: the place of a matrix in its layer; the input's is first."""

    def change(case: Case, a: Arguments) -> None:
        matrices = 3 if case.cell == "stochastic_gru" else 2
        per_row = (2 if case.bias else 1) * matrices + bool(case.proj_size)
        for i, w in enumerate(a.weights):
            if w.dim() == 2 and which(i % per_row):
                # exp(logvar / 2) of a huge logvar is inf in every implementation.
                rows = case.latent_size if i % per_row == 2 and matrices == 3 else len(w)
                scale(w[:rows], factor)

    return change


def gradients(factor: float | Tensor) -> Change:
    def change(case: Case, a: Arguments) -> None:
        for gradient in a.cotangents():
            scale(gradient, factor)

    return change


def states(case: Case, a: Arguments) -> None:
    """Sets each state in a row of the batch, with both signs."""
    for state in (a.hx, a.cx):
        if state is not None:
            # A gradient may be as large as the square, which the truth needs to hold in float64.
            largest = min(float(torch.finfo(state.dtype).max), 1e140)
            values = torch.tensor(STATES, dtype=torch.float64).clamp(max=largest)
            put(state, state.double().sign() * values[:, None])


def together(*changes: Change) -> Change:
    def change(case: Case, a: Arguments) -> None:
        for one in changes:
            one(case, a)

    return change


def poison(name: str, values: tuple[float, ...]) -> Change:
    """Sets one number in a few rows of the batch; other rows do not depend on it."""

    def change(case: Case, a: Arguments) -> None:
        tensor = getattr(a, name)
        if tensor is None:
            return
        for i, value in enumerate(values):
            at = (min(1, tensor.shape[0] - 1), 2 * i % tensor.shape[-2], i)
            at = at if tensor.dim() == 3 else (0, *at)
            tensor[at] = torch.tensor(value, dtype=torch.float64)

    return change


def denormal(case: Case, a: Arguments) -> None:
    scale(a.input, 1e-40)
    scale(a.hx, 1e-41)


def zero(case: Case, a: Arguments) -> None:
    for tensor in (a.input, *a.weights):
        tensor.zero_()


# Changes that treat all rows and units alike. Which of them has the worst error is then luck, and
# with large weights errors grow from step to step, so they are judged together.
ALIKE: dict[str, Change] = {
    **{f"input x {s:g}": inputs(s) for s in (1e-6, 100.0, 255.0, 1e3, 1e6)},
    **{f"weights x {s:g}": weights(s) for s in (1e-2, 10.0, 1e2, 1e3)},
    "input weights x 1000": weights(1e3, lambda place: place == 0),
    "recurrent weights x 1000": weights(1e3, lambda place: place > 0),
    "input x 1e6, weights x 1000": together(inputs(1e6), weights(1e3)),
    "input x 1e6, weights x 0.01": together(inputs(1e6), weights(1e-2)),
    **{f"gradients x {s:g}": gradients(s) for s in (1e-30, 1e-6, 1e6, 1e30)},
    "denormal input and state": denormal,
    "all zero": zero,
}


def changes(cell: str) -> dict[str, Change]:
    """The changes for a cell: "gru", "lstm" or "stochastic_gru"."""
    found = ALIKE | {
        "input rows x 1e-6 .. 1e6": inputs(ROWS),
        "gradient rows x 1e-6 .. 1e6": gradients(ROWS),
        "states of any size": states,
        # Gate 1 keeps the state: u of a GRU, f of an LSTM.
        "states of any size, held": together(states, saturate(1, (30.0,))),
        "states of any size, gate 1 shut": together(states, saturate(1, (-200.0,))),
    }
    signed = tuple(s * b for b in BIASES for s in (-1, 1))
    for gate, name in enumerate("ifgo" if cell == "lstm" else "run"):
        found[f"gate {name} saturated"] = saturate(gate, signed)
        found[f"gate {name} saturated, input x 100"] = together(saturate(gate, signed), inputs(100))
    if cell == "stochastic_gru":
        found["loc saturated"] = saturate(3, signed)
        values = (-1e4, -200.0, -176.0, -174.0, -20.0, 9.0, 20.0)
        found["logvar of any size"] = saturate(4, values)
    for name in ("input", "hx", "cx", "eps", "grad_output", "grad_h_n"):
        is_there = {"cx": cell == "lstm", "eps": cell == "stochastic_gru"}.get(name, True)
        if is_there:
            found[f"NaN and inf in {name}"] = poison(name, NOT_FINITE)
            found[f"6e4 and 1e30 in {name}"] = poison(name, HUGE)
    return found
