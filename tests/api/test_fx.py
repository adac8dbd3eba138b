"""torch.fx: layers and cells are one node each, as those of torch.nn."""

import copy

import pytest
import torch
from torch import fx, nn

import fusedrnn


class Model(nn.Module):
    def __init__(self, rnn, **arguments):
        super().__init__()
        self.inner = nn.Sequential(rnn)
        self.head = nn.Linear(5, 2)
        self.arguments = arguments
        self.returns_several = not isinstance(rnn, fusedrnn.GRUCell | fusedrnn.StochasticGRUCell)

    def forward(self, input, hx=None, lengths=None):
        given = {} if lengths is None else {"lengths": lengths}
        output = self.inner[0](input * 2, hx, **given, **self.arguments)
        return self.head(output[0] if self.returns_several else output).tanh()


MODULES = {
    "gru": (fusedrnn.GRU(4, 5, 2), {}),
    "lstm": (fusedrnn.LSTM(4, 5, batch_first=True), {}),
    "stochastic_gru": (fusedrnn.StochasticGRU(4, 5, 3), {"sample": False}),
    "gru_cell": (fusedrnn.GRUCell(4, 5), {}),
    "lstm_cell": (fusedrnn.LSTMCell(4, 5), {}),
    "stochastic_gru_cell": (fusedrnn.StochasticGRUCell(4, 5, 3), {"sample": False}),
}


def make_input(name, seq_len=6, batch=3):
    return torch.randn(batch, 4) if name.endswith("cell") else torch.randn(seq_len, batch, 4)


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_is_one_node(name):
    rnn, arguments = MODULES[name]
    model = Model(rnn, **arguments)
    traced = fx.symbolic_trace(model, concrete_args={"hx": None, "lengths": None})
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [node.target for node in nodes] == ["inner.0", "head"]
    assert nodes[0].kwargs == arguments
    assert traced.get_submodule("inner.0") is rnn
    for module in (traced, copy.deepcopy(traced)):
        assert module.state_dict().keys() == model.state_dict().keys()
        for sizes in ((6, 3), (9, 2)):
            input = make_input(name, *sizes)
            assert torch.equal(module(input), model(input))
    input = make_input(name)
    for module in (model, traced):
        module.zero_grad()
        module(input).sum().backward()
        grads = [weight.grad.clone() for weight in module.parameters()]
        assert len(grads) == len(list(model.parameters()))
        if module is model:
            expected = grads
    assert all(map(torch.equal, grads, expected))


def test_states_and_lengths_are_arguments_of_the_node():
    model = Model(fusedrnn.GRU(4, 5))
    traced = fx.symbolic_trace(model)
    input, hx, lengths = torch.randn(6, 3, 4), torch.randn(1, 3, 5), torch.tensor([6, 2, 1])
    assert torch.equal(traced(input, hx, lengths), model(input, hx, lengths))


def test_a_layer_is_not_traced_through():
    with pytest.raises(TypeError, match=r"torch\.fx takes GRU as one node of a larger module"):
        fx.symbolic_trace(fusedrnn.GRU(4, 5))
