"""Pairs of a torch.nn module and ours with the same weights, and comparisons of them."""

import torch
from torch import nn

import fusedrnn

F64 = {"dtype": torch.float64}
NAMES = ["GRU", "LSTM"]


def pair(name, *sizes, **options):
    """Our module and torch's with the same weights, in float64."""
    options = F64 | options
    torch.manual_seed(1)
    ours = getattr(fusedrnn, name)(*sizes, **options)
    torch.manual_seed(1)
    return ours, getattr(nn, name)(*sizes, **options)


def state(name, *shape, dtype=torch.float64):
    """A random hx for the module ``name``."""
    h, c = torch.randn(2, *shape, dtype=dtype)
    return (h, c) if name.startswith("LSTM") else h


def leaves(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def assert_same(actual, expected, atol=1e-12):
    actual, expected = leaves(actual), leaves(expected)
    assert [t.shape for t in actual] == [t.shape for t in expected]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def loss_of(result):
    return sum((t.double() ** 2).sum() for t in leaves(result) if t.is_floating_point())


def assert_same_gradients(ours, theirs, *args, **kwargs):
    """Asserts equal values, and equal gradients of weights and floating-point arguments."""
    wanted = [t for t in leaves(args) if t.is_floating_point()]
    grads = []
    for module in (ours, theirs):
        result = module(*args, **kwargs)
        grads.append(torch.autograd.grad(loss_of(result), [*wanted, *module.parameters()]))
    assert_same(ours(*args, **kwargs), theirs(*args, **kwargs))
    assert_same(*grads, atol=1e-10)


def leaf(tensor):
    return tensor.clone().requires_grad_()


EVERY_OPTIONS = [
    {},
    {"num_layers": 2, "bias": False},
    {"num_layers": 3, "bidirectional": True},
    {"batch_first": True, "num_layers": 2, "dropout": 0.25},
    {"bidirectional": True, "dtype": torch.float16},
    {"dtype": torch.bfloat16},
]
PROJECTED = [{"proj_size": 3, **options} for options in EVERY_OPTIONS[:4]]
