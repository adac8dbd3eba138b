"""workspace_bytes: a call never takes more, and as much as whole steps allow.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

import contextlib
import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import CELLS, DTYPES, MASKED, MODULES, Case, allow_tf32, operator_arguments
from checks import allocations
from layouts import with_gaps

import fusedrnn
from fusedrnn import _helpers, _library, _plans
from fusedrnn import _tuning as tuning

MULTIPROCESSORS = 132
LSTM = Case("lstm", seq_len=12, dtype=torch.float32)
PROJECTED = replace(LSTM, proj_size=5)
EVERY = [*(replace(LSTM, cell=cell) for cell in CELLS), PROJECTED]


def name_of(case):
    return "projected_lstm" if case.proj_size else case.cell


def gpu_of(device, multiprocessors=0):
    return None if device == "cpu" else ("emulated", 90, multiprocessors, 227 << 10, 0, 0)


def tuning_of(case):
    """The current settings of overlap and TF32."""
    bits = _helpers.TUNING
    overlap, tf32 = tuning.switches.overlap_chunks, tuning.allows_tf32(case.dtype)
    return bits["overlap"] * overlap + bits["tf32"] * tf32


def made(case, gpu, chunk_size=0, workspace_bytes=0, backend="auto", strides=()):
    """The plan of the case's one layer."""
    return _plans.plan_layer(
        gpu,
        cell=name_of(case),
        noise=case.noise != "none",
        input_size=case.input_size,
        hidden_size=case.hidden_size,
        latent_size=case.latent_size,
        output_size=case.proj_size or case.hidden_size,
        bias=case.bias,
        seq_len=case.seq_len,
        batch=case.batch,
        dtype=str(case.dtype).removeprefix("torch."),
        chunk_size=chunk_size,
        workspace_bytes=workspace_bytes,
        backend=backend,
        tuning=tuning_of(case),
        strides=strides,
    )


def swapped(tensor, *dims):
    """A copy with two dimensions swapped in memory."""
    return tensor.transpose(*dims).contiguous().transpose(*dims)


class Call:
    """Calls of the operators themselves, so that every allocation is known."""

    def __init__(self, case, strided=False, dropout=0.0, packed=False):
        self.case, self.dropout, a = case, dropout, case.tensors()
        self.arguments = a
        self.batch_sizes = None
        if packed:  # rows end at different steps
            lengths = torch.arange(case.batch).neg().add(case.seq_len).clamp(min=1)
            steps = torch.arange(case.seq_len)
            self.batch_sizes = (lengths > steps.unsqueeze(1)).sum(1)
            taken = steps.unsqueeze(1) < lengths
            a.lengths, a.input, a.grad_output = None, a.input[taken], a.grad_output[taken]
        if strided:
            a.input, a.grad_output = swapped(a.input, 0, 1), swapped(a.grad_output, 0, 1)
            a.eps = None if a.eps is None else swapped(a.eps, 1, 2)
            # All matrices are operands except one of one direction.
            a.weights = [swapped(w, 0, -1) if w.dim() == 2 else with_gaps(w) for w in a.weights]
            a.weights[0] = with_gaps(a.weights[0])

    @property
    def strides(self):
        return [w.stride() for w in self.arguments.weights]

    def run(self, workspace_bytes):
        """Runs the call; returns the sizes of the workspaces of forward and of backward."""
        a, ops, dtype = self.arguments, _library.operators, self.case.dtype
        overlap = tuning.switches.overlap_chunks
        raw = operator_arguments(
            self.case,
            a,
            batch_sizes=self.batch_sizes,
            mask_seed=torch.tensor([5]),
            dropout=self.dropout,
            workspace_bytes=workspace_bytes,
            tuning=_helpers.TUNING["replay"] + _helpers.TUNING["overlap"] * overlap,
        )
        results = []
        sizes = allocations(lambda: results.append(ops.forward(**raw)))
        in_forward = others(sizes, results[0])
        output, _, _, _, cell_states = results[0]
        needs = 1 + 2 + 4 * (a.cx is not None) + 8 * (a.eps is not None)
        needs += 16 * (2 ** len(a.weights) - 1)
        raw |= {"grad_output": a.grad_output, "grad_h_n": a.grad_h_n, "grad_c_n": a.grad_c_n}
        raw |= {"output": output, "chunk_cell_states": None if a.cx is None else cell_states}
        sizes = allocations(lambda: results.append(ops.backward(**raw, needs=needs)))
        summed = [results[1][-1].float()] if dtype.itemsize == 2 else []  # before rounding
        return in_forward, others(sizes, [*results[1], *summed])

    def least(self):
        """The least bytes that one step takes, read from the error."""
        with pytest.raises(RuntimeError, match="fusedrnn: workspace_bytes must be at") as caught:
            self.run(1)
        return int(re.search(r"at least (\d+) for .*, got 1$", str(caught.value))[1])


def others(sizes, results):
    """The allocations that are not results."""
    left = Counter(sizes)
    left.subtract(t.nbytes for t in results if t.nbytes)
    assert min(left.values()) >= 0
    return list(left.elements())


def length_of(chunks, case, gpu):
    """The steps of each of so many chunks: on a GPU with rows in 128s, if that takes no more."""
    steps = -(-case.seq_len // chunks)
    alike = 1 if gpu is None else 128 // math.gcd(case.batch, 128)
    rounded = -(-steps // alike) * alike
    if -(-case.seq_len // rounded) == chunks:
        return min(rounded, case.seq_len)
    return steps


def check(call, gpu, part):
    """Checks a limit between one step, whose bytes an error says, and the whole sequence."""
    case, least = call.case, call.least()
    assert made(case, gpu, workspace_bytes=least, strides=call.strides)["chunk_steps"] >= 1
    with pytest.raises(RuntimeError, match=f"must be at least {least} for .*, got {least - 1}"):
        call.run(least - 1)
    most = made(case, gpu, chunk_size=case.seq_len, strides=call.strides)["memory"][
        "most_workspace_bytes"
    ]
    for limit in {least, least + int(part * (most - least))}:
        for sizes in call.run(limit):
            assert len(sizes) == (2 if case.bidirectional else 1) and max(sizes) <= limit
        plan = made(case, gpu, workspace_bytes=limit, strides=call.strides)
        assert plan["memory"]["most_workspace_bytes"] <= limit
        chunks = -(-case.seq_len // plan["chunk_steps"])
        if chunks > 1:  # chunks would be too long if there were one less
            ways = {plan["forward"]["backend"], plan["backward"]["backend"]}
            backend = "stepwise" if ways == {"stepwise"} else "auto"
            steps = length_of(chunks - 1, case, gpu)
            longer = made(case, gpu, steps, backend=backend, strides=call.strides)
            assert longer["memory"]["most_workspace_bytes"] > limit


def drawn(rng):
    """A random layer."""

    def size(least=1, most=20):
        return rng.choice([least, rng.randint(least, most), rng.randint(least, most)])

    flags = ("bias", "bidirectional", "lengths", "reset")
    cell, hidden_size = rng.choice(CELLS), size(2)
    return Case(
        cell,
        seq_len=size(),
        batch=size(most=12),
        # One feature is left out: with gaps in weight_ih a call then takes the bytes of a copy.
        input_size=size(2),
        hidden_size=hidden_size,
        latent_size=size(),
        proj_size=rng.choice([0, hidden_size // 2]) if cell == "lstm" else 0,
        noise=rng.choice(["seed", "eps", "none"]) if cell == "stochastic_gru" else "none",
        dtype=rng.choice(DTYPES),
        **{flag: rng.random() < 0.5 for flag in flags},
    )


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(300), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_never_more_and_not_needlessly_less(request, device, seeds):
    if device == "emulated":
        request.getfixturevalue("emulator")
    for seed in seeds:
        rng = random.Random(seed)
        case, dropout, part = (
            drawn(rng),
            rng.choice([0.0, 0.5]),
            rng.choice([0, rng.uniform(0, 1.1)]),
        )
        print(f"seed {seed}: {case}")  # of a failure, the last one
        call = Call(case, rng.random() < 0.5, dropout, packed=rng.random() < 0.5)
        check(call, gpu_of(device), part)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_call_with_all_there_can_be_takes_just_what_is_counted(request, device, case, dtype):
    if device == "emulated":
        request.getfixturevalue("emulator")
    case = replace(case, dtype=dtype, noise="eps", **MASKED)
    # Packed rows take more only where those of a chunk are not compact.
    call = Call(case, strided=True, dropout=0.5, packed=device != "cpu")
    limit = call.least() + 10_000
    plan = made(call.case, gpu_of(device), workspace_bytes=limit, strides=call.strides)
    forward, backward = call.run(limit)
    assert max(*forward, *backward) == plan["memory"]["most_workspace_bytes"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_of_persistent_kernels_too(emulator, monkeypatch, overlap, case, dtype):
    """Their exchange grows with the steps, and two streams need twice the room."""
    monkeypatch.setattr(tuning.switches, "overlap_chunks", overlap)
    emulator.control(False, "", multiprocessors=MULTIPROCESSORS, schedule=1)
    allow_tf32(True)
    gpu = gpu_of("emulated", MULTIPROCESSORS)
    case = replace(case, dtype=dtype, seq_len=6, batch=9, **MASKED)
    for part in (0.2, 0.7):
        check(Call(case), gpu, part)
    ways = [
        made(case, gpu, workspace_bytes=2**n)["forward"]["backend"] for n in range(22 + overlap, 30)
    ]
    assert ways == ["persistent"] * len(ways)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", [LSTM, PROJECTED], ids=str)
def test_backward_has_the_chunks_of_forward(emulator, monkeypatch, case, before):
    """This holds even if TF32, the way of exchange or strides change between the passes."""
    case = replace(case, seq_len=6, batch=9, input_size=40, hidden_size=40, **MASKED)
    arguments = case.tensors().to(torch.float32)
    with torch.no_grad():  # not an operand until a hook copies it
        arguments.weights[0] = arguments.weights[0].repeat(1, 2)[:, ::2].requires_grad_()
    strides = [w.stride() for w in arguments.weights]

    def tell(tf32):
        emulator.control(False, "", multiprocessors=MULTIPROCESSORS, schedule=1)
        monkeypatch.setattr(tuning.switches, "exchange_by_flags", tf32)
        allow_tf32(tf32)

    def train(changes, limit):
        tell(before)
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t)
        with hooks if changes else contextlib.nullcontext():
            results = arguments.call(fusedrnn, **case.sizes, workspace_bytes=limit)
        tell(before != changes)
        return torch.autograd.grad(results, arguments.differentiable(), arguments.cotangents())

    gpu, others = gpu_of("emulated", MULTIPROCESSORS), 0
    tell(before)
    least = least_of(made, case, gpu, strides=strides)
    for limit in range(least, least + 100_000, 10_000):
        tell(before)
        expected = made(case, gpu, workspace_bytes=limit, strides=strides)
        tell(not before)
        others += made(case, gpu, workspace_bytes=limit)["chunk_steps"] != expected["chunk_steps"]
        # One of them may round to TF32 in backward; states of other steps would give large errors.
        for one, other in zip(train(True, limit), train(False, limit), strict=True):
            assert (one - other).norm() < 2**-10 * other.norm()
    assert others > 0  # what backward alone would have planned


def test_a_persistent_kernel_is_not_lost_to_more_steps_than_it_can_count():
    case = Case("gru", 2**32 - 1, 1, 1, 1, dtype=torch.bfloat16)
    plan = made(case, gpu_of("emulated", MULTIPROCESSORS), workspace_bytes=2**50)
    steps = -(-(2**32 - 1) // 3 // 128) * 128  # of three chunks, rows in multiples of 128
    assert (plan["forward"]["backend"], plan["chunk_steps"]) == ("persistent", steps)


def test_an_empty_batch_takes_none():
    rnn = fusedrnn.LSTM(5, 7, dtype=torch.bfloat16, workspace_bytes=1)
    output, _ = rnn(torch.randn(4, 0, 5, dtype=torch.bfloat16))
    assert output.shape == (4, 0, 7)


def test_the_least_workspace_holds_no_packed_weight_of_the_input():
    layer = fusedrnn.GRU(4000, 64, workspace_bytes=2**19)
    output, _ = layer(torch.randn(512, 1, 4000))  # the packed weight would take 3 MB
    assert output.isfinite().all()
    one, two = (
        fusedrnn.plan(fusedrnn.LSTM(64, 64, chunk_size=n), (100, 64, 64)).forward.workspace_bytes
        for n in (1, 2)
    )
    gates = packed = 64 * 256 * 4  # of a step, and the weight
    assert two - one == gates + packed


def test_single_steps_where_a_persistent_kernel_has_no_room():
    case = replace(LSTM, dtype=torch.bfloat16, batch=64, hidden_size=256, input_size=256)
    gpu = gpu_of("emulated", MULTIPROCESSORS)
    needed = made(case, gpu, chunk_size=1)["memory"]["most_workspace_bytes"]
    assert made(case, gpu, workspace_bytes=needed)["forward"]["backend"] == "persistent"
    plan = made(case, gpu, workspace_bytes=needed - 1)
    assert [plan[name]["backend"] for name in ("forward", "backward")] == ["stepwise"] * 2
    assert "takes more memory than workspace_bytes" in plan["reason"]
    assert plan["memory"]["most_workspace_bytes"] < needed
    with pytest.raises(RuntimeError, match=f"must be at least {needed} for"):
        made(case, gpu, workspace_bytes=needed - 1, backend="persistent")


def test_both_passes_are_what_is_planned_where_there_is_no_room(emulator):
    """Backward follows the plan too; it has the number of chunks from forward."""
    case = replace(LSTM, dtype=torch.bfloat16, seq_len=3, batch=64, input_size=256, hidden_size=64)
    gpu = gpu_of("emulated", MULTIPROCESSORS)
    emulator.control(False, "", multiprocessors=MULTIPROCESSORS, schedule=1)
    needed = made(case, gpu, chunk_size=1)["memory"]["most_workspace_bytes"]
    for limit, way in ((needed, "persistent"), (needed - 1, "stepwise")):
        plan = made(case, gpu, workspace_bytes=limit)
        assert [plan[name]["backend"] for name in ("forward", "backward")] == [way] * 2
        before = emulator.counts()[2:4]
        allocated = Call(case).run(limit)
        ran = [after > count for after, count in zip(emulator.counts()[2:4], before, strict=True)]
        assert ran == [way == "persistent"] * 2
        assert max(map(max, allocated)) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_backward_has_chunks_of_forward_s_length(emulator, dtype):
    """For these sizes, no equal chunks are exactly one more."""
    rnn = fusedrnn.LSTM(1, 8, dtype=dtype)
    input = torch.randn(49, 160, 1, dtype=dtype, requires_grad=True)
    found = []
    for chunk_size in (None, 49):
        rnn.chunk_size = chunk_size
        output, (_, c_n) = rnn(input)
        found.append(torch.autograd.grad(output.sum() + c_n.sum(), [input, *rnn.parameters()]))
    for automatic, whole in zip(*found, strict=True):
        error = (automatic - whole).double().norm() / whole.double().norm()
        assert error < {torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]


def least_of(function, *arguments, **options):
    """The least workspace_bytes with which a call goes through; each error names a larger one."""
    least = 1
    while True:
        try:
            function(*arguments, workspace_bytes=least, **options)
        except RuntimeError as error:
            more = int(re.search(r"workspace_bytes must be at least (\d+)", str(error))[1])
            assert more > least
            least = more
        else:
            return least


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_results_are_the_same(device, case):
    case = replace(case, dtype=torch.float64, batch=5, num_layers=2, **MASKED)
    arguments = case.tensors(device).to(torch.float64)
    options = case.options
    expected = arguments.results(fusedrnn, **options)
    del options["chunk_size"]
    least = least_of(arguments.call, fusedrnn, **options)
    for limit in (least, least + least // 2, 2**40):
        ours = arguments.results(fusedrnn, workspace_bytes=limit, **options)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("cell", CELLS)
def test_the_plan_of_a_module_counts_it(cell):
    rnn = MODULES[cell](5, 7, bidirectional=True, workspace_bytes=20_000)
    assert "workspace_bytes=20000" in repr(rnn)
    input = torch.randn(100, 4, 5, requires_grad=True)
    plan = fusedrnn.plan(rnn, input.shape, device="cpu")
    assert plan.memory.most_workspace_bytes <= 20_000 and 1 < plan.chunk_steps < 100
    output, _ = rnn(input)
    gradient = torch.ones_like(output)
    assert plan.backward.workspace_bytes in allocations(lambda: output.backward(gradient))

    def run(workspace_bytes):
        rnn.workspace_bytes = workspace_bytes
        rnn(input)

    def ask(workspace_bytes):
        rnn.workspace_bytes = workspace_bytes
        fusedrnn.plan(rnn, input.shape, device="cpu")

    assert least_of(run) == least_of(ask)


def test_fake_states_are_as_many_as_real_ones():
    for case in (LSTM, PROJECTED, replace(LSTM, dtype=torch.bfloat16, bidirectional=True)):
        for limit in (12_000, 20_000, 60_000):
            a = case.tensors()
            raw = operator_arguments(case, a, workspace_bytes=limit)
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(torch.ops.fusedrnn.forward.default, (), raw, test_utils=tests)
