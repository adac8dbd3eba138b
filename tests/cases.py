"""One list of cases for every backend's tests: shapes x dtypes x options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedrnn import reference
from fusedrnn._library import layout


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call; ``tensors`` makes its arguments."""

    seq_len: int = 9
    batch: int = 3
    input_size: int = 5
    hidden_size: int = 7
    latent_size: int = 6
    num_layers: int = 1
    bias: bool = True
    noise: str = "seed"  # | "eps" | "none"
    recompute: bool = True
    chunk_size: int | None = None
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        default = Case()
        changed = [
            f"{name}={getattr(self, name)}".replace("torch.", "")
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(default, name)
        ]
        return ",".join(changed) or "default"

    @property
    def options(self) -> dict[str, Any]:
        """What the functional form takes besides tensors."""
        return {
            "num_layers": self.num_layers,
            "bias": self.bias,
            "recompute": self.recompute,
            "chunk_size": self.chunk_size,
        }

    def tensors(self, device: str = "cpu") -> Arguments:
        """Random arguments, the same for the same sizes whatever the dtype and the device."""
        generator = torch.Generator().manual_seed(17)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return values.to(device, self.dtype)

        sizes = (self.input_size, self.hidden_size, self.latent_size, self.num_layers, 1, self.bias)
        scale = self.hidden_size**-0.5
        eps_shape = (self.num_layers, self.seq_len, self.batch, self.latent_size)
        return Arguments(
            input=normal(self.seq_len, self.batch, self.input_size),
            hx=normal(self.num_layers, self.batch, self.hidden_size, scale=0.5),
            weights=[normal(*s, scale=scale) for _, _, s in layout("stochastic_gru", *sizes)],
            eps=normal(*eps_shape) if self.noise == "eps" else None,
            seed=torch.tensor([-(3**37)], device=device) if self.noise == "seed" else None,
            sample=self.noise != "none",
            grad_output=normal(self.seq_len, self.batch, self.hidden_size),
            grad_h_n=normal(self.num_layers, self.batch, self.hidden_size),
        )


@dataclass
class Arguments:
    """Tensors of one call, and cotangents of its results."""

    input: Tensor
    hx: Tensor
    weights: list[Tensor]
    eps: Tensor | None
    seed: Tensor | None
    sample: bool
    grad_output: Tensor
    grad_h_n: Tensor

    def differentiable(self) -> list[Tensor]:
        """Every tensor that has a gradient: input, hx, eps if given, weights."""
        return [t for t in (self.input, self.hx, self.eps, *self.weights) if t is not None]

    def to(self, dtype: torch.dtype) -> Arguments:
        """The same values in another dtype, as fresh leaves that require gradients."""

        def leaf(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_()

        return replace(
            self,
            input=leaf(self.input),
            hx=leaf(self.hx),
            weights=[leaf(w) for w in self.weights],
            eps=leaf(self.eps),
            grad_output=self.grad_output.to(dtype),
            grad_h_n=self.grad_h_n.to(dtype),
        )

    def call(self, function: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``function`` is fusedrnn.stochastic_gru or the reference."""
        noise = {"eps": self.eps, "seed": self.seed, "sample": self.sample}
        return function(self.input, self.weights, self.hx, **noise, **options)

    def results(self, function: Any, **options: Any) -> dict[str, Tensor]:
        """Outputs and all gradients by name."""
        output, h_n = self.call(function, **options)
        wanted = self.differentiable()
        grads = torch.autograd.grad([output, h_n], wanted, [self.grad_output, self.grad_h_n])
        names = ["grad_input", "grad_hx"] + ["grad_eps"] * (self.eps is not None)
        names += [f"grad_weights[{i}]" for i in range(len(self.weights))]
        return {"output": output, "h_n": h_n} | dict(zip(names, grads, strict=True))


def reference_results(arguments: Arguments, dtype: torch.dtype, case: Case) -> dict[str, Tensor]:
    """Outputs and gradients of the plain loop, computed in ``dtype``."""
    return arguments.to(dtype).results(
        reference.stochastic_gru, num_layers=case.num_layers, bias=case.bias
    )


def relative_errors(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each difference over the norm of the truth."""
    errors = {}
    for name, expected in truth.items():
        expected = expected.detach()
        error = (results[name].detach().double() - expected).norm()
        errors[name] = float(error / expected.norm() if expected.any() else error)
    return errors


SHAPES = [
    Case(),
    Case(seq_len=1, batch=1, input_size=1, hidden_size=1, latent_size=1),
    Case(seq_len=1, batch=5),
    Case(seq_len=13, batch=1),
    Case(seq_len=7, batch=11, input_size=3, hidden_size=17, latent_size=19),
    Case(seq_len=10, batch=4, input_size=16, hidden_size=64, latent_size=32),
    Case(seq_len=5, batch=2, input_size=31, hidden_size=130, latent_size=67),
    Case(seq_len=12, chunk_size=4),  # whole chunks
    Case(seq_len=13, chunk_size=4),  # one step more
    Case(seq_len=13, chunk_size=1),
    Case(seq_len=13, chunk_size=100),  # longer than the sequence
    Case(seq_len=1030, batch=1, hidden_size=4, latent_size=3),  # the automatic chunk is shorter
    Case(seq_len=9, batch=130, hidden_size=33),  # enough rows for several threads
    Case(seq_len=3, batch=600, hidden_size=3),  # more rows in a step than in a chunk
]
OPTIONS = [
    {},
    {"noise": "eps"},
    {"noise": "none"},
    {"bias": False},
    {"recompute": False},
    {"recompute": False, "noise": "eps", "num_layers": 2},
    {"recompute": False, "noise": "none", "bias": False},
    {"num_layers": 3},
]
CASES = [replace(shape, **options) for shape in SHAPES for options in OPTIONS]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
