"""``reset_to``: states other than zero where a row starts anew, against a loop over steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from runtime.plain import Masks, one_loop
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fusedrnn
from fusedrnn._step.noise import Noise, Seed

T, B, H = 9, 4, 5
CELLS = {
    "gru": lambda **named: fusedrnn.GRU(3, H, **named),
    "lstm": lambda **named: fusedrnn.LSTM(3, H, **named),
    "projected": lambda **named: fusedrnn.LSTM(3, H, proj_size=2, **named),
    "stochastic": lambda **named: fusedrnn.StochasticGRU(3, H, 4, **named),
}
RESET = torch.rand(T, B, generator=torch.Generator().manual_seed(3)) < 0.3


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def states(rnn: Any, *batch: int) -> tuple[Tensor, ...]:
    """hx of a module, as a tuple."""
    rows = rnn.num_layers * (2 if rnn.bidirectional else 1)
    is_lstm = isinstance(rnn, fusedrnn.LSTM)
    h = leaf(rows, *batch, rnn.proj_size or H)
    return (h, leaf(rows, *batch, H)) if is_lstm else (h,)


def as_argument(parts: tuple[Tensor, ...]) -> Any:
    return parts if len(parts) == 2 else parts[0]


def as_tuple(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def loop(
    rnn: Any, x: Tensor, hx: Any, to: Any, lengths: list[int], noise: dict[str, Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Every layer and direction by a plain loop over calls of one step.

    The module must have weights only: no dropout, no zoneout.
    """
    function = {
        fusedrnn.GRU: fusedrnn.gru,
        fusedrnn.LSTM: fusedrnn.lstm,
        fusedrnn.StochasticGRU: fusedrnn.stochastic_gru,
    }[type(rnn)]
    options = {"proj_size": rnn.proj_size} if rnn.proj_size else {}

    def step(number: int, x: dict[str, Tensor], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = {name: leaf[None] for name, leaf in x.items()}
        drawn = {name: eps[None] for name, eps in given.items() if name == "eps"}
        start = as_argument(tuple(s[None] for s in state))
        _, end = function(given["x"], rnn.all_weights[number], start, **options, **drawn)
        return tuple(s[0] for s in as_tuple(end))

    directions, last = 2 if rnn.bidirectional else 1, []
    for first in range(0, len(hx[0]), directions):
        sides = []
        for number in range(first, first + directions):
            given = {"x": x} | {name: eps[number] for name, eps in noise.items()}
            masks = Masks(lengths, RESET, tuple(s[number] for s in to), to[0].dim() == 4)
            state = tuple(s[number] for s in hx)
            nothing = Noise(Seed(torch.Generator()), 0)  # is drawn
            y, end = one_loop(partial(step, number), given, state, nothing, masks, number > first)
            sides.append(y)
            last.append(end)
        x = torch.cat(sides, -1)
    return x, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", ["one row", "rows", "steps"])
@pytest.mark.parametrize("layers", [(1, False), (2, True)])
@pytest.mark.parametrize("form", ["padded", "lengths", "packed", "batch_first"])
def test_values_and_gradients(
    cell: str, kind: str, layers: tuple[int, bool], form: str, chunk_size: int = 4
) -> None:
    rnn: Any = CELLS[cell](
        num_layers=layers[0],
        bidirectional=layers[1],
        batch_first=form == "batch_first",
        chunk_size=chunk_size,
        dtype=torch.float64,
    )
    x, hx = leaf(T, B, 3), states(rnn, B)
    to = states(rnn, *{"one row": (1,), "rows": (B,), "steps": (T, B)}[kind])
    lengths = [5, T, 2, 5] if form in ("lengths", "packed") else [T] * B
    noise: dict[str, Any] = {}
    if cell == "stochastic":
        noise = {"eps": leaf(hx[0].shape[0], T, B, 4)}
    named: dict[str, Any] = {"reset": RESET, "reset_to": as_argument(to), **noise}
    if form == "lengths":
        named["lengths"] = lengths

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        if form == "packed":
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            output, last = rnn(packed, as_argument(hx), **named)
            output, _ = pad_packed_sequence(output)
        elif form == "batch_first":
            values = tuple(s.transpose(1, 2) if s.dim() == 4 else s for s in to)
            swapped = {"reset": RESET.t(), "reset_to": as_argument(values)}
            output, last = rnn(x.transpose(0, 1), as_argument(hx), **{**named, **swapped})
            output = output.transpose(0, 1)
        else:
            output, last = rnn(x, as_argument(hx), **named)
        return output, as_tuple(last)

    found, wanted = run(), loop(rnn, x, hx, to, lengths, noise)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    leaves = [x, *hx, *to, *noise.values(), *rnn.parameters()]
    mine, exact = (
        torch.autograd.grad(
            output.sin().sum() + sum(s.square().sum() for s in last),
            leaves,
            allow_unused=True,
            materialize_grads=True,
        )
        for output, last in (found, wanted)
    )
    torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_zeros_are_a_plain_reset(cell: str) -> None:
    rnn: Any = CELLS[cell](num_layers=2, bidirectional=True, dropout=0.5)
    x, noise = torch.randn(T, B, 3), {}
    if cell == "stochastic":
        noise = {"sample": False}
    zeros = as_argument(tuple(torch.zeros_like(s, dtype=torch.float32) for s in states(rnn, 1)))
    torch.manual_seed(4)
    found = rnn(x, reset=RESET, reset_to=zeros, **noise)
    torch.manual_seed(4)
    torch.testing.assert_close(found, rnn(x, reset=RESET, **noise))


@pytest.mark.parametrize("cell", CELLS)
def test_the_last_states_alone(cell: str) -> None:
    rnn: Any = CELLS[cell](num_layers=2, bidirectional=True)
    x, to = torch.randn(T, B, 3), as_argument(tuple(s.float() for s in states(rnn, B)))
    noise = {"sample": False} if cell == "stochastic" else {}
    _, last = rnn(x, reset=RESET, reset_to=to, **noise)
    rnn.return_sequence = False
    output, again = rnn(x, reset=RESET, reset_to=to, **noise)
    torch.testing.assert_close(again, last)
    h = as_tuple(last)[0]
    torch.testing.assert_close(output, torch.cat([h[2], h[3]], -1))


def test_without_a_batch() -> None:
    rnn = fusedrnn.GRU(3, H, dtype=torch.float64)
    x, to, steps = leaf(T, 3), leaf(1, H), leaf(1, T, H)
    for value, batched in ((to, to[:, None]), (steps, steps[:, :, None])):
        output, h = rnn(x, reset=RESET[:, 0], reset_to=value)
        wanted, last = rnn(x[:, None], reset=RESET[:, :1], reset_to=batched)
        torch.testing.assert_close((output, h), (wanted[:, 0], last[:, 0]))


def test_second_derivatives_and_autocast() -> None:
    rnn = fusedrnn.LSTM(3, H, dtype=torch.float64)
    to = (leaf(1, 1, H), leaf(1, 1, H))
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    reset = torch.tensor([[True, False], [False, True], [False, False]])
    assert torch.autograd.gradgradcheck(
        lambda *to: rnn(x, reset=reset, reset_to=to)[0], to, check_fwd_over_rev=False
    )
    with torch.autocast("cpu", torch.bfloat16):
        single = fusedrnn.GRU(3, H)
        output, _ = single(torch.randn(T, B, 3), reset=RESET, reset_to=torch.ones(1, 1, H))
    assert output.dtype == torch.bfloat16


def test_torch_compile_breaks_its_graph() -> None:
    rnn = fusedrnn.GRU(3, H)
    x, to = torch.randn(T, B, 3), torch.ones(1, 1, H)
    compiled = torch.compile(lambda x: rnn(x * 2, reset=RESET, reset_to=to)[0], backend="aot_eager")
    torch.testing.assert_close(compiled(x), rnn(x * 2, reset=RESET, reset_to=to)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_are_refused() -> None:
    """They would keep the resets of the first call."""
    rnn, to = fusedrnn.GRU(3, H).requires_grad_(False), torch.ones(1, 1, H)
    with pytest.raises(RuntimeError, match="reset_to cannot be traced"):
        torch.jit.trace(lambda x: rnn(x, reset=RESET, reset_to=to)[0], torch.randn(T, B, 3))
    weights = list(rnn.parameters())
    for mode in ("real", "fake", "symbolic"):
        with pytest.raises(RuntimeError, match="reset_to cannot be traced"):
            make_fx(
                lambda x, reset, to, *weights: fusedrnn.gru(x, weights, reset=reset, reset_to=to),
                tracing_mode=mode,
            )(torch.randn(T, B, 3), RESET, to, *weights)


@pytest.mark.parametrize(
    ("to", "error", "message"),
    [
        (torch.zeros(2, B, H), RuntimeError, r"reset_to must have shape \(1, 4, 5\), \(1, 1, 5\)"),
        (torch.zeros(1, 3, H), RuntimeError, r"\(1, 9, 4, 5\), got \(1, 3, 5\)"),
        (torch.zeros(1, B, T, H), RuntimeError, r"got \(1, 4, 9, 5\)"),
        (torch.zeros(1, B, H).double(), ValueError, "reset_to must be torch.float32 as input"),
        (torch.zeros(1, B, H, device="meta"), RuntimeError, "reset_to must be on cpu"),
        (3.0, TypeError, "reset_to must be a tensor, got float"),
    ],
)
def test_errors(to: Any, error: type[Exception], message: str) -> None:
    rnn, x = fusedrnn.GRU(3, H), torch.randn(T, B, 3)
    with pytest.raises(error, match=f"fusedrnn: .*{message}"):
        rnn(x, reset=RESET, reset_to=to)


def test_errors_of_what_goes_together() -> None:
    rnn, lstm, x = fusedrnn.GRU(3, H), fusedrnn.LSTM(3, H), torch.randn(T, B, 3)
    with pytest.raises(ValueError, match="reset_to must be given together with reset"):
        rnn(x, reset_to=torch.zeros(1, B, H))
    with pytest.raises(TypeError, match=r"reset_to must be a pair of tensors \(h, c\), got Tensor"):
        lstm(x, reset=RESET, reset_to=torch.zeros(1, B, H))
    pair = (torch.zeros(1, B, H), torch.zeros(1, 2, H))
    with pytest.raises(RuntimeError, match=r"reset_to\[1\] must have shape"):
        lstm(x, reset=RESET, reset_to=pair)


def test_no_rows() -> None:
    rnn = fusedrnn.LSTM(3, H, 2, bidirectional=True)
    x, reset = torch.randn(T, 0, 3), torch.zeros(T, 0, dtype=torch.bool)
    to = (torch.zeros(4, 1, H), torch.zeros(4, 1, H))
    for keeps in (True, False):
        rnn.return_sequence = keeps
        got = rnn(x, reset=reset, reset_to=to)
        torch.testing.assert_close(got, rnn(x, reset=reset))
