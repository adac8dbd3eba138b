"""Properties of the GPU backend that the emulation can prove, apart from values."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import DTYPES, OPTIONS, Case
from checks import allocations, assert_same
from emulator import FOLDER, SANITIZED
from layouts import shifted

import fusedrnn
from fusedrnn import _tuning as tuning

# Ten chunks and a short one; widths with and without whole groups of four.
LONG = Case(seq_len=41, batch=3, hidden_size=12, latent_size=6, chunk_size=4, dtype=torch.float32)
LONG_OPTIONS = [*OPTIONS, {"noise": "eps", "num_layers": 2}]


def results(arguments, case):
    return arguments.results(fusedrnn, **case.options)


# --- recorded chunks -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", LONG_OPTIONS, ids=str)
def test_replayed_chunks_give_the_same_bits(emulator, monkeypatch, options, dtype):
    case = replace(LONG, dtype=dtype, **options)
    arguments = case.tensors().to(dtype)
    replayed = results(arguments, case)
    # Steps whose rows become fewer are not alike.
    assert (emulator.counts()[1] > 0) == (not case.lengths)
    monkeypatch.setattr(tuning.switches, "replay_chunks", False)
    emulator.control(False, "")
    assert_same(replayed, results(arguments, case))
    assert emulator.counts()[1] == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_replayed_chunks_read_copies_of_expanded_tensors(emulator, monkeypatch, recompute):
    case = replace(LONG, noise="eps", recompute=recompute)
    arguments = case.tensors().to(torch.float32)
    rows = arguments.grad_output[:, :1].expand_as(arguments.grad_output)
    eps = arguments.eps.detach()[..., :1].expand_as(arguments.eps).requires_grad_()
    arguments = replace(arguments, grad_output=rows, eps=eps)
    replayed = results(arguments, case)
    monkeypatch.setattr(tuning.switches, "replay_chunks", False)
    assert_same(replayed, results(arguments, case))


@pytest.mark.parametrize(
    ("seq_len", "in_forward", "in_backward"),
    [
        (12, 0, 0),  # three chunks are too few
        (13, 2, 1),  # the first chunk runs unrecorded, as does the first full one of backward
        (16, 3, 2),
        (40, 9, 8),
        (41, 9, 8),
    ],
)
def test_all_chunks_but_the_outermost_are_replayed(emulator, seq_len, in_forward, in_backward):
    arguments = replace(LONG, seq_len=seq_len).tensors().to(torch.float32)
    output, _ = arguments.call(fusedrnn, **LONG.options)
    assert emulator.counts()[1] == in_forward
    output.backward(arguments.grad_output)
    assert emulator.counts()[1] == in_forward + in_backward


@pytest.mark.parametrize("hidden_size", [1, 3, 8])
@pytest.mark.parametrize("latent_size", [1, 3, 8])
@pytest.mark.parametrize("seq_len", range(13, 21))
def test_nothing_new_happens_while_recording(emulator, seq_len, latent_size, hidden_size):
    """The emulation refuses to choose an algorithm while recording; choices depend on addresses."""
    case = Case(
        "stochastic_gru",
        seq_len,
        1,
        5,
        hidden_size,
        latent_size,
        chunk_size=4,
        dtype=torch.bfloat16,
    )
    results(case.tensors().to(torch.bfloat16), case)
    assert emulator.counts()[1] > 0


# --- threads and memory --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", LONG_OPTIONS, ids=str)
def test_the_order_of_threads_does_not_matter(emulator, options, dtype):
    case = replace(LONG, dtype=dtype, **options)
    arguments = case.tensors().to(dtype)
    forwards = results(arguments, case)
    emulator.control(True, "")
    assert_same(results(arguments, case), forwards)


def test_arguments_are_left_as_they_were(emulator):
    case = replace(LONG, noise="eps")
    arguments = case.tensors().to(torch.float32)
    tensors = [*arguments.differentiable(), arguments.grad_output, arguments.grad_h_n]
    before = [t.detach().clone() for t in tensors]
    results(arguments, case)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_what_is_returned_or_kept_grows_with_the_sequence(emulator, dtype, recompute):
    sizes = []
    for seq_len in (64, 128):
        case = replace(LONG, seq_len=seq_len, recompute=recompute, dtype=dtype)
        arguments = case.tensors().to(dtype)
        calls = []
        forward = allocations(lambda a=arguments, c=case, o=calls: o.append(forward_of(a, c)))
        backward = allocations(lambda a=arguments, o=calls: o[0].backward(a.grad_output))
        grown = arguments.input.nbytes, calls[0].nbytes
        saved = case.seq_len * case.batch * (4 * case.hidden_size + 2 * case.latent_size)
        saved *= torch.promote_types(dtype, torch.float32).itemsize
        sizes.append((forward, backward, (*grown, saved)))
    (forward, backward, (input, output, saved)), (*long, _) = sizes
    grows = [small for small, large in zip(forward, long[0], strict=True) if small != large]
    assert sorted(grows) == sorted([output] if recompute else [output, saved])
    grows = [small for small, large in zip(backward, long[1], strict=True) if small != large]
    assert grows == [input]


def forward_of(arguments, case):
    return arguments.call(fusedrnn, **case.options)[0]


@pytest.mark.parametrize(
    "every",
    [pytest.param(17, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)],
)
@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="the libraries of a torch for CUDA do not pass the address sanitizer themselves",
)
def test_no_access_outside_of_a_tensor(every):
    """One of so many calls, an odd number because dtypes take turns; each night all of them."""
    words = ["c++", "-print-file-name=libasan.so"]
    sanitizer = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    if not Path(sanitizer).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    environment = os.environ | {
        "LD_PRELOAD": sanitizer,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(FOLDER.parent),
    }
    command = [sys.executable, str(FOLDER / "sanitized.py"), str(SANITIZED.make()), str(every)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


# --- what users pass -----------------------------------------------------------------------------


def test_expanded_weights_give_the_same_bits(emulator):
    arguments = LONG.tensors()
    weights = [w[:1].expand_as(w) for w in arguments.weights]
    dense = replace(arguments, weights=[w.contiguous() for w in weights])
    expanded = replace(arguments, weights=weights)
    for a in (dense, expanded):
        for tensor in a.differentiable():
            tensor.requires_grad_()
    assert_same(results(expanded, LONG), results(dense, LONG))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["eps", "grad_output", "weights"])
def test_addresses_do_not_matter(emulator, what, dtype):
    """Each of these arguments alone makes kernels load number by number."""
    case = replace(LONG, noise="eps", latent_size=8, dtype=dtype)
    arguments = case.tensors()
    value = getattr(arguments, what)
    value = [shifted(t) for t in value] if what == "weights" else shifted(value)
    expected = results(arguments.to(dtype), case)
    moved = replace(arguments, **{what: value})
    for tensor in moved.differentiable():
        tensor.requires_grad_()
    assert_same(results(moved, case), expected)


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "where"),
    [
        ("sample_forward", "3 rows of 6"),
        ("linear_forward", "3 rows of 6"),
        ("gru_forward", "3 rows of 12"),
        ("sample_backward", "3 rows of 6"),
        ("linear_backward", "3 rows of 6"),
        ("gru_backward", "3 rows of 12"),
        ("column_sums_partial", "3 rows of 60"),
        ("column_sums_total", "3 rows of 60"),
        ("set_replay_offset", "1 rows of 1"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_that_cannot_be_launched(emulator, dtype, kernel, where):
    case = replace(LONG, noise="none" if "linear" in kernel else "seed", dtype=dtype)
    arguments = case.tensors().to(dtype)
    expected = results(arguments, case)
    emulator.control(False, kernel)
    name = {torch.float32: "Float", torch.float64: "Double"}.get(dtype)
    name = name or {torch.bfloat16: "BFloat16", torch.float16: "Half"}[dtype]
    sentence = f"fusedrnn: kernel {kernel} over {where} in {name} failed to launch: it was told to"
    with pytest.raises(RuntimeError, match=sentence):
        results(arguments, case)
    emulator.control(False, "")
    assert_same(results(arguments, case), expected)


def test_a_failure_while_recording(emulator):
    """Most kernels would fail in the first chunk already, so this one runs only in later chunks."""
    arguments = LONG.tensors().to(torch.float32)
    emulator.control(False, "set_replay_offset")
    with pytest.raises(RuntimeError, match="set_replay_offset"):
        arguments.call(fusedrnn, **LONG.options)
    assert emulator.counts()[:2] == (2 * LONG.chunk_size * 2, 0)  # recorded, but never replayed
