"""Bad input gets one clear sentence and leaves everything as it was."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CELLS, MASKED, Case

import fusedrnn

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
    good = {"cell": "projected_lstm", "lengths": None, "reset": None}
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
    a = case.tensors()
    arguments = {
        "cell": a.cell,
        "input": a.input,
        "hx": a.hx,
        "cx": a.cx,
        "weights": a.weights,
        "lengths": a.lengths,
        "batch_sizes": None,
        "reset": a.reset,
        "eps": a.eps,
        "seed": a.seed,
        "dropout": 0.0,
        "zoneout": 0.0,
        "state_zoneout": 0.0,
        "mask_seed": None,
        "layer": 0,
        "first_step": 0,
        "reverse": False,
        "chunk_size": 2,
        "workspace_bytes": 0,
        "backend": "auto",
        "keep": False,
        "replay": True,
        "by_flags": False,
        "overlap": False,
    }
    arguments |= changes
    return torch.ops.fusedrnn.forward(**arguments), arguments


@pytest.mark.parametrize("cell", CELLS)
def test_the_operator_itself_reads_nothing_that_is_not_there(cell):
    case = replace(CASE, cell=cell, num_layers=1, **MASKED, dtype=torch.float32)
    (output, _, _, _, states), good = raw_forward(case)
    weights, lengths, reset = (good[name] for name in ("weights", "lengths", "reset"))
    is_lstm = cell == "lstm"
    last = {"gru": "bias_hh", "lstm": "bias_hh", "stochastic_gru": "bias_hz"}[cell]
    size = len(weights) // 2
    bad = {
        "no cell": {"cell": "elman"},
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
        "layer": {"layer": -1},
    }
    if cell != "stochastic_gru":
        for message in ("eps must have shape", "exclude"):
            del bad[message]
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=message):
            raw_forward(case, **changes)

    def raw_backward(**changes):
        arguments = {k: v for k, v in good.items() if k != "keep"}
        arguments |= {"grad_output": torch.ones_like(output), "grad_h_n": None, "grad_c_n": None}
        arguments |= {"output": output, "kept": None, "needs": 3}
        arguments |= {"states": states if is_lstm else None}
        return torch.ops.fusedrnn.backward(**(arguments | changes))

    raw_backward()
    bad = {
        "output must have shape": {"output": output[1:]},
        "output must be contiguous": {
            "output": output.transpose(0, 1).contiguous().transpose(0, 1)
        },
        "grad_output must have shape": {"grad_output": output[..., 1:]},
        "grad_h_n must have shape": {"grad_h_n": output},
        "kept must be": {"kept": output},
        "eps was drawn": {"needs": 8},
        "needs": {"needs": 16 << len(weights)},
    }
    if is_lstm:
        bad |= {
            "states must be given": {"states": None},
            "states must be what forward returned": {"states": states[1:]},
            "grad_c_n must have shape": {"grad_c_n": output},
        }
    else:
        bad |= {"there is no cx": {"needs": 4}, "states must be given": {"states": output}}
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=message):
            raw_backward(**changes)


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
