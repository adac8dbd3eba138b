"""Which pre-activations forward saves for backward with ``recompute=None``, the default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from checks import HAS_OWN_PRODUCTS
from torch.fx.experimental.proxy_tensor import make_fx

import fusedrnn
from bench.clock import saved_sizes_bytes
from fusedrnn import _plans
from tests.cases import CELLS, Case

INPUT, HIDDEN, LATENT = 5, 7, 3
SIZES = {"input_size": INPUT, "hidden_size": HIDDEN}
MODULES = {"gru": fusedrnn.GRU, "lstm": fusedrnn.LSTM, "stochastic_gru": fusedrnn.StochasticGRU}


def make(cell: str, **options: Any) -> torch.nn.Module:
    latent = {"latent_size": LATENT} if cell == "stochastic_gru" else {}
    return MODULES[cell](**SIZES, **latent, **options)


def saves(rnn: torch.nn.Module, *arguments: Any, **named: Any) -> int:
    """How many tensors of the size of all pre-activations a call saves."""
    x = arguments[0]
    data = x.data if isinstance(x, torch.nn.utils.rnn.PackedSequence) else x
    steps, batch = (len(x.batch_sizes), int(x.batch_sizes[0])) if data is not x else x.shape[:2]
    columns = 4 * HIDDEN + 2 * LATENT * isinstance(rnn, fusedrnn.StochasticGRU)
    directions = 2 if rnn.bidirectional else 1
    known = [*rnn.parameters(), data]

    def forward() -> torch.Tensor:
        output = rnn(*arguments, **named)[0]
        return output.data if data is not x else output

    sizes = saved_sizes_bytes(forward, known)
    return sizes.count(4 * directions * steps * batch * columns)


@pytest.fixture
def no_small_states(monkeypatch):
    """Saves only where it costs no more than the weights."""
    monkeypatch.setattr(_plans, "SMALL_STATES", 0)


def test_the_limit_is_eight_mebibytes():
    saves, recomputes = (
        fusedrnn.plan(fusedrnn.GRU(1, 256), (64, batch, 1), device="cpu") for batch in (32, 33)
    )
    assert not saves.recompute and recomputes.recompute
    assert saves.memory.saved_bytes - recomputes.memory.saved_bytes == pytest.approx(
        2**23, rel=0.01
    )


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers, bidirectional", [(2, False), (1, True), (3, True)])
def test_what_all_layers_save_adds_up(monkeypatch, cell, layers, bidirectional):
    count = layers * (2 if bidirectional else 1)
    monkeypatch.setattr(_plans, "SMALL_STATES", count * 22 * HIDDEN)  # above 21, the features
    rnn = make(cell, num_layers=layers, bidirectional=bidirectional)
    sizes = {"cell": cell, **SIZES, "num_layers": layers, "bidirectional": bidirectional}
    if cell == "stochastic_gru":
        sizes["latent_size"] = LATENT
    for steps, expected in ((22, layers), (23, 0)):
        assert saves(rnn, torch.randn(steps, 1, INPUT)) == expected
        for module in (rnn, sizes):
            made = fusedrnn.plan(module, (steps, 1, INPUT), device="cpu")
            assert made.recompute is (expected == 0)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("steps", "batch", "expected"), [(2, 10, 1), (20, 1, 1), (21, 1, 0), (2, 11, 0)]
)
def test_saved_where_it_is_little_by_itself(monkeypatch, cell, steps, batch, expected):
    monkeypatch.setattr(_plans, "SMALL_STATES", 21 * HIDDEN - 1)  # above 12, the features
    rnn = make(cell)
    x = torch.randn(steps, batch, INPUT)
    assert saves(rnn, x) == expected
    assert fusedrnn.plan(rnn, x.shape, device="cpu").recompute is not bool(expected)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("steps", "batch", "expected"), [(2, 6, 1), (12, 1, 1), (13, 1, 0), (2, 7, 0), (1, 4, 0)]
)
def test_saved_where_it_costs_no_more_than_the_weights(
    no_small_states, cell, bidirectional, steps, batch, expected
):
    rnn = make(cell, bidirectional=bidirectional)
    x = torch.randn(steps, batch, INPUT)
    assert saves(rnn, x) == expected
    made = fusedrnn.plan(rnn, x.shape, device="cpu")
    assert made.recompute is not bool(expected)
    assert ("recomputes" in str(made)) is made.recompute


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("recompute", [True, False])
def test_a_caller_who_says_which_is_obeyed(cell, recompute):
    rnn = make(cell, recompute=recompute)
    for steps, batch in ((2, 6), (40, 6), (1, 4)):
        x = torch.randn(steps, batch, INPUT)
        assert saves(rnn, x) == (not recompute)
        assert fusedrnn.plan(rnn, x.shape, device="cpu").recompute is recompute


@pytest.mark.parametrize("cell", CELLS)
def test_a_plan_has_the_numbers_of_its_choice(no_small_states, cell):
    shape, device = (1024, 64, INPUT), "H100"
    saves, recomputes = (
        fusedrnn.plan(make(cell, recompute=r), shape, torch.bfloat16, device) for r in (False, True)
    )
    more = saves.memory.saved_bytes - recomputes.memory.saved_bytes
    columns = 4 * HIDDEN + 2 * LATENT * (cell == "stochastic_gru")
    assert more == 4 * 1024 * 64 * columns
    assert saves.memory.training_bytes - recomputes.memory.training_bytes == more
    us = saves.backward.modelled_us
    assert us == recomputes.backward.modelled_us_without_recompute < recomputes.backward.modelled_us
    assert fusedrnn.plan(make(cell), shape, torch.bfloat16, device) == recomputes


def test_a_plan_is_for_the_device_of_the_module():
    cpu = fusedrnn.plan(fusedrnn.GRU(5, 7), (3, 2, 5))
    assert cpu == fusedrnn.plan(fusedrnn.GRU(5, 7), (3, 2, 5), device="cpu")
    if not torch.cuda.is_available():
        sizes = {"cell": "gru", "input_size": 5, "hidden_size": 7}
        assert fusedrnn.plan(sizes, (3, 2, 5)) == cpu


def test_the_last_state_alone_always_recomputes():
    rnn = make("gru", return_sequence=False, recompute=False)
    assert fusedrnn.plan(rnn, (2, 3, INPUT)).recompute


@pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="nothing is packed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_of_steps_have_no_copy_but_their_panels(dtype):
    """In forward; the same numbers in float32 have none either, since their memory serves."""
    rnn = fusedrnn.LSTM(1, 256)
    weight_bytes = 4 * 4 * 256 * 256
    narrow, wide = (
        fusedrnn.plan(rnn, (8, 1, 1), dtype=d, device="cpu").forward.workspace_bytes
        for d in (dtype, torch.float32)
    )
    assert weight_bytes < wide < narrow < wide + weight_bytes // 4


def test_a_layer_counts_the_features_that_it_reads(no_small_states):
    """The second layer of two directions has 2 * 7 + 7 features, the first one 5 + 7."""
    rnn = make("gru", num_layers=2, bidirectional=True)
    assert saves(rnn, torch.randn(2, 6, INPUT)) == 2
    assert saves(rnn, torch.randn(2, 10, INPUT)) == 1
    assert saves(rnn, torch.randn(2, 11, INPUT)) == 0


def test_rows_of_packed_sequences_are_those_of_the_padded_batch(no_small_states):
    rnn = make("lstm")
    pack = torch.nn.utils.rnn.pack_sequence
    assert saves(rnn, pack([torch.randn(n, INPUT) for n in (4, 2, 1)])) == 1
    assert saves(rnn, pack([torch.randn(n, INPUT) for n in (7, 2)])) == 0
    lengths = torch.tensor([4, 2, 1])
    assert saves(rnn, torch.randn(4, 3, INPUT), lengths=lengths) == 1


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_those_of_either(cell):
    case = replace(Case(cell=cell), seq_len=2, batch=3)
    chosen, saved = (replace(case, recompute=r).results("cpu") for r in (None, False))
    assert chosen.keys() == saved.keys()
    assert all(torch.equal(chosen[name], saved[name]) for name in saved)


def test_a_graph_for_all_lengths_recomputes(no_small_states):
    """Its choice would be a guard on the length, or fail where a length is to be free."""
    rnn = fusedrnn.LSTM(5, 7)
    weights = [*rnn.parameters()]

    def train(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(rnn(x)[0].sum(), weights)[0]

    graph = make_fx(train, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        torch.randn(2, 3, 5)
    )
    assert "save_gates = True" not in graph.code
    for steps in (2, 9):
        x = torch.randn(steps, 3, 5)
        torch.testing.assert_close(graph(x), train(x))
    static = make_fx(train, _allow_non_fake_inputs=True)(torch.randn(2, 3, 5))
    assert "save_gates = True" in static.code


def test_a_compiled_model_is_not_compiled_again_for_the_choice(no_small_states):
    torch._dynamo.reset()
    rnn = fusedrnn.GRU(5, 7)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rnn, backend=counter, dynamic=True)
    compiled(torch.randn(2, 3, 5))[0].sum().backward()
    graphs = counter.frame_count
    for steps in (3, 9, 40):
        compiled(torch.randn(steps, 3, 5))[0].sum().backward()
    assert counter.frame_count == graphs
