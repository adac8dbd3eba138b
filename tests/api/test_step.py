"""A cell's step, which is an operator of its own with one for its gradients, against a layer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_cases import CELLS, Spy, arguments, as_layer
from torch import Tensor
from torch.utils._pytree import tree_leaves as flat

import fusedrnn
from fusedrnn import _cells as cells
from fusedrnn import _ops


def both_ways(cell: torch.nn.Module, *args: Any, **kwargs: Any) -> list[list[Tensor]]:
    """Results of the operator for a step, without gradients and with, and of a layer's."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(_ops.step)
        patch.setattr(_ops, "step", spy)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                results.append([t.detach() for t in flat(cell(*args, **kwargs))])
        as_layer(patch)
        results.append([t.detach() for t in flat(cell(*args, **kwargs))])
        assert spy.calls == 2
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (7,), (40,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_the_same_bits_as_with_gradients(device, name, bias, batch, dtype):
    for sizes in ((1, 1), (3, 5), (17, 33)):
        cell = getattr(fusedrnn, name)(*sizes, bias=bias, device=device, dtype=dtype)
        x, states, noise = arguments(name, batch, sizes, device=device, dtype=dtype)
        for given in (states, None):
            *ours, expected = both_ways(cell, x, given, **noise)
            for found in ours:
                assert [t.shape for t in found] == [(*batch, sizes[1])] * len(expected)
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
                    assert a.is_contiguous()


@pytest.mark.parametrize("name", CELLS)
def test_strides(name):
    cell = getattr(fusedrnn, name)(6, 5)
    x, states, noise = arguments(name, (4,), (6, 5))

    def strange(t: Tensor) -> Tensor:
        wide = torch.full((2 * t.shape[0] + 3, 2 * t.shape[1]), torch.nan)
        wide[3::2, ::2] = t
        return wide[3::2, ::2]

    expected = flat(both_ways(cell, x, states, **noise)[0])
    states = tuple(map(strange, states)) if name == "LSTMCell" else strange(states)
    noise = {what: strange(eps) for what, eps in noise.items()}
    for results in both_ways(cell, strange(x), states, **noise):
        assert all(map(torch.equal, results, expected))
    one = torch.randn(1, 6)
    same = both_ways(cell, one.expand(4, 6), **({"sample": False} if noise else {}))
    assert all(map(torch.equal, *same[:2])) and all(map(torch.equal, *same[1:]))


def test_noise_is_drawn_from_the_same_seeds():
    cell = fusedrnn.StochasticGRUCell(3, 4)
    x = torch.randn(2, 3)
    results = []
    for grad in (False, True):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        with torch.set_grad_enabled(grad):
            h = cell(x)
            h = cell(x, h.detach(), generator=generator)
            results.append((h.detach(), cell(x, sample=False).detach(), torch.rand(1)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", CELLS)
def test_results_have_memory_of_their_own(name):
    cell = getattr(fusedrnn, name)(3, 4)
    x, states, noise = arguments(name, (2,), (3, 4))
    before = [t.clone() for t in flat(states)]
    with torch.no_grad():
        results = flat(cell(x, states, **noise))
        kept = [t.clone() for t in results]
        results[0].zero_()
        assert all(map(torch.equal, results[1:], kept[1:]))
        assert all(map(torch.equal, flat(states), before))
        results = flat(cell(x, None, **noise))
        assert len({t.data_ptr() for t in results}) == len(results)


@pytest.mark.parametrize("needs", ["input", "state", "weight", "eps"])
@pytest.mark.parametrize("name", CELLS)
def test_whatever_needs_a_gradient_gets_it(name, needs):
    cell = getattr(fusedrnn, name)(3, 4).requires_grad_(False)
    x, states, noise = arguments(name, (2,), (3, 4))
    if needs == "eps" and not noise:
        pytest.skip("no noise")
    wanted = {
        "input": x,
        "state": flat(states)[-1],
        "weight": next(iter(cell.parameters())),
        "eps": noise.get("eps"),
    }[needs].requires_grad_()
    flat(cell(x, states, **noise))[0].sum().backward()
    assert wanted.grad.abs().sum() > 0


@pytest.mark.parametrize("batch", [(2,), ()])
@pytest.mark.parametrize("name", CELLS)
def test_a_state_can_be_detached_in_place(name, batch):
    """Truncated backpropagation does so."""
    cell = getattr(fusedrnn, name)(3, 4)
    x, states, noise = arguments(name, batch, (3, 4))
    for _ in range(2):
        states = cell(x, states, **noise)
        sum(t.sum() for t in flat(states)).backward(retain_graph=True)
        for state in flat(states):
            assert not state._is_view()
            state.detach_()


def test_no_tangent_is_lost():
    cell = fusedrnn.GRUCell(3, 4).requires_grad_(False)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(2, 3), torch.ones(2, 3))
        for module, input in ((cell, x), (fusedrnn.GRU(3, 4).requires_grad_(False), x[None])):
            output = module(input)
            output = output[0] if isinstance(output, tuple) else output
            tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
            assert tangent.abs().sum() > 0


def test_wrong_calls_of_the_operator():
    operator = torch.ops.fusedrnn.step
    gru, lstm = (cells.CELLS[name].index for name in ("gru", "lstm"))

    def step(cell, x, h, c, weights, eps, seed, tuning=0):
        return operator(cell, x, h, c, weights, eps=eps, seed=seed, tuning=tuning)

    x, h = torch.randn(2, 3), torch.randn(2, 4)
    weights = [torch.randn(12, 3), torch.randn(12, 4)]
    of_lstm = [torch.randn(16, 3), torch.randn(16, 4)]
    assert step(gru, x, h, None, weights, None, None)[0].shape == (2, 4)
    assert step(lstm, x, None, h, of_lstm, None, None)[1].shape == (2, 4)
    projected = cells.CELLS["projected_lstm"].index
    for wrong in (
        (-1, x, h, None, weights, None, None),
        (99, x, h, None, weights, None, None),
        (projected, x, h, h, [*of_lstm, torch.randn(4, 4)], None, None),
        (gru, x, h, h, weights, None, None),
        (gru, x[None], h, None, weights, None, None),
        (gru, x.sum(), h, None, weights, None, None),
        (gru, x, h[None], None, weights, None, None),
        (gru, x, h[0], None, weights, None, None),
        (gru, x, h[:, :2], None, weights, None, None),
        (gru, x, h[:1], None, weights, None, None),
        (gru, x, h.double(), None, weights, None, None),
        (gru, x, h.to("meta"), None, weights, None, None),
        (gru, x.long(), h, None, weights, None, None),
        (gru, x, h, None, [], None, None),
        (gru, x, h, None, weights[:1], None, None),
        (gru, x, h, None, [*weights, weights[0]], None, None),
        (gru, x, h, None, [weights[0], weights[1][0]], None, None),
        (gru, x, h, None, [weights[0], weights[1][:, :0]], None, None),
        (gru, x, None, None, [weights[0], weights[1][:, :0]], None, None),
        (gru, x[:, :0], h, None, weights, None, None),
        (gru, x, h, None, weights, h, torch.ones(1, dtype=torch.int64)),
        (gru, x, h, None, weights, h[0], None),
        (gru, x, h, None, weights, None, torch.ones(1)),
        (gru, x, h, None, weights, None, None, -1),
        (lstm, x, h, None, weights, None, None),
        (lstm, x, h, h[:1], of_lstm, None, None),
    ):
        with pytest.raises(RuntimeError):
            step(*wrong)
