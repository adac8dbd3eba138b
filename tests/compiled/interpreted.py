"""The operators of programs in plain torch: no library is compiled, and no C++ runs.

Everything else is as in use: the trace, the lowering, the derivatives that are printed, the
verification, and what `Recurrent` makes of programs. So thousands of steps can be tried in minutes,
and the C++ has something to be compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from compiled.plain import operators_loop
from torch import Tensor

from fusedrnn import _compile, _ops
from fusedrnn._compile import ready, records, verify
from fusedrnn._compile.cell import Printed
from fusedrnn._compile.graphs import CannotStore
from fusedrnn._compile.interpret import _Step
from fusedrnn.recurrent import compiling, programs
from fusedrnn.recurrent.program_call import KEEP, ZERO

_programs: list[Any] = []
"""By their numbers; modules keep these for as long as they live."""
_found: dict[str, tuple[Any, Any]] = {}


def have_own_programs(patch: pytest.MonkeyPatch, backend: str = "") -> None:
    """Steps get no program that has been made for another backend in this process.

    Args:
        backend: Or none that has been made at all, if this is empty.
    """
    new = compiling._Steps(), WeakValueDictionary[Any, Any]()
    steps, known = _found.setdefault(backend, new) if backend else new
    patch.setattr(compiling, "_steps", steps)
    patch.setattr(programs, "_known", known)


@contextmanager
def interpreted(makes_all_anew: bool = False) -> Iterator[None]:
    """Programs are run by torch."""
    fake = ModuleType("operators")
    for function in (_Operators.chunk, _Operators.forward, _Operators.backward):
        setattr(fake, function.__name__, function.__get__(_Operators()))

    def with_library(program: Any, *_: Any) -> Any:
        with suppress(CannotStore):
            program.printed = _stored(program.printed)
        program.number = len(_programs)
        _programs.append(program)
        return program

    def by_interpreter(program: Any, trial: verify.Trial, *_: Any) -> Any:
        return trial.by_interpreter(program)

    with pytest.MonkeyPatch.context() as patch:
        have_own_programs(patch, "" if makes_all_anew else "interpreted")
        patch.setattr(_compile, "operators", fake)
        patch.setattr(ready, "with_library", with_library)
        patch.setattr(verify, "_by_operators", by_interpreter)
        # Programs of others have libraries, and these have none.
        patch.setattr(programs, "_known", WeakValueDictionary())
        patch.setattr(compiling, "_steps", compiling._Steps())
        yield


def _stored(printed: Printed) -> Printed:
    """As a record has it."""
    found = records._to_printed(json.loads(json.dumps(records._of_printed(printed))))
    assert found is not None
    assert found._replace(outside=None) == printed._replace(outside=None)  # type: ignore[arg-type]
    return found


class _Operators:
    def chunk(
        self, number: int, seq_len: int, batch: int, dtype: torch.dtype, chunk: int, limit: int
    ) -> list[int]:
        return [min(chunk, seq_len) if chunk > 0 else seq_len, 0, 0]

    def forward(
        self, number: int, *given: Any, sequences: list[Tensor], last: list[Tensor],
        kept: list[Tensor], saved: list[Tensor], **options: Any,
    ) -> None:  # fmt: skip
        with torch.no_grad():
            steps = sequences[0].shape[0]
            results = _run(_programs[number], steps, *given, **options)
        for to, value in zip((*sequences, *last), results, strict=True):
            to.copy_(value)
        for tensor in kept:  # nobody may read it
            tensor.fill_(torch.nan)

    def backward(
        self, number: int, inputs: list[Tensor], carries: list[Tensor], weights: list[Tensor],
        vectors: list[Tensor], reset_to: list[Tensor], kinds: list[int], *,
        sequences: list[Tensor], kept: list[Tensor], saved: list[Tensor],
        grad_sequences: list[Tensor], grad_last: list[Tensor], grad_inputs: list[Tensor],
        grad_carries: list[Tensor], grad_weights: list[Tensor], grad_vectors: list[Tensor],
        grad_reset_to: list[Tensor], **options: Any,
    ) -> None:  # fmt: skip
        rows = carries[0].shape[0]
        to = [
            t.expand(rows, -1) if t.dim() == 2 and kind not in (ZERO, KEEP) else t
            for t, kind in zip(reset_to, kinds, strict=True)
        ]
        groups = [
            [leaf.detach().clone().requires_grad_() for leaf in leaves]
            for leaves in (inputs, carries, weights, vectors, to)
        ]
        with torch.enable_grad():
            steps = sequences[0].shape[0]
            results = _run(_programs[number], steps, *groups, kinds, **options)
        pairs = [
            (value, gradient)
            for value, gradient in zip(results, (*grad_sequences, *grad_last), strict=True)
            if gradient.numel() and value.requires_grad
        ]
        leaves = [leaf for group in groups for leaf in group]
        wanted = [*grad_inputs, *grad_carries, *grad_weights, *grad_vectors]
        wanted += grad_reset_to if to else []
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            values, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(values, leaves, given, allow_unused=True)
        for memory, gradient in zip(wanted, found, strict=True):
            if memory.numel():
                memory.copy_(torch.zeros(()) if gradient is None else gradient)


def _run(
    program: Any, steps: int, inputs: list[Tensor], carries: list[Tensor], weights: list[Tensor],
    vectors: list[Tensor], reset_to: list[Tensor], kinds: list[int], *, lengths: Tensor | None,
    reset: Tensor | None, seed: Tensor | None, stream: int, first_step: int, reverse: bool,
    chunk: int,
) -> list[Tensor]:  # fmt: skip
    """All sequences and the last carries."""
    made_by, like = program.made(), carries[0]
    plan = made_by.plan
    rows = like.shape[0]
    inputs, carries, weights, vectors, reset_to = (
        [leaf.double() for leaf in leaves]
        for leaves in (inputs, carries, weights, vectors, reset_to)
    )
    draws = {
        d: _ops.draw(
            seed,
            steps,
            rows,
            plan.lowered.draws[d].width,
            stream=stream + d * 2**16,
            distribution=plan.lowered.draws[d].distribution,
            dtype=like.dtype,
            first_step=first_step,
        ).double()
        for d in plan.draws
    }

    def step(time: int, x: list[Tensor], old: list[Tensor]) -> tuple[Any, Any]:
        drawn = {d: numbers[time] for d, numbers in draws.items()}
        now = _Step(made_by, weights, vectors, x, old, drawn)
        return now.run(), now.sequences()

    options: Any = {"lengths": lengths, "reset": reset, "reverse": reverse}
    made, last = operators_loop(step, steps, inputs, carries, reset_to, kinds, **options)
    return [*made, *last]
