"""All cells that compiled steps are tested with, and how to make their inputs and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from recurrent import published, written
from runtime.plain import Masks
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from docs.examples import published_cells as examples


@dataclass(frozen=True)
class Tokens:
    """int64 (seq_len, batch) from 0 on."""

    count: int


@dataclass(frozen=True)
class Flags:
    """(seq_len, batch, ...) of 0 and 1, as bool or in the dtype of the cell."""

    shape: tuple[int, ...] = ()
    is_bool: bool = False


@dataclass(frozen=True)
class Times:
    """(seq_len, batch) of positive numbers that grow."""


@dataclass(frozen=True)
class Unit:
    """(seq_len, batch, features) of numbers between 0 and 1."""

    features: int


@dataclass(frozen=True, eq=False)
class Case:
    """A cell, and what is known of it."""

    name: str
    make: Callable[[], nn.Module]
    input: Any
    """Of each tensor of the input, nested as it is, its features or one of the classes above."""
    draws: bool = False
    is_discrete: bool = False
    """Whether it chooses: a rounding may change its results altogether."""
    has_kinks: bool = False
    """Whether a rounding may change a derivative, where it takes a sum across 0."""
    compiles: bool = True
    """Whether a compiled step is required, and not just allowed."""

    def __str__(self) -> str:
        return self.name

    def cell(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        return self.make().to(dtype)

    def inputs(self, seq_len: int, batch: int, dtype: torch.dtype = torch.float64) -> Any:
        return pytree.tree_map(lambda spec: made(spec, seq_len, batch, dtype), self.input)

    def zeros(self, cell: nn.Module, batch: int) -> Any:
        """The state that a call without one starts from."""
        if hasattr(cell, "initial_state"):
            return cell.initial_state(batch)
        zeros = next(cell.parameters()).new_zeros(batch, cell.hidden_size)
        return (zeros, zeros.clone()) if isinstance(cell, nn.LSTMCell) else zeros

    def state(self, cell: nn.Module, batch: int, *steps: int) -> Any:
        """A random state with gradient, or a sequence of such: positive, as some have to be."""

        def drawn(leaf: Tensor) -> Tensor:
            shape = (*steps, batch, *leaf.shape[1:])
            if not leaf.is_floating_point():
                return torch.randint(0, 5, shape, dtype=leaf.dtype)
            return (0.1 + torch.rand(shape, dtype=torch.float64)).to(leaf.dtype).requires_grad_()

        return pytree.tree_map(drawn, self.zeros(cell, batch))

    def masks(
        self, cell: nn.Module, kind: str, reset: Tensor, lengths: list[int] | None = None
    ) -> Masks:
        """Resets to zero, or to states that are the same for all rows, of each, or of each step."""
        if kind == "zero":
            return Masks(lengths, reset)
        seq_len, batch = reset.shape
        steps = (seq_len,) if kind == "sequence" else ()
        to = self.state(cell, 1 if kind == "one row" else batch, *steps)
        return Masks(lengths, reset, to, has_steps=bool(steps))


def made(spec: Any, seq_len: int, batch: int, dtype: torch.dtype) -> Tensor:
    """The random tensor of an input; those of floating point have a gradient."""
    sizes = (seq_len, batch)
    if isinstance(spec, Tokens):
        return torch.randint(0, spec.count, sizes)
    if isinstance(spec, Flags):
        flags = torch.rand(*sizes, *spec.shape) < 0.7
        return flags if spec.is_bool else flags.to(dtype).requires_grad_()
    if isinstance(spec, Times):
        numbers = torch.rand(sizes, dtype=torch.float64).cumsum(0)
    elif isinstance(spec, Unit):
        numbers = torch.rand(*sizes, spec.features, dtype=torch.float64)
    else:
        numbers = torch.randn(*sizes, spec, dtype=torch.float64)
    return numbers.to(dtype).requires_grad_()


I, H = 4, 6  # noqa: E741
WORLD = {"action": 2, "embedding": I}
RESET_WORLD = {**WORLD, "is_first": Flags(is_bool=True)}
GAPS = {"value": I, "mask": Flags(shape=(I,)), "delta": Unit(I)}
TIMED, RESETS = {"value": I, "time": Times()}, {"value": I, "reset": Flags(is_bool=True)}
DISCRETE = {"draws": True, "is_discrete": True}
CASES = [
    Case("RNNCell", lambda: nn.RNNCell(I, H), I),
    Case("RNNCell relu", lambda: nn.RNNCell(I, H, nonlinearity="relu"), I, has_kinks=True),
    Case("RNNCell without biases", lambda: nn.RNNCell(I, H, bias=False), I),
    Case("GRUCell", lambda: nn.GRUCell(I, H), I),
    Case("LSTMCell", lambda: nn.LSTMCell(I, H), I),
    Case("ForumCell", lambda: examples.ForumCell(I, H, 5), I, draws=True),
    Case("MGU", lambda: examples.MinimalGatedUnitCell(I, H), I),
    Case("reset before", lambda: examples.ResetBeforeGRUCell(I, H), I),
    Case("reset before, concatenated", lambda: published.ConcatenatedGRU(I, H), I),
    Case("late reset", lambda: examples.LateResetGRUCell(I, H, None), I),
    Case("late reset, LayerNorm", lambda: examples.LateResetGRUCell(I, H, nn.LayerNorm), I),
    Case("late reset, RMSNorm", lambda: examples.LateResetGRUCell(I, H, nn.RMSNorm), I),
    Case("LayerNorm LSTM", lambda: examples.LayerNormLSTMCell(I, H), I),
    Case("peephole LSTM", lambda: examples.PeepholeLSTMCell(I, H), I),
    Case("sLSTM", lambda: examples.SLSTMCell(I, H), I),
    Case("IndRNN", lambda: examples.IndRNNCell(I, H), I),
    Case("block GRU", lambda: examples.BlockGRUCell(I, H, 3), I),
    Case("PlaNet", lambda: examples.PlaNetCell(I, 2, H, 3), WORLD, draws=True),
    Case("DreamerV1", lambda: examples.DreamerV1Cell(I, 2, H, 3), RESET_WORLD, draws=True),
    Case("DreamerV2", lambda: examples.DreamerV2Cell(I, 2, H, 3, 4), RESET_WORLD, **DISCRETE),
    Case("DreamerV3", lambda: examples.DreamerV3Cell(I, 2, H, 3, 4), WORLD, **DISCRETE),
    Case("categorical by hand", lambda: published.SampledByHand(I, H, 2, 3), I, **DISCRETE),
    Case("Gumbel", lambda: published.GumbelCell(I, H, 3, False), I, draws=True, compiles=False),
    Case(
        "Gumbel, hard", lambda: published.GumbelCell(I, H, 3, True), I, **DISCRETE, compiles=False
    ),
    Case("VRNN", lambda: published.VRNN(I, H, 3), Unit(I), draws=True),
    Case("VRNN by distributions", lambda: published.VRNNByDistributions(I, H, 3), I, draws=True),
    Case("VRNN of the examples", lambda: examples.VRNNCell(I, H, 3), I, draws=True),
    Case("LFADS generator", lambda: examples.LFADSGeneratorCell(I, H, 0.5), I),
    Case("LFADS", lambda: examples.LFADSCell(I, H, 3, 2), I, draws=True),
    Case("mogrifier LSTM", lambda: published.MogrifierLSTM(I, H), I),
    Case("multiplicative LSTM", lambda: published.MultiplicativeLSTM(I, H), I),
    Case("antisymmetric", lambda: published.AntisymmetricRNN(I, H), I),
    Case("coRNN", lambda: published.CoupledOscillators(I, H), I),
    Case("recurrent highway", lambda: published.RecurrentHighway(I, H), I),
    Case("LMU", lambda: published.LegendreMemory(I, H), I),
    Case("GRU-D", lambda: published.GRUD(I, H), GAPS),
    Case("liquid", lambda: published.LiquidTimeConstant(I, H), I),
    Case("RG-LRU", lambda: published.LinearRecurrence(H), H),
    Case("hyper GRU", lambda: published.HyperGRU(I, H, 3), I, compiles=False),
    Case("ON-LSTM", lambda: published.OrderedNeuronsLSTM(I, H, 2), I),
    Case("fast weights", lambda: published.FastWeights(I, 3, 2), I, compiles=False),
    Case("convolutional GRU", lambda: published.ConvGRU(1, 2, 2), I, compiles=False),
    Case("phased LSTM", lambda: published.PhasedLSTM(I, H), TIMED, is_discrete=True),
    Case("dropout inside", lambda: written.Dropped(I, H), I, draws=True),
    Case("dropout inside, eval", lambda: written.Dropped(I, H).eval(), I),
    Case("recurrent dropout", lambda: examples.RecurrentDropoutLSTMCell(I, H), I, draws=True),
    Case("zoneout", lambda: written.Zoneout(I, H), I, draws=True),
    Case("zoneout, eval", lambda: written.Zoneout(I, H).eval(), I),
    Case("zoneout by dropout", lambda: written.ZoneoutByDropout(I, H), I, draws=True),
    Case("zoneout by rand", lambda: written.ZoneoutByRand(I, H), I, draws=True),
    Case("dict state", lambda: written.DictState(I, H), I),
    Case("tuple output", lambda: written.TupleOutput(I, H), I),
    Case("dict output", lambda: written.DictOutput(I, H), I),
    Case("embedding", lambda: written.Embedded(7, I, H), Tokens(7)),
    Case("tied embedding", lambda: written.TiedEmbedding(7, H), Tokens(7)),
    Case("reset inside", lambda: written.ResetInside(I, H), RESETS),
    Case("reset by a factor", lambda: written.ResetByFactor(I, H), (I, Flags())),
    Case("lists of weights", lambda: written.Listed(I, H), I),
    Case("tied", lambda: written.Tied(H), H),
    Case("frozen", lambda: written.Frozen(I, H), I),
    Case("in place", lambda: written.InPlace(I, H), I),
    Case("detached", lambda: written.Detached(I, H), I, is_discrete=True),
    Case("low rank", lambda: written.LowRank(I, H), I),
    Case("two speeds", lambda: written.TwoSpeeds(I, H), I),
    Case("wrapped", lambda: written.Wrapped(I, H), I),
    Case("counting", lambda: written.Counting(I, H), I, compiles=False),
]
BY_NAME = {case.name: case for case in CASES}
