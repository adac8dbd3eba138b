"""Calls of programs, and what a loop in Python makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from driver_cells import Cell
from torch import Tensor

from fusedrnn._compile import operators

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
    carries, made = list(leaves["carry"]), {}
    steps = range(call.seq_len)
    for t in reversed(steps) if call.reverse else steps:
        takes = active[t][:, None]
        before = [
            _after_reset(call, t, j, carry, leaves["reset_to"]) for j, carry in enumerate(carries)
        ]
        new, made[t] = call.cell.step(
            leaves["weight"],
            leaves["vector"],
            [x[t] for x in leaves["input"]],
            before,
            [draw[t] for draw in draws],
        )
        carries = [torch.where(takes, a, b) for a, b in zip(new, carries, strict=True)]
        made[t] = [torch.where(takes, y, 0) for y in made[t]]
    sequences = [torch.stack([made[t][i] for t in steps]) for i in range(len(made[0]))]
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


def _after_reset(call: Call, t: int, j: int, carry: Tensor, reset_to: list[Tensor]) -> Tensor:
    kind = call.kinds[j] if call.kinds else ZERO
    if call.reset is None or kind == KEEP:
        return carry
    value = torch.zeros(()) if kind == ZERO else reset_to[j][t] if kind == STEPS else reset_to[j]
    takes = call.reset[t] if call.lengths is None else call.reset[t] & (t < call.lengths)
    return torch.where(takes[:, None], value, carry)


def _numbered(name: str, tensors: list[Tensor]) -> Results:
    return {f"{name} {i}": tensor for i, tensor in enumerate(tensors)}


def found(
    call: Call,
    *,
    wants: Callable[[str], bool] = lambda name: True,
    transposed: bool = True,
) -> Results:
    """The same by the operators, into memory that is not zero.

    Args:
        wants: Whether a gradient is wanted, by its name.
        transposed: Whether gradients of weights lie as those of torch do.
    """
    form, dtype, sums = call.cell.program, call.dtype, call.sums
    nothing = {kind: torch.empty(0, dtype=kind) for kind in (dtype, sums)}

    def memory(shape: tuple[int, ...] | torch.Size, kind: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), float("nan"), dtype=kind)

    number, whole = call.cell.number(dtype), (call.seq_len, call.batch)
    steps = operators.chunk(number, *whole, dtype, call.chunk, 0)[0]
    sequences = [memory((*whole, width), dtype) for width in form.sequences]
    last = [memory(carry.shape, dtype) for carry in call.carries]
    chunks = -(-call.seq_len // steps)
    kept = [memory((chunks, call.batch, c.width), sums) for c in form.carries if c.sequence < 0]
    rows = call.seq_len * call.batch
    saved = [memory((rows, a.columns), sums) for a in form.arrays] if call.saves else []
    arguments = (
        number,
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
        "seed": torch.tensor([SEED]) if form.streams else None,
        "stream": call.stream,
        "first_step": call.first_step,
        "reverse": call.reverse,
        "chunk": steps,
    }
    operators.forward(*arguments, sequences=sequences, last=last, kept=kept, saved=saved, **options)

    def wanted(name: str, tensors: list[Tensor], kind: torch.dtype) -> list[Tensor]:
        return [
            memory(t.shape, kind) if wants(f"grad {name} {i}") else nothing[kind]
            for i, t in enumerate(tensors)
        ]

    weights = wanted("weight", call.weights, sums)
    if transposed:
        weights = [
            w if w.dim() == 1 else memory((w.shape[1], w.shape[0]), sums).t() for w in weights
        ]
    of_resets = []
    for j, (to, kind) in enumerate(zip(call.reset_to, call.kinds, strict=True)):
        of_kind = sums if kind == ROWS else dtype
        shape = (call.batch, to.shape[-1]) if kind == ROWS else to.shape
        is_wanted = kind in (ROWS, STEPS) and wants(f"grad reset_to {j}")
        of_resets.append(memory(shape, of_kind) if is_wanted else nothing[of_kind])
    if not call.kinds:
        of_resets = [nothing[dtype]] * len(form.carries)
    gradients = {
        "input": wanted("input", call.inputs, dtype),
        "carry": wanted("carry", call.carries, dtype),
        "weight": weights,
        "vector": wanted("vector", call.vectors, sums),
        "reset_to": of_resets,
    }
    operators.backward(
        *arguments,
        sequences=sequences,
        kept=kept,
        saved=saved,
        grad_sequences=call.grad_sequences,
        grad_last=call.grad_last,
        grad_inputs=gradients["input"],
        grad_carries=gradients["carry"],
        grad_weights=gradients["weight"],
        grad_vectors=gradients["vector"],
        grad_reset_to=gradients["reset_to"],
        **options,
    )
    results = _numbered("sequence", sequences) | _numbered("last", last)
    for name, tensors in gradients.items():
        results |= _numbered(f"grad {name}", tensors)
    for j, to in enumerate(call.reset_to):
        name = f"grad reset_to {j}"
        if to.dim() == 2 and to.shape[0] == 1 and results[name].dim() == 2:
            results[name] = results[name].sum(0, keepdim=True)
    return {
        name: tensor
        for name, tensor in results.items()
        if tensor.dim() != 1 or tensor.numel() or "grad" not in name
    }


def check(call: Call, tolerance: float = 1e-11, **options: Any) -> None:
    """Compares the two for all results that are found."""
    right = expected(call)
    for name, tensor in found(call, **options).items():
        assert_close(name, tensor, right[name], tolerance)


def assert_close(name: str, tensor: Tensor, right: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        tensor, right, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}"
    )
