"""The plain loop with the operands of its products rounded to TF32 by hand."""

from types import SimpleNamespace
from unittest import mock

import torch

from fusedrnn import reference


def rounded(tensor):
    """To TF32, 10 bits of fraction, and back to the dtype."""
    bits = tensor.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(tensor.dtype)


class RoundedLinear(torch.autograd.Function):
    """A product with both sides rounded, as are those of the gradient and the weight.

    those_of_weight: also of the product that makes the weight's gradient.
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
    """The loop in float64, where both sides of the recurrent products are rounded by hand.

    Forward and backward; of_all: those of the input's and of the weights' gradients too.
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
