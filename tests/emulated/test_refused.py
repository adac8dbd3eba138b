"""Kernels that a GPU refuses: `auto` takes single steps, says so, and leaves no error behind.

The emulation of the GPU backend refuses here; on a GPU without room, the driver does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import MASKED, Case, relative_errors, truth
from checks import allocations, assert_no_worse, assert_same

import fusedrnn
from fusedrnn import _helpers
from fusedrnn import _tuning as tuning

FORWARD, BACKWARD = "persistent_forward", "persistent_backward"
BASE = Case("gru", 7, 9, 5, 17, 9, chunk_size=2, dtype=torch.bfloat16)
CASES = [
    BASE,
    replace(BASE, cell="lstm", recompute=False, **MASKED),
    replace(BASE, cell="lstm", proj_size=5, num_layers=2),
    replace(BASE, cell="stochastic_gru", bidirectional=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launch_that_is_refused_is_made_up_for_by_single_steps(gpu, case):
    expected = gpu(case.results, multiprocessors=0)
    assert_same(gpu(lambda: case.results(backend="stepwise")), expected)
    exact = truth(case.same_for_torch(), "cpu")
    for refused, other in ((FORWARD, "backward_kernels"), (BACKWARD, "forward_kernels")):
        ours = gpu(case.results, refused_kernel=refused)
        assert gpu.counts["forward_kernels" if refused == FORWARD else "backward_kernels"] == 1, (
            "tried again"
        )
        assert gpu.counts[other] > 1
        assert not gpu.counts["error_is_pending"]
        assert_no_worse(ours, expected, exact)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_that_the_driver_has_no_room_for_is_not_launched(gpu, case):
    """The driver is asked before; a part of the blocks is not enough."""
    expected = gpu(case.results, multiprocessors=0)
    grid = 4  # two tiles of rows, and two blocks for 17 units
    for blocks_at_once in (0, grid - 1):
        ours = gpu(case.results, blocks_at_once=blocks_at_once)
        assert gpu.counts["forward_kernels"] == gpu.counts["backward_kernels"] == 0
        assert_same(ours, expected)
    gpu(case.results, blocks_at_once=grid)
    assert gpu.counts["forward_kernels"] > 0 and gpu.counts["backward_kernels"] > 0


@pytest.mark.parametrize("refused", [{"refused_kernel": FORWARD}, {"blocks_at_once": 3}], ids=str)
def test_what_was_asked_for_is_an_error_that_says_why(gpu, refused):
    why = "refused to run all 4 blocks" if "refused_kernel" in refused else "and the .* runs 3"
    with pytest.raises(RuntimeError, match=f"'persistent' is not possible here: .*{why}"):
        gpu(lambda: BASE.results(backend="persistent"), **refused)
    assert not gpu.counts["error_is_pending"]


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD, "gru_forward", "gather"])
def test_no_error_is_left_for_the_next_kernel_to_tell(gpu, kernel):
    case = replace(BASE, reset=True)
    multiprocessors = 132 if "persistent" in kernel else 0
    with pytest.raises(RuntimeError, match=f"kernel {kernel} over .* failed to launch"):
        gpu(case.results, failing_kernel=kernel, multiprocessors=multiprocessors)
    assert not gpu.counts["error_is_pending"]


@pytest.mark.parametrize("refused", [FORWARD, BACKWARD])
def test_workspace_bytes_hold_after_a_refusal(gpu, refused):
    """The workspace is the largest allocation here."""
    case = replace(BASE, cell="lstm", chunk_size=None, seq_len=12)
    exact = truth(case.same_for_torch(), "cpu")
    expected = gpu(case.results, multiprocessors=0)
    for limit in (2_130_000, 2_150_000, 2_200_000):
        found = []

        def run(limit=limit, found=found):
            found.append(case.results(workspace_bytes=limit, chunk_size=None))

        def run_again(run=run):
            run()  # the kernel is refused
            return allocations(run)

        most = max(gpu(run_again, refused_kernel=refused))
        assert 2**21 < most <= limit
        for ours in found:
            assert_no_worse(ours, expected, exact)


def test_what_is_refused_is_said_where_room_lacks(gpu):
    """Single steps may take more in backward than the persistent kernel that the limit allowed."""
    case = Case("stochastic_gru", 2, 128, 16, 100, 512, dtype=torch.bfloat16)
    options = {"workspace_bytes": 3_689_216, "chunk_size": None}
    with pytest.raises(RuntimeError, match=r"at least .* got 3689216\. .* has refused"):
        gpu(lambda: case.results(**options), refused_kernel=BACKWARD, multiprocessors=132)
    assert not gpu.counts["error_is_pending"]


def test_products_that_cublas_has_no_algorithm_for_are_by_torch(gpu):
    for case in (
        *CASES,
        replace(BASE, cell="stochastic_gru", noise="eps", dtype=torch.float32),
        replace(BASE, cell="lstm", dtype=torch.float64, seq_len=21),
    ):
        exact = truth(case.same_for_torch(), "cpu")
        stepwise = {"multiprocessors": 0}
        bounds = relative_errors(gpu(case.results, **stepwise), exact)
        assert (gpu.counts["replays"] > 0) == (case.seq_len > 6 and not case.lengths)
        errors = relative_errors(gpu(case.results, failing_kernel="gemm", **stepwise), exact)
        assert gpu.counts["replays"] == 0, "torch takes memory, which no recording may"
        rounded_anyway = min(torch.finfo(case.dtype).eps, 1e-4)
        for name, error in errors.items():
            assert error <= 2 * bounds[name] + rounded_anyway, name


# --- plans ---------------------------------------------------------------------------------------

SIZES = {"input_size": 64, "hidden_size": 64, "latent_size": 32, "bias": True, "noise": True}
CALL = {"seq_len": 64, "batch": 64, "dtype": "bfloat16", "chunk_size": 4}
REST = {"workspace_bytes": 0, "tuning": 0}


def ways(made):
    """The backends of forward and of backward."""
    return made["forward"]["backend"], made["backward"]["backend"]


def planned(answers, cell="gru", output_size=64, **options):
    """A plan with a driver that gives these answers for forward and backward."""
    asked = []

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
    def most_blocks(kernel):
        device, is_backward = ctypes.cast(kernel, ctypes.POINTER(ctypes.c_int))[:2]
        asked.append((device, bool(is_backward & 0xFF)))
        return answers[is_backward & 0xFF]

    address = ctypes.cast(most_blocks, ctypes.c_void_p).value
    gpu = (*_helpers.known_gpus()["H100"][:4], 3, address)
    options = {"backend": "auto"} | SIZES | CALL | REST | options
    return _helpers.plan(cell=cell, output_size=output_size, gpu=gpu, **options), asked


def test_a_plan_says_what_the_driver_objects_to():
    free, asked = planned((132, 132))
    assert (*ways(free), free["forward"]["grid"]) == ("persistent", "persistent", 32)
    assert asked == [(3, False), (3, True)]
    refused, _ = planned((-1, 132))
    assert ways(refused) == ("stepwise", "persistent")
    assert refused["reason"] == (
        "The GPU's driver has refused to run all 32 blocks of the kernel at once."
    )
    assert refused["forward"]["grid"] == refused["forward"]["shared_memory_bytes"] == 0
    few, _ = planned((132, 31))
    assert ways(few) == ("persistent", "stepwise")
    assert few["reason"] == (
        "Runs as one persistent kernel: 8 copies of the weights, 4 multiprocessors each. "
        "Backward is stepwise: "
        "The kernel needs all 32 blocks at once, and the GPU's driver runs 31."
    )
    neither, _ = planned((0, 0))
    assert ways(neither) == ("stepwise", "stepwise")
    _, asked = planned((0, 0), backend="stepwise")
    assert asked == []


REFUSED_BACKWARD = {
    "shorter chunks": {  # single steps take more than the refused kernel
        **{"cell": "gru", "noise": False, "input_size": 512, "hidden_size": 256},
        **{"output_size": 256, "workspace_bytes": 9_779_712},
    },
    "the same chunks": {  # less, in chunks of several steps
        **{"cell": "projected_lstm", "input_size": 1, "hidden_size": 16, "output_size": 8},
        "workspace_bytes": 2_399_795,
    },
}


@pytest.mark.parametrize("backend", ["auto", "persistent"])
@pytest.mark.parametrize("chunks", REFUSED_BACKWARD)
def test_a_refused_backward_leaves_forward_as_it_is(chunks, backend):
    options = {"seq_len": 2000, "batch": 128, "chunk_size": 0, "backend": backend}
    options |= REFUSED_BACKWARD[chunks]
    free, _ = planned((10**6, 10**6), **options)
    refused, _ = planned((10**6, -1), **options)
    if chunks == "shorter chunks":
        assert refused["chunk_steps"] < free["chunk_steps"]
    else:
        assert refused["chunk_steps"] == free["chunk_steps"] > 1
        assert refused["backward"]["workspace_bytes"] < free["backward"]["workspace_bytes"]
    assert ways(refused) == ("persistent", "stepwise")
    assert "Backward is stepwise: The GPU's driver has refused" in refused["reason"]
    assert refused["memory"]["most_workspace_bytes"] <= options["workspace_bytes"]


def test_chunks_are_as_long_whatever_the_driver_says():
    """A graph that was compiled before has the number of chunks in its shapes."""
    for cell in ("gru", "lstm", "stochastic_gru"):
        both = [planned(a, cell, chunk_size=0, seq_len=999)[0] for a in ((132, 132), (-1, -1))]
        assert both[0]["forward"]["backend"] != both[1]["forward"]["backend"]
        assert both[0]["chunk_steps"] == both[1]["chunk_steps"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_cell_has_kernels_or_a_reason(tmp_path):
    source, program = Path(__file__).parents[1] / "cpp" / "plans.cpp", tmp_path / "plans"
    subprocess.run(["c++", "-std=c++17", "-O1", source, "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "stochastic_lstm: There is no such kernel for the stages of this cell." in run.stdout


# --- room for others -----------------------------------------------------------------------------


@pytest.fixture
def free():
    """Sets the multiprocessors that are left free, for one test."""
    yield fusedrnn.set_free_multiprocessors
    fusedrnn.set_free_multiprocessors(None)


def grid(batch, size, **options):
    sizes = {"cell": "gru", "input_size": size, "hidden_size": size, **options}
    made = fusedrnn.plan(sizes, (64, batch, size), torch.bfloat16, "H100")
    assert made.forward.backend == "persistent"
    return made.forward.grid


def test_multiprocessors_are_left_free(free):
    assert (grid(64, 256), grid(64, 512), grid(32, 1024)) == (128, 128, 128)
    free(4)
    assert grid(64, 256) == 128
    free(16)
    assert (grid(64, 256), grid(64, 512), grid(16, 256)) == (64, 96, 32)
    assert grid(32, 1024) == 64
    free(132)
    assert grid(64, 256) == 16, "one copy of the weights is always there"
    free(None)
    assert grid(64, 256) == 128


def test_a_setting_holds_within_each_with(free):
    setting = free(5)
    for _ in range(2):
        free(7)
        with setting:
            assert tuning.free_multiprocessors() == 5


def test_where_others_have_joined_some_are_left_free(monkeypatch, free):
    group = {"is_initialized": lambda: True, "get_world_size": lambda: 2}
    for name, value in group.items():
        monkeypatch.setattr(torch.distributed, name, value)
    assert tuning.free_multiprocessors() == 16
    assert grid(64, 256) == 64
    free(0)
    assert grid(64, 256) == 128
    free(None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert grid(64, 256) == 128


def test_calls_leave_them_free_too(gpu, free):
    case = replace(BASE, seq_len=2, batch=20)
    expected = gpu(case.results)
    for count in (1, 128, 10**6):
        free(count)
        assert_same(gpu(case.results), expected)
        assert gpu.counts["forward_kernels"] > 0


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-1, ValueError, r"in \[0, 2\^31\), got -1"),
        (10**20, ValueError, r"in \[0, 2\^31\), got 1000"),
        (True, TypeError, "an int or None, got bool"),
        (1.0, TypeError, "an int or None, got float"),
    ],
)
def test_the_number_is_checked(count, error, message):
    with pytest.raises(error, match=f"^fusedrnn: count must be {message}"):
        fusedrnn.set_free_multiprocessors(count)


# --- on a GPU ------------------------------------------------------------------------------------


IN_A_PART_OF_THE_GPU = """
import torch
from torch.cuda.green_contexts import GreenContext
import fusedrnn

rnn = fusedrnn.LSTM(64, 256, device="cuda", dtype=torch.bfloat16)
input = torch.randn(40, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
def last():
    # No backward: autograd's threads are not in this part of the GPU, and nothing waits for it.
    with torch.no_grad():
        output, _ = rnn(input)
    torch.cuda.synchronize()
    return output
rnn.backend = "stepwise"
expected = last()
rnn.backend = "auto"
part = GreenContext.create(num_sms=16)
part.set_context()
try:
    got = last()
    (input + 1).sum().item()  # would tell of an error that was left behind
finally:
    part.pop_context()
plan = fusedrnn.plan(rnn, input.shape, device="cuda")
error = (got.double() - expected.double()).norm() / expected.double().norm()
assert error < 2e-2, (error, plan.reason)  # whichever way it went
"""


@pytest.mark.cuda
def test_a_grid_that_is_refused_by_a_gpu():
    """In a part of the GPU's multiprocessors, which the driver's count does not know about."""
    pytest.importorskip("torch.cuda.green_contexts")
    command = [sys.executable, "-c", IN_A_PART_OF_THE_GPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "not supported" in done.stderr or "not available" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
