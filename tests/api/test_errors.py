"""Bad input gets one clear sentence and leaves everything as it was."""

import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CELLS, MASKED, Case, operator_arguments

import fusedrnn
from fusedrnn import cells

CASE = Case(seq_len=4, batch=3, input_size=5, hidden_size=7, latent_size=6, num_layers=2)


def one(tensors, index, value):
    return [value if i == index else t for i, t in enumerate(tensors)]


def bad_calls():
    """(what is wrong, changed arguments, changed options, error, what its message says)."""
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
    yield (
        "unbatched with hx",
        arguments(input=x[:, 0]),
        {},
        RuntimeError,
        "hx must have shape (2, 7)",
    )
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
    yield (
        "meta seed",
        arguments(**without, seed=seed.to("meta")),
        {},
        RuntimeError,
        "seed must be on",
    )
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
    yield (
        "weight dtype",
        arguments(weights=one(weights, 4, weights[4].float())),
        {},
        ValueError,
        "[4]",
    )
    yield (
        "weight meta",
        arguments(weights=one(weights, 4, weights[4].to("meta"))),
        {},
        RuntimeError,
        "[4]",
    )
    yield "weight None", arguments(weights=one(weights, 4, None)), {}, TypeError, "weights[4]"
    for wrong in (-0.1, 1.5, "a"):
        yield f"dropout {wrong}", good, {"dropout": wrong}, ValueError, "probability in [0, 1]"
    # Lengths and resets, of 3 rows of 4 steps.
    for wrong, error, message in (
        ([1, 2], RuntimeError, "lengths must have shape (3,), got (2,)"),
        (torch.ones(3, 1).long(), RuntimeError, "lengths must have shape (3,), got (3, 1)"),
        ([0, 1, 2], ValueError, "lengths must be in [1, 4], got 0"),
        ([-1, 1, 2], ValueError, "lengths must be in [1, 4], got -1"),
        (torch.tensor([1, 5, 2]), ValueError, "lengths must be in [1, 4], got 5"),
        (torch.tensor([1.0, 2.0, 3.0]), ValueError, "lengths must be int64, got torch.float32"),
        (torch.tensor([1, 2, 3]).int(), ValueError, "lengths must be int64, got torch.int32"),
        ([1.0, 2, 3], TypeError, "lengths must be an int64 tensor or a sequence of ints"),
        ([True, 2, 3], TypeError, "lengths must be an int64 tensor or a sequence of ints"),
        ([[1], [2], [3]], TypeError, "lengths must be an int64 tensor or a sequence of ints"),
        (torch.ones(3, device="meta").long(), RuntimeError, "lengths must be on the CPU"),
    ):
        yield f"lengths {wrong}", arguments(lengths=wrong), {}, error, message
    unbatched = arguments(input=x[:, 0], hx=hx[:, 0], eps=eps[:, :, 0], lengths=[1])
    yield "lengths without batch", unbatched, {}, ValueError, "lengths are for a batch"
    reset = torch.zeros(4, 3, dtype=torch.bool)
    for name, wrong, error, message in (
        ("shape", reset[:3], RuntimeError, "reset must have shape (4, 3), got (3, 3)"),
        ("order", reset.t(), RuntimeError, "reset must have shape (4, 3), got (3, 4)"),
        ("rank", reset[..., None], RuntimeError, "reset must have shape (4, 3), got (4, 3, 1)"),
        ("dtype", reset.float(), ValueError, "reset must be torch.bool, got torch.float32"),
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


@pytest.mark.parametrize("name", CALLS)
def test_bad_call(name):
    arguments, options, error, message = CALLS[name]
    tensors = [arguments.input, arguments.hx, arguments.eps, arguments.seed, *arguments.weights]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    state = torch.get_rng_state()
    with pytest.raises(error, match=re.escape(message)) as caught:
        arguments.call(fusedrnn, **(CASE.options | options))
    assert str(caught.value).startswith("fusedrnn: ")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_the_operator_of_a_projection_checks_both_widths():
    case = Case("lstm", seq_len=4, proj_size=2, dtype=torch.float32)
    good = {"lengths": None, "reset": None}
    _, arguments = raw_forward(case, **good)
    weights, hx, cx = (arguments[name] for name in ("weights", "hx", "cx"))
    for message, changes in {
        "takes 3 weights, or 5 with biases": {"weights": weights[:4]},
        "weight_hh must have shape .28, 1.": {"hx": hx[..., :1]},
        "weight_ih must have shape .24, 5.": {"cx": cx[..., :6]},
        "needs cx": {"cx": None},
        "cx must have 3 dimensions": {"cx": cx[0]},
        "weight_hr must have shape .2, 7.": {"weights": [*weights[:4], weights[4].t()]},
    }.items():
        with pytest.raises(RuntimeError, match=message):
            raw_forward(case, **good, **changes)


def packed(batch_sizes):
    """Of input with 5 features, as the operator takes it."""
    rows = torch.zeros(int(sum(batch_sizes)), 5)
    return {"input": rows, "batch_sizes": torch.tensor(batch_sizes), "lengths": None, "reset": None}


def raw_forward(case, **changes):
    """The operator itself, past the checks of the functional form."""
    arguments = operator_arguments(case, case.tensors(), chunk_size=2) | changes
    return torch.ops.fusedrnn.forward(**arguments), arguments


@pytest.mark.parametrize("cell", CELLS)
def test_the_operator_itself_reads_nothing_that_is_not_there(cell):
    case = replace(CASE, cell=cell, num_layers=1, **MASKED, dtype=torch.float32)
    (output, _, _, _, cell_states), good = raw_forward(case)
    weights, lengths, reset = (good[name] for name in ("weights", "lengths", "reset"))
    is_lstm = cell == "lstm"
    last = {"gru": "bias_hh", "lstm": "bias_hh", "stochastic_gru": "bias_hz"}[cell]
    size = len(weights) // 2
    bad = {
        "no backend": {"backend": 3},
        "weights, or": {"weights": weights[:2]},
        "weight_ih must have shape .*, got .5,": {"weights": [weights[0][0], *weights[1:]]},
        "weight_ih must have shape": {"weights": [weights[0][1:], *weights[1:]]},
        f"{last} must have shape": {"weights": [*weights[:-1], weights[-1][1:]]},
        "weight_ih must have": {"weights": [*weights[:size], weights[0][1:], *weights[size + 1 :]]},
        "hx must have shape": {"hx": good["hx"][:, :2]},
        "hx must have shape .directions": {"hx": good["hx"][0]},
        "cx" if is_lstm else "takes no cx": {"cx": None if is_lstm else good["hx"]},
        "eps must have shape": {"eps": torch.zeros(2, 4, 3, 5), "seed": None},
        "seed must be Long": {"seed": torch.zeros(1)},
        "seed must have one": {"seed": torch.zeros(2).long()},
        "exclude": {"eps": torch.zeros(2, 4, 3, 6), "seed": torch.zeros(1).long()},
        "hx must be Float": {"hx": good["hx"].double()},
        "dropout needs a mask_seed": {"dropout": 0.5},
        "must be probabilities": {"zoneout": 1.5},
        "first_step must be 0 or more, and below 2": {"first_step": -1},
        "first_step must be 0 or more": {"first_step": 2**32 - 4},
        "reverse is for": {"reverse": True},
        "at least one step": {"input": good["input"][:0]},
        "3 dimensions": {"input": good["input"][0]},
        "lengths and batch_sizes exclude": {"batch_sizes": lengths},
        "lengths must have shape": {"lengths": lengths[1:]},
        "lengths must be Long": {"lengths": lengths.int()},
        "lengths must have 1 dim": {"lengths": lengths[:, None]},
        r"lengths must be in \[0, 4\], got 5": {"lengths": lengths.clamp(min=5)},
        r"lengths must be in \[0, 4\], got -1": {"lengths": lengths.clamp(max=-1)},
        "seq_len . batch must be below": {"input": good["input"][:1].expand(2**31, 3, 5)},
        "layer must have features": {"input": good["input"][..., :0]},
        "input must have 2 dimensions": packed([3, 3, 2, 1]) | {"input": good["input"]},
        "batch_sizes must be positive": packed([3, 3, 2, 0]),
        "batch_sizes must be positive, at most": packed([4, 3, 2, 1]),
        "and never rise, got 3 at step 2 after 2": packed([3, 2, 3, 1]),
        "batch_sizes must add up to the rows of input, got 9": packed([3, 3, 2, 1])
        | {"input": torch.zeros(8, 5)},
        "batch_sizes must be Long": packed([3.0, 3.0]),
        "reset must have shape": {"reset": reset.t().contiguous()},
        "reset must be Bool": {"reset": reset.float()},
        "reset must be contiguous": {"reset": reset.t().contiguous().t()},
        "float32, float64, bfloat16 or float16": {
            "input": good["input"].int(),
            "hx": good["hx"].int(),
            "cx": good["cx"].int() if is_lstm else None,
            "weights": [w.int() for w in weights],
        },
        "chunk_size": {"chunk_size": -1},
        "workspace_bytes must be 0": {"workspace_bytes": -1},
        "chunk_size and workspace_bytes exclude": {"workspace_bytes": 2**20},
        "noise_stream": {"noise_stream": -1},
        "tuning must have": {"tuning": -1},
    }
    if cell != "stochastic_gru":
        for message in ("eps must have shape", "exclude"):
            del bad[message]
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}") as caught:
            raw_forward(case, **changes)
        assert "csrc" not in str(caught.value)

    def raw_backward(**changes):
        arguments = good | {
            "grad_output": torch.ones_like(output),
            "grad_h_n": None,
            "grad_c_n": None,
        }
        arguments |= {"output": output, "saved_gates": None, "needs": 3}
        arguments |= {"chunk_cell_states": cell_states if is_lstm else None}
        return torch.ops.fusedrnn.backward(**(arguments | changes))

    raw_backward()
    for cell in (-1, len(cells.CELLS)):
        with pytest.raises(RuntimeError, match=f"fusedrnn: there is no cell {cell}"):
            raw_backward(cell=cell)
    bad = {
        "output must have shape": {"output": output[1:]},
        "output must be contiguous": {
            "output": output.transpose(0, 1).contiguous().transpose(0, 1)
        },
        "grad_output must have shape": {"grad_output": output[..., 1:]},
        "grad_h_n must have shape": {"grad_h_n": output},
        "saved_gates must be": {"saved_gates": output},
        "eps was drawn": {"needs": 8},
        "needs": {"needs": 16 << len(weights)},
    }
    if is_lstm:
        bad |= {
            "chunk_cell_states must be given": {"chunk_cell_states": None},
            "chunk_cell_states must be what forward returned": {
                "chunk_cell_states": cell_states[1:]
            },
            "grad_c_n must have shape": {"grad_c_n": output},
        }
    else:
        bad |= {
            "there is no cx": {"needs": 4},
            "chunk_cell_states must be given": {"chunk_cell_states": output},
        }
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}"):
            raw_backward(**changes)


def calls_of(tensors, path=()):
    """Each tensor among arguments, with where it is."""
    for at, value in tensors.items() if isinstance(tensors, dict) else enumerate(tensors):
        if isinstance(value, torch.Tensor):
            yield (*path, at), value
        elif isinstance(value, list):
            yield from calls_of(value, (*path, at))


@pytest.mark.parametrize("cell", CELLS)
def test_one_meta_tensor_among_others_does_not_lead_to_results_of_nothing(cell):
    case = replace(CASE, cell=cell, num_layers=1, **MASKED, dtype=torch.float32)
    (output, h_n, _, _, cell_states), good = raw_forward(case)
    backward = good | {"grad_output": output, "grad_h_n": h_n, "grad_c_n": None, "output": output}
    backward |= {"chunk_cell_states": cell_states if cell == "lstm" else None, "needs": 3}
    for operator, arguments in (
        (torch.ops.fusedrnn.forward, good),
        (torch.ops.fusedrnn.backward, backward),
    ):
        for path, tensor in calls_of(arguments):
            changed = arguments | {"weights": list(arguments["weights"])}
            where = changed
            for at in path[:-1]:
                where = where[at]
            where[path[-1]] = tensor.to("meta")
            with pytest.raises(RuntimeError, match=r"fusedrnn: .* must be on the (device|CPU)"):
                operator(**changed)
    everything = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in good.items()}
    everything["weights"] = [w.to("meta") for w in good["weights"]]
    assert torch.ops.fusedrnn.forward(**everything)[0].is_meta


FLAGS = ("bias", "batch_first", "bidirectional", "training", "return_sequence", "recompute")


@pytest.mark.parametrize("value", ["False", 0, 1, None, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("cell", CELLS)
def test_flags_are_bools(cell, value):
    arguments = replace(CASE, cell=cell).tensors()
    kind = type(value).__name__
    for flag in FLAGS:
        with pytest.raises(TypeError, match=f"^fusedrnn: {flag} must be a bool, got {kind}$"):
            arguments.call(fusedrnn, **(CASE.options | {flag: value}))
    if cell == "stochastic_gru":
        with pytest.raises(TypeError, match=r"^fusedrnn: sample must be a bool, got"):
            replace(arguments, sample=value).call(fusedrnn)


# What no equation is for, and torch makes all the same.
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
    cell, x = fusedrnn.LSTMCell(8, 16), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=r"features \(input_size\), got shape \(4, 7\)"):
        cell(x[:, :7])
    with pytest.raises(RuntimeError, match=r"cx must have shape \(4, 16\), got \(1, 16\)"):
        cell(x, (torch.zeros(4, 16), torch.zeros(1, 16)))
    with pytest.raises(RuntimeError, match=r"eps must have shape \(4, 3\), got \(4, 2\)"):
        fusedrnn.StochasticGRUCell(8, 16, 3)(x, eps=torch.zeros(4, 2))


def test_hints():
    with pytest.raises(ValueError, match=r"or convert the input by .to\(torch.float32\)"):
        fusedrnn.GRU(5, 7)(torch.randn(4, 3, 5).double())
    with pytest.raises(TypeError, match=r"a pair of tensors .*, got tuple of Tensor, NoneType"):
        fusedrnn.LSTM(5, 7)(torch.randn(4, 3, 5), (torch.zeros(1, 3, 7), None))
    with pytest.raises(TypeError, match="a sequence of ints, got one with float and int"):
        fusedrnn.GRU(5, 7)(torch.randn(4, 3, 5), lengths=[1.0, 2, 3])


def test_input_on_another_device_is_told_what_to_do():
    rnn = fusedrnn.LSTM(3, 4, device="meta")
    hx = (torch.zeros(1, 2, 4, device="meta"),) * 2
    for options in ({}, {"hx": hx}):
        with pytest.raises(RuntimeError, match=r'got meta; or move the input by .to\("meta"\)'):
            rnn(torch.zeros(5, 2, 3), **options)


def test_what_is_drawn_is_drawn_after_all_checks():
    """Also of what only an operator knows: of its last layer, and of the backend."""
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
    # Enough for the first layer, whose input is narrow, and not for the second.
    rnn = fusedrnn.GRU(1, 64, num_layers=2, bidirectional=True, dropout=0.5)
    with pytest.raises(RuntimeError, match="workspace_bytes must be") as caught:
        rnn.workspace_bytes = 1
        rnn(x[..., :1])
    rnn.workspace_bytes = int(str(caught.value).split("at least ")[1].split()[0])
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="workspace_bytes must be"):
        rnn(x[..., :1])
    assert torch.equal(state, torch.get_rng_state())
    first(x)  # and it still can be drawn
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


def test_an_interruption_that_is_swallowed_is_raised_in_the_end():
    """And not in some later call."""
    seen = []

    def handler(number, frame):
        raise KeyError("of the handler")

    x = torch.randn(20_000, 32, 64)  # far more than half a second
    rnn = fusedrnn.GRU(64, 256)
    flat = list(rnn.parameters())
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)

        def call():
            try:
                gru = fusedrnn.cells.CELLS["gru"].index
                torch.ops.fusedrnn.forward(gru, x, torch.zeros(1, 32, 256), None, flat)
            except RuntimeError as error:
                seen.append(str(error))

        with pytest.raises(KeyError, match="of the handler"):
            fusedrnn._helpers.call_interruptibly(call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == ["fusedrnn: a signal has ended the call"]
    assert fusedrnn._helpers.call_interruptibly(len, "later") == 5


@pytest.mark.parametrize("num_layers", [10**6, 10**8])
def test_weights_are_counted_first(num_layers):
    weights = list(fusedrnn.GRU(5, 7).parameters())
    with pytest.raises(ValueError, match=f"take {4 * num_layers} weights, got 4"):
        fusedrnn.gru(torch.randn(4, 3, 5), weights, num_layers=num_layers)


@pytest.mark.parametrize("make", [fusedrnn.GRU, fusedrnn.LSTM, fusedrnn.StochasticGRU])
def test_sizes_without_end(make):
    for sizes, error, message in (
        ((5, 7), ValueError, "num_layers must be at most 268435455, got 1000000000"),
        ((2**62, 7), RuntimeError, "sizes are too large"),
        ((5, 2**40), RuntimeError, "sizes are too large"),
        ((2**63, 7), ValueError, "input_size must be below 2^63"),
    ):
        options = {"num_layers": 10**9} if error is ValueError and sizes[0] == 5 else {}
        with pytest.raises(error, match=f"^fusedrnn: {re.escape(message)}"):
            make(*sizes, device="meta", **options)
    # No layer is too large, but all of them are.
    with pytest.raises(RuntimeError, match=r"^fusedrnn: no [0-9,]{26} weights of .*: too many"):
        make(5, 8 * 10**8, num_layers=5, bidirectional=True, device="meta")


HUGE = (2**31, 2**40, 2**62 - 1, 2**62, 2**63 - 1)


@pytest.mark.parametrize("device", ["cpu", "H100", "A100"])
@pytest.mark.parametrize("cell", CELLS)
def test_plans_of_sizes_near_the_end_of_int64(cell, device):
    def attempt(steps, batch, dtype=torch.bfloat16, **sizes):
        sizes = {"cell": cell, "input_size": 8, "hidden_size": 8} | sizes
        try:
            plan = fusedrnn.plan(sizes, (steps, batch, sizes["input_size"]), dtype, device)
        except (ValueError, RuntimeError) as error:
            assert str(error).startswith("fusedrnn: ")
        else:
            assert (
                min(plan.memory.training_bytes, plan.memory.most_workspace_bytes, plan.chunk_steps)
                > 0
            )
            assert plan.memory.training_bytes < 2**62 and plan.memory.most_workspace_bytes < 2**62

    for huge in HUGE:
        attempt(huge, 1)
        attempt(1, huge)
        attempt(huge, huge)
        attempt(4, 3, chunk_size=huge)
        attempt(4, 3, workspace_bytes=huge)
        for name in ("input_size", "hidden_size", "num_layers"):
            attempt(4, 3, **{name: huge})
            attempt(2**31, 1, torch.float64, **{name: huge})
        attempt(2**16, 2**15, hidden_size=huge, input_size=huge)
    attempt(2**32 - 1, 1, torch.float64, input_size=2**16, hidden_size=2**16)


def test_wrong_plans():
    sizes = {"cell": "gru", "input_size": 8, "hidden_size": 8}
    for arguments, error, message in (
        ((sizes, 5), TypeError, r"input_shape must be (seq_len, batch, 8), got int"),
        ((sizes, None), TypeError, "got NoneType"),
        ((sizes, "abc"), TypeError, "got str"),
        ((sizes, (4, 3.0, 8)), TypeError, "got (4, 3.0, 8)"),
        ((sizes, ()), ValueError, "input_shape must be (seq_len, batch, 8), got ()"),
        ((sizes, (4, 0, 8)), ValueError, "each at least 1, got (4, 0, 8)"),
        ((sizes, (4, 3, 8), torch.float32, 3.5), ValueError, "device must be cpu, a CUDA device"),
        ((sizes, (4, 3, 8), torch.float32, object()), ValueError, "device must be cpu"),
        ((sizes | {"cell": []}, (4, 3, 8)), ValueError, "cell must be one of"),
        ((sizes | {"heads": 3}, (4, 3, 8)), TypeError, "GRU has no argument 'heads'"),
        (({"cell": "gru", "input_size": 8}, (4, 3, 8)), TypeError, "GRU needs hidden_size"),
        ((3, (4, 3, 8)), TypeError, "module must be a fusedrnn.GRU"),
    ):
        with pytest.raises(error, match=re.escape(message)) as caught:
            fusedrnn.plan(*arguments)
        assert str(caught.value).startswith("fusedrnn: ")
    with pytest.raises(TypeError, match="sample must be a bool"):
        fusedrnn.plan(sizes, (4, 3, 8), torch.float32, "cpu", sample="no")


def test_generators():
    rnn = fusedrnn.StochasticGRU(5, 7)
    with pytest.raises(TypeError, match=r"^fusedrnn: generator must be a torch.Generator, got int"):
        rnn(torch.randn(4, 3, 5), generator=3)


def test_proj_size_is_that_of_the_weights():
    weights = list(fusedrnn.LSTM(5, 7, proj_size=3).parameters())
    with pytest.raises(ValueError, match="proj_size must be 3 as weights have it, got 2"):
        fusedrnn.lstm(torch.randn(4, 2, 5), weights, proj_size=2)


def test_lengths_on_another_default_device():
    rnn = fusedrnn.GRU(5, 7)
    x = torch.randn(4, 3, 5)
    expected, _ = rnn(x, lengths=[4, 2, 1])
    packed = torch.nn.utils.rnn.pack_sequence([x[:4, 0], x[:2, 1], x[:1, 2]])
    try:
        torch.set_default_device("meta")
        output, _ = rnn(x, lengths=[4, 2, 1])
        of_packed, _ = rnn(packed)
        by_loop, _ = fusedrnn.reference.gru(x, list(rnn.parameters()), lengths=[4, 2, 1])
    finally:
        torch.set_default_device(None)
    assert torch.equal(output, expected)
    assert torch.equal(of_packed.data[:3], expected[0])
    torch.testing.assert_close(by_loop, expected)


INTERRUPTED = """
import os, signal, sys, threading, time
import torch, fusedrnn

rnn = fusedrnn.GRU(64, 512)
x = torch.randn(20_000, 32, 64)  # minutes
small = x[:9].requires_grad_()
before = rnn(small)[0]
call = lambda: rnn(x)
if sys.argv[1] == "backward":
    # Half a minute, after forward took a third of that.
    total = rnn(x[:6_000].requires_grad_())[0].sum()
    call = total.backward
seen = []
# As usual, also where a shell that is not a terminal's has started this in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGUSR1, lambda *_: seen.append(torch.tensor(1e-40) * 1))
stop = threading.Event()

def others():  # calls of other threads neither take the exception nor lose it
    while not stop.is_set():
        rnn(small)

busy = [threading.Thread(target=others, daemon=True) for _ in range(2)]
for thread in busy:
    thread.start()
signals = [signal.SIGUSR1, signal.SIGINT]  # a handler that returns does not end the call

def send():
    for number in signals:
        time.sleep(0.3)
        os.kill(os.getpid(), number)

threading.Thread(target=send, daemon=True).start()
state = torch.get_rng_state()
try:
    call()
except KeyboardInterrupt:
    print("interrupted")
stop.set()
for thread in busy:
    thread.join()
assert torch.equal(state, torch.get_rng_state())
assert len(seen) == 1 and seen[0] > 0  # denormals are not flushed in handlers
after = rnn(small)[0]
assert torch.equal(before, after)
grads = [torch.autograd.grad(output.sum(), small)[0] for output in (before, after)]
assert torch.equal(*grads)
print("nothing lost")
"""


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_signals_end_a_long_call(what):
    """With time to spare: this is no measurement."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, what], capture_output=True, text=True, timeout=500
    )
    assert run.stdout.splitlines() == ["interrupted", "nothing lost"], run.stderr


def test_the_library_says_when_it_is_not_built(tmp_path):
    source = Path(fusedrnn.__file__).parent
    (tmp_path / "fusedrnn").mkdir()
    for file in source.glob("*.py"):
        shutil.copy(file, tmp_path / "fusedrnn")
    run = subprocess.run(
        [sys.executable, "-c", "import fusedrnn"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "fusedrnn is not built" in run.stderr and "pip install ." in run.stderr


def test_a_leftover_library_is_not_loaded(tmp_path):
    """Of another build: what is loaded has the very name that this one gives."""
    source = Path(fusedrnn.__file__).parent
    shutil.copytree(source, tmp_path / "fusedrnn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_core.so", "_core.0.so", "_core_old.abi3.so", "_cuda.0.so"):
        (tmp_path / "fusedrnn" / name).write_text("no library at all")
    code = "import fusedrnn; fusedrnn.GRU(2, 3); print(fusedrnn.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(tmp_path / "fusedrnn/__init__.py")
