"""Remembered checks: a wrong call is still noticed after right calls that are like it.

Each wrong call is made twice, with nothing remembered and after right calls, and must raise the
same error.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import OPERATOR_CELLS
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves as flat

import fusedrnn
from fusedrnn import _call as call
from fusedrnn._options import FIELDS

T, B, IN, H, P, L = 5, 3, 4, 6, 2, 2


@pytest.fixture(autouse=True)
def _forgetful():
    call._remembered.clear()


class Call:
    """The arguments of a functional form or a cell."""

    def __init__(self, cell: str, **options: Any) -> None:
        self.cell = cell
        self.options = {"num_layers": L, **options}
        sizes = {"proj_size": P} if cell == "projected_lstm" else {}
        cls = {"gru": fusedrnn.GRU, "stochastic_gru": fusedrnn.StochasticGRU}.get(
            cell, fusedrnn.LSTM
        )
        rnn = cls(IN, H, num_layers=L, **sizes)
        self.options |= sizes
        self.weights = [w.detach() for w in rnn.parameters()]
        self.input = torch.randn(T, B, IN)
        h, c = torch.randn(L, B, P if sizes else H), torch.randn(L, B, H)
        self.hx: Any = (h, c) if "lstm" in cell else h
        if cell == "stochastic_gru":
            self.options["eps"] = torch.randn(L, T, B, H)

    def but(self, **changes: Any) -> Call:
        """The call with other arguments; ``options`` are those that differ."""
        other = copy.copy(self)
        other.options = self.options | changes.pop("options", {})
        vars(other).update(changes)
        return other

    def run(self) -> Any:
        form = {"projected_lstm": "lstm"}.get(self.cell, self.cell)
        return getattr(fusedrnn, form)(self.input, self.weights, self.hx, **self.options)


def error_of(run) -> tuple[type, str] | None:
    try:
        run()
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    return None


def assert_seen(right: Any, wrong: Any) -> None:
    """Asserts that a wrong call's error is the same after right calls."""
    call._remembered.clear()
    expected = error_of(wrong.run)
    assert expected is not None, "the call is not wrong"
    call._remembered.clear()
    for _ in range(2):
        right.run()
    assert len(call._remembered) == 1
    assert error_of(wrong.run) == expected


# Values of another type that are equal, where there are any, and then other values.
WRONG_OPTIONS: dict[str, list[Any]] = {
    "num_layers": [2.0, 1, 3, True, "2"],
    "bias": [1, False, 1.0],
    "batch_first": [0, 0.0, None],
    "bidirectional": [0, True],
    "dropout": [False, -0.5, 2, "0"],
    "zoneout": [False, (0.0, 0.0, 0.0), [0.0, 0.0], 1.5],
    "weight_dropout": [False, float("nan")],
    "training": [1, 1.0],
    "return_sequence": [1, "yes"],
    "recompute": [1, 0, "no"],
    "chunk_size": [True, 2.0, 0, "2"],
    "workspace_bytes": [10, 0, 1e6],
    "backend": ["persistent", "fast", b"auto"],
    "proj_size": [1, True, 2.0, -1],
}


def test_every_option_is_tried():
    assert set(WRONG_OPTIONS) == set(FIELDS) - {"cell"}


@pytest.mark.parametrize("cell", OPERATOR_CELLS)
@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_after_right_ones(cell, name):
    if name == "proj_size" and "lstm" not in cell:
        pytest.skip("an option of the LSTM")
    for value in WRONG_OPTIONS[name]:
        right = Call(cell)
        if name == "proj_size" and value == right.options.get(name) and type(value) is int:
            continue
        assert_seen(right, right.but(options={name: value}))


def test_a_pair_of_zoneout_is_looked_into():
    right = Call("lstm", zoneout=(0.0, 1.0))
    for pair in ((False, 1.0), (0.0, True), (0.0, 1.5)):
        assert_seen(right, right.but(options={"zoneout": pair}))


WRONG_TENSORS = {
    "dtype": lambda t: t.double(),
    "integers": lambda t: t.long(),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "shape": lambda t: t[..., :-1],
    "longer": lambda t: torch.cat([t, t]),
    "rank": lambda t: t.unsqueeze(0).unsqueeze(0),
    "array": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "look-alike": lambda t: SimpleNamespace(
        shape=t.shape, dtype=t.dtype, device=t.device, layout=t.layout
    ),
    "none": lambda t: None,
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("what", WRONG_TENSORS)
@pytest.mark.parametrize("cell", OPERATOR_CELLS)
def test_wrong_tensors_after_right_ones(cell, what):
    change, right = WRONG_TENSORS[what], Call(cell)
    for i in range(len(right.weights)):
        if what == "nested" and right.weights[i].dim() < 2:
            continue
        weights = [change(w) if j == i else w for j, w in enumerate(right.weights)]
        assert_seen(right, right.but(weights=weights))
    if what != "longer":  # a longer sequence's states and noise have other shapes
        assert_seen(right, right.but(input=change(right.input)))
    if what != "none":
        hx = (right.hx[0], change(right.hx[1])) if "lstm" in cell else change(right.hx)
        assert_seen(right, right.but(hx=hx))
        if "eps" in right.options:
            assert_seen(right, right.but(options={"eps": change(right.options["eps"])}))


@pytest.mark.parametrize("cell", OPERATOR_CELLS)
def test_wrong_containers_after_right_ones(cell):
    right = Call(cell)
    for weights in (
        right.weights[:-1],
        [*right.weights, right.weights[-1]],
        right.weights[::-1],
        dict(enumerate(right.weights)),
        iter(right.weights),
        None,
        3,
    ):
        assert_seen(right, right.but(weights=weights))
    # A tensor whose rows could be taken for the weights.
    one = Call("gru", num_layers=1, bias=False)
    one.weights, one.hx = [torch.randn(3 * H, H) for _ in range(2)], torch.randn(1, B, H)
    one.input = torch.randn(T, B, H)
    assert_seen(one, one.but(weights=torch.stack(one.weights)))


def packed(*lengths: int) -> PackedSequence:
    return pack_padded_sequence(torch.randn(max(lengths), len(lengths), IN), torch.tensor(lengths))


def test_packed_sequences_are_looked_at_in_every_call():
    right = Call("gru")
    right.input = packed(5, 3, 3)
    right.hx = None
    for batch_sizes in ([3, 3, 3, 2], [1, 3, 3, 3, 1], [3, 3, 3, 1, 0], [11]):
        wrong = right.but(input=PackedSequence(right.input.data, torch.tensor(batch_sizes)))
        if error_of(wrong.run) is not None:
            assert_seen(right, wrong)
    # The same number of rows, but another batch, so states have another shape.
    right.hx = torch.randn(L, 3, H)
    assert_seen(right, right.but(input=packed(4, 3, 3, 1)))


def test_autocast_is_looked_at_in_every_call():
    right = Call("gru")
    right.weights = [w.bfloat16() for w in right.weights]

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return right.run()

    assert_seen(SimpleNamespace(run=run), right)
    assert run()[0].dtype == torch.bfloat16
    plain = Call("gru")
    for dtype in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            assert plain.run()[0].dtype == (dtype or torch.float32)


def test_a_step_and_a_sequence_are_not_mixed_up():
    cell = fusedrnn.GRUCell(IN, H)
    weights = list(cell.parameters())
    both = torch.randn(T, IN)
    assert cell(both).shape == (T, H)
    output, h_n = fusedrnn.gru(both, weights)
    assert output.shape == (T, H)
    assert h_n.shape == (1, H)
    assert cell(both).shape == (T, H)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell", "StochasticGRUCell"])
def test_wrong_calls_of_a_cell_after_right_ones(name, grad):
    cell = getattr(fusedrnn, name)(IN, H)
    x, h = torch.randn(B, IN), torch.randn(B, H)
    states = (h, h) if name == "LSTMCell" else h

    def state(wrong):
        return (h, wrong) if name == "LSTMCell" else wrong

    def calling(*arguments):
        def run():
            with torch.set_grad_enabled(grad):
                return cell(*arguments)

        return SimpleNamespace(run=run)

    right = calling(x, states)

    for wrong in (
        (x.double(), states),
        (x.to("meta"), states),
        (x[None], states),
        (x[:, :-1], states),
        (x[0], states),
        (x.numpy(), states),
        (x, state(h[:, :-1])),
        (x, state(h[:-1])),
        (x, state(h[0])),
        (x, state(h[None])),
        (x, state(h.double())),
        (x, state(h.to("meta"))),
        (x, state(h.to_sparse())),
        (x, state(3)),
        (packed(3, 2, 1), states),
        (packed(3, 2, 1),),
    ):
        assert_seen(right, calling(*wrong))
    for size in ("input_size", "hidden_size"):
        setattr(cell, size, getattr(cell, size) + 1)
        with pytest.raises(RuntimeError, match="must"):
            right.run()
        setattr(cell, size, getattr(cell, size) - 1)
        right.run()
    cell.bias = 1
    with pytest.raises(TypeError, match="bias must be a bool"):
        right.run()


@pytest.mark.parametrize(
    "change",
    [
        lambda rnn: setattr(rnn, "bias", 1),
        lambda rnn: setattr(rnn, "dropout", True),
        lambda rnn: setattr(rnn, "training", 1),
        lambda rnn: setattr(rnn, "num_layers", 3),
        lambda rnn: setattr(rnn.weight_hh_l0, "data", rnn.weight_hh_l0.data.double()),
        lambda rnn: setattr(rnn.weight_hh_l0, "data", rnn.weight_hh_l0.data[:-1]),
        lambda rnn: setattr(rnn, "weight_hh_l0", nn.Parameter(torch.randn(3 * H, H + 1))),
        lambda rnn: rnn.__dict__.__setitem__("weight_hh_l0", None),
        lambda rnn: rnn.double(),
    ],
)
def test_a_module_that_is_changed_after_a_call(change):
    input = torch.randn(T, B, IN)
    rnn, fresh = fusedrnn.GRU(IN, H, L), fusedrnn.GRU(IN, H, L)
    change(fresh)
    expected = error_of(lambda: fresh(input))
    assert expected is not None
    call._remembered.clear()
    for _ in range(2):
        rnn(input)
    change(rnn)
    assert error_of(lambda: rnn(input)) == expected


def test_what_stands_behind_a_name_now_is_used():
    rnn = fusedrnn.GRU(IN, H)
    input = torch.randn(T, B, IN)
    rnn(input)
    doubled = 2 * rnn.weight_hh_l0.detach()
    expected = fusedrnn.gru(
        input, [doubled if name == "weight_hh_l0" else w for name, w in rnn.named_parameters()]
    )
    nn.utils.parametrize.register_parametrization(rnn, "weight_hh_l0", Double())
    assert all(map(torch.equal, flat(rnn(input)), flat(expected)))
    other = fusedrnn.GRU(IN, H)
    other.load_state_dict(
        {n: p for n, p in zip(other.state_dict(), rnn.all_weights[0], strict=True)}
    )
    assert all(map(torch.equal, flat(other(input)), flat(expected)))
    other.__dict__["weight_hh_l0"] = doubled / 2
    assert not torch.equal(other(input)[0], expected[0])
    rnn = fusedrnn.GRU(IN, H)
    rnn.weight_hh_l0.data = doubled / 2
    for name, weight in other.named_parameters():
        if name != "weight_hh_l0":
            getattr(rnn, name).data = weight.data
    rnn.__class__ = Doubled
    assert all(map(torch.equal, flat(rnn(input)), flat(expected)))


class Doubled(fusedrnn.GRU):
    weight_hh_l0 = property(lambda self: 2 * self._parameters["weight_hh_l0"])


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("cell", OPERATOR_CELLS)
def test_the_same_bits_whether_remembered_or_not(cell):
    right = Call(cell)
    first, second = flat(right.run()), flat(right.run())
    assert all(map(torch.equal, first, second))
    noise = {name: eps[:, :2] for name, eps in right.options.items() if name == "eps"}
    shorter = right.but(input=right.input[:2], options=noise)
    assert flat(shorter.run())[0].shape[0] == 2
    assert len(call._remembered) == 2


def test_no_tensor_is_kept_and_not_everything_is_remembered(monkeypatch):
    monkeypatch.setattr(call, "_MOST_REMEMBERED", 10)
    rnn = fusedrnn.GRU(IN, H)
    for seq_len in range(1, 40):
        rnn(torch.randn(seq_len, B, IN))
        assert 1 <= len(call._remembered) <= 10

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            for item in value.items() if isinstance(value, dict) else value:
                yield from tensors(item)

    assert not list(tensors(call._remembered))


def test_threads_share_what_is_remembered(monkeypatch):
    monkeypatch.setattr(call, "_MOST_REMEMBERED", 4)
    rnn = fusedrnn.GRU(IN, H).requires_grad_(False)
    inputs = [torch.randn(n, B, IN) for n in range(1, 9)]
    expected = [rnn(x)[0] for x in inputs]

    def work(_):
        for x, output in 50 * list(zip(inputs, expected, strict=True)):
            assert torch.equal(rnn(x)[0], output)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
