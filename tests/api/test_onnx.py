"""Export to ONNX: layers and cells become ONNX's own GRU and LSTM, by both exporters of torch."""

import copy

import pytest
import torch
from cases import allow_tf32
from torch import nn

import fusedrnn

onnx = pytest.importorskip("onnx", reason="needs onnx")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytest.importorskip("onnxscript", reason="needs onnxscript")

pytestmark = pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:torch",
)
INPUT, HIDDEN, LATENT = 4, 5, 3


@pytest.fixture(autouse=True)
def _float32_is_not_rounded():
    """Replaces conftest.py's fixture: torch.export does not run where TF32 is forbidden."""
    allow_tf32(True)


@pytest.fixture(autouse=True)
def _autocast_keeps_copies():
    """torch leaves its cache turned off if an export to TorchScript fails."""
    yield
    torch.set_autocast_cache_enabled(True)


class Model(nn.Module):
    """Runs ``rnn`` on tensors of the names that are given once for all calls."""

    def __init__(self, rnn, names=(), **arguments):
        super().__init__()
        self.rnn, self.names, self.arguments = rnn, names, arguments

    def forward(self, input, *others):
        named = dict(zip(self.names, others, strict=True))
        if "cx" in named:
            named["hx"] = named["hx"], named.pop("cx")
        return self.rnn(input, **named, **self.arguments)


def exported(model, tensors, axes, dynamo, path):
    """A session of onnxruntime and the graph. ``axes``: of each tensor, names of dynamic axes."""
    if dynamo:
        dims = {name: torch.export.Dim(name) for names in axes for name in names.values()}
        input, *others = ({at: dims[name] for at, name in names.items()} for names in axes)
        shapes = (input, *([tuple(others)] if others else []))
        options = {"dynamic_shapes": shapes, "verbose": False, "external_data": False}
    else:
        names = [f"input_{i}" for i in range(len(tensors))]
        options = {"input_names": names, "dynamic_axes": dict(zip(names, axes, strict=True))}
    torch.onnx.export(model, tensors, path, dynamo=dynamo, **options)
    graph = onnx.load(path)
    onnx.checker.check_model(graph)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options), graph.graph


GRU, LSTM, NOISY = fusedrnn.GRU, fusedrnn.LSTM, fusedrnn.StochasticGRU
DEEP = {"num_layers": 2, "bidirectional": True}
LAST = {"num_layers": 2, "return_sequence": False}
# Classes, options, dimensions of each tensor of a call, and how often which operator must be in the
# graph. T and B are dynamic.
CASES = {
    "GRU": (GRU, DEEP | {"dropout": 0.5}, {"input": "TBI"}, {"GRU": 2}),
    "GRU, no bias": (GRU, DEEP | {"bias": False}, {"input": "TBI"}, {"GRU": 2}),
    "LSTM, states, batch_first": (
        LSTM,
        {"num_layers": 2, "batch_first": True},
        {"input": "BTI", "hx": "2BH", "cx": "2BH"},
        {"LSTM": 2},
    ),
    "StochasticGRU": (NOISY, {"bidirectional": True}, {"input": "TBI", "hx": "2BH"}, {"GRU": 1}),
    "StochasticGRU, no bias": (NOISY, {"bias": False}, {"input": "TBI", "hx": "1BH"}, {"GRU": 1}),
    "GRU, lengths": (GRU, DEEP, {"input": "TBI", "lengths": "B"}, {"GRU": 2}),
    "LSTM, lengths": (LSTM, DEEP, {"input": "TBI", "lengths": "B"}, {"LSTM": 2}),
    "last states": (LSTM, LAST, {"input": "TBI"}, {"LSTM": 2}),
    "last states, two directions": (LSTM, LAST | DEEP, {"input": "TBI"}, {"LSTM": 2}),
    "no batch": (GRU, {}, {"input": "TI"}, {"GRU": 1}),
    "GRUCell": (fusedrnn.GRUCell, {}, {"input": "BI"}, {"GRU": 1}),
    "LSTMCell": (fusedrnn.LSTMCell, {}, {"input": "BI"}, {"LSTM": 1}),
    "StochasticGRUCell": (fusedrnn.StochasticGRUCell, {}, {"input": "BI"}, {"GRU": 1}),
}
ALSO_QUICK = "LSTM, states, batch_first"  # by dynamo, which takes some seconds


def made(inputs, seq_len, batch):
    sizes = {"T": seq_len, "B": batch, "I": INPUT, "H": HIDDEN, "1": 1, "2": 2}
    for name, dims in inputs.items():
        shape = [sizes[letter] for letter in dims]
        yield torch.randint(1, seq_len + 1, shape) if name == "lengths" else torch.randn(shape)


@pytest.mark.parametrize(
    ("case", "dynamo"),
    [
        pytest.param(case, dynamo, marks=[pytest.mark.slow] * (dynamo and case != ALSO_QUICK))
        for case in CASES
        for dynamo in (True, False)
    ],
)
def test_right_at_other_sizes(case, dynamo, tmp_path):
    """Exports at some sizes, and compares at others."""
    kind, options, inputs, nodes = CASES[case]
    is_noisy = kind in (NOISY, fusedrnn.StochasticGRUCell)
    rnn = kind(INPUT, HIDDEN, **options, **({"latent_size": LATENT} if is_noisy else {}))
    model = Model(rnn, [*inputs][1:], **({"sample": False} if is_noisy else {})).eval()
    axes = [{i: n for i, n in enumerate(dims) if n in "TB"} for dims in inputs.values()]
    session, graph = exported(model, (*made(inputs, 6, 3),), axes, dynamo, tmp_path / "a.onnx")
    kinds = [node.op_type for node in graph.node]
    recurrent = {kind: kinds.count(kind) for kind in ("GRU", "LSTM", "RNN", "Loop", "Scan")}
    assert {kind: count for kind, count in recurrent.items() if count} == nodes
    exact = copy.deepcopy(model).double()
    for sizes in ((9, 4), (1, 1), (40, 2)):
        tensors = [*made(inputs, *sizes)]
        feeds = {of.name: t.numpy() for of, t in zip(session.get_inputs(), tensors, strict=True)}
        found = [torch.from_numpy(array) for array in session.run(None, feeds)]
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        expected = torch.utils._pytree.tree_leaves(exact(*wide))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.float())


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(
    ("wanted", "kind", "options", "named"),
    [
        ("sample=False, got noise", NOISY, {}, {}),
        ("sample=False, got noise", NOISY, {}, {"eps": torch.zeros(1, 6, 3, HIDDEN)}),
        ("proj_size=0, got a projected LSTM", LSTM, {"proj_size": 2}, {}),
        ("no reset, got one", GRU, {}, {"reset": torch.zeros(6, 3, dtype=torch.bool)}),
        ("zoneout=0, got 0.25", LSTM, {"zoneout": (0.0, 0.25)}, {}),
        ("no dropout or evaluation mode", GRU, {"num_layers": 2, "dropout": 0.25}, {}),
    ],
)
def test_what_onnx_cannot_express(wanted, kind, options, named, dynamo, tmp_path):
    training, mode = "dropout" in options, {}
    if training and not dynamo:
        mode = {"training": torch.onnx.TrainingMode.TRAINING}
    model = Model(kind(INPUT, HIDDEN, **options), named).train(training)
    tensors = (torch.randn(6, 3, INPUT), *named.values())
    with pytest.raises(Exception, match=f"fusedrnn: ONNX needs {wanted}"):
        torch.onnx.export(model, tensors, tmp_path / "a.onnx", dynamo=dynamo, verbose=False, **mode)


def test_packed_sequences(tmp_path):
    """torch.export does not get so far: it cannot take the batch from the values of a tensor."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = fusedrnn.GRU(INPUT, HIDDEN)

        def forward(self, data):
            return self.rnn(nn.utils.rnn.PackedSequence(data, torch.tensor([2, 1])))[1]

    with pytest.raises(Exception, match="fusedrnn: ONNX needs padded sequences, got a Packed"):
        torch.onnx.export(Packed(), (torch.randn(3, INPUT),), tmp_path / "a.onnx", dynamo=False)


def test_nothing_changes_outside_of_an_export():
    """torch.export and torch.jit.trace keep our operators."""
    rnn, x = fusedrnn.GRU(INPUT, HIDDEN).eval(), torch.randn(6, 3, INPUT)
    program = torch.export.export(rnn, (x,))
    assert any("fusedrnn" in str(node.target) for node in program.graph.nodes)
    traced = torch.jit.trace(rnn, x)
    torch.testing.assert_close(traced(x), rnn(x))
