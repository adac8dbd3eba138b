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
from runtime.plain import operators_loop
from torch import Tensor

from fusedrnn import _ops
from fusedrnn._compiler import compiled_step, pipeline, records, unused_results
from fusedrnn._compiler.compiled_step import Generated
from fusedrnn._compiler.interpreter import _Step
from fusedrnn._compiler.operation_graph import CannotStore
from fusedrnn._compiler.trial import Trial
from fusedrnn._recurrent import compiled_calls, running_call
from fusedrnn._recurrent.shared_steps import SharedSteps
from fusedrnn._runtime import find_program, program_call
from fusedrnn._runtime.program_call import SEQUENCE, STATE

_programs: list[Any] = []
"""By their numbers; modules keep these for as long as they live."""
_found: dict[str, tuple[Any, Any]] = {}


def have_own_programs(patch: pytest.MonkeyPatch, backend: str = "") -> None:
    """Steps get no program that has been made for another backend in this process.

    Args:
        backend: Or none that has been made at all, if this is empty.
    """
    new = SharedSteps(), WeakValueDictionary[Any, Any]()
    steps, known = _found.setdefault(backend, new) if backend else new
    patch.setattr(compiled_calls, "steps_of_process", steps)
    patch.setattr(find_program, "_known", known)


@contextmanager
def interpreted(makes_all_anew: bool = False) -> Iterator[None]:
    """Programs are run by torch."""
    fake = ModuleType("operators")
    for function in (_Operators.chunk, _Operators.call, _Operators.call_backward):
        setattr(fake, function.__name__, function.__get__(_Operators()))

    def add_library(program: Any, *_: Any) -> None:
        with suppress(CannotStore):
            program.generated = _stored(program.generated)
        program.number = len(_programs)
        _programs.append(program)

    def by_interpreter(program: Any, trial: Trial, *_: Any) -> Any:
        return trial.by_interpreter(program)

    with pytest.MonkeyPatch.context() as patch:
        have_own_programs(patch, "" if makes_all_anew else "interpreted")
        patch.setattr(program_call, "program_operators", fake)
        patch.setattr(compiled_step, "program_operators", fake)
        for module in (pipeline, unused_results):
            patch.setattr(module, "add_library", add_library)
            patch.setattr(module, "verify_library", lambda *_: None)
        for user in (find_program, running_call):
            patch.setattr(user, "run_library", by_interpreter)
        # Programs of others have libraries, and these have none.
        patch.setattr(find_program, "_known", WeakValueDictionary())
        patch.setattr(compiled_calls, "steps_of_process", SharedSteps())
        yield


def _stored(generated: Generated) -> Generated:
    """As a record has it."""
    found = records._to_generated(json.loads(json.dumps(records._of_generated(generated))))
    assert found is not None
    assert found._replace(call_weights=None) == generated._replace(call_weights=None)  # type: ignore[arg-type]
    return found


class _Operators:
    def chunk(
        self, number: int, seq_len: int, batch: int, dtype: torch.dtype, chunk: int, limit: int
    ) -> list[int]:
        return [min(chunk, seq_len) if chunk > 0 else seq_len, 0, 0]

    def call(
        self, number: int, tensors: list[Tensor], first_state: int, seq_len: int, keeps: int,
        *options: Any,
    ) -> list[Tensor]:  # fmt: skip
        program = _programs[number]
        groups = _groups(program, tensors, first_state)
        with torch.no_grad():
            results = _run(program, seq_len, groups, *options)
        like, form = tensors[first_state], program.form
        made = list[Tensor]()
        for shapes, values in (
            (program.sequence_shapes, results[: len(form.sequences)]),
            (program.state_shapes, results[len(form.sequences) :]),
        ):
            for shape, value in zip(shapes, values, strict=True):
                flat = value.to(like.dtype)
                made.append(flat.reshape(*flat.shape[:-1], *shape).clone())
        if keeps:  # nobody may read it
            made += [like.new_full((1,), torch.nan) for c in form.carries if c.sequence < 0]
        if keeps > 1:
            made += [like.new_full((1,), torch.nan) for _ in form.arrays]
        return made

    def call_backward(
        self, number: int, tensors: list[Tensor], first_state: int, seq_len: int,
        kept: list[Tensor], gradients: list[Tensor], needs: list[bool], is_part: bool,
        *options: Any,
    ) -> list[Tensor]:  # fmt: skip
        program, (reset_to, *others) = _programs[number], options
        rows, dtype = tensors[first_state].shape[0], tensors[first_state].dtype
        leaves = [
            leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in tensors
        ]
        to = [leaf.detach().clone().requires_grad_() for leaf in reset_to]
        kinds = others[0]
        with torch.enable_grad():
            wide = [
                t.expand(rows, *t.shape[1:]) if kind == STATE else t
                for t, kind in zip(to, kinds, strict=bool(to))
            ]
            groups = _groups(program, leaves, first_state)
            results = _run(program, seq_len, groups, wide, *others)
        pairs = [
            (value, gradient.reshape(value.shape))
            for value, gradient in zip(results, gradients, strict=True)
            if gradient.numel() and value.requires_grad
        ]
        found: Sequence[Tensor | None] = [None] * len(needs)
        if pairs:
            values, given = zip(*pairs, strict=True)
            trained = [leaf for leaf in [*leaves, *to] if leaf.requires_grad]
            of_trained = iter(torch.autograd.grad(values, trained, given, allow_unused=True))
            found = [next(of_trained) if t.requires_grad else None for t in [*leaves, *to]]
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        made = []
        for i, (leaf, gradient, need) in enumerate(zip([*leaves, *to], found, needs, strict=True)):
            is_constant = first_state + len(program.form.carries) <= i < len(leaves)
            is_sum = i >= len(leaves) and kinds[i - len(leaves)] == STATE
            one = torch.zeros_like(leaf) if gradient is None else gradient
            if not need or (is_constant and gradient is None):
                one = leaf.new_empty(0)
            made.append(one.to(sums) if is_sum or (is_part and is_constant) else one)
        return made


def _groups(program: Any, tensors: list[Tensor], first_state: int) -> list[list[Tensor]]:
    """Inputs, carries, weights and vectors, as the interpreter takes them."""
    call_weights, first = program.generated.call_weights, first_state + len(program.form.carries)
    inputs, like = tensors[:first_state], tensors[first_state].double()
    if not call_weights.makes_inputs:
        inputs = [inputs[i] for i in call_weights._inputs]
    weights, vectors = call_weights.recipes.made(tensors[first:], like)
    return [
        [x.double().reshape(*x.shape[:2], -1) for x in inputs],
        [x.double().reshape(x.shape[0], -1) for x in tensors[first_state:first]],
        weights,
        vectors,
    ]


def _run(
    program: Any, steps: int, groups: list[list[Tensor]], reset_to: list[Tensor],
    kinds: list[int], chunk: int, reverse: bool, stream: int, first_step: int,
    seed: Tensor | None, lengths: Tensor | None, reset: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """All sequences and the last carries."""
    made_by, (inputs, carries, weights, vectors) = program.derived(), groups
    plan = made_by.plan
    rows, nothing = carries[0].shape[0], carries[0].new_empty(0)
    reset_to = [
        t.double().reshape(*t.shape[: 2 if kind == SEQUENCE else 1], -1)
        if kind in (STATE, SEQUENCE)
        else t
        for t, kind in zip(reset_to or [nothing] * len(kinds), kinds, strict=True)
    ]
    draws = {
        d: _ops.draw(
            seed,
            steps,
            rows,
            plan.lowered.draws[d].width,
            stream=stream + d * 2**16,
            distribution=plan.lowered.draws[d].distribution,
            dtype=program.dtype,
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
