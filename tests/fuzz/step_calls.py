"""Calls of random cells: sizes, masks, options, and numbers that are special to functions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from runtime.plain import Masks
from torch import Tensor

from .step_source import Source

KINDS = ["normal"] * 4 + ["zero", "integers", "sparse", "large", "equal", "outlier", "tiny"]


@dataclass
class Call:
    """The arguments of one call, drawn from a number."""

    seed: int
    source: Source
    seq_len: int
    batch: int
    kinds: tuple[str, str]
    """Of the numbers in inputs and states."""
    masks: Masks
    chunk_size: int | None
    returns_sequence: bool
    wanted: str
    """Whose gradients."""
    unused: frozenset[int]
    """Results that get no gradient, by their place among all leaves."""
    changes: list[str] = field(default_factory=list)
    """What is done before the call."""

    @classmethod
    def drawn(cls, rng: random.Random, source: Source) -> Call:
        seq_len, batch = rng.choice([1, 2, 3, 5, 5, 6]), rng.choice([1, 2, 3, 4, 4])
        seed = rng.getrandbits(31)
        torch.manual_seed(seed)
        own = random.Random(seed)
        share = own.choice([0, 0, 0.3, 0.7])
        return cls(
            seed,
            source,
            seq_len,
            batch,
            (rng.choice(KINDS), rng.choice(KINDS)),
            _masks(rng, source, seq_len, batch),
            rng.choice([None, None, 1, 2, 4]),
            rng.random() < 0.85,
            rng.choice(["all"] * 6 + ["weights", "inputs", "states", "none"]),
            frozenset(i for i in range(12) if own.random() < share),
        )

    def arguments(self) -> tuple[Any, Any]:
        """Input and state, the same in each call."""
        torch.manual_seed(self.seed)
        x = [numbers(self.kinds[0], self.seq_len, self.batch, w) for w in self.source.inputs]
        state = [numbers(self.kinds[1], self.batch, w) for w in self.source.states]
        for leaf, name in [(leaf, "inputs") for leaf in x] + [(leaf, "states") for leaf in state]:
            leaf.requires_grad_(self.wanted in ("all", name))
        return _packed(x), _packed(state)

    def __str__(self) -> str:
        masks = [f"lengths {self.masks.lengths}"] if self.masks.lengths else []
        if self.masks.reset is not None:
            to = "zero" if self.masks.reset_to is None else "a state"
            masks.append(f"resets to {'a sequence' if self.masks.has_steps else to}")
        options = f"chunk_size {self.chunk_size}, sequence {self.returns_sequence}"
        if self.unused:
            options += f", results {sorted(self.unused)} without gradient"
        parts = [f"T {self.seq_len}, B {self.batch}, numbers {self.kinds}", *masks, options]
        return ", ".join([*parts, f"gradients of {self.wanted}", *self.changes])


def _masks(rng: random.Random, source: Source, seq_len: int, batch: int) -> Masks:
    lengths = [rng.randint(1, seq_len) for _ in range(batch)] if rng.random() < 0.25 else None
    if rng.random() < 0.75:
        return Masks(lengths)
    reset = torch.rand(seq_len, batch) < 0.4
    kind = rng.choice(["zero", "row", "rows", "steps"])
    if kind == "zero":
        return Masks(lengths, reset)
    shape = {"row": (1,), "rows": (batch,), "steps": (seq_len, batch)}[kind]
    to = [torch.randn(*shape, w, dtype=torch.float64) for w in source.states]
    return Masks(lengths, reset, _packed(to), kind == "steps")


def _packed(leaves: list[Tensor]) -> Any:
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def numbers(kind: str, *shape: int) -> Tensor:
    """Random numbers, or such that meet the corners of functions and make ties."""
    made = torch.randn(shape, dtype=torch.float64)
    if kind == "zero":
        made = torch.zeros_like(made)
    elif kind == "integers":
        made = torch.randint(-1, 2, shape).double()
    elif kind == "sparse":
        made = made * (torch.rand(shape) < 0.5)
    elif kind == "large":
        made = 20 * made
    elif kind == "equal":
        made = made[..., :1].expand(shape).clone()
    elif kind == "outlier":
        made.view(-1)[made.numel() // 2] = 3000.0
    elif kind == "tiny":
        made = 1e-9 * made
    return made
