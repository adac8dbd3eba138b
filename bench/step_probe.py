"""Computes a call of a layer in two ways, compares all numbers, and finds the first wrong one.

A persistent kernel is compared with single steps, and single steps over tensors in odd strides with
the CPU in float64. Pre-activations are compared too, to show which gate was wrong first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedrnn import _library
from fusedrnn import _tuning as tuning
from fusedrnn._autograd import run_layer
from fusedrnn._cells import Sizes, layout
from fusedrnn._ops import ForwardResults, LayerCall, LayerTensors

BATCH, INPUT = 11, 5  # two tiles of rows
# Sizes that give each depth of a persistent kernel: blocks of columns that a warp multiplies.
SIZES = {1: 40, 2: 300, 4: 600}
SIZES_FLOAT32 = {1: 40, 2: 150, 4: 300}
# Tolerances, in roundings of the largest number of a kind. Persistent kernels and single steps
# round at the same places; tensors in odd strides are compared with float64.
OF_PERSISTENT, OF_STRIDED = 4, 8
TF32_ROUNDING = 2.0**-10

GRU, LSTM, SAMPLE = ("r", "u", "n of x", "n of h"), ("i", "f", "g", "o"), ("loc", "logvar")


@dataclass(frozen=True)
class Values:
    """The numbers of one kind that a call computes.

    Attributes:
        axes: What each index counts; "t", "row", "gate" and "unit" where there are such.
        gates: Names of an index along "gate".
        is_backward: Whether the last step comes first.
    """

    values: Tensor
    axes: Sequence[str]
    gates: Sequence[str] = ()
    is_backward: bool = False


@dataclass(frozen=True)
class Step:
    """A call of one layer over a few steps."""

    cell: str = "gru"
    dtype: torch.dtype = torch.bfloat16
    seq_len: int = 1
    size: int = SIZES[1]
    by_flags: bool = False
    noise: str = "seed"  # only for a stochastic GRU; also "eps" or "none"
    device: str = "cuda"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        exchange = "flags" if self.by_flags else "packets"
        noise = f" {self.noise}" if self.cell == "stochastic_gru" else ""
        return f"{self.cell}{noise} {dtype} T={self.seq_len} H={self.size} {exchange}"

    @property
    def is_lstm(self) -> bool:
        """Whether the cell has a cell state."""
        return self.cell.endswith("lstm")

    def tensors(self) -> dict[str, Any]:
        """Random arguments, the same for the same sizes."""
        generator = torch.Generator().manual_seed(17)
        size, output = self.size, self.output_size

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return values.to(self.device, self.dtype).requires_grad_()

        parameters = layout(self.cell, Sizes(INPUT, size, size, output), 1, 1, True)
        is_noisy = self.cell == "stochastic_gru"
        return {
            "input": normal(self.seq_len, BATCH, INPUT),
            "hx": normal(1, BATCH, output, scale=0.5),
            "cx": normal(1, BATCH, size) if self.is_lstm else None,
            "weights": {name: normal(*shape, scale=size**-0.5) for name, _, shape in parameters},
            "eps": normal(1, self.seq_len, BATCH, size)
            if is_noisy and self.noise == "eps"
            else None,
            "seed": (
                torch.tensor([-(3**37)], device=self.device)
                if is_noisy and self.noise == "seed"
                else None
            ),
            "cotangents": [
                normal(self.seq_len, BATCH, output),
                normal(1, BATCH, output),
                normal(1, BATCH, size),
            ],
        }

    @property
    def output_size(self) -> int:
        """Features of h."""
        return self.size // 2 if self.cell == "projected_lstm" else self.size

    def stages(self) -> dict[str, Sequence[str]]:
        """Names of pre-activations by stage, as the operators save them for backward."""
        if self.is_lstm:
            return {"the LSTM": LSTM}
        if self.cell == "gru":
            return {"the GRU": GRU}
        return {"the sample": SAMPLE[:1] if self.noise == "none" else SAMPLE, "the GRU": GRU}

    def gates(self, parameter: str) -> Sequence[str]:
        """Names of the blocks of rows of a weight or a bias."""
        projection = parameter.removesuffix("_l0").rpartition("_")[2]
        if projection == "hr":
            return ("",)
        if projection == "hz":
            return SAMPLE
        return LSTM if self.is_lstm else (*GRU[:2], "n")


class _Watch:
    """The operators, with a record of what the last forward saved for backward."""

    def __init__(self, operators: Any) -> None:
        self.operators = operators
        self.saved_gates = torch.empty(0)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        results = self.operators.forward(*arguments, **named)
        self.saved_gates = ForwardResults(*results).saved_gates
        return results

    def backward(self, *arguments: Any, **named: Any) -> Any:
        return self.operators.backward(*arguments, **named)


def run(step: Step, backend: str, tensors: Mapping[str, Any] | None = None) -> dict[str, Values]:
    """Everything that a call computes, forward and backward, in the order of its work."""
    given = tensors or step.tensors()
    weights = given["weights"]
    watch = _Watch(_library.operators)
    with (
        mock.patch.object(_library, "operators", watch),
        mock.patch.object(tuning.switches, "exchange_by_flags", step.by_flags),
    ):
        call = LayerCall(
            cell=step.cell,
            backend=backend,
            recompute=False,
            tuning=tuning.number_for(given["input"]),
        )
        results = run_layer(
            call,
            LayerTensors(
                input=given["input"],
                hx=given["hx"],
                cx=given["cx"],
                weights=list(weights.values()),
                eps=given["eps"],
                seed=given["seed"],
            ),
        )
        outputs = results[: 3 if step.is_lstm else 2]
        wanted = {name: given[name] for name in ("input", "hx", "cx", "eps")}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor is not None} | weights
        cotangents = given["cotangents"][: len(outputs)]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), cotangents)
    found: dict[str, Values] = {}
    saved = watch.saved_gates
    for stage, gates in step.stages().items():
        count = step.seq_len * BATCH * len(gates) * step.size
        shape = (step.seq_len, BATCH, len(gates), step.size)
        values, saved = saved[:count].view(shape), saved[count:]
        axes = ("t", "row", "gate", "unit")
        found[f"pre-activations of {stage}"] = Values(values, axes, gates)
    assert len(saved) == 0, "more is saved for backward than is known here"
    return found | named(step, outputs, dict(zip(wanted, gradients, strict=True)))


def named(
    step: Step, outputs: Sequence[Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Values]:
    """Results and gradients with the meaning of their indices."""
    axes = ("t", "row", "unit")
    found = {"output": Values(outputs[0], axes)}
    for name, state in zip(("h_n", "c_n"), outputs[1:], strict=False):
        found[name] = Values(state[0], axes[1:])
    for name, gradient in gradients.items():
        what = f"gradient of {name}"
        if name == "input":
            found[what] = Values(gradient, ("t", "row", "feature"), is_backward=True)
        elif name == "eps":
            found[what] = Values(gradient[0], axes, is_backward=True)
        elif name in ("hx", "cx"):
            found[what] = Values(gradient[0], axes[1:], is_backward=True)
        else:
            gates = step.gates(name)
            blocks = gradient.view(len(gates), -1, *gradient.shape[1:])
            of_weight = ("gate", "unit", "column")[: blocks.dim()]
            found[what] = Values(blocks, of_weight, gates, is_backward=True)
    return found


def differences(
    ours: Mapping[str, Values], expected: Mapping[str, Values], tolerance: float
) -> list[str]:
    """Wrong numbers in the order of the work, a sentence for each kind.

    ``tolerance`` is relative to the largest number of a kind.
    """
    said: list[tuple[tuple[bool, float], str]] = []
    for name, kind in expected.items():
        theirs = kind.values.detach().double().cpu()
        found = ours[name].values.detach().double().cpu()
        limit = tolerance * float(theirs.abs().max())
        wrong = ((found - theirs).abs() <= limit).logical_not().nonzero()  # NaN is wrong too
        if len(wrong) == 0:
            continue
        steps = wrong[:, 0] if kind.axes[0] == "t" else torch.zeros(len(wrong))
        first = wrong[int(steps.argmax() if kind.is_backward else steps.argmin())].tolist()
        place = " ".join(
            f"{axis}={kind.gates[i] if axis == 'gate' else i}"
            for axis, i in zip(kind.axes, first, strict=True)
            if axis != "gate" or kind.gates[i]
        )
        values = f"{found[tuple(first)]:.6g} instead of {theirs[tuple(first)]:.6g}"
        at = float(first[0]) if kind.axes[0] == "t" else float("inf")
        order = (kind.is_backward, -at if kind.is_backward and at < float("inf") else at)
        count = f"{len(wrong)} of {theirs.numel()} numbers are wrong"
        said.append((order, f"{name}: {count}, the first at {place}: {values}"))
    return [sentence for _, sentence in sorted(said, key=lambda item: item[0])]


def persistent(step: Step) -> list[str]:
    """Differences between a persistent kernel and single steps."""
    ours, expected = (run(step, backend) for backend in ("persistent", "stepwise"))
    # float32 has a persistent kernel only through TF32.
    rounding = TF32_ROUNDING if step.dtype is torch.float32 else torch.finfo(step.dtype).eps
    return differences(ours, expected, OF_PERSISTENT * rounding)


LAYOUTS = ("contiguous", "transposed", "wider rows", "every second column", "off by one")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of a tensor with other strides, as a leaf."""
    values = tensor.detach()
    *rows, columns = values.shape
    if layout == "transposed":
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "wider rows":
        values = values.new_empty(*rows, columns + 3)[..., :columns].copy_(values)
    elif layout == "every second column":
        values = values.new_empty(*rows, 2 * columns)[..., ::2].copy_(values)
    elif layout == "off by one":
        values = values.new_empty(values.numel() + 1)[1:].view(values.shape).copy_(values)
    return values.requires_grad_()


def strided(step: Step, layout: str) -> list[str]:
    """Differences between single steps over tensors in odd strides and the CPU in float64."""
    tensors = step.tensors()
    odd = tensors | {
        "input": laid_out(tensors["input"], layout),
        "weights": {name: laid_out(w, layout) for name, w in tensors["weights"].items()},
    }
    exact = {name: _exact(value) for name, value in tensors.items()}
    expected = run(replace(step, dtype=torch.float64, device="cpu"), "stepwise", exact)
    tolerance = OF_STRIDED * torch.finfo(step.dtype).eps
    return differences(run(step, "stepwise", odd), expected, tolerance)


def _exact(value: Any) -> Any:
    """Copies of tensors in float64 on the CPU, as leaves."""
    if isinstance(value, dict):
        return {name: _exact(tensor) for name, tensor in value.items()}
    if isinstance(value, list):
        return [_exact(tensor) for tensor in value]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().cpu().requires_grad_()
