"""The plain loop with the operands of its products rounded to TF32 by hand."""

from types import SimpleNamespace
from unittest import mock

import torch
from cases import relative_errors, truth
from checks import assert_no_worse

from fusedrnn import reference


def rounded(tensor):
    """Rounds to TF32, 10 bits of fraction, and returns the dtype of the input."""
    bits = tensor.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(tensor.dtype)


class RoundedLinear(torch.autograd.Function):
    """A product whose operands are rounded in forward and backward.

    those_of_weight: whether to round in the product for the weight's gradient too.
    """

    @staticmethod
    def forward(ctx, x, weight, those_of_weight):
        ctx.save_for_backward(x, weight)
        ctx.those_of_weight = those_of_weight
        return rounded(x) @ rounded(weight).mT

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        both = gradient.flatten(0, -2), x.flatten(0, -2)
        if ctx.those_of_weight:
            both = tuple(map(rounded, both))
        return rounded(gradient) @ rounded(weight), both[0].mT @ both[1], None


def rounded_truth(case, device="cpu", of_all=False):
    """The loop in float64 with the operands of the recurrent products rounded by hand.

    of_all: whether to round in the products for the gradients of input and weights too.
    """
    arguments = case.tensors(device).to(torch.float64)
    directions = 2 if case.bidirectional else 1
    per_row = len(arguments.weights) // (case.num_layers * directions)
    exact = set() if of_all else {id(w) for w in arguments.weights[::per_row]}

    def linear(x, weight, bias=None):
        if id(weight) in exact:
            return torch.nn.functional.linear(x, weight, bias)
        product = RoundedLinear.apply(x, weight, of_all)
        return product if bias is None else product + bias

    with mock.patch.object(reference, "F", SimpleNamespace(linear=linear)):
        return arguments.results(reference, **case.sizes)


def assert_nearer(ours, by_hand, case, share=0.5):
    """Asserts that results are nearer to the rounding loop than a share of its own error."""
    exact = truth(case.same_for_torch(), "cpu")
    by_hand, exact = ({name: every[name] for name in ours} for every in (by_hand, exact))
    allowed = relative_errors(by_hand, exact)
    for name, error in relative_errors(ours, by_hand).items():
        assert error <= share * allowed[name] + 1e-6, (name, error, allowed[name])
        assert allowed[name] < 2**-10, (name, allowed[name])


def assert_forward_is_rounded(ours, case):
    """Asserts that most numbers equal the rounding loop's; a sum's last bit may change a row."""
    by_hand = rounded_truth(case)
    assert_nearer(ours, by_hand, case)
    for name, tensor in ours.items():
        assert (tensor - by_hand[name]).abs().median() < 2e-6, name


def assert_backward_is_rounded(ours, case):
    """Asserts the same for gradients; a sum's last bit may change an operand and what follows."""
    by_hand = rounded_truth(case)
    assert_nearer(ours, by_hand, case, share=0.75)
    assert_no_worse(ours, by_hand, truth(case.same_for_torch(), "cpu"))
