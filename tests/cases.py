"""The cells, and one list of cases for every backend: cells x shapes x dtypes x options."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fusedrnn
from fusedrnn import reference
from fusedrnn._cells import Sizes, layout
from fusedrnn._ops import LayerCall, LayerTensors

MODULES = {"gru": fusedrnn.GRU, "lstm": fusedrnn.LSTM, "stochastic_gru": fusedrnn.StochasticGRU}
CELLS = list(MODULES)
# The cells of the operators, for which a projected LSTM is a cell of its own.
OPERATOR_CELLS = list(fusedrnn._cells.CELLS)


def variants(proj_size: int) -> list[dict[str, Any]]:
    """Every cell, and every variant of it: with a projection, or with each source of noise."""
    return [
        {"cell": "gru"},
        {"cell": "lstm"},
        {"cell": "lstm", "proj_size": proj_size},
        {"cell": "stochastic_gru"},
        {"cell": "stochastic_gru", "noise": "eps"},
        {"cell": "stochastic_gru", "noise": "none"},
    ]


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call; ``tensors`` makes its arguments."""

    cell: str = "stochastic_gru"
    seq_len: int = 9
    batch: int = 3
    input_size: int = 5
    hidden_size: int = 7
    latent_size: int = 6
    proj_size: int = 0  # only for an LSTM
    num_layers: int = 1
    bias: bool = True
    bidirectional: bool = False
    lengths: bool = False
    reset: bool = False
    noise: str = "seed"  # or "eps" or "none"; only for a stochastic GRU
    recompute: bool | None = True
    chunk_size: int | None = None
    gain: float = 1.0  # a factor of the weights
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        default = Case()
        changed = [
            f"{name}={getattr(self, name)}".replace("torch.", "").replace("cell=", "")
            for name in self.__dataclass_fields__
            if name == "cell" or getattr(self, name) != getattr(default, name)
        ]
        return ",".join(changed)

    def same_for_torch(self) -> Case:
        """The case without options that make no difference to a loop."""
        return replace(self, recompute=True, chunk_size=None)

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of the reference other than tensors."""
        sizes = {
            "num_layers": self.num_layers,
            "bias": self.bias,
            "bidirectional": self.bidirectional,
        }
        return sizes | ({"proj_size": self.proj_size} if self.proj_size else {})

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the functional form other than tensors."""
        return self.sizes | {"recompute": self.recompute, "chunk_size": self.chunk_size}

    def results(self, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
        """Outputs and all gradients of the functional form, for arguments in the case's dtype."""
        arguments = self.tensors(device).to(self.dtype)
        return arguments.results(fusedrnn, **(self.options | options))

    def tensors(self, device: str = "cpu") -> Arguments:
        """Random arguments, the same for the same sizes whatever the dtype and the device."""
        generator = torch.Generator().manual_seed(17)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return values.to(device, self.dtype)

        directions = 2 if self.bidirectional else 1
        rows, steps = self.num_layers * directions, (self.seq_len, self.batch)
        is_lstm, is_stochastic = self.cell == "lstm", self.cell == "stochastic_gru"
        cell = "projected_lstm" if self.proj_size else self.cell
        output_size = self.proj_size or self.hidden_size
        sizes = Sizes(self.input_size, self.hidden_size, self.latent_size, output_size)
        all_weights = layout(cell, sizes, self.num_layers, directions, self.bias)
        weights = [shape for _, _, shape in all_weights]
        h, c = ((rows, self.batch, width) for width in (output_size, self.hidden_size))
        needs_seed = is_stochastic and self.noise == "seed"
        needs_eps = is_stochastic and self.noise == "eps"
        lengths = torch.randint(1, self.seq_len + 1, (self.batch,), generator=generator)
        reset = torch.rand(steps, generator=generator) < 0.25
        return Arguments(
            cell=self.cell,
            input=normal(*steps, self.input_size),
            hx=normal(*h, scale=0.5),
            cx=normal(*c) if is_lstm else None,
            weights=[normal(*shape, scale=self.gain * self.hidden_size**-0.5) for shape in weights],
            eps=normal(rows, *steps, self.latent_size) if needs_eps else None,
            seed=torch.tensor([-(3**37)], device=device) if needs_seed else None,
            sample=self.noise != "none",
            lengths=lengths if self.lengths else None,
            reset=reset.to(device) if self.reset else None,
            grad_output=normal(*steps, directions * output_size),
            grad_h_n=normal(*h),
            grad_c_n=normal(*c) if is_lstm else None,
        )


@dataclass
class Arguments:
    """Tensors of one call, and cotangents of its results."""

    cell: str
    input: Tensor
    hx: Tensor
    cx: Tensor | None
    weights: list[Tensor]
    eps: Tensor | None
    seed: Tensor | None
    sample: bool
    lengths: Tensor | None
    reset: Tensor | None
    grad_output: Tensor
    grad_h_n: Tensor
    grad_c_n: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """Every tensor that has a gradient."""
        tensors = {"input": self.input, "hx": self.hx, "cx": self.cx, "eps": self.eps}
        tensors |= {f"weights[{i}]": w for i, w in enumerate(self.weights)}
        return {name: t for name, t in tensors.items() if t is not None}

    def differentiable(self) -> list[Tensor]:
        """Every tensor that has a gradient."""
        return list(self.named().values())

    def with_differentiable(self, tensors: Any) -> Arguments:
        """The same call with other tensors in place of ``differentiable()``."""
        named = dict(zip(self.named(), tensors, strict=True))
        weights = [named.pop(f"weights[{i}]") for i in range(len(self.weights))]
        return replace(self, weights=weights, **named)

    def cotangents(self) -> list[Tensor]:
        """A cotangent for each result."""
        every = (self.grad_output, self.grad_h_n, self.grad_c_n)
        return [t for t in every if t is not None]

    def to(self, dtype: torch.dtype) -> Arguments:
        """Copies in another dtype, as fresh leaves that require gradients."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.differentiable()]
        return replace(
            self.with_differentiable(leaves),
            grad_output=self.grad_output.to(dtype),
            grad_h_n=self.grad_h_n.to(dtype),
            grad_c_n=None if self.grad_c_n is None else self.grad_c_n.to(dtype),
        )

    def on(self, device: str) -> Arguments:
        """Copies on a device, as fresh leaves."""
        moved = {
            name: value.detach().to(device).requires_grad_(value.requires_grad)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "lengths"
        }
        weights = [w.detach().to(device).requires_grad_(w.requires_grad) for w in self.weights]
        return replace(self, weights=weights, **moved)

    def call(self, library: Any, **options: Any) -> tuple[Tensor, ...]:
        """The cell's function in fusedrnn or its reference -> output, h_n, c_n if any."""
        if self.cell == "stochastic_gru":
            options |= {"eps": self.eps, "seed": self.seed, "sample": self.sample}
        output, last = getattr(library, self.cell)(
            self.input,
            self.weights,
            self.hx if self.cx is None else (self.hx, self.cx),
            lengths=self.lengths,
            reset=self.reset,
            **options,
        )
        return (output, last) if isinstance(last, Tensor) else (output, *last)

    def results(self, library: Any, **options: Any) -> dict[str, Tensor]:
        """Outputs and all gradients by name."""
        outputs = self.call(library, **options)
        wanted = self.named()
        grads = torch.autograd.grad(outputs, list(wanted.values()), self.cotangents())
        results = dict(zip(("output", "h_n", "c_n"), outputs, strict=False))
        return results | {f"grad_{n}": g for n, g in zip(wanted, grads, strict=True)}


class TorchLibrary:
    """The functions behind torch.nn.GRU and torch.nn.LSTM, in our form."""

    @staticmethod
    def gru(input, weights, hx, *, num_layers, bias, bidirectional, lengths, reset):  # type: ignore
        assert lengths is None and reset is None
        return torch.gru(input, hx, weights, bias, num_layers, 0.0, True, bidirectional, False)

    @staticmethod
    def lstm(  # type: ignore
        input, weights, hx, *, num_layers, bias, bidirectional, lengths, reset, proj_size=0
    ):
        assert lengths is None and reset is None
        output, h_n, c_n = torch.lstm(
            input, hx, weights, bias, num_layers, 0.0, True, bidirectional, False
        )
        return output, (h_n, c_n)


def allow_tf32(allowed: bool) -> None:
    """Sets whether cuDNN and this package may round products of float32, for the rest of a test.

    Sets all of cuDNN's operations, since torch objects to switches that contradict each other.
    """
    precision = "tf32" if allowed else "ieee"
    torch.backends.cudnn.rnn.fp32_precision = torch.backends.cudnn.conv.fp32_precision = precision
    if allowed:  # sets what torch.export reads, and nothing else can be read then
        torch.backends.cudnn.allow_tf32 = True


@functools.cache
def truth(case: Case, device: str) -> dict[str, Tensor]:
    """Outputs and gradients of the plain loop in float64, for arguments in ``case.dtype``."""
    return case.tensors(device).to(torch.float64).results(reference, **case.sizes)


@functools.cache
def baseline(case: Case, device: str) -> dict[str, Tensor]:
    """Results of torch's own kernel for a case in its dtype, or of the loop if there is none."""
    has_kernel = case.cell != "stochastic_gru" and not case.lengths and not case.reset
    library = TorchLibrary if has_kernel else reference
    return case.tensors(device).to(case.dtype).results(library, **case.sizes)


def relative_errors(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each difference over the norm of the truth."""
    errors = {}
    for name, expected in truth.items():
        expected = expected.detach()
        error = (results[name].detach().double() - expected).norm()
        errors[name] = float(error / expected.norm() if expected.any() else error)
    return errors


MASKED: dict[str, Any] = {"bidirectional": True, "lengths": True, "reset": True}
# Sizes for plain and masked cases.
SHAPES = [
    Case(seq_len=1, batch=1, input_size=1, hidden_size=1, latent_size=1),
    Case(seq_len=1, batch=5),
    Case(seq_len=13, batch=1),
    Case(seq_len=7, batch=11, input_size=3, hidden_size=17, latent_size=19),
    Case(seq_len=10, batch=4, input_size=16, hidden_size=64, latent_size=32),
    Case(seq_len=5, batch=2, input_size=31, hidden_size=130, latent_size=67),
    Case(seq_len=12, chunk_size=4),  # whole chunks
    Case(seq_len=7, batch=2, chunk_size=1),
    Case(seq_len=13, chunk_size=100),  # longer than the sequence
    Case(seq_len=9, batch=130, hidden_size=33),  # several automatic chunks and threads
    Case(seq_len=3, batch=600, hidden_size=3),  # more rows in a step than in a chunk
]
PROJECTED = [
    Case("lstm", seq_len=1, batch=5, hidden_size=2, proj_size=1),
    Case("lstm", seq_len=7, batch=11, input_size=3, hidden_size=19, proj_size=17),
    Case("lstm", seq_len=10, batch=4, input_size=16, hidden_size=48, proj_size=32),
    Case("lstm", seq_len=5, batch=2, input_size=31, hidden_size=130, proj_size=3),
    Case("lstm", seq_len=9, batch=130, hidden_size=33, proj_size=32),
    Case("lstm", seq_len=3, batch=600, hidden_size=3, proj_size=2),
]
# The size for all options: enough chunks for a GPU to replay those between the first and the last.
CHUNKED = Case(seq_len=21, chunk_size=4)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"recompute": False},
    {"num_layers": 3},
    {"bidirectional": True},
    {"lengths": True},
    {"reset": True},
    {"bidirectional": True, "reset": True, "recompute": False},
    {"bidirectional": True, "lengths": True, "bias": False},
    {**MASKED, "num_layers": 2},
    {**MASKED, "num_layers": 2, "recompute": False},
]
NOISE: list[dict[str, Any]] = [
    {"noise": "eps"},
    {"noise": "none"},
    {"noise": "eps", "num_layers": 2, "recompute": False},
    {"noise": "none", "bias": False, "recompute": False},
    {"noise": "eps", **MASKED, "num_layers": 2},
    {"noise": "none", **MASKED, "recompute": False},
]
ALL_OPTIONS = [{"cell": cell, **options} for cell in CELLS for options in OPTIONS] + NOISE
ALL_OPTIONS += [{"cell": "lstm", "proj_size": 2, **options} for options in OPTIONS]
SHAPE_CASES = [replace(case, **options) for case in PROJECTED for options in ({}, MASKED)]
SHAPE_CASES += [
    replace(shape, cell=cell, **options)
    for cell in CELLS
    for shape in SHAPES
    for options in ({}, MASKED)
]
CASES = SHAPE_CASES + [replace(CHUNKED, **options) for options in ALL_OPTIONS]
CASES += [Case(cell=cell, seq_len=300, batch=1, hidden_size=4, latent_size=3) for cell in CELLS]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# float32 and float16 run the code of float64 and bfloat16, so options are not tried again.
DTYPE_CASES = [replace(case, dtype=torch.bfloat16) for case in CASES]
DTYPE_CASES += [
    replace(case, dtype=dtype) for case in SHAPE_CASES for dtype in (torch.float32, torch.float16)
]


def operator_arguments(
    case: Case,
    arguments: Arguments,
    *,
    batch_sizes: Tensor | None = None,
    mask_seed: Tensor | None = None,
    **call: Any,
) -> dict[str, Any]:
    """Arguments of a layer's operators by name. ``call``: fields of LayerCall."""
    names = ("input", "hx", "weights", "cx", "eps", "seed", "lengths", "reset")
    given = {name: getattr(arguments, name) for name in names}
    tensors = LayerTensors(**given, batch_sizes=batch_sizes, mask_seed=mask_seed)
    named = LayerCall(cell="projected_lstm" if case.proj_size else case.cell, **call)
    return tensors._asdict() | named.others | tensors.others() | {"cell": named.index}
