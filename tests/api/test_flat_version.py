"""A write through flat_weight before backward is an error, however forward was called."""

import copy

import pytest
import torch
from cases import allow_tf32
from torch.autograd import forward_ad

import fusedrnn


def under(context, call):
    with context:
        return call()


def exported(rnn, x):
    allow_tf32(True)  # torch.export does not run where TF32 is forbidden
    return torch.export.export(rnn, (x,)).module()(x), rnn


def through_another_module(rnn, x):
    other = fusedrnn.GRU(3, 4).to(x.dtype)
    for name, weight in rnn.named_parameters():
        setattr(other, name, weight)
    return rnn(x), other


def with_swapped_memory(rnn, x):
    """As for an evaluation by an average of weights."""
    other = copy.deepcopy(rnn)
    for a, b in zip(rnn.parameters(), other.parameters(), strict=True):
        a.data, b.data = b.data, a.data
    return rnn(x), rnn


def with_detached_weights(rnn, x):
    weights = {name: weight.detach() for name, weight in rnn.named_parameters()}
    return torch.func.functional_call(rnn, weights, (x.requires_grad_(),)), rnn


CALLS = {  # -> results, and the module whose buffer is written to
    "plain": lambda rnn, x: (rnn(x), rnn),
    "autocast": lambda rnn, x: (under(torch.autocast("cpu", torch.bfloat16), lambda: rnn(x)), rnn),
    "vmap": lambda rnn, x: (torch.func.vmap(rnn)(x[None]), rnn),
    "dual level": lambda rnn, x: (under(forward_ad.dual_level(), lambda: rnn(x)), rnn),
    "jit.trace": lambda rnn, x: (torch.jit.trace(rnn, x)(x), rnn),
    "export": exported,
    "function": lambda rnn, x: (fusedrnn.gru(x, list(rnn.parameters())), rnn),
    "copy": lambda rnn, x: (rnn(x), copy.copy(rnn)),
    "through another module": through_another_module,
    "by another module": lambda rnn, x: (through_another_module(rnn, x)[1](x), rnn),
    "swapped memory": with_swapped_memory,
    "detached weights": with_detached_weights,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("return_sequence", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_write_is_an_error(call, return_sequence, dtype):
    rnn = fusedrnn.GRU(3, 4, return_sequence=return_sequence).to(dtype)
    (output, _), owner = CALLS[call](rnn, torch.randn(5, 2, 3, dtype=dtype))
    owner.flat_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_write_before_a_second_backward_is_an_error():
    rnn, x = fusedrnn.GRU(3, 4).double(), torch.randn(5, 2, 3).double().requires_grad_()
    (grad,) = torch.autograd.grad(rnn(x)[0].sum(), x, create_graph=True)
    rnn.flat_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.sum().backward()


def test_what_does_not_read_the_buffer_may_be_written_to():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    others = {name: w.detach().clone().requires_grad_() for name, w in rnn.named_parameters()}
    output, _ = torch.func.functional_call(rnn, others, (x,))
    rnn.flat_weight.mul_(2)
    output.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = rnn(x)  # by converted copies
    rnn.flat_weight.mul_(2)
    output.sum().backward()
    first, second = fusedrnn.GRU(3, 4), fusedrnn.GRU(3, 4)
    output, _ = first(x)
    second.flat_weight.mul_(2)
    output.sum().backward()


def test_weights_can_be_swapped():
    """torch swaps no tensor that something refers to weakly."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        rnn = fusedrnn.GRU(3, 4)
        rnn(torch.randn(5, 2, 3))[0].sum().backward()
        rnn.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    output, _ = rnn(torch.randn(5, 2, 3).double())
    rnn.flatten_parameters()
    rnn.flat_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
