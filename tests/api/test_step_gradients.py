"""Gradients of a cell's step, by an operator of their own, against those of a layer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from step_cases import CELLS, Spy, arguments, as_layer
from torch import Tensor
from torch.utils._pytree import tree_leaves as flat

import fusedrnn
from fusedrnn import _cells as cells
from fusedrnn import _ops


def leaves(x: Tensor, states: Any, noise: dict[str, Any]) -> list[Tensor]:
    return [x, *(t for t in flat(states) if t is not None), *noise.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (7,), (40,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_the_same_bits_of_gradients_as_a_layer(device, name, bias, batch, dtype):
    for sizes in ((1, 1), (3, 5), (17, 33)):
        cell = getattr(fusedrnn, name)(*sizes, bias=bias, device=device, dtype=dtype)
        x, states, noise = arguments(name, batch, sizes, device=device, dtype=dtype)
        cotangents = [torch.randn(*batch, sizes[1], device=device, dtype=dtype) for _ in range(2)]
        for given in (states, None):
            wanted = [*leaves(x, given, noise), *cell.parameters()]
            for leaf in wanted:
                leaf.requires_grad_()
            for used in ([0], [1], [0, 1]):
                found = []
                for is_layer in (False, True):
                    with pytest.MonkeyPatch.context() as patch:
                        spy = Spy(_ops.step_backward)
                        patch.setattr(_ops, "step_backward", spy)
                        if is_layer:
                            as_layer(patch)
                        results = flat(cell(x, given, **noise))
                        chosen = [(results[i], cotangents[i]) for i in used if i < len(results)]
                        if not chosen:
                            continue
                        outputs, grads = zip(*chosen, strict=True)
                        found.append(torch.autograd.grad(outputs, wanted, grads))
                        assert spy.calls == (not is_layer)
                if not found:
                    continue
                for leaf, a, b in zip(wanted, *found, strict=True):
                    assert a.shape == leaf.shape and a.is_contiguous()
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CELLS)
def test_gradients_of_some_tensors_alone(name):
    cell = getattr(fusedrnn, name)(3, 4)
    x, states, noise = arguments(name, (2,), (3, 4))
    wanted = [*leaves(x, states, noise), *cell.parameters()]
    for leaf in wanted:
        leaf.requires_grad_()
    expected = torch.autograd.grad(sum(t.sum() for t in flat(cell(x, states, **noise))), wanted)
    for i, leaf in enumerate(wanted):
        for other in wanted:
            other.requires_grad_(other is leaf)
        (found,) = torch.autograd.grad(sum(t.sum() for t in flat(cell(x, states, **noise))), leaf)
        assert torch.equal(found, expected[i])


@pytest.mark.filterwarnings("ignore:.*second derivatives")
@pytest.mark.parametrize("batch", [(2,), ()])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_of_gradients(name, batch):
    cell = getattr(fusedrnn, name)(3, 4, dtype=torch.float64)
    x, states, noise = arguments(name, batch, (3, 4), dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (*leaves(x, states, noise), *cell.parameters())]

    def results(*_: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat(cell(x, states, **noise)))

    assert torch.autograd.gradcheck(results, tensors)
    assert torch.autograd.gradgradcheck(results, tensors, fast_mode=True)


@pytest.mark.parametrize("name", CELLS)
def test_batched_cotangents(name):
    """By torch.func.vmap over backward of a graph that is there, and by the older vmap."""
    cell = getattr(fusedrnn, name)(3, 4)
    x, states, noise = arguments(name, (2,), (3, 4))
    wanted = [t.requires_grad_() for t in (*leaves(x, states, noise), *cell.parameters())]
    h = flat(cell(x, states, **noise))[0]
    grads = torch.randn(5, *h.shape)

    def of(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(h, wanted, grad, retain_graph=True)

    each = [torch.stack(found) for found in zip(*map(of, grads), strict=True)]
    older = torch.autograd.grad(h, wanted, grads, retain_graph=True, is_grads_batched=True)
    for found in (torch.func.vmap(of)(grads), older):
        torch.testing.assert_close([*found], each)


def noted(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor


def test_only_arguments_are_saved():
    """The gates are recomputed, and neither h nor c is kept a second time."""
    for name in CELLS:
        cell = getattr(fusedrnn, name)(3, 4)
        x, states, noise = arguments(name, (2,), (3, 4))
        saved: list[Tensor] = []
        pack = functools.partial(noted, saved)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            cell(x, states, **noise)
        known = {t.data_ptr() for t in (*leaves(x, states, noise), *cell.parameters())}
        assert {t.data_ptr() for t in saved if t.numel() > 0} == known


def test_wrong_calls_of_the_operator_for_gradients():
    gru, lstm = (cells.CELLS[name].index for name in ("gru", "lstm"))
    x, h = torch.randn(2, 3), torch.randn(2, 4)
    weights = [torch.randn(12, 3), torch.randn(12, 4)]
    of_lstm = [torch.randn(16, 3), torch.randn(16, 4)]

    def backward(cell, grad_h, grad_c, h, c, weights, needs, **others):
        operator = torch.ops.fusedrnn.step_backward
        return operator(grad_h, grad_c, cell, x, h, c, weights, needs=needs, **others)

    found = backward(lstm, h, None, h, h, of_lstm, 0b110101)
    assert [g.shape for g in found] == [(2, 3), (2, 4), (16, 3), (16, 4)]
    assert backward(gru, h, None, None, None, weights, 0) == []
    for wrong in (
        (-1, h, None, h, None, weights, 1),
        (gru, h[0], None, h, None, weights, 1),
        (gru, h[:1], None, h, None, weights, 1),
        (gru, h[:, :3], None, h, None, weights, 1),
        (gru, h.double(), None, h, None, weights, 1),
        (gru, h.to("meta"), None, h, None, weights, 1),
        (lstm, h, h[:1], h, h, of_lstm, 1),
        (lstm, h, h[0], h, h, of_lstm, 1),
        (gru, h, None, h[:1], None, weights, 1),
        (gru, h, None, h, None, [], 1),
        (gru, h, None, h, None, [weights[0], weights[0]], 1),
        (gru, h, None, h, None, weights, -1),
        (gru, h, None, h, None, weights, 64),
        (gru, h, None, None, None, weights, 2),
        (gru, h, None, h, None, weights, 4),
        (lstm, h, None, h, None, of_lstm, 4),
        (gru, h, None, h, None, weights, 8),
    ):
        with pytest.raises(RuntimeError):
            backward(*wrong)
    with pytest.raises(RuntimeError):
        backward(gru, h, None, h, None, weights, 1, tuning=-1)


def test_operators_as_tracers_see_them():
    """Schemas, fake kernels and derivatives, by torch's own test."""
    for name in CELLS:
        cell = getattr(fusedrnn, name)(3, 4).requires_grad_()
        x, states, noise = arguments(name, (2,), (3, 4))
        h, *c = flat(states)
        arguments_of_step = (
            cells.CELLS[cell._cell].index,
            *(x, h, c[0] if c else None),
            [w.detach() for w in cell.parameters()],
        )
        grads = (torch.randn(2, 4), torch.randn(2, 4) if c else None)
        needs = 0b11110011 | (4 if c else 0) | (8 if noise else 0)
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        for operator, given, named in (
            (torch.ops.fusedrnn.step, arguments_of_step, noise),
            (
                torch.ops.fusedrnn.step_backward,
                (*grads, *arguments_of_step),
                {**noise, "needs": needs},
            ),
        ):
            torch.library.opcheck(operator.default, given, named, test_utils=tests)
