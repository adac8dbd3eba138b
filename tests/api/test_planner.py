"""Plans from sizes and the properties of GPUs that are not in this machine.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import CELLS
from checks import peak_bytes

import fusedrnn
from fusedrnn import _helpers

sys.path.append(str(Path(__file__).parents[2]))  # last, so that fusedrnn is the installed one

BF16 = torch.bfloat16
GPUS = list(_helpers.known_gpus())


def plan(cell, batch, size, gpu="H100", *, dtype=BF16, seq_len=1024, **options):
    sizes = {"cell": cell, "input_size": size, "hidden_size": size, **options}
    return fusedrnn.plan(sizes, (seq_len, batch, size), dtype, gpu)


def test_the_gpus_are_those_of_the_documentation():
    assert GPUS == ["A100", "H100", "H200", "B200", "L40S", "RTX 4090"]
    assert all(f'"{name}"' in fusedrnn.plan.__doc__ for name in GPUS)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("batch", "size"), [(16, 256), (64, 256), (64, 512), (32, 1024), (1, 1)])
def test_sizes_that_fit_are_persistent(cell, batch, size, gpu):
    made = plan(cell, batch, size, gpu)
    name, capability, multiprocessors, shared_bytes, *_ = _helpers.known_gpus()[gpu]
    assert name == gpu
    assert made.forward.backend == "persistent" and made.reason.startswith(
        "Runs as one persistent kernel: "
    )
    assert 0 < made.forward.grid <= multiprocessors and made.forward.threads == 256
    assert 0 < made.forward.weight_registers < 200  # of 255
    assert 0 < made.forward.shared_memory_bytes <= shared_bytes
    assert capability >= 80


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"batch": 64, "size": 2048}, "2048 is above the 1024"),
        ({"batch": 64, "size": 64, "latent_size": 1025}, "1025 is above the 1024"),
        ({"batch": 256, "size": 1024}, "faster than a persistent one with 16 tiles"),
        ({"batch": 16, "size": 256, "dtype": torch.float32}, "TF32, which torch is not told to"),
        ({"batch": 16, "size": 256, "dtype": torch.float64}, "for bfloat16, float16 and float32"),
        ({"batch": 16, "size": 256, "gpu": "cpu"}, "for GPUs only"),
        ({"batch": 1, "size": 1, "chunk_size": 2**31, "seq_len": 2**31}, "too long to be counted"),
        ({"batch": 16, "size": 256, "backend": "stepwise"}, "backend says so"),
        ({"batch": 16, "size": 2048, "backend": "stepwise"}, "backend says so"),
    ],
    ids=str,
)
def test_the_others_are_stepwise_and_say_why(case, reason):
    made = plan("stochastic_gru", **case)
    assert made.forward.backend == "stepwise" and reason in made.reason
    kernel = ("grid", "threads", "weight_registers", "shared_memory_bytes")
    assert {getattr(made.forward, name) for name in kernel} == {0}
    case.pop("backend", None)
    if "faster" in reason:
        assert plan("stochastic_gru", backend="persistent", **case).forward.backend == "persistent"
    elif reason != "backend says so":
        with pytest.raises(RuntimeError, match=f"is not possible here: .*{reason}"):
            plan("stochastic_gru", backend="persistent", **case)


@pytest.fixture(params=["cudnn.rnn", "cudnn", "backends"])
def tf32(request):
    """Sets whether TF32 is allowed, by one of torch's switches for recurrent layers."""
    backends = torch.backends
    backends.cudnn.rnn.fp32_precision = "none"  # "none" follows the more general switches
    of = {"cudnn.rnn": backends.cudnn.rnn, "cudnn": backends.cudnn, "backends": backends}
    of[request.param].fp32_precision = "tf32"
    yield
    of[request.param].fp32_precision = "none"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("cell", CELLS)
def test_float32_is_persistent_where_torch_allows_tf32(cell, gpu, tf32):
    """In float32, half as many columns take the same registers."""
    made, half = (plan(cell, 64, 256, gpu, dtype=dtype) for dtype in (torch.float32, BF16))
    assert (
        made.forward.backend == made.backward.backend == "persistent" and made.reason == half.reason
    )
    assert (made.fp32_precision, half.fp32_precision) == ("tf32", "")
    assert "\nproducts of float32: tf32\n" in str(made) and "float32" not in str(half)
    assert plan(cell, 64, 256, "cpu", dtype=torch.float32).fp32_precision == "ieee"
    assert made.forward.weight_registers == 2 * half.forward.weight_registers < 200
    assert made.forward.workspace_bytes > half.forward.workspace_bytes
    assert plan(cell, 16, 512, gpu, dtype=torch.float32).forward.backend == "persistent"
    too_wide = plan(cell, 16, 513, gpu, dtype=torch.float32)
    assert too_wide.forward.backend == "stepwise" and "513 is above the 512" in too_wide.reason
    assert plan(cell, 16, 256, gpu, dtype=torch.float64).forward.backend == "stepwise"


def test_torch_allows_tf32_by_default():
    """A process of its own checks that: torch's older and newer switches exclude each other."""
    program = """
import fusedrnn, torch
sizes = {"cell": "gru", "input_size": 64, "hidden_size": 256}
def backend():
    return fusedrnn.plan(sizes, (64, 16, 64), torch.float32, "H100").forward.backend
print(backend())
torch.backends.cudnn.allow_tf32 = False
print(backend())
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert said.split() == ["persistent", "stepwise"]


def test_products_of_matrices_have_a_switch_of_their_own():
    torch.backends.cuda.matmul.allow_tf32 = True
    made = plan("gru", 16, 256, dtype=torch.float32)
    assert "torch is not told to allow" in made.reason and made.fp32_precision == "ieee"
    torch.backends.cuda.matmul.allow_tf32 = False


def test_the_model():
    """By docs/gpu.md a step takes an exchange, and time for each 256 columns of 8 rows."""
    assert plan("gru", 64, 512).forward.modelled_step_us == pytest.approx(0.6 + 0.1 * 2 * 2)
    assert plan("stochastic_gru", 16, 256).forward.modelled_step_us == pytest.approx(2 * 0.7)
    assert plan("lstm", 64, 2048).forward.modelled_step_us == 4
    assert plan("lstm", 64, 2048, "cpu").forward.modelled_step_us == 0


@pytest.mark.parametrize(
    ("cell", "rate", "dtype", "rows", "recomputed"),
    [  # an H100's rates, and rows of weights in units of the width
        ("gru", 989.4, BF16, 6, 6),
        ("lstm", 989.4, torch.float16, 8, 8),
        ("stochastic_gru", 66.9, torch.float32, 8, 8),
        ("gru", 66.9, torch.float64, 6, 6),
    ],
)
def test_the_model_of_both_passes(cell, rate, dtype, rows, recomputed):
    """A pass takes its steps, GEMMs over all rows of a chunk, and a fixed cost of each chunk."""
    seq_len, batch, size, chunks = 1024, 64, 512, 32
    made = plan(cell, batch, size, dtype=dtype, chunk_size=seq_len // chunks)
    stages = 2 if cell == "stochastic_gru" else 1
    is_lstm, is_persistent = cell == "lstm", dtype.itemsize == 2
    assert made.backward.backend == ("persistent" if is_persistent else "stepwise")
    if is_persistent:
        tiles, depth, gates = 2, 2, {"gru": 3, "lstm": 4}[cell]
        forward_us = 0.6 + 0.1 * depth * tiles
        backward_us = 0.6 + 0.1 * gates * depth * tiles + (0.45 * tiles if is_lstm else 0)
    else:
        forward_us = backward_us = 4 * stages
    side = 4 if is_lstm else 3  # rows of the input's weight, in units of the width

    def chunks_us(products, gemms, launches=0, kernels=0):
        """Microseconds of all chunks. products: of (rows of a chunk, H) and (H, H)."""
        arithmetic = 2 * products * seq_len * batch * size**2 / (1e6 * rate)
        return arithmetic + chunks * (4 * gemms + 3 * launches + 10 * kernels)

    forward = seq_len * forward_us + chunks_us(side, 1, 0, is_persistent)
    assert made.forward.modelled_us == pytest.approx(forward)
    # GEMMs for the gradients of all weights and of the input. A GRU's input gates are in two parts,
    # and their sum is rounded afterwards in 16 bits. Gradients of biases take two kernels.
    parts = 1 if is_lstm else 2
    launches = 2 + (stages - 1) + is_persistent + (parts == 2 and is_persistent)
    leaves = chunks_us(rows + side, 2 * parts + stages, launches, is_persistent)
    saved = seq_len * backward_us + leaves
    assert made.backward.modelled_us_without_recompute == pytest.approx(saved)
    recompute = chunks_us(recomputed, parts + stages)
    assert made.backward.modelled_us == pytest.approx(saved + recompute)


def test_the_model_of_the_host():
    """A chunk of one short step takes the CPU's time to enqueue its work, 2 us an item."""
    made = plan("gru", 1, 64, chunk_size=1, recompute=True)
    gemms, launches = 8, 4
    assert made.forward.modelled_us == pytest.approx(
        1024 * (4 + 10 + 0.7), rel=1e-4
    )  # here the GPU is slower
    device_us = 4 * gemms + 3 * launches + 10
    assert made.backward.modelled_us == pytest.approx(1024 * device_us, rel=0.1)
    stepwise = plan("gru", 1, 64, chunk_size=1024, backend="stepwise")
    assert stepwise.forward.modelled_us == pytest.approx(4 * 1024 + 4, rel=0.01)


def test_the_model_of_other_gpus():
    """GPUs with a known name or compute capability have known rates per multiprocessor."""
    sizes = dict(input_size=512, hidden_size=512, latent_size=0, output_size=512, bias=True)
    call = dict(cell="gru", noise=False, seq_len=1024, batch=64, dtype="float32", chunk_size=32)
    rest = dict(workspace_bytes=0, backend="stepwise", tuning=_helpers.TUNING["tf32"])

    def us(*gpu):
        made = _helpers.plan(gpu=gpu, **sizes, **call, **rest)
        return made["backward"]["modelled_us"]

    known = _helpers.known_gpus()
    assert us("NVIDIA H100 80GB HBM3", *known["H100"][1:]) == us(*known["H100"])
    assert us("NVIDIA GeForce RTX 4090", *known["RTX 4090"][1:]) == us(*known["RTX 4090"])
    assert us("NVIDIA L4", 89, 58, 99 << 10, 0, 0) > us(*known["L40S"])
    assert us("another", 89, 142, 99 << 10, 0, 0) == us(*known["L40S"])
    assert us("another", 75, 72, 64 << 10, 0, 0) == 0  # unknown
    assert plan("gru", 64, 512, "cpu").backward.modelled_us == 0


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("dtype", "sum_bytes"), [(BF16, 4), (torch.float64, 8)])
def test_saved_bytes(cell, dtype, sum_bytes):
    made = plan(cell, 16, 256, "cpu", dtype=dtype, chunk_size=100)
    states = 11 * 16 * 256 * sum_bytes if cell == "lstm" else 0
    assert made.memory.saved_bytes == states
    saved = 1024 * 16 * (6 if cell == "stochastic_gru" else 4) * 256 * sum_bytes
    assert made.memory.saved_bytes_without_recompute == states + saved


def test_chunks_of_the_cpu_have_256_rows():
    for seq_len, batch, steps in ((1024, 16, 16), (1000, 100, 3), (20, 3, 20), (50, 100_000, 1)):
        assert plan("gru", batch, 8, "cpu", seq_len=seq_len).chunk_steps == steps


@pytest.mark.parametrize(
    ("cell", "dtype", "steps"),
    [  # the fixed cost of a chunk in both passes / 3% of a step; rows in multiples of 128
        ("gru", torch.float64, 176),  # (4 + 8 * 4 + 2 * 3) / (0.03 * 8), and up to 8 steps
        ("lstm", torch.float64, 112),  # (4 + 3 + 5 * 4 + 3 * 3) / (0.03 * (4 + 7))
        ("stochastic_gru", torch.float64, 112),  # (4 + 10 * 4 + 3 * 3) / (0.03 * 16)
        ("gru", BF16, 1424),  # (4 + 10 + 8 * 4 + 4 * 3 + 10) / (0.03 * (0.7 + 0.9))
    ],
)
def test_a_chunk_costs_little_besides_its_steps(cell, dtype, steps):
    made = plan(cell, 16, 256, dtype=dtype, seq_len=50 * steps)
    assert made.chunk_steps == steps
    assert made.chunk_reason == (
        "Long enough that a chunk's fixed cost is at most 3% of the time of its steps."
    )


def limit_of(made):
    """The limit of memory in training."""
    half = made.memory.nn_lstm_training_bytes / 2
    return max(half / 2, min(half, 256 << 20))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_chunks_on_a_gpu_are_as_long_as_memory_allows(cell, dtype):
    reasons = set()
    for seq_len, batch, size in (
        *((1024, 16, 256), (1024, 64, 256), (1024, 64, 512), (4096, 64, 512), (256, 64, 2048)),
        *((100_000, 1, 64), (20_000, 64, 512), (20, 3, 64), (64, 512, 256), (1000, 5000, 8)),
        *((1001, 7, 300), (512, 65, 512), (2, 4, 8), (4096, 4, 8)),
    ):
        options = {"dtype": dtype, "seq_len": seq_len}
        made = plan(cell, batch, size, **options)
        steps, why = made.chunk_steps, made.chunk_reason
        reasons.add(why)
        least = max(-(-256 // batch), min(8, -(-1024 // batch)))
        if why == "The most that take no more memory than the shortest chunks.":
            shortest = plan(cell, batch, size, **options, chunk_size=least)
            assert limit_of(made) < made.memory.training_bytes <= shortest.memory.training_bytes
            continue
        if seq_len <= least:
            assert steps == seq_len
            continue
        # More steps mean fewer states to save.
        is_least = made.backward.workspace_bytes <= made.memory.saved_bytes
        assert made.memory.training_bytes <= limit_of(made) or is_least
        if "memory" in why:
            longer = -(-seq_len // max(1, -(-seq_len // steps) - 1))  # one chunk less
            rounded = math.lcm(batch, 128) // batch + longer
            more = plan(cell, batch, size, **options, chunk_size=max(longer, rounded))
            assert more.memory.training_bytes > limit_of(made)
        if batch <= 64 and batch.bit_count() == 1 and steps < seq_len:
            assert steps * batch % 128 == 0
    assert len(reasons) >= 4, reasons


@pytest.mark.parametrize("gpu", ["H100", "cpu"])
def test_why_chunks_are_as_long_as_they_are(gpu):
    def why(**options):
        made = plan("lstm", 16, 64, gpu, **options)
        return made.chunk_steps, made.chunk_reason

    assert why(chunk_size=40) == (40, "chunk_size says so.")
    assert why(chunk_size=4000) == (1024, "The whole sequence.")
    steps, reason = why(workspace_bytes=4 << 20)
    assert 8 < steps < 1024 and reason == "The most that fit into workspace_bytes."
    assert why(workspace_bytes=1 << 30) == (1024, "The whole sequence.")
    assert why(seq_len=3) == (3, "The whole sequence.")
    if gpu == "cpu":
        assert why() == (
            16,
            "At least 256 rows (steps x batch); longer chunks are not faster on a CPU.",
        )


def test_plans_depend_on_the_gpu():
    assert plan("gru", 128, 1024, "H100").forward.backend == "persistent"
    assert plan("gru", 128, 1024, "A100").forward.backend == "stepwise"  # too few of them


@pytest.mark.parametrize("gpu", ["H100", "cpu"])
@pytest.mark.parametrize("cell", CELLS)
def test_workspace_does_not_grow_with_the_sequence(cell, gpu):
    short, long = (plan(cell, 64, 256, gpu, seq_len=n, chunk_size=16) for n in (64, 4096))
    for name in ("forward", "backward"):
        assert getattr(short, name).workspace_bytes == getattr(long, name).workspace_bytes
    assert short.memory.most_workspace_bytes == long.memory.most_workspace_bytes
    assert 0 < short.forward.workspace_bytes < short.backward.workspace_bytes
    assert plan(cell, 64, 256, gpu, chunk_size=32).chunk_steps == 32


def test_modules_and_shapes():
    rnn = fusedrnn.GRU(5, 7, 3, batch_first=True, bidirectional=True, dtype=BF16)
    made = fusedrnn.plan(rnn, (4, 100, 5), device="H100")
    assert made == plan("gru", 4, 5, seq_len=100, hidden_size=7, num_layers=3, bidirectional=True)
    assert fusedrnn.plan(rnn, (100, 5), device="H100").chunk_steps == 100
    half = fusedrnn.plan(rnn, (4, 100, 5), torch.float16, "H100")
    assert half == made
    noise, mean = (
        fusedrnn.plan(
            fusedrnn.StochasticGRU(5, 7, dtype=BF16), (100, 4, 5), device="H100", sample=sample
        )
        for sample in (True, False)
    )
    registers = [made.forward.weight_registers for made in (noise, mean)]
    assert registers[0] > registers[1]  # half of weight_hz is not used


def test_a_plan_is_printed_with_its_reason():
    made = plan("gru", 64, 512, chunk_size=32)
    text = str(made)
    assert text.startswith("Runs as one persistent kernel: ")
    lines = {line.rpartition("  ")[0].strip(): line.split()[-1] for line in text.splitlines()}
    assert lines["workspace bytes"] == f"{made.backward.workspace_bytes:,}"
    assert made.forward.workspace_bytes > 10**7
    assert re.search(r"^  modelled step us +1\.0$", text, re.MULTILINE)
    saved_us = made.backward.modelled_us_without_recompute
    assert saved_us > 1000 and lines["modelled us without recompute"] == f"{saved_us:,.1f}"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["auto", "stepwise"])
def test_bytes_of_a_row(cell, dtype, backend):
    """A row takes pre-activations, gradients if they are apart, z or c, and parts of bias sums."""
    pytest.importorskip("rich")
    from bench.model import row_bytes

    # loc and logvar leave one factor, but have two gradients.
    numbers, gradients = {"stochastic_gru": (5, 6), "gru": (4, 4), "lstm": (4, 4)}[cell]
    if dtype == torch.float32:
        counted = 4 * gradients  # gradients overwrite the numbers, and all of them fit
    else:
        counted = 4 * numbers + 2 * gradients * (backend == "auto")
    counted += {"stochastic_gru": dtype.itemsize, "gru": 0, "lstm": 4}[cell]  # c is in float32
    assert counted <= row_bytes(cell, dtype, backend) <= counted + 0.5


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_what_training_holds(cell, dtype):
    """Counts the bytes of training independently, for H = I = Z."""
    seq_len, batch, size = 1024, 64, 256
    made = plan(cell, batch, size, dtype=dtype, seq_len=seq_len)
    weights = {"gru": 6, "lstm": 8, "stochastic_gru": 8}[cell] * size * (size + 1)
    output_bytes = seq_len * batch * size * dtype.itemsize
    states = (
        2 * (2 if cell == "lstm" else 1) * batch * size
    )  # before the first step, after the last
    ours = output_bytes + states * dtype.itemsize + made.memory.saved_bytes + 4 * weights
    assert made.memory.training_bytes == ours + made.backward.workspace_bytes
    lstm = 7 * output_bytes + 8 * size * (size + 1) * dtype.itemsize
    assert made.memory.nn_lstm_training_bytes == lstm
    assert made.memory.training_bytes <= limit_of(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(64, 32, 32, 64), (64, 8, 64, 48), (200, 4, 16, 16), (1, 8, 8, 8)]
)
@pytest.mark.parametrize(
    "layer",
    [fusedrnn.GRU, fusedrnn.LSTM, fusedrnn.StochasticGRU, partial(fusedrnn.LSTM, proj_size=6)],
)
def test_what_training_holds_is_what_it_takes(layer, sizes, dtype):
    """The gradient of the input, which the plan leaves out, is made as well."""
    seq_len, batch, input_size, hidden_size = sizes
    rnn = layer(input_size, hidden_size, dtype=dtype)
    x = torch.randn(seq_len, batch, input_size, dtype=dtype, requires_grad=True)
    gradient = torch.randn(seq_len, batch, rnn.proj_size or hidden_size, dtype=dtype)

    def train():
        output, last = rnn(x)
        output.backward(gradient)
        del output, last

    train()
    rnn.zero_grad()
    x.grad = None
    seed_bytes = 8 if layer is fusedrnn.StochasticGRU else 0
    planned = fusedrnn.plan(rnn, (seq_len, batch, input_size), device="cpu").memory.training_bytes
    assert peak_bytes(train) == planned + x.nbytes + seed_bytes


GRU = fusedrnn.GRU(5, 7)
OF_GRU = {"cell": "gru", "input_size": 8, "hidden_size": 8}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.nn.GRU(5, 7), (3, 2, 5)), TypeError, "must be a fusedrnn.GRU"),
        ((3, (4, 3, 8)), TypeError, "module must be a fusedrnn.GRU"),
        (({"cell": "elman"}, (3, 2, 5)), ValueError, "cell must be one of gru, lstm"),
        ((OF_GRU | {"cell": []}, (4, 3, 8)), ValueError, "cell must be one of"),
        ((OF_GRU | {"heads": 3}, (4, 3, 8)), TypeError, "GRU has no argument 'heads'"),
        (({"cell": "gru", "input_size": 8}, (4, 3, 8)), TypeError, "GRU needs hidden_size"),
        ((GRU, (3, 2, 4)), ValueError, "must be (seq_len, batch, 5), got (3, 2"),
        ((GRU, (5,)), ValueError, "input_shape"),
        ((GRU, (0, 2, 5)), ValueError, "input_shape"),
        ((GRU, 5), TypeError, "input_shape must be (seq_len, batch, 5), got int"),
        ((GRU, None), TypeError, "got NoneType"),
        ((GRU, "abc"), TypeError, "got str"),
        ((GRU, (4, 3.0, 5)), TypeError, "got (4, 3.0, 5)"),
        ((GRU, ()), ValueError, "input_shape must be (seq_len, batch, 5), got ()"),
        ((GRU, (4, 0, 5)), ValueError, "each at least 1, got (4, 0, 5)"),
        ((GRU, (3, 2, 5), torch.int64), RuntimeError, "dtype must be one of"),
        ((GRU, (3, 2, 5), None, "GTX 970"), ValueError, "one of A100, H100"),
        ((GRU, (3, 2, 5), None, "meta"), ValueError, "one of A100, H100"),
        ((GRU, (4, 3, 5), None, 3.5), ValueError, "device must be cpu, a CUDA device"),
        ((GRU, (4, 3, 5), None, object()), ValueError, "device must be cpu"),
        ((GRU, (4, 3, 5), None, "cpu", "no"), TypeError, "sample must be a bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_planned(arguments, error, message):
    module, *others = arguments
    named = dict(zip(("input_shape", "dtype", "device", "sample"), others, strict=False))
    with pytest.raises(error, match=f"^fusedrnn: .*{re.escape(message)}"):
        fusedrnn.plan(module, **named)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_there_must_be_a_gpu_to_ask():
    with pytest.raises(RuntimeError, match="there is no cuda on this machine"):
        fusedrnn.plan(fusedrnn.GRU(5, 7), (3, 2, 5), device="cuda")


@pytest.mark.cuda
def test_the_plan_of_this_gpu():
    rnn = fusedrnn.GRU(256, 256, device="cuda", dtype=BF16)
    assert fusedrnn.plan(rnn, (64, 16, 256)).forward.backend == "persistent"


def test_backends_are_checked_by_modules_and_calls():
    for backend in ("cudnn", None, 1):
        with pytest.raises(ValueError, match="backend must be one of 'auto', 'stepwise', 'persi"):
            fusedrnn.GRU(5, 7, backend=backend)
    x = torch.randn(3, 2, 5)
    plain = fusedrnn.GRU(5, 7, backend="stepwise")
    assert "backend=stepwise" in repr(plain)
    forced = fusedrnn.GRU(5, 7, backend="persistent")
    forced.load_state_dict(plain.state_dict())
    plain(x)
    with pytest.raises(RuntimeError, match=r"'persistent' is not possible here: .* for GPUs only"):
        forced(x)
