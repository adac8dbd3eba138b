"""Short forms of all experiments of the folder stress, and checks that they notice faults."""

from __future__ import annotations

import ctypes
import itertools
import signal
import time
from dataclasses import replace

import pytest
import torch

from stress import CELLS, Scale, masked, no_memory, processes, results_of
from stress.__main__ import EXPERIMENTS
from stress.bits import beyond_rounding, changed, copied, same_bits
from stress.growth import growth
from stress.isolation import Broken, isolated
from stress.poison import wrong_rows
from stress.threads import repetitions, verdict

GRU = CELLS["gru"]


@pytest.mark.ci_has_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_nothing_is_wrong(name):
    assert EXPERIMENTS[name].row(Scale(short=True)).wrong == []


# --- that what is wrong would be noticed ---------------------------------------------------------


@pytest.fixture
def results():
    torch.set_num_threads(1)
    return copied(GRU.results())


def flipped(tensor):
    """A copy in which the lowest bit of one number differs."""
    other = tensor.clone()
    other.view(torch.int32).view(-1)[3] ^= 1
    return other


def test_bits_are_those_of_nan_and_of_zero_too():
    a = torch.tensor([0.0, torch.nan])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([-0.0, torch.nan]))
    assert not same_bits(a, a.double())


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("leak", ["malloc", "tensor", "object"])
def test_a_leak_is_noticed(leak):
    kept = []
    libc = ctypes.CDLL(None)
    if leak == "malloc" and not hasattr(libc, "mallinfo2"):
        pytest.skip("malloc cannot be asked")
    leaks = {
        "tensor": lambda: kept.append(torch.zeros(1)),
        "object": lambda: kept.append(object()),
        "malloc": lambda: libc.malloc(16),
    }
    found = growth(leaks[leak], steps=2_000).wrong
    names = {"tensor": "tensors", "object": "objects", "malloc": "allocated"}
    assert any(text.startswith(names[leak]) for text in found)


def test_a_changed_bit_is_noticed(results):
    other = results | {"h_n": flipped(results["h_n"])}
    assert changed(other, results) == ["h_n"]
    assert changed({n: t for n, t in results.items() if n != "h_n"}, results) == ["h_n"]
    assert beyond_rounding(other, results) == []
    assert beyond_rounding(other | {"h_n": results["h_n"] * torch.nan}, results) == ["h_n"]


def test_a_result_of_no_number_of_threads_is_noticed(results):
    other = results | {"output": flipped(results["output"])}
    assert verdict(other, [results, other]) == "same bits"
    assert verdict(other, [results]) == "same but for rounding"
    wrong = results | {"output": results["output"] * 1.001}
    assert verdict(wrong, [results, other]) == "wrong: output"


def test_a_repetition_with_other_bits_is_noticed(results):
    others = itertools.cycle([results, results, results | {"grad_hx": flipped(results["grad_hx"])}])
    (found,) = repetitions("gru", lambda: next(others), results, 6)
    assert found == "gru: 2 of 6 times others: grad_hx"


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_hx"])
def test_a_poisoned_row_that_reaches_another_is_noticed(name):
    def mixed(case, arguments):
        results = results_of(case, arguments)
        mean = results[name].nan_to_num().clamp(-1, 1).mean(-2, keepdim=True)
        return results | {name: results[name] + 0.01 * mean}

    found = list(wrong_rows(replace(GRU, batch=3), [1], mixed))
    assert any(f and f"reached {name} of others" in f for f in found)
    assert not any(wrong_rows(replace(GRU, batch=3), [1]))


def test_errors_that_do_not_say_that_memory_ran_out_are_noticed():
    ours = "fusedrnn: out of memory: there is no room"
    assert no_memory.kind_of(RuntimeError(ours)) == "of fusedrnn"
    assert "behind" in no_memory.kind_of(RuntimeError(f"a place: {ours}"))
    assert no_memory.kind_of(RuntimeError("std::bad_alloc")).startswith("wrong")
    assert no_memory.kind_of(ValueError(ours)).startswith("wrong")


def _failures_of_a_spoiled_call(spoil):
    """The finding for a call that changes something although memory has run out."""
    kept = no_memory.make_room_for_small_things()
    case = replace(GRU, **no_memory.SIZES, noise="drawn")
    call = no_memory.Call(case, case.tensors().to(case.dtype), is_backward=False)
    forward = call.forward

    def failing():
        try:
            return forward()
        except RuntimeError:
            spoil(call.arguments)
            raise

    call.forward = failing
    kinds = list(no_memory.failures(call, 2 * no_memory.MIB))
    del kept
    return kinds


def _spoil_weight(arguments):
    with torch.no_grad():
        arguments.weights[0][0, 0] += 1


def _spoil_mode(arguments):
    torch.set_flush_denormal(True)


@pytest.mark.parametrize(
    ("spoil", "found"), [(_spoil_weight, "weights[0]"), (_spoil_mode, "denormals are flushed")]
)
def test_what_a_failure_leaves_behind_is_noticed(spoil, found):
    kinds = isolated(
        _failures_of_a_spoiled_call, spoil, seconds=120, environment=no_memory.ENVIRONMENT
    )
    assert any(kind.startswith("wrong") and found in kind for kind in kinds)


def test_other_bits_of_another_process_are_noticed():
    work = processes.Work.of(replace(masked(GRU), noise="eps"))
    expected = processes.results_of([work], 1)
    with torch.no_grad():
        work.rnn.bias_ih_l0[0] += 1e-3
    answer = processes.results_of([work], 1)
    assert processes.differences(answer, expected) == [f"other bits: {work.name}"]
    assert processes.differences({}, expected) == [f"other bits: {work.name}"]


def test_a_process_that_does_not_answer_is_noticed():
    with pytest.raises(Broken, match="hung"):
        isolated(time.sleep, 60, seconds=0.5, method="fork")
    with pytest.raises(Broken, match="died with exit status -9"):
        isolated(signal.raise_signal, signal.SIGKILL, seconds=60, method="fork")
    with pytest.raises(Broken, match="ValueError"):
        isolated(int, "a", seconds=60)
