"""Graphs that torch.jit.trace and make_fx record of layers and cells, run at other sizes."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

import fusedrnn

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")

INPUT, HIDDEN, PROJECTED = 4, 7, 3
# The first is recorded. make_fx takes equal sizes for one size, so these are no others of a layer.
SIZES = ((11, 5), (3, 2), (13, 1), (1, 9), (11, 5))

LAYERS = {"GRU": fusedrnn.GRU, "LSTM": fusedrnn.LSTM, "StochasticGRU": fusedrnn.StochasticGRU}
CELLS = (fusedrnn.GRUCell, fusedrnn.LSTMCell, fusedrnn.StochasticGRUCell)
STACK = {"num_layers": 2, "bidirectional": True}
OPTIONS = [
    {},
    {"bias": False},
    {**STACK, "dropout": 0.5},
    {"batch_first": True},
    {"recompute": False},
    {**STACK, "recompute": False},
    {"return_sequence": False},
    {**STACK, "return_sequence": False},
    {"zoneout": 0.3, "weight_dropout": 0.3},
    {"workspace_bytes": 2**20},
    {"chunk_size": 2},
]
PROJECTIONS = [{"proj_size": PROJECTED}, {**STACK, "proj_size": PROJECTED}]

all_layers = pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in LAYERS for options in OPTIONS]
    + [("LSTM", options) for options in PROJECTIONS],
)
each_layer = pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in LAYERS), ("LSTM", PROJECTIONS[1])]
)


class Model(nn.Module):
    """A layer or a cell in evaluation mode, from tensors to tensors."""

    def __init__(self, rnn, given=None):
        super().__init__()
        self.rnn, self.given = rnn.eval(), given
        # Noise would differ from call to call.
        self.named = {"sample": False} if hasattr(rnn, "latent_size") else {}

    def forward(self, input, *given):
        named = dict(self.named)
        if self.given == "packed":
            input = PackedSequence(input, *given)
        elif given:
            named[self.given] = given if len(given) == 2 else given[0]
        leaves = pytree.tree_leaves(self.rnn(input, **named))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def arguments(self, seq_len, batch):
        rnn, given = self.rnn, self.given
        steps, rows = (seq_len, batch), ()
        if isinstance(rnn, CELLS):
            steps = (batch,)
        else:
            steps = steps[::-1] if rnn.batch_first else steps
            rows = (rnn.num_layers * (2 if rnn.bidirectional else 1),)
        if given == "unbatched":
            return (torch.randn(seq_len, INPUT),)
        if given == "packed":
            lengths = sorted(range(1, seq_len + 1), reverse=True)[:batch]
            packed = pack_sequence([torch.randn(length, INPUT) for length in lengths])
            return packed.data, packed.batch_sizes
        input = torch.randn(*steps, INPUT)
        if given == "hx":
            h = torch.randn(*rows, batch, getattr(rnn, "proj_size", 0) or HIDDEN)
            c = torch.randn(*rows, batch, HIDDEN)
            return (input, h, c) if rnn._cell == "lstm" else (input, h)
        if given == "lengths":
            return input, torch.randint(1, seq_len + 1, (batch,))
        if given == "reset":
            return input, torch.rand(steps) < 0.3
        return (input,)


def cells():
    for cls in CELLS:
        for bias in (True, False):
            for given in (None, "hx"):
                yield Model(cls(INPUT, HIDDEN, bias=bias), given)


def gradients(model, results):
    wanted = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.autograd.grad(sum(result.square().sum() for result in results), wanted)


# --- torch.jit.trace ----------------------------------------------------------------------------


def check_traces(model):
    """torch.jit.trace itself compares the graph to that of another trace, without gradients."""
    for needs_weights, needs_input in ((True, False), (False, True), (False, False)):
        model.requires_grad_(needs_weights)
        for is_enabled in (True, False):
            arguments = model.arguments(*SIZES[0])
            arguments[0].requires_grad_(needs_input)
            with torch.set_grad_enabled(is_enabled):
                traced = torch.jit.trace(model, arguments)
            for seq_len, batch in SIZES:
                arguments = model.arguments(seq_len, batch)
                found, expected = traced(*arguments), model(*arguments)
                torch.testing.assert_close(found, expected)
                if needs_weights:
                    found, expected = gradients(model, found), gradients(model, expected)
                    torch.testing.assert_close(found, expected)


@all_layers
def test_traced_layers(name, options):
    check_traces(Model(LAYERS[name](INPUT, HIDDEN, **options)))


@pytest.mark.parametrize("given", ["hx", "lengths", "reset", "unbatched", "packed"])
@each_layer
def test_traced_layers_with_other_arguments(name, options, given):
    check_traces(Model(LAYERS[name](INPUT, HIDDEN, **options), given))


def test_traced_cells():
    for model in cells():
        check_traces(model)


def test_further_ways_to_trace():
    rnn, x = fusedrnn.GRU(INPUT, HIDDEN), torch.randn(11, 5, INPUT)
    rnn(x)  # a call before changes nothing
    others = [(torch.randn(3, 2, INPUT),), (torch.randn(1, 1, INPUT),)]
    weights = [weight.detach().requires_grad_() for weight in rnn.parameters()]
    for traced in (
        torch.jit.trace(rnn, (x,), check_inputs=others),
        torch.jit.trace(rnn, example_kwarg_inputs={"input": x}),
        torch.jit.trace_module(rnn, {"forward": x}),
    ):
        torch.testing.assert_close(traced(others[0][0]), rnn(others[0][0]))
    function = torch.jit.trace(lambda x, *weights: fusedrnn.gru(x, weights), (x, *weights))
    torch.testing.assert_close(function(others[0][0], *weights), rnn(others[0][0]))
    for is_enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(is_enabled):
            rnn(x)  # which keeps the converted weights
            traced = torch.jit.trace(rnn, x)
            torch.testing.assert_close(traced(others[0][0]), rnn(others[0][0]))


# --- make_fx ------------------------------------------------------------------------------------


def with_gradients(function):
    """The gradients of all arguments that can have one."""

    def call(*arguments):
        leaves = [a.detach().requires_grad_(a.is_floating_point()) for a in arguments]
        with torch.enable_grad():
            total = sum(result.square().sum() for result in function(*leaves))
            return torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad])

    return call


def check_model(model, modes=("symbolic",)):
    """In mode "symbolic" sizes are left open."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    count = len(model.arguments(*SIZES[0]))

    def results(*tensors):
        named = dict(zip(weights, tensors[count:], strict=True))
        return torch.func.functional_call(model, named, tensors[:count])

    def arguments(*size):
        return *model.arguments(*size), *weights.values()

    for of in (results, with_gradients(results)):
        for mode in modes:
            graph = make_fx(of, tracing_mode=mode)(*arguments(*SIZES[0]))
            for size in SIZES if mode == "symbolic" else SIZES[:1]:
                others = arguments(*size)
                torch.testing.assert_close(graph(*others), of(*others))
            if mode == "symbolic":
                input = next(iter(graph.graph.nodes)).meta["val"]
                assert all(size.node.maybe_as_int() is None for size in input.shape[:-1])


@pytest.mark.ci_has_every(3)
@all_layers
def test_graphs_of_layers(name, options):
    check_model(Model(LAYERS[name](INPUT, HIDDEN, **options)))


@pytest.mark.parametrize("given", ["hx", "lengths", "reset", "unbatched"])
@each_layer
def test_graphs_of_layers_with_other_arguments(name, options, given):
    model = Model(LAYERS[name](INPUT, HIDDEN, **options), given)
    check_model(model, ("symbolic", "fake", "real"))


def test_graphs_of_cells():
    for model in cells():
        check_model(model)
