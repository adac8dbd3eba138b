"""An optimizer's step between forward and backward is an error, whatever the optimizer."""

import pytest
import torch
from torch import nn

import fusedrnn

INPUT = torch.linspace(-1, 1, 6 * 2 * 3, dtype=torch.float64).reshape(6, 2, 3)


class Foreign(torch.optim.Optimizer):
    """A step by a kernel that autograd knows nothing of, as other packages have them."""

    __module__ = "apex.optimizers.fused_sgd"

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.detach().numpy()[...] -= group["lr"] * weight.grad.numpy()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    "one group": lambda p: torch.optim.Adam([{"params": list(p), "fused": True}], 0.1),
    "foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "foreign": lambda p: Foreign(p, 0.1),
}
LAYERS = {
    "GRU": lambda: fusedrnn.GRU(3, 4),
    "GRU, two layers": lambda: fusedrnn.GRU(3, 4, 2),
    "LSTM": lambda: fusedrnn.LSTM(3, 4),
    "LSTM, last state": lambda: fusedrnn.LSTM(3, 4, return_sequence=False),
    "compiled": lambda: fusedrnn.Recurrent(nn.GRUCell(3, 4), compile="require"),
    "in Python": lambda: fusedrnn.Recurrent(nn.GRUCell(3, 4), compile="never"),
    "graph": lambda: fusedrnn.Recurrent(nn.GRUCell(3, 4), compile="never", recompute=False),
    "nn.GRU": lambda: nn.GRU(3, 4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_before_backward_is_an_error(layer, optimizer):
    torch.manual_seed(0)
    rnn = LAYERS[layer]().double()
    step = OPTIMIZERS[optimizer](rnn.parameters()).step
    sum(y.sum() for y in rnn(INPUT) if isinstance(y, torch.Tensor)).backward()
    results = rnn(INPUT)
    step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace|changed"):
        sum(y.square().sum() for y in results if isinstance(y, torch.Tensor)).backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_count_for_weights_with_a_gradient_alone(optimizer):
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    step = OPTIMIZERS[optimizer](weights).step
    weights[0].grad = torch.ones(3)
    versions = [weight._version for weight in weights]
    step()
    assert weights[0]._version > versions[0]
    assert weights[1]._version == versions[1]


def test_a_step_on_flat_tensors_counts():
    rnn = fusedrnn.GRU(3, 4).double()
    flat = rnn.flat_weight
    rnn.flat_grad = flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.AdamW([flat], fused=True)
    rnn(INPUT)[0].sum().backward()
    output, _ = rnn(INPUT)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step(backend):
    rnn, other = (fusedrnn.GRU(3, 4).double() for _ in range(2))
    other.load_state_dict(rnn.state_dict())
    for module, wrap in ((rnn, lambda f: torch.compile(f, backend=backend)), (other, lambda f: f)):
        step = wrap(torch.optim.AdamW(module.parameters(), fused=True).step)
        for _ in range(2):
            module(INPUT)[0].sum().backward()
            step()
        output, _ = module(INPUT)
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    torch.testing.assert_close(rnn.flat_weight, other.flat_weight)


def test_optimizers_of_other_kinds_go_on():
    """What is no optimizer of torch's form is not looked into; its own changes count as ever."""

    class Other(torch.optim.Optimizer):
        def __init__(self):
            self.rnn = fusedrnn.GRU(3, 4)
            self._patch_step_function()
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            self.defaults = {}

        def step(self):
            return 5

    assert Other().step() == 5
    rnn = fusedrnn.GRU(3, 4).double()

    class Waits(Foreign):
        """Takes no step yet, as while it accumulates gradients."""

        __module__ = "my.optimizers"

        def step(self, closure=None):
            pass

    output, _ = rnn(INPUT)
    output.sum().backward(retain_graph=True)
    Waits(rnn.parameters(), 0.1).step()
    output.sum().backward()
