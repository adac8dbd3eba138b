"""Calls that fail: in checks, in the operators, in backward, and for lack of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from cases import Case

import fusedrnn

Call = Callable[[], Any]


def wrong_calls(case: Case) -> Iterator[tuple[str, Call]]:
    """Failing calls by name; each can be repeated."""
    good = case.tensors().to(case.dtype)

    def call(options: dict[str, Any] | None = None, **changes: Any) -> Call:
        arguments = replace(good, **changes)
        return lambda: arguments.call(fusedrnn, **(case.options | (options or {})))

    x, hx, weights = good.input, good.hx, good.weights
    yield "rank of input", call(input=x[0, 0])
    yield "width of input", call(input=x[..., :-1])
    yield "dtype of input", call(input=x.long())
    yield "no steps", call(input=x[:0])
    yield "no tensor", call(input=[1.0])
    yield "shape of hx", call(hx=hx[..., :-1])
    yield "device of hx", call(hx=hx.to("meta"))
    yield "few weights", call(weights=weights[:-1])
    yield "shape of a weight", call(weights=[*weights[:-1], weights[-1][:-1]])
    yield "long lengths", call(lengths=[case.seq_len + 1] * case.batch)
    yield "number of lengths", call(lengths=[1] * (case.batch + 1))
    yield "shape of reset", call(reset=torch.zeros(1, 1, dtype=torch.bool))
    yield "probability", call({"dropout": 1.5})
    yield "two sizes", call({"chunk_size": 1, "workspace_bytes": 2**20})
    yield "few bytes", call({"workspace_bytes": 1})  # raised by the operator
    yield "backend", call({"backend": "persistent"})  # by the operator: not on the CPU

    def backward_twice() -> None:
        output = good.call(fusedrnn, **case.options)[0].sum()
        torch.autograd.grad(output, [x])
        torch.autograd.grad(output, [x])

    def no_room() -> None:
        """A call for more memory than any machine can address; its arguments take none."""
        steps = x.detach()[:1, :1].expand(2**32 - 1, 1, -1)
        size, width = 2**20, case.input_size
        few = weights[0].new_zeros(1)
        shapes = [(3 * size, width), (3 * size, size), (3 * size,), (3 * size,)]
        fusedrnn.gru(steps, [few.expand(shape) for shape in shapes])

    yield "backward twice", backward_twice
    yield "no room", no_room


def failure_of(call: Call) -> str:
    """The text of a call's error, or nothing if it did not fail."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""
