"""Calls of programs, and what a loop in Python makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from runtime.driver_cells import Cell, Made
from runtime.plain import operators_loop
from torch import Tensor

from fusedrnn import _library
from fusedrnn._compiler import program_operators
from fusedrnn._ops import call_operator

ZERO, ROWS, STEPS, KEEP = range(4)
"""Kinds of resets."""
ONE_ROW = 4
"""A kind for tests: the same row for all, which operators take as ROWS."""
SEED = 5
TENSORS = (
    "inputs",
    "carries",
    "weights",
    "vectors",
    "grad_sequences",
    "grad_last",
    "reset_to",
)
"""Of a call, all of its dtype."""


@dataclass
class Call:
    cell: Cell
    inputs: list[Tensor]
    carries: list[Tensor]
    weights: list[Tensor]
    vectors: list[Tensor]
    grad_sequences: list[Tensor]
    grad_last: list[Tensor]
    lengths: Tensor | None = None
    reset: Tensor | None = None
    reset_to: list[Tensor] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    reverse: bool = False
    chunk: int = 0
    saves: bool = False
    stream: int = 0
    first_step: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.carries[0].dtype

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def seq_len(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def batch(self) -> int:
        return self.inputs[0].shape[1]

    @property
    def steps(self) -> int:
        """Of a chunk."""
        number = self.cell.number(self.dtype)
        return program_operators.chunk(number, self.seq_len, self.batch, self.dtype, self.chunk, 0)[
            0
        ]

    def to(self, dtype: torch.dtype) -> Call:
        lists = {name: [tensor.to(dtype) for tensor in getattr(self, name)] for name in TENSORS}
        return replace(self, **lists)

    def draws(self, dtype: torch.dtype) -> list[Tensor]:
        """The numbers of a program of this dtype."""
        streams = self.cell.program.streams
        shape = (self.first_step, self.seq_len, self.batch)
        return [
            torch.ops.fusedrnn.draw(
                torch.tensor([SEED]), *shape, width, stream + self.stream, 0, dtype
            )
            for width, stream in zip(self.cell.draws, streams, strict=True)
        ]


def random_call(
    cell: Cell, seq_len: int = 7, batch: int = 4, seed: int = 0, **options: Any
) -> Call:
    """In float64. Options: ``kinds`` for all carries, and fields of a call."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    form = cell.program
    widths = [carry.width for carry in form.carries]
    kinds = options.pop("kinds", [])
    shapes = {ZERO: (), KEEP: (), ROWS: (batch,), ONE_ROW: (1,), STEPS: (seq_len, batch)}
    reset_to = [
        normal(*shapes[kind], width) if shapes[kind] else torch.empty(0, dtype=torch.float64)
        for kind, width in zip(kinds, widths, strict=False)
    ]
    call = Call(
        cell,
        [normal(seq_len, batch, width) for width in form.inputs],
        [normal(batch, width) for width in widths],
        [normal(*shape) * shape[0] ** -0.5 for shape in cell.weights],
        [normal(width) * 0.5 for width in form.vectors],
        [normal(seq_len, batch, width) for width in form.sequences],
        [normal(batch, width) for width in widths],
        reset_to=reset_to,
        kinds=[ROWS if kind == ONE_ROW else kind for kind in kinds],
        **options,
    )
    if call.lengths is not None:  # numbers behind the end are not read
        ended = torch.arange(seq_len)[:, None] >= call.lengths
        for x in call.inputs + call.grad_sequences:
            x[ended] = float("nan")
    return call


def resets(seq_len: int, batch: int, seed: int = 1) -> Tensor:
    return torch.rand(seq_len, batch, generator=torch.Generator().manual_seed(seed)) < 0.3


Results = dict[str, Tensor]


def expected(call: Call, draws: list[Tensor] | None = None) -> Results:
    """Values and gradients of all tensors by a loop over steps."""
    active = torch.ones(call.seq_len, call.batch, dtype=torch.bool)
    if call.lengths is not None:
        active = torch.arange(call.seq_len)[:, None] < call.lengths
    leaves = {
        name: [tensor.detach().clone().requires_grad_() for tensor in tensors]
        for name, tensors in (
            ("input", [torch.where(active[..., None], x, 0) for x in call.inputs]),
            ("carry", call.carries),
            ("weight", call.weights),
            ("vector", call.vectors),
            ("reset_to", call.reset_to),
        )
    }
    draws = call.draws(call.dtype) if draws is None else draws

    def step(time: int, x: list[Tensor], old: list[Tensor]) -> Made:
        drawn = [draw[time] for draw in draws]
        return call.cell.step(leaves["weight"], leaves["vector"], x, old, drawn)

    sequences, carries = operators_loop(
        step, call.seq_len, leaves["input"], leaves["carry"], leaves["reset_to"], call.kinds,
        lengths=call.lengths, reset=call.reset, reverse=call.reverse,
    )  # fmt: skip
    given = [torch.where(active[..., None], g, 0) for g in call.grad_sequences] + call.grad_last
    total = sum((y * g).sum() for y, g in zip(sequences + carries, given, strict=True))
    flat = [leaf for tensors in leaves.values() for leaf in tensors]
    gradients = iter(torch.autograd.grad(total, flat, allow_unused=True))
    results = _numbered("sequence", sequences) | _numbered("last", carries)
    for name, tensors in leaves.items():
        found = [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(tensors, gradients, strict=False)
        ]
        results |= _numbered(f"grad {name}", found)
    return {name: tensor.detach() for name, tensor in results.items()}


def _numbered(name: str, tensors: list[Tensor]) -> Results:
    return {f"{name} {i}": tensor for i, tensor in enumerate(tensors)}


@dataclass
class Memory:
    """For the results of a call. It is not zero."""

    sequences: list[Tensor]
    last: list[Tensor]
    kept: list[Tensor]
    saved: list[Tensor]
    gradients: dict[str, list[Tensor]]
    """By the names of arguments; some are empty, since they are not wanted."""

    @classmethod
    def of(
        cls,
        call: Call,
        wants: Callable[[str], bool] = lambda name: True,
        *,
        transposed: bool = True,
    ) -> Memory:
        """
        Args:
            wants: Whether a gradient is wanted, by its name.
            transposed: Whether gradients of weights lie as those of torch do.
        """
        form, dtype, sums = call.cell.program, call.dtype, call.sums
        rows, chunks = call.seq_len * call.batch, -(-call.seq_len // call.steps)

        def wanted(name: str, tensors: list[Tensor], kind: torch.dtype) -> list[Tensor]:
            return [
                full(t.shape if wants(f"grad {name} {i}") else (0,), kind)
                for i, t in enumerate(tensors)
            ]

        weights = wanted("weight", [w.t() if transposed else w for w in call.weights], sums)
        return cls(
            [full((call.seq_len, call.batch, width), dtype) for width in form.sequences],
            [full(carry.shape, dtype) for carry in call.carries],
            [full((chunks, call.batch, c.width), sums) for c in form.carries if c.sequence < 0],
            [full((rows, a.columns), sums) for a in form.arrays] if call.saves else [],
            {
                "input": wanted("input", call.inputs, dtype),
                "carry": wanted("carry", call.carries, dtype),
                "weight": [w.t() if transposed and w.dim() == 2 else w for w in weights],
                "vector": wanted("vector", call.vectors, sums),
                "reset_to": [_of_reset(call, j, wants) for j in range(len(form.carries))],
            },
        )

    def results(self) -> Results:
        """All but the gradients that are not wanted."""
        results = _numbered("sequence", self.sequences) | _numbered("last", self.last)
        for name, tensors in self.gradients.items():
            numbered = _numbered(f"grad {name}", tensors).items()
            results |= {name: t for name, t in numbered if t.dim() != 1 or t.numel()}
        return results


def full(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def _of_reset(call: Call, j: int, wants: Callable[[str], bool]) -> Tensor:
    """Memory for the gradient of what a carry becomes at resets."""
    kind = call.kinds[j] if call.kinds else ZERO
    if kind not in (ROWS, STEPS) or not wants(f"grad reset_to {j}"):
        return full((0,), call.dtype)
    to = call.reset_to[j]
    if kind == STEPS:
        return full(to.shape, call.dtype)
    return full((call.batch, to.shape[1]), call.sums)


def run(call: Call, memory: Memory, *, has_backward: bool = True) -> None:
    """Forward, and backward, by the operators."""
    arguments = (
        call.cell.number(call.dtype),
        call.inputs,
        call.carries,
        call.weights,
        call.vectors,
        call.reset_to,
        call.kinds,
    )
    options: dict[str, Any] = {
        "lengths": call.lengths,
        "reset": call.reset,
        "seed": torch.tensor([SEED]) if call.cell.draws else None,
        "stream": call.stream,
        "first_step": call.first_step,
        "reverse": call.reverse,
        "chunk": call.steps,
        "sequences": memory.sequences,
        "kept": memory.kept,
        "saved": memory.saved,
    }
    call_operator(_library.operators.program_forward, *arguments, last=memory.last, **options)
    if not has_backward:
        return
    call_operator(
        _library.operators.program_backward,
        *arguments,
        grad_sequences=call.grad_sequences,
        grad_last=call.grad_last,
        grad_inputs=memory.gradients["input"],
        grad_carries=memory.gradients["carry"],
        grad_weights=memory.gradients["weight"],
        grad_vectors=memory.gradients["vector"],
        grad_reset_to=memory.gradients["reset_to"],
        **options,
    )


def found(
    call: Call, wants: Callable[[str], bool] = lambda name: True, *, transposed: bool = True
) -> Results:
    """The same as :func:`expected` by the operators; arguments as of :class:`Memory`."""
    memory = Memory.of(call, wants, transposed=transposed)
    run(call, memory)
    results = memory.results()
    for j, to in enumerate(call.reset_to):
        name = f"grad reset_to {j}"
        if to.dim() == 2 and to.shape[0] == 1 and name in results:
            results[name] = results[name].sum(0, keepdim=True)
    return results


def check(call: Call, tolerance: float = 1e-11, **options: Any) -> None:
    """Compares the two for all results that are found."""
    right = expected(call)
    for name, tensor in found(call, **options).items():
        assert_close(name, tensor, right[name], tolerance)


def assert_close(name: str, tensor: Tensor, right: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        tensor, right, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}"
    )
