"""Bad input gets one clear sentence and leaves everything as it was."""

import re
from dataclasses import replace

import numpy
import pytest
import torch
from cases import CELLS, Case

import fusedrnn
from fusedrnn import _call as call

CASE = Case(seq_len=4, batch=3, input_size=5, hidden_size=7, latent_size=6, num_layers=2)


def one(tensors, index, value):
    return [value if i == index else t for i, t in enumerate(tensors)]


def bad_calls():
    """Tuples: what is wrong, changed arguments, changed options, error, a part of its message."""
    good = replace(CASE, noise="eps").tensors()
    x, hx, eps, weights = good.input, good.hx, good.eps, good.weights

    def arguments(**changes):
        return replace(good, **changes)

    seed = torch.tensor([1])
    yield "input of rank 1", arguments(input=x[0, 0]), {}, ValueError, "2 or 3 dimensions, got 1"
    yield "input of rank 4", arguments(input=x[None]), {}, ValueError, "2 or 3 dimensions, got 4"
    yield "width of input", arguments(input=x[..., :4]), {}, RuntimeError, "5 features"
    yield "no steps", arguments(input=x[:0], eps=eps[:, :0]), {}, RuntimeError, "at least one step"
    yield "int input", arguments(input=x.long()), {}, ValueError, "got torch.int64"
    yield "complex input", arguments(input=x.to(torch.complex64)), {}, ValueError, "complex64"
    float8 = x.to(torch.float8_e4m3fn)
    yield "float8 input", arguments(input=float8), {}, ValueError, "bfloat16 or float16, got"
    yield "dtype of input", arguments(input=x.float()), {}, ValueError, "must be torch.float32"
    yield "input not a tensor", arguments(input=[1.0]), {}, TypeError, "input must be a tensor"
    yield "input None", arguments(input=None), {}, TypeError, "got NoneType"
    yield "meta input", arguments(input=x.to("meta")), {}, RuntimeError, "on meta"
    yield "rank of hx", arguments(hx=hx[0]), {}, RuntimeError, "hx must have shape (2, 3, 7)"
    yield "layers of hx", arguments(hx=hx[:1]), {}, RuntimeError, "got (1, 3, 7)"
    yield "batch of hx", arguments(hx=hx[:, :2]), {}, RuntimeError, "got (2, 2, 7)"
    yield "width of hx", arguments(hx=hx[..., :6]), {}, RuntimeError, "got (2, 3, 6)"
    yield "dtype of hx", arguments(hx=hx.bfloat16()), {}, RuntimeError, "hx must be torch.float64"
    yield "meta hx", arguments(hx=hx.to("meta")), {}, RuntimeError, "hx must be on cpu"
    yield "hx not a tensor", arguments(hx=(hx, hx)), {}, TypeError, "hx must be a tensor"
    unbatched = arguments(input=x[:, 0])
    yield "unbatched with hx", unbatched, {}, RuntimeError, "hx must have shape (2, 7)"
    yield "rank of eps", arguments(eps=eps[0]), {}, RuntimeError, "eps must have shape (2, 4, 3, 6)"
    yield "width of eps", arguments(eps=eps[..., :5]), {}, RuntimeError, "got (2, 4, 3, 5)"
    yield "dtype of eps", arguments(eps=eps.float()), {}, ValueError, "eps must be torch.float64"
    yield "meta eps", arguments(eps=eps.to("meta")), {}, RuntimeError, "eps must be on cpu"
    yield "eps and seed", arguments(seed=seed), {}, ValueError, "eps and seed exclude"
    yield "eps without sample", arguments(sample=False), {}, ValueError, "sample=False"
    without = {"eps": None}
    yield "dtype of seed", arguments(**without, seed=seed.int()), {}, ValueError, "one int64"
    yield "two seeds", arguments(**without, seed=torch.tensor([1, 2])), {}, ValueError, "one int64"
    yield "seed a number", arguments(**without, seed=3), {}, TypeError, "seed must be a tensor"
    meta = arguments(**without, seed=seed.to("meta"))
    yield "meta seed", meta, {}, RuntimeError, "seed must be on"
    yield "sample a number", arguments(**without, sample=1), {}, TypeError, "sample must be a bool"
    yield "no generator", arguments(**without), {"generator": 3}, TypeError, "must be a torch.Gen"
    unsampled = arguments(**without, seed=seed, sample=False)
    yield "seed without sample", unsampled, {}, ValueError, "sample=False"
    generator = {"generator": torch.Generator()}
    yield "seed and generator", arguments(**without, seed=seed), generator, ValueError, "exclude"
    yield "few weights", arguments(weights=weights[:-1]), {}, ValueError, "12 weights, got 11"
    yield "no biases", good, {"bias": False}, ValueError, "6 weights, got 12"
    yield "other layers", good, {"num_layers": 3}, ValueError, "18 weights, got 12"
    yield "no layers", good, {"num_layers": 0}, ValueError, "a positive integer, got 0"
    for index, name in enumerate(["ih", "zh", "hz"]):
        w = weights[index]
        rank = arguments(weights=one(weights, index, w[0]))
        yield f"rank of weight {name}", rank, {}, ValueError, "must have 2 dimensions, got 1"
        rows = arguments(weights=one(weights, index, w[:-1]))
        yield f"rows of weight {name}", rows, {}, RuntimeError, f"weight_{name}_l0 must have shape"
        bias = arguments(weights=one(weights, index + 3, weights[index + 3][:-1]))
        yield f"bias {name}", bias, {}, RuntimeError, f"bias_{name}_l0 must have shape"
    later = arguments(weights=one(weights, 6, weights[0]))
    yield "weight of layer 1", later, {}, RuntimeError, "weight_ih_l1 must have shape (21, 7)"
    other = arguments(weights=one(weights, 4, weights[4].float()))
    message = "bias_zh_l0 must be torch.float64 as input is, got torch.float32"
    yield "weight dtype", other, {}, ValueError, message
    other = arguments(weights=one(weights, 4, weights[4].to("meta")))
    yield "weight meta", other, {}, RuntimeError, "bias_zh_l0 must be on cpu as input is, got meta"
    yield "weight None", arguments(weights=one(weights, 4, None)), {}, TypeError, "weights[4]"
    for wrong in (-0.1, 1.5, "a"):
        yield f"dropout {wrong}", good, {"dropout": wrong}, ValueError, "probability in [0, 1]"
    # Lengths and resets for 3 rows of 4 steps.
    for wrong, error, message in (
        ([1, 2], RuntimeError, "lengths must have shape (3,), got (2,)"),
        (torch.ones(3, 1).long(), RuntimeError, "lengths must have shape (3,), got (3, 1)"),
        ([0, 1, 2], ValueError, "lengths must be in [1, 4], got 0"),
        ([-1, 1, 2], ValueError, "lengths must be in [1, 4], got -1"),
        (torch.tensor([1, 5, 2]), ValueError, "lengths must be in [1, 4], got 5"),
        ([2**70, 1, 2], ValueError, "lengths must be in [1, 4], got 2^62 or more"),
        (
            torch.tensor([2**64 - 1, 1, 2], dtype=torch.uint64),
            ValueError,
            "lengths must be in [1, 4], got 2^62 or more",
        ),
        ([-(2**70), 1, 2], ValueError, "lengths must be in [1, 4], got -2^62 or less"),
        (torch.tensor([1.0, 2.0, 3.0]), ValueError, "sequence of integers, got torch.float32"),
        (torch.ones(3).bool(), ValueError, "a sequence of integers, got torch.bool"),
        (numpy.ones(3, "float32"), TypeError, "a sequence of integers, got one with float32"),
        (numpy.ones(3, "bool"), TypeError, "a sequence of integers, got one with bool"),
        (numpy.array(3), TypeError, "a sequence of integers, got ndarray"),
        ([1.0, 2, 3], TypeError, "lengths must be a tensor or a sequence of integers, got one"),
        ([True, 2, 3], TypeError, "a sequence of integers, got one with bool and int"),
        ([[1], [2], [3]], TypeError, "a sequence of integers, got one with list"),
        ([torch.tensor(1.0), 2, 3], TypeError, "got one with int and torch.float32"),
        ([torch.tensor(True), 2, 3], TypeError, "got one with int and torch.bool"),
        (torch.tensor(3), RuntimeError, "lengths must have shape (3,), got ()"),
        (torch.full((3,), 2**64 - 1, dtype=torch.uint64), ValueError, "must be in [1, 4], got"),
        (torch.ones(3, device="meta").long(), RuntimeError, "lengths must be on the CPU"),
    ):
        yield f"lengths {wrong}", arguments(lengths=wrong), {}, error, message
    unbatched = arguments(input=x[:, 0], hx=hx[:, 0], eps=eps[:, :, 0], lengths=[1])
    yield "lengths without batch", unbatched, {}, ValueError, "lengths need a batch"
    reset = torch.zeros(4, 3, dtype=torch.bool)
    for name, wrong, error, message in (
        ("shape", reset[:3], RuntimeError, "reset must have shape (4, 3), got (3, 3)"),
        ("order", reset.t(), RuntimeError, "(4, 3), got (3, 4); its steps and batch must be in"),
        ("rank", reset[..., None], RuntimeError, "got (4, 3, 1); use reset.squeeze(-1)"),
        ("dtype", reset.float(), ValueError, "got torch.float32; use reset.bool()"),
        ("type", reset.tolist(), TypeError, "reset must be a tensor, got list"),
        ("device", reset.to("meta"), RuntimeError, "reset must be on cpu"),
    ):
        yield f"{name} of reset", arguments(reset=wrong), {}, error, message
    for name in ("chunk_size", "workspace_bytes"):
        for wrong, error, message in (
            (0, ValueError, "must be a positive integer, got 0"),
            (-3, ValueError, "must be a positive integer, got -3"),
            (2.0, TypeError, "must be an int or None, got float"),
            (True, TypeError, "must be an int or None, got bool"),
        ):
            options = {"chunk_size": None, name: wrong}
            yield f"{name} {wrong}", good, options, error, f"{name} {message}"
    both = {"chunk_size": 3, "workspace_bytes": 2**20}
    message = "chunk_size and workspace_bytes exclude each other, got 3 and 1048576"
    yield "two sizes", good, both, ValueError, message
    message = "workspace_bytes must be at least "
    yield "too few bytes", good, {"workspace_bytes": 1}, RuntimeError, message


CALLS = {name: rest for name, *rest in bad_calls()}


def right_calls():
    """Calls with all that a wrong one may have: with noise that is given, or drawn; with masks."""
    for noise in ("eps", "seed"):
        for masks in ({}, {"lengths": [4, 2, 1], "reset": torch.zeros(4, 3, dtype=torch.bool)}):
            replace(replace(CASE, noise=noise).tensors(), **masks).call(fusedrnn, **CASE.options)


@pytest.mark.parametrize("name", CALLS)
def test_bad_call(name):
    """The error is the same after right calls, whose checks are remembered."""
    arguments, options, error, message = CALLS[name]
    tensors = [arguments.input, arguments.hx, arguments.eps, arguments.seed, *arguments.weights]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    call._remembered.clear()
    said = []
    for _ in range(2):
        state = torch.get_rng_state()
        with pytest.raises(error, match=re.escape(message)) as caught:
            arguments.call(fusedrnn, **(CASE.options | options))
        said.append(str(caught.value))
        assert torch.equal(state, torch.get_rng_state())
        right_calls()
    assert said[0] == said[1] and said[0].startswith("fusedrnn: ")
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


FLAGS = ("bias", "batch_first", "bidirectional", "training", "return_sequence")


@pytest.mark.parametrize("value", ["False", 0, 1, None, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("cell", CELLS)
def test_flags_are_bools(cell, value):
    arguments = replace(CASE, cell=cell).tensors()
    kind = type(value).__name__
    for flag in FLAGS:
        with pytest.raises(TypeError, match=f"^fusedrnn: {flag} must be a bool, got {kind}$"):
            arguments.call(fusedrnn, **(CASE.options | {flag: value}))
    if value is not None:
        message = f"^fusedrnn: recompute must be a bool or None, got {kind}$"
        with pytest.raises(TypeError, match=message):
            arguments.call(fusedrnn, **(CASE.options | {"recompute": value}))
    if cell == "stochastic_gru":
        with pytest.raises(TypeError, match=r"^fusedrnn: sample must be a bool, got"):
            replace(arguments, sample=value).call(fusedrnn)


# Tensors that no equation is defined for, but that torch can make.
STRANGE = {
    "sparse": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.flatten(1).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "mkldnn": lambda t: t.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", ["input", "hx", "eps", "weights"])
def test_tensors_without_strides(name, kind):
    case = replace(CASE, noise="eps", num_layers=1, dtype=torch.float32)
    good = case.tensors()
    value = good.weights[0] if name == "weights" else getattr(good, name)
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("a torch without mkldnn")
    strange = STRANGE[kind](value)
    bad = replace(good, **{name: one(good.weights, 0, strange) if name == "weights" else strange})
    said = r"weights\[0\]" if name == "weights" else name
    state = torch.get_rng_state()
    with pytest.raises(TypeError, match=f"^fusedrnn: {said} must be a dense tensor, got a "):
        bad.call(fusedrnn, **case.options, weight_dropout=0.5)
    assert torch.equal(state, torch.get_rng_state())


def test_cells_speak_of_the_shapes_that_they_are_given():
    with pytest.raises(RuntimeError, match=r"cx must have shape \(4, 16\), got \(1, 16\)"):
        fusedrnn.LSTMCell(8, 16)(torch.ones(4, 8), (torch.zeros(4, 16), torch.zeros(1, 16)))


def test_dtypes_of_weights_that_differ_give_no_hint():
    rnn = fusedrnn.GRU(5, 7, num_layers=2)
    rnn.weight_hh_l1.data = rnn.weight_hh_l1.double()
    message = r"weight_hh_l1 must be torch.float32 as input is, got torch.float64$"
    with pytest.raises(ValueError, match=message):
        rnn(torch.randn(4, 3, 5))


def test_hints():
    with pytest.raises(ValueError, match=r"or convert the input by .to\(torch.float32\)"):
        fusedrnn.GRU(5, 7)(torch.randn(4, 3, 5).double())
    with pytest.raises(TypeError, match=r"a pair of tensors .*, got tuple of Tensor, NoneType"):
        fusedrnn.LSTM(5, 7)(torch.randn(4, 3, 5), (torch.zeros(1, 3, 7), None))
    with pytest.raises(TypeError, match="a sequence of integers, got one with float and int"):
        fusedrnn.GRU(5, 7)(torch.randn(4, 3, 5), lengths=[1.0, 2, 3])


def test_input_on_another_device_is_told_what_to_do():
    rnn = fusedrnn.LSTM(3, 4, device="meta")
    hx = (torch.zeros(1, 2, 4, device="meta"),) * 2
    for options in ({}, {"hx": hx}):
        with pytest.raises(RuntimeError, match=r'got meta; or move the input by .to\("meta"\)'):
            rnn(torch.zeros(5, 2, 3), **options)


def test_what_is_drawn_is_drawn_after_all_checks():
    """This includes checks that depend on the plan: of the last layer, and of the backend."""
    x = torch.randn(4, 3, 5)
    draws = {"num_layers": 2, "dropout": 0.5, "zoneout": 0.5, "weight_dropout": 0.5}
    first = fusedrnn.StochasticGRU(5, 7)
    state = torch.get_rng_state()
    for options in ({"workspace_bytes": 100}, {"backend": "persistent"}):
        for return_sequence in (True, False):
            rnn = fusedrnn.StochasticGRU(5, 7, **draws, **options, return_sequence=return_sequence)
            torch.set_rng_state(state)
            with pytest.raises(RuntimeError, match=r"workspace_bytes must be|is not possible here"):
                rnn(x)
            assert torch.equal(state, torch.get_rng_state())
    # Enough for the first layer, whose input is narrow, but not for the second.
    rnn = fusedrnn.GRU(1, 64, num_layers=2, bidirectional=True, dropout=0.5)
    with pytest.raises(RuntimeError, match="workspace_bytes must be") as caught:
        rnn.workspace_bytes = 1
        rnn(x[..., :1])
    rnn.workspace_bytes = int(str(caught.value).split("at least ")[1].split()[0])
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="workspace_bytes must be"):
        rnn(x[..., :1])
    assert torch.equal(state, torch.get_rng_state())
    first(x)  # which can still draw
    assert not torch.equal(state, torch.get_rng_state())


def test_sizes_are_checked_before_anything_is_drawn():
    rnn = fusedrnn.StochasticGRU(2**19, 2, zoneout=0.5)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"^fusedrnn: sizes are too large: a layer may have 2"):
        rnn(torch.zeros(1).expand(2**21, 2000, 2**19))
    assert torch.equal(state, torch.get_rng_state())


def test_weights_in_any_collection():
    weights = list(fusedrnn.GRU(5, 7).parameters())
    x = torch.randn(4, 3, 5)
    expected, _ = fusedrnn.gru(x, weights)
    for collection in (tuple(weights), torch.nn.ParameterList(weights)):
        assert torch.equal(fusedrnn.gru(x, collection)[0], expected)
    for wrong in (weights[0], dict(enumerate(weights)), set(weights), "abc", 3, iter(weights)):
        with pytest.raises(TypeError, match="fusedrnn: weights must be a sequence of tensors, got"):
            fusedrnn.gru(x, wrong)


def test_proj_size_is_that_of_the_weights():
    weights = list(fusedrnn.LSTM(5, 7, proj_size=3).parameters())
    with pytest.raises(ValueError, match="proj_size must be 3 as weights have it, got 2"):
        fusedrnn.lstm(torch.randn(4, 2, 5), weights, proj_size=2)
