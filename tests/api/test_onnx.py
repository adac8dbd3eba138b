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

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
both_exporters = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])

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
        torch.onnx.export(
            model,
            tensors,
            path,
            dynamo=True,
            dynamic_shapes=(input, *([tuple(others)] if others else [])),
            verbose=False,
            external_data=False,
        )
    else:
        names = [f"input_{i}" for i in range(len(tensors))]
        torch.onnx.export(
            model,
            tensors,
            path,
            dynamo=False,
            input_names=names,
            dynamic_axes=dict(zip(names, axes, strict=True)),
        )
    graph = onnx.load(path)
    onnx.checker.check_model(graph)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options), graph.graph


def flat(results):
    """All tensors of nested tuples."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in flat(result)]


def check(model, make, axes, dynamo, path, nodes):
    """Exports at some sizes, and compares at others.

    Args:
        make: Tensors of the call, from T and B.
        nodes: How often each recurrent operator must be in the graph.
    """
    model.eval()
    session, graph = exported(model, make(6, 3), axes, dynamo, path)
    kinds = [node.op_type for node in graph.node]
    recurrent = {kind: kinds.count(kind) for kind in ("GRU", "LSTM", "RNN", "Loop", "Scan")}
    assert {kind: count for kind, count in recurrent.items() if count} == nodes
    exact = copy.deepcopy(model).double()
    for seq_len, batch in ((9, 4), (1, 1), (40, 2)):
        tensors = make(seq_len, batch)
        feeds = {of.name: t.numpy() for of, t in zip(session.get_inputs(), tensors, strict=True)}
        found = [torch.from_numpy(array) for array in session.run(None, feeds)]
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        expected = flat(exact(*wide))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.float())


@both_exporters
@pytest.mark.parametrize("bias", [True, False])
def test_gru_in_both_directions(bias, dynamo, tmp_path):
    rnn = fusedrnn.GRU(INPUT, HIDDEN, num_layers=2, bidirectional=True, bias=bias, dropout=0.5)

    def make(seq_len, batch):
        return (torch.randn(seq_len, batch, INPUT),)

    check(Model(rnn), make, [{0: "T", 1: "B"}], dynamo, tmp_path / "a.onnx", {"GRU": 2})


@both_exporters
def test_lstm_with_states_and_batch_first(dynamo, tmp_path):
    rnn = fusedrnn.LSTM(INPUT, HIDDEN, num_layers=2, batch_first=True)

    def make(seq_len, batch):
        states = torch.randn(2, 2, batch, HIDDEN)
        return torch.randn(batch, seq_len, INPUT), *states

    axes = [{0: "B", 1: "T"}, {1: "B"}, {1: "B"}]
    check(Model(rnn, ["hx", "cx"]), make, axes, dynamo, tmp_path / "a.onnx", {"LSTM": 2})


@both_exporters
@pytest.mark.parametrize("bias", [True, False])
def test_stochastic_gru_without_noise(bias, dynamo, tmp_path):
    rnn = fusedrnn.StochasticGRU(INPUT, HIDDEN, LATENT, bias=bias, bidirectional=True)

    def make(seq_len, batch):
        return torch.randn(seq_len, batch, INPUT), torch.randn(2, batch, HIDDEN)

    model = Model(rnn, ["hx"], sample=False)
    axes = [{0: "T", 1: "B"}, {1: "B"}]
    check(model, make, axes, dynamo, tmp_path / "a.onnx", {"GRU": 1})


@both_exporters
@pytest.mark.parametrize("kind", [fusedrnn.GRU, fusedrnn.LSTM])
def test_lengths(kind, dynamo, tmp_path):
    rnn = kind(INPUT, HIDDEN, num_layers=2, bidirectional=True)

    def make(seq_len, batch):
        return torch.randn(seq_len, batch, INPUT), torch.randint(1, seq_len + 1, (batch,))

    axes = [{0: "T", 1: "B"}, {0: "B"}]
    nodes = {kind.__name__: 2}
    check(Model(rnn, ["lengths"]), make, axes, dynamo, tmp_path / "a.onnx", nodes)


@both_exporters
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_last_states_alone(bidirectional, dynamo, tmp_path):
    rnn = fusedrnn.LSTM(
        INPUT, HIDDEN, num_layers=2, return_sequence=False, bidirectional=bidirectional
    )

    def make(seq_len, batch):
        return (torch.randn(seq_len, batch, INPUT),)

    axes = [{0: "T", 1: "B"}]
    check(Model(rnn), make, axes, dynamo, tmp_path / "a.onnx", {"LSTM": 2})


@both_exporters
def test_a_sequence_without_a_batch(dynamo, tmp_path):
    def make(seq_len, batch):
        return (torch.randn(seq_len, INPUT),)

    check(
        Model(fusedrnn.GRU(INPUT, HIDDEN)),
        make,
        [{0: "T"}],
        dynamo,
        tmp_path / "a.onnx",
        {"GRU": 1},
    )


@both_exporters
@pytest.mark.parametrize("kind", [fusedrnn.GRUCell, fusedrnn.LSTMCell, fusedrnn.StochasticGRUCell])
def test_cells(kind, dynamo, tmp_path):
    def make(_, batch):
        return (torch.randn(batch, INPUT),)

    sampled = {"sample": False} if kind is fusedrnn.StochasticGRUCell else {}
    nodes = {"LSTM" if kind is fusedrnn.LSTMCell else "GRU": 1}
    model = Model(kind(INPUT, HIDDEN), **sampled)
    check(model, make, [{0: "B"}], dynamo, tmp_path / "a.onnx", nodes)


@both_exporters
@pytest.mark.parametrize(
    ("wanted", "rnn", "named"),
    [
        ("sample=False, got noise", fusedrnn.StochasticGRU(INPUT, HIDDEN), {}),
        (
            "sample=False, got noise",
            fusedrnn.StochasticGRU(INPUT, HIDDEN, LATENT),
            {"eps": torch.zeros(1, 6, 3, LATENT)},
        ),
        ("proj_size=0, got a projected LSTM", fusedrnn.LSTM(INPUT, HIDDEN, proj_size=2), {}),
        (
            "no reset, got one",
            fusedrnn.GRU(INPUT, HIDDEN),
            {"reset": torch.zeros(6, 3, dtype=torch.bool)},
        ),
        ("zoneout=0, got 0.25", fusedrnn.LSTM(INPUT, HIDDEN, zoneout=(0.0, 0.25)), {}),
    ],
)
def test_what_onnx_cannot_express(wanted, rnn, named, dynamo, tmp_path):
    model, tensors = Model(rnn, named).eval(), (torch.randn(6, 3, INPUT), *named.values())
    with pytest.raises(Exception, match=f"fusedrnn: ONNX needs {wanted}"):
        torch.onnx.export(model, tensors, tmp_path / "a.onnx", dynamo=dynamo, verbose=False)


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


@both_exporters
def test_dropout_in_training_mode(dynamo, tmp_path):
    model = Model(fusedrnn.GRU(INPUT, HIDDEN, num_layers=2, dropout=0.25)).train()
    mode = {} if dynamo else {"training": torch.onnx.TrainingMode.TRAINING}
    with pytest.raises(Exception, match="fusedrnn: ONNX needs no dropout or evaluation mode"):
        torch.onnx.export(
            model,
            (torch.randn(6, 3, INPUT),),
            tmp_path / "a.onnx",
            dynamo=dynamo,
            verbose=False,
            **mode,
        )


def test_nothing_changes_outside_of_an_export():
    """torch.export and torch.jit.trace keep our operators."""
    rnn, x = fusedrnn.GRU(INPUT, HIDDEN).eval(), torch.randn(6, 3, INPUT)
    program = torch.export.export(rnn, (x,))
    assert any("fusedrnn" in str(node.target) for node in program.graph.nodes)
    traced = torch.jit.trace(rnn, x, check_trace=False)
    torch.testing.assert_close(traced(x), rnn(x))
