"""Sets a row of the batch to NaN, inf or the largest number; all other rows keep their bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from cases import DTYPES, Arguments, Case
from torch import Tensor

from . import CELLS, LARGE, Row, Scale, large, results_of
from .bits import copied, same_bits

POISONS = {"NaN": torch.nan, "inf": torch.inf, "largest": None}
PLACES = ("input", "hx", "cx", "eps", "grad_output", "grad_h_n", "grad_c_n")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"lengths": True},
    "resets": {"reset": True},
    "both directions": {"bidirectional": True},
    "all": {"lengths": True, "reset": True, "bidirectional": True, "num_layers": 2},
    "all, kept": {"lengths": True, "reset": True, "bidirectional": True, "recompute": False},
    "all, in chunks": {"lengths": True, "reset": True, "bidirectional": True, "chunk_size": 2},
}
# The batch is the second last dimension of all of them.
OF_ROWS = ("output", "h_n", "c_n", "grad_input", "grad_hx", "grad_cx", "grad_eps")
Run = Callable[[Case, Arguments], dict[str, Tensor]]


def poisoned(arguments: Arguments, place: str, row: int, value: float | None) -> Arguments:
    """A copy with one row of one argument replaced, in every step."""
    tensor = getattr(arguments, place).detach().clone()
    tensor[..., row, :] = torch.finfo(tensor.dtype).max if value is None else value
    return replace(arguments, **{place: tensor.requires_grad_(place in arguments.named())})


def reached(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], row: int) -> list[str]:
    """Names of results in which another row than the poisoned one has changed."""
    others = [r for r in range(expected["output"].shape[-2]) if r != row]
    return [
        name
        for name in OF_ROWS
        if name in expected
        and not same_bits(results[name][..., others, :], expected[name][..., others, :])
    ]


def wrong_rows(case: Case, rows: list[int], run: Run = results_of) -> Iterator[str | None]:
    """For each poison in each place, the results that it reached."""
    arguments = case.tensors().to(case.dtype)
    expected = copied(run(case, arguments))
    places = [p for p in PLACES if getattr(arguments, p) is not None]
    for place, row, (poison, value) in itertools.product(places, rows, POISONS.items()):
        results = run(case, poisoned(arguments, place, row, value))
        names = reached(results, expected, row)
        reason = f"{poison} in {place}, row {row}, reached {', '.join(names)} of others ({case})"
        yield reason if names else None


def _cases(scale: Scale) -> Iterator[tuple[Case, int]]:
    """The cases, each with a number of threads."""
    for (at, case), dtype in itertools.product(enumerate(CELLS.values()), DTYPES):
        for number, changes in enumerate(OPTIONS.values()):
            if scale.short and (at + number + DTYPES.index(dtype)) % 2:
                continue
            given = "seed" if number % 2 else "eps"
            changed = replace(case, **changes, dtype=dtype, noise=given)
            yield replace(changed, batch=5), 1
            if not scale.short:
                yield replace(large(changed), bidirectional=changed.bidirectional), 2
        if scale.short:
            yield replace(large(case), dtype=dtype, seq_len=2), 2


def poison(scale: Scale) -> Row:
    """Tries every dtype, option, place and value, in rows at both ends and inside of the batch."""
    total, wrong = 0, []
    for case, count in _cases(scale):
        torch.set_num_threads(count)
        is_large = case.batch == LARGE["batch"]
        rows = [64] if is_large else [0, 2] if scale.short else [0, 2, 4]
        found = list(wrong_rows(case, rows))
        total += len(found)
        wrong += [reason for reason in found if reason]
    return Row(
        f"{total:,} calls with one poisoned row",
        f"{len(wrong):,} in which other rows changed",
        wrong[:20],
    )
