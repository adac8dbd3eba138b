"""A layer in plain torch, and its derivatives beyond the first, against operator and autograd."""

import dataclasses
from functools import partial

import pytest
import torch
from last_states_cases import Stacked
from torch.autograd import forward_ad

from bench.clock import measure_memory
from fusedrnn import _ops, _plain_layer
from fusedrnn._ops import LayerTensors
from fusedrnn._plain_layer import Variables

CELLS = ["gru", "lstm", "projected_lstm", "stochastic_gru"]
OPTIONS = [
    "plain",
    "no_bias",
    "reverse",
    "both",
    "lengths",
    "lengths reverse",
    "lengths both reset",
    "packed",
    "packed both reset",
    "packed reverse reset",
    "reset",
    "reset reverse",
    "average",
    "masks",
    "masks both lengths",
    "masks reverse part reset packed",
    "noise",
    "noise both lengths part",
    "no_noise both",
]


def case(cell, options, dtype=torch.float64, steps=7):
    """The arguments of a layer's call, the same in each run."""
    torch.manual_seed(3)
    words = options.split()
    layer = Stacked(
        cell,
        steps,
        num_layers=1,
        input_size=4,
        mask=options,
        noise={"noise": "seed", "no_noise": "none"}.get(words[0], "eps"),
        dropout=0.25 if "masks" in words else 0.0,
        zoneout=0.4 if words[0] in ("masks", "average") else 0.0,
        bias="no_bias" not in words,
        reverse="reverse" in words,
        bidirectional="both" in words,
        chunk_size=3,
        dtype=dtype,
    )
    call, tensors = layer.call(), layer.tensors()
    call = dataclasses.replace(call, first_step=11 if "part" in words else 0)
    return call, tensors if "masks" in words else tensors._replace(mask_seed=None)


every_case = pytest.mark.parametrize(
    ("cell", "options"), [(cell, options) for cell in CELLS for options in OPTIONS]
)


def leaves_of(tensors):
    """What a layer is differentiated by, and how to put it back."""
    named = {name: getattr(tensors, name) for name in ("input", "hx", "cx", "eps")}
    names = [name for name, tensor in named.items() if tensor is not None]
    leaves = [named[name] for name in names] + list(tensors.weights)

    def rebuilt(flat):
        given = dict(zip(names, flat, strict=False))
        return tensors._replace(**given, weights=list(flat[len(names) :]))

    return leaves, rebuilt


def variables_of(tensors, flat):
    """Tangents or gradients by name."""
    names = [n for n in ("input", "hx", "cx", "eps") if getattr(tensors, n) is not None]
    given = dict(zip(names, flat, strict=False))
    return Variables(**({"input": None, "hx": None} | given), weights=list(flat[len(names) :]))


def flat_of(variables):
    first = (variables.input, variables.hx, variables.cx, variables.eps)
    return [t for t in (*first, *variables.weights) if t is not None]


def results_of(cell, results):
    return list(results) if "lstm" in cell else list(results[:2])


def random_like(tensors):
    return [torch.randn_like(t) for t in tensors]


def assert_close(found, expected, **tolerance):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 1e-10, "atol": 1e-10}))


def grads_by_operator(call, tensors, found, cotangents):
    is_there = [getattr(tensors, name) is not None for name in ("input", "hx", "cx", "eps")]
    flags = dict(zip(("input", "hx", "cx", "eps"), is_there, strict=True))
    everything = _ops.needs_of(LayerTensors(**flags, weights=[True] * len(tensors.weights)))
    saved = _ops.Saved(
        output=found.output,
        saved_gates=None,
        chunk_cell_states=found.chunk_cell_states if tensors.cx is not None else None,
    )
    grads = _ops.Cotangents(*(*cotangents, None)[:3])
    gradients = _ops.backward(call, everything, grads, saved, tensors)
    weights = gradients.weights.split([w.numel() for w in tensors.weights])
    weights = [g.view_as(w) for g, w in zip(weights, tensors.weights, strict=True)]
    first = [getattr(gradients, n) for n in ("input", "hx", "cx", "eps")]
    return [g for g, there in zip(first, is_there, strict=True) if there] + weights


@every_case
def test_layer_and_its_gradients_are_those_of_the_operator(cell, options):
    call, tensors = case(cell, options)
    leaves, rebuilt = leaves_of(tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    results = _plain_layer.layer(call, rebuilt(leaves))
    with torch.no_grad():
        expected = _ops.forward(call, tensors, save_gates=False)
    assert results[2].shape == expected.c_n.shape
    assert_close(results, expected[:3])
    results = results_of(cell, results)
    cotangents = random_like(results)
    found = torch.autograd.grad(results, leaves, cotangents)
    with torch.no_grad():
        assert_close(found, grads_by_operator(call, tensors, expected, cotangents))


@every_case
def test_tangents_and_second_order_are_those_of_autograd(cell, options):
    call, tensors = case(cell, options)
    leaves, rebuilt = leaves_of(tensors)
    directions = random_like(leaves)

    def run(*flat):
        return tuple(results_of(cell, _plain_layer.layer(call, rebuilt(flat))))

    _, expected = torch.func.jvp(run, tuple(leaves), tuple(directions))
    named = variables_of(tensors, directions)
    assert_close(results_of(cell, _plain_layer.tangents(call, tensors, named)), expected)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    results = run(*leaves)
    cotangents = random_like(results)
    gradients = torch.autograd.grad(results, leaves, cotangents, create_graph=True)
    product = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    second = torch.autograd.grad(product, leaves)
    with torch.no_grad():
        grads = (*cotangents, None)[:3]
        found, gradients = _plain_layer.second_order(call, tensors, grads, named)
    assert_close(results_of(cell, found), expected)
    assert_close(flat_of(gradients), second)


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_none_is_zero(cell):
    call, tensors = case(cell, "both lengths")
    leaves, _ = leaves_of(tensors)
    directions = [torch.zeros_like(leaf) for leaf in leaves]
    directions[0] = torch.randn_like(directions[0])
    zeros = variables_of(tensors, directions)
    nones = Variables(directions[0], None, [None] * len(tensors.weights))
    output = torch.randn_like(_plain_layer.layer(call, tensors)[0])
    every = (output, torch.zeros_like(tensors.hx), None)
    expected = _plain_layer.second_order(call, tensors, every, zeros)
    found = _plain_layer.second_order(call, tensors, (output, None, None), nones)
    assert_close(results_of(cell, found[0]), results_of(cell, expected[0]))
    assert_close(flat_of(found[1]), flat_of(expected[1]))


@pytest.mark.ci_has_every(2)
@pytest.mark.parametrize("options", ["plain", "masks both lengths", "packed both reset"])
@pytest.mark.parametrize("cell", CELLS)
def test_third_order(cell, options):
    call, tensors = case(cell, options, steps=3)
    leaves, rebuilt = leaves_of(tensors)
    directions = random_like(leaves)
    results = results_of(cell, _plain_layer.layer(call, tensors))
    cotangents = random_like(results)
    count, given = len(leaves), [*leaves, *directions, *cotangents]
    inputs = [t.requires_grad_() for t in given]

    def run(*flat):
        flat, named, grads = flat[:count], flat[count : 2 * count], flat[2 * count :]
        found, gradients = _plain_layer.second_order(
            call, rebuilt(flat), (*grads, None)[:3], variables_of(tensors, named)
        )
        return (*results_of(cell, found), *flat_of(gradients))

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("cell", CELLS)
def test_under_vmap_and_levels_of_forward_mode(cell):
    call, tensors = case(cell, "both lengths reset")
    leaves, rebuilt = leaves_of(tensors)
    directions = [torch.stack(random_like([leaf] * 2)) for leaf in leaves]
    cotangents = random_like(results_of(cell, _plain_layer.layer(call, tensors)))

    def run(flat, named):
        found, gradients = _plain_layer.second_order(
            call, rebuilt(flat), (*cotangents, None)[:3], variables_of(tensors, named)
        )
        return (*results_of(cell, found), *flat_of(gradients))

    found = torch.func.vmap(lambda *named: run(leaves, named))(*directions)
    for i in range(2):
        assert_close([f[i] for f in found], run(leaves, [d[i] for d in directions]))
    first = tuple(d[0] for d in directions)
    _, tangents = torch.func.jvp(lambda *flat: run(flat, first), tuple(leaves), first)
    step = 1e-5
    ends = [
        run([a + s * b for a, b in zip(leaves, first, strict=True)], first) for s in (step, -step)
    ]
    expected = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
    assert_close(tangents, expected, rtol=1e-5, atol=1e-6)
    with forward_ad.dual_level():
        found = run([forward_ad.make_dual(a, b) for a, b in zip(leaves, first, strict=True)], first)
        assert_close([forward_ad.unpack_dual(t).tangent for t in found], tangents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", CELLS)
def test_dtypes(cell, dtype):
    """Results are those of float64, rounded to the dtype of the tensors."""
    call, tensors = case(cell, "both lengths masks", dtype)
    leaves, rebuilt = leaves_of(tensors)
    exact = rebuilt([leaf.double() for leaf in leaves])
    directions = random_like(leaves)
    cotangents = random_like(results_of(cell, _plain_layer.layer(call, tensors)))
    results = []
    for given, to in ((tensors, dtype), (exact, torch.float64)):
        named = variables_of(tensors, [d.to(to) for d in directions])
        grads = (*(c.to(to) for c in cotangents), None)[:3]
        found, gradients = _plain_layer.second_order(call, given, grads, named)
        results.append([*_plain_layer.layer(call, given), *found, *flat_of(gradients)])
    assert all(t.dtype == dtype for t in results[0])
    bound = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_memory_of_second_order_grows_less_than_linearly(cell):
    extra = []
    for steps in (64, 256):
        call, tensors = case(cell, "plain", steps=steps)
        leaves, _ = leaves_of(tensors)
        directions = variables_of(tensors, random_like(leaves))
        grads = (*random_like(_plain_layer.layer(call, tensors)[:2]), None)
        second = partial(_plain_layer.second_order, call, tensors, grads, directions)
        found, gradients = second()
        # Results are made in parts, and then one of them is joined.
        results = found[0].nbytes + 2 * gradients.input.nbytes
        extra.append(measure_memory(second).peak_bytes - results)
    assert 0 < extra[1] < 2.5 * extra[0], extra


def test_other_options_of_a_call_change_nothing():
    call, tensors = case("gru", "plain")
    other = dataclasses.replace(call, chunk_size=1, recompute=False)
    assert_close(_plain_layer.layer(call, tensors), _plain_layer.layer(other, tensors))
