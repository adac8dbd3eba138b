"""Derivatives other than a plain backward pass: all compared with the loop in plain torch."""

import pytest
import torch
from cases import allow_tf32
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils._pytree import tree_leaves

import fusedrnn
from fusedrnn import cells, reference

MODULES = {"gru": "GRU", "lstm": "LSTM", "stochastic_gru": "StochasticGRU"}


@pytest.fixture(params=MODULES)
def cell(request):
    return request.param


class Pair:
    """A layer and the loop as functions of input and weights, with the same noise."""

    def __init__(self, cell, **options):
        torch.manual_seed(0)
        module = getattr(fusedrnn, MODULES[cell])(3, 3, dtype=torch.float64, **options)
        self.weights = [weight.detach() for weight in module.parameters()]
        self.input = torch.randn(4, 2, 3, dtype=torch.float64)
        self.tensors = (self.input, *self.weights)
        self.all = tuple(range(len(self.tensors)))
        named = options | ({"seed": torch.tensor([5])} if cell == "stochastic_gru" else {})

        def of(package):
            function = getattr(package, cell)
            return lambda x, *w: function(x, list(w), **named)[0].sin().sum()

        self.ours, self.loop = of(fusedrnn), of(reference)

    def compare(self, derive, *arguments):
        """``derive`` makes of a function another, which is called with the arguments."""
        found, expected = (derive(f)(*arguments) for f in (self.ours, self.loop))
        for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    def directions(self):
        return tuple(torch.randn_like(tensor) for tensor in self.tensors)


def square(values):
    return sum(value.pow(2).sum() for value in values)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    "derive",
    [
        lambda f, all: grad(f, all),
        lambda f, all: grad(lambda *t: square(grad(f, all)(*t)), all),
        lambda f, all: hessian(f, (0, 1)),
        lambda f, all: jacrev(f, (0, 1)),
        lambda f, all: jacfwd(f, (0, 2)),
        lambda f, all: jacrev(jacrev(f)),
        lambda f, all: torch.func.functionalize(f),
    ],
    ids=["grad", "grad of grad", "hessian", "jacrev", "jacfwd", "jacrev twice", "functionalize"],
)
def test_func(cell, derive, bidirectional):
    pair = Pair(cell, bidirectional=bidirectional)
    pair.compare(lambda f: derive(f, pair.all), *pair.tensors)


def test_forward_mode(cell):
    pair = Pair(cell)
    along = pair.directions()
    pair.compare(lambda f: lambda *t: jvp(f, t, along), *pair.tensors)
    pair.compare(lambda f: lambda *t: jvp(grad(f, pair.all), t, along), *pair.tensors)
    of_input = [lambda x, f=f: f(x, *pair.weights) for f in (pair.ours, pair.loop)]
    found = linearize(of_input[0], pair.input)[1](along[0])
    torch.testing.assert_close(found, jvp(of_input[1], (pair.input,), along[:1])[1])


def test_double_backward(cell):
    """To the third order; gradcheck compares with differences."""
    pair = Pair(cell)
    inputs = [tensor.clone().requires_grad_() for tensor in pair.tensors]

    def derive(function):
        def thrice(*tensors):
            first = torch.autograd.grad(function(*tensors), tensors, create_graph=True)
            second = torch.autograd.grad(square(first), tensors, create_graph=True)
            return second, torch.autograd.grad(square(second), tensors)

        return thrice

    pair.compare(derive, *inputs)
    options = {"check_forward_ad": True, "check_batched_grad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(pair.ours, inputs, **options)
    assert torch.autograd.gradgradcheck(pair.ours, inputs, fast_mode=True)


def test_vmap(cell):
    """Over inputs, gradients of each, and weights of their own."""
    pair = Pair(cell)
    inputs = torch.randn(5, *pair.input.shape, dtype=torch.float64)
    shared = (0, *[None] * len(pair.weights))
    pair.compare(lambda f: vmap(f, shared), inputs, *pair.weights)
    pair.compare(lambda f: vmap(f, (1, *shared[1:])), inputs.transpose(0, 1), *pair.weights)
    pair.compare(lambda f: vmap(grad(f, pair.all), shared), inputs, *pair.weights)
    several = [torch.stack([weight, 2 * weight]) for weight in pair.weights]
    pair.compare(lambda f: vmap(f, (None, *[0] * len(several))), pair.input, *several)


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_vmap_with_drawn_noise(randomness):
    rnn = fusedrnn.StochasticGRU(3, 4)
    x = torch.randn(6, 2, 3).expand(5, 6, 2, 3)
    mapped = vmap(lambda x: rnn(x)[0], randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            mapped(x)
        return
    output = mapped(x)
    assert torch.equal(output[0], output[1]) == (randomness == "same")


def test_gradients_of_many_cotangents(cell):
    pair = Pair(cell)
    x = pair.input.clone().requires_grad_()
    grads = torch.randn(3, 4, 2, 3, dtype=torch.float64)
    found = []
    for package in (fusedrnn, reference):
        seed = {"seed": torch.tensor([5])} if cell == "stochastic_gru" else {}
        output = getattr(package, cell)(x, pair.weights, **seed)[0]
        found.append(torch.autograd.grad(output, x, grads, is_grads_batched=True)[0])
    torch.testing.assert_close(*found)


def test_an_operator_called_directly_has_gradients(cell):
    pair = Pair(cell)
    x, *weights = (tensor.clone().requires_grad_() for tensor in pair.tensors)
    zeros = torch.zeros(1, 2, 3, dtype=torch.float64)
    cx = zeros if cell == "lstm" else None
    seed = torch.tensor([5]) if cell == "stochastic_gru" else None
    index = cells.CELLS[cell].index
    output = torch.ops.fusedrnn.forward(index, x, zeros, cx, weights, seed=seed)[0]
    found = torch.autograd.grad(output.sin().sum(), (x, *weights))
    expected = torch.autograd.grad(pair.loop(x, *weights), (x, *weights))
    torch.testing.assert_close(found, expected)
    h = torch.ops.fusedrnn.step(index, x[0], None, None, weights, seed=seed)[0]
    torch.testing.assert_close(h, output[0])
    assert torch.autograd.grad(h.sum(), x)[0][0].abs().sum() > 0


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_gradient_within_a_compiled_function(cell, backend):
    torch._dynamo.reset()
    pair = Pair(cell)
    compiled = torch.compile(grad(pair.ours), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*pair.tensors), grad(pair.loop)(*pair.tensors))


@pytest.mark.parametrize(
    "options",
    [
        {"zoneout": (0.1, 0.2)},
        {"dropout": 0.5, "num_layers": 2},
        {"return_sequence": False},
        {"return_sequence": False, "num_layers": 2, "bidirectional": True},
    ],
)
def test_second_derivatives_of_every_option(options):
    rnn = fusedrnn.LSTM(2, 3, dtype=torch.float64, **options)
    x = torch.randn(20, 2, 2, dtype=torch.float64, requires_grad=True)

    def call(x):
        torch.manual_seed(5)  # the same masks each time
        output, states = rnn(x)
        return output, *states

    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


def test_second_derivatives_of_packed_rows():
    rnn = fusedrnn.GRU(2, 3, dtype=torch.float64)
    x = torch.randn(6, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(x):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1])
        output, h_n = rnn(packed)
        return output.data, h_n

    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


def test_the_cost_of_second_derivatives_is_told_once(monkeypatch):
    monkeypatch.setattr(fusedrnn._autograd, "_has_warned", False)
    pair = Pair("gru")
    with pytest.warns(UserWarning, match="second derivatives") as seen:
        for _ in range(2):
            hessian(pair.ours)(*pair.tensors)
    assert sum("fusedrnn" in str(warning.message) for warning in seen) == 1


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("layers", "frozen"), [(1, False), (2, False), (2, True)])
def test_a_write_through_flat_weight_is_noticed(cell, layers, frozen, backend):
    rnn = getattr(fusedrnn, MODULES[cell])(3, 4, num_layers=layers)
    for name, parameter in rnn.named_parameters():
        parameter.requires_grad_(not (frozen and name.endswith("_l0")))
    called = rnn if backend is None else torch.compile(rnn, backend=backend, fullgraph=True)
    total = called(torch.randn(5, 2, 3))[0].sum()
    rnn.flat_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_autocast_forgets_its_copies_whatever_the_default_dtype():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    fusedrnn._autocast._witnesses.clear()

    def output():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rnn(x)[0]

    torch.set_default_dtype(torch.bfloat16)
    try:
        first = output()
    finally:
        torch.set_default_dtype(torch.float32)
    rnn.flat_weight.mul_(2)
    assert not torch.equal(output(), first)


def test_autocast_of_fake_tensors_keeps_nothing():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    fusedrnn._autocast._witnesses.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = rnn(mode.from_tensor(x))[0]
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert type(rnn(x)[0]) is torch.Tensor


def test_an_exported_program_can_be_trained(cell):
    pair = Pair(cell)
    rnn = getattr(fusedrnn, MODULES[cell])(3, 3, dtype=torch.float64)
    kwargs = {"sample": False} if cell == "stochastic_gru" else {}
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = {"input": sizes} | ({"sample": None} if kwargs else {})
    allow_tf32(True)  # export refuses what the fixture of all tests sets
    program = torch.export.export(rnn, (pair.input,), kwargs, dynamic_shapes=shapes)
    x = torch.randn(9, 5, 3, dtype=torch.float64)
    copy = program.module()
    for module in (copy, rnn):
        module(x, **kwargs)[0].sin().sum().backward()
    for name, parameter in rnn.named_parameters():
        torch.testing.assert_close(copy.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("shape", ["lengths", "shapes"])
def test_other_sizes_keep_the_graph(cell, shape):
    torch._dynamo.reset()
    rnn = getattr(fusedrnn, MODULES[cell])(3, 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, lengths: rnn(x, lengths=lengths)[0], fullgraph=True, backend=counter
    )
    for seq_len, batch in ((5, 3), (7, 4), (9, 6), (12, 5), (21, 8)):
        lengths = None
        if shape == "lengths":
            batch, lengths = 3, [seq_len, seq_len - 1, 3]
        x = torch.randn(seq_len, batch, 3, requires_grad=True)
        compiled(x, lengths).sum().backward()
    assert counter.frame_count <= 2


def test_a_generator_compiles():
    torch._dynamo.reset()
    rnn = fusedrnn.StochasticGRU(3, 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, generator: rnn(x, generator=generator)[0], fullgraph=True, backend=counter
    )
    x, generators = torch.randn(5, 2, 3), [torch.Generator(), torch.Generator()]
    for generator in generators * 2:
        found = []
        for called in (compiled, lambda x, g: rnn(x, generator=g)[0]):
            generator.manual_seed(3)
            found.append([called(x, generator) for _ in range(2)])
        torch.testing.assert_close(*found)
        assert not torch.equal(*found[0])
    assert counter.frame_count == 2


@pytest.mark.parametrize("make", [fusedrnn.GRU, fusedrnn.LSTMCell])
def test_autocast_converts_weights_once(make):
    rnn, x = make(3, 4), torch.randn(5, 3)
    places = {weight.data_ptr() for weight in rnn.parameters()}

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_cast = func is torch.ops.aten._to_copy.default
            self.casts += is_cast and args[0].data_ptr() in places
            return func(*args, **(kwargs or {}))

    def casts_of(*modes, calls=5):
        with torch.autocast("cpu", dtype=torch.bfloat16), Count() as count:
            for mode in modes:
                with mode:
                    outputs = [rnn(x)[0] for _ in range(calls)]
        return count.casts, outputs[0]

    casts, output = casts_of(torch.enable_grad())
    assert casts == 4
    assert casts_of(torch.no_grad())[0] == 4
    # Copies without a graph must not serve where gradients are wanted.
    casts, output = casts_of(torch.no_grad(), torch.enable_grad())
    assert casts == 8
    for weight in rnn.parameters():
        weight.data.mul_(2)  # which autograd does not notice; the graph of `output` has copies
    assert not torch.equal(casts_of(torch.enable_grad())[1], output)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert {p.grad.dtype for p in rnn.parameters()} == {torch.float32}
