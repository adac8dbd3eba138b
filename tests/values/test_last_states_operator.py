"""The operators for last states alone, against `forward` over the whole sequence."""

from dataclasses import replace

import pytest
import torch
from cases import relative_errors
from last_states_cases import Stacked, all_needed, in_parts, layer_by_layer

from fusedrnn import _library, _ops
from fusedrnn._cells import CELLS

MASKS = ["", "lengths", "packed", "reset", "lengths reset", "packed reset"]
CASES = [Stacked(cell=cell, mask=mask) for cell in CELLS for mask in MASKS]
OPTIONS = [
    {"mask": "packed reset", "chunk_size": 3},
    {"mask": "lengths", "workspace_bytes": 1 << 23},
    {"num_layers": 1, "reverse": True},
    {"num_layers": 1, "reverse": True, "mask": "lengths reset"},
    {"num_layers": 1, "reverse": True, "mask": "packed reset"},
    {"bias": False, "dropout": 0.0, "inner_dropout": 0.0, "zoneout": 0.0},
    {"seq_len": 1, "batch": 1},
    {"seq_len": 7, "num_layers": 3},
    {"seq_len": 48, "num_layers": 3},
    {"seq_len": 300, "batch": 1},  # parts of 17 steps, and a last one of 11
    {"seq_len": 33, "batch": 0},
]
CASES += [Stacked(cell=cell, **options) for cell in CELLS for options in OPTIONS]
CASES += [
    Stacked(cell=cell, noise=noise, mask=mask)
    for cell in CELLS
    if CELLS[cell].has_latent
    for noise in ("eps", "none")
    for mask in ("", "lengths reset", "packed")
]
# The length of parts is a fact of the operators: part_h tells how many there are.
PARTS = {1: 1, 7: 1, 33: 3, 40: 3, 48: 3, 300: 18}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_as_the_whole_sequence(device, case):
    tensors = case.tensors(device)
    found, expected = in_parts(case, tensors), layer_by_layer(case, tensors)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-11, msg=name)
    if case.cell == "gru":
        assert len(_ops.last_states(case.call(), 0.0, tensors).part_h) == PARTS[case.seq_len]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["", "lengths reset", "packed"])
@pytest.mark.parametrize("cell", CELLS)
def test_error_is_that_of_the_whole_sequence(device, cell, mask, dtype):
    """Against float64. In half dtypes the states between parts are rounded too."""
    case = Stacked(cell=cell, mask=mask, hidden_size=24, batch=5, dtype=dtype)
    tensors = case.tensors(device)
    wide = [
        None if t is None else t.double() if t.is_floating_point() else t for t in tensors.flat()
    ]
    truth = layer_by_layer(case, type(tensors).of(wide))
    found = relative_errors(in_parts(case, tensors), truth)
    whole = relative_errors(layer_by_layer(case, tensors), truth)
    for name in truth:
        assert found[name] <= 2 * whole[name] + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("mask", ["", "lengths reset", "packed reset"])
@pytest.mark.parametrize("cell", CELLS)
def test_fresh_memory_reaches_no_result(device, deterministic, cell, mask):
    case = Stacked(cell=cell, mask=mask, dtype=torch.float32)
    tensors = case.tensors(device)
    expected = in_parts(case, tensors)
    deterministic(True)
    torch.testing.assert_close(in_parts(case, tensors), expected, rtol=0, atol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_not_needed_is_left_out(device, cell):
    case = Stacked(cell=cell, num_layers=3)
    tensors = case.tensors(device)
    needs_all = all_needed(tensors)
    count = len(tensors.weights) // 3
    of_last = [False] * (2 * count + 1) + [True] + [False] * (count - 2)
    frozen = needs_all._replace(input=False, hx=False, cx=False, eps=False)
    layers, grads = (case.call(), case.inner_dropout), case.grads(tensors)
    _, _, *parts = _ops.last_states(*layers, tensors)

    def gradients(needs):
        return _ops.last_states_backward(*layers, needs, grads, parts, tensors)

    expected = gradients(needs_all)
    sizes = [w.numel() for w in tensors.weights]
    for needs in (
        frozen._replace(weights=of_last),
        needs_all._replace(weights=of_last[::-1]),
        frozen._replace(weights=[False] * len(sizes)),
        needs_all._replace(hx=False),
    ):
        found = gradients(needs)
        for name in ("input", "hx", "cx", "eps"):
            if getattr(needs, name):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
            else:
                assert getattr(found, name).numel() == 0, name
        if not any(needs.weights):
            assert found.weights.numel() == 0
            continue
        both = zip(found.weights.split(sizes), expected.weights.split(sizes), strict=True)
        for need, (some, every) in zip(needs.weights, both, strict=True):
            assert torch.equal(some, every if need else torch.zeros_like(every))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_training_step_allocates_less_than_20_tensors(cell):
    from bench.clock import measure_memory

    def memory(seq_len, num_layers):
        case = Stacked(cell=cell, seq_len=seq_len, num_layers=num_layers, hidden_size=32, batch=8)
        tensors = case.tensors()
        return measure_memory(lambda: in_parts(case, tensors)), tensors.input.nbytes

    for seq_len in (100, 1600):
        for num_layers in (1, 4):
            assert memory(seq_len, num_layers)[0].allocations < 20 + 5, (seq_len, num_layers)
    (short, input), (long, input_of_long) = memory(400, 1), memory(6400, 1)
    # What is there besides the gradient of the input grows by a factor of 4, or less.
    assert long.peak_bytes - input_of_long < 4.5 * (short.peak_bytes - input)


def test_the_operators_themselves_read_nothing_that_is_not_there(device):
    case = Stacked("lstm", mask="lengths reset")
    tensors = case.tensors(device)
    call, operators = case.call(), _library.operators
    (input, hx, weights, cx), others = tensors[:4], call.others | tensors.others()
    good = {"cell": call.index, "input": input, "hx": hx, "cx": cx, "weights": weights, **others}

    def forward(**changes):
        return operators.last_states(**(good | changes))

    h_n, c_n, part_h, part_c = forward()

    def backward(**changes):
        arguments = {"grad_h_n": h_n, "grad_c_n": c_n, "part_h": part_h, "part_c": part_c}
        arguments |= {"needs": [True] * 3 + [False] + [True] * len(weights)}
        return operators.last_states_backward(**(good | arguments | changes))

    backward()
    lengths, reset = others["lengths"], others["reset"]
    bad = {
        "there is no cell": {"cell": len(CELLS)},
        "hx must have shape .layers": {"hx": hx[0]},
        "hx must have shape .layers, batch, hidden_size., got .0": {"hx": hx[:0]},
        "hx must have shape .1, 3, 5., got .1, 2, 5": {"hx": hx[:, :2]},
        "cx must have 3 dimensions, the first one of the 2 layers": {"cx": cx[:1]},
        "cx must have shape": {"cx": cx[..., 1:]},
        "weights must be as many in each layer, got 7": {"weights": weights[:7]},
        "takes 2 weights, or 4": {"weights": weights[:6]},
        "weight_ih must have shape .20, 5.": {"weights": [*weights[:4], *weights[:4]]},
        "reverse is for one layer": {"reverse": True},
        "inner_dropout must be a probability": {"inner_dropout": 1.5},
        "inner_dropout needs a mask_seed": {
            "inner_dropout": 0.5,
            "dropout": 0.0,
            "mask_seed": None,
        },
        "noise_stream must be": {"noise_stream": 2**29 - 2},
        "eps must have 4 dimensions": {"eps": cx},
        "lengths must be in": {"lengths": lengths + 40},
        "reset must have shape": {"reset": reset[1:]},
        "first_step": {"first_step": 2**32 - 10},
        "there is no backend": {"backend": 3},
    }
    for message, changes in bad.items():
        for operator in (forward, backward):
            with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}"):
                operator(**changes)
    bad = {
        "part_h must have shape .3, 2, 3, 5., got .2": {"part_h": part_h[1:]},
        "part_h must be contiguous": {"part_h": part_h.transpose(2, 3).contiguous().mT},
        "part_h must be Double": {"part_h": part_h.float()},
        "part_c must have shape": {"part_c": part_c[..., 1:]},
        "part_c must be given": {"part_c": None},
        "grad_h_n must have shape": {"grad_h_n": h_n[:1]},
        "grad_c_n must have shape": {"grad_c_n": c_n[..., 1:]},
        "needs must have an entry": {"needs": [True] * 5},
        "eps was drawn": {"needs": [True] * (4 + len(weights))},
    }
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}"):
            backward(**changes)


def test_states_may_have_any_strides(device):
    case = Stacked("projected_lstm", mask="lengths")
    tensors = case.tensors(device)
    strided = tensors._replace(
        **{
            name: getattr(tensors, name).transpose(0, 2).contiguous().transpose(0, 2)
            for name in ("input", "hx", "cx")
        }
    )
    assert not strided.hx.is_contiguous()
    found, expected = in_parts(case, strided), in_parts(case, tensors)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_tracer_sees_the_shapes(cell):
    case = Stacked(cell, mask="packed")
    tensors = case.tensors()
    layers, needed = (case.call(), 0.0), all_needed(tensors)

    def run(tensors):
        h_n, c_n, *parts = _ops.last_states(*layers, tensors)
        found = _ops.last_states_backward(*layers, needed, (h_n, None), parts, tensors)
        return [h_n, c_n, *parts, *found]

    with torch._subclasses.FakeTensorMode() as mode:
        fake = run(
            type(tensors).of([t if t is None else mode.from_tensor(t) for t in tensors.flat()])
        )
    assert [t.shape for t in fake] == [t.shape for t in run(tensors)]


def test_one_graph_serves_every_length():
    """Sizes are symbols, and so is the number of parts, or of the cell states before chunks."""
    case = Stacked("lstm", num_layers=1, dropout=0.0, zoneout=0.0)
    graphs = []

    def note(graph, _):
        graphs.append(graph)
        return graph.forward

    def states(tensors):
        call = case.call()
        saved = _ops.forward(call, tensors, save_gates=False)
        results = _ops.last_states(call, 0.0, tensors)
        assert results.part_h.shape[1:] == tensors.hx.shape
        return [saved.output, saved.chunk_cell_states + 1, *results]

    compiled = torch.compile(states, backend=note, dynamic=True, fullgraph=True)
    for seq_len, batch in ((40, 7), (700, 6), (33, 9)):  # no batch is like another size
        tensors = replace(case, seq_len=seq_len, batch=batch).tensors()
        found = compiled(tensors)
        for one, other in zip(found, states(tensors), strict=True):
            assert torch.equal(one, other)
    assert len(graphs) == 1
