"""What is compared, at which sizes, against which targets: the one table of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn import reference

THREADS = 2

LSTM, GRU = "nn.LSTM", "nn.GRU"
LOOP, COMPILED = "plain loop", "compiled loop"
OURS, KEPT = "fusedrnn", "fusedrnn, recompute=False"


@dataclass(frozen=True)
class Shape:
    """Sizes of a sequence; input, state and latent have the same width."""

    seq_len: int
    batch: int
    hidden_size: int

    def __str__(self) -> str:
        return f"T={self.seq_len} B={self.batch} H={self.hidden_size}"

    @property
    def output_bytes(self) -> int:
        """Size of the output in float32."""
        return 4 * self.seq_len * self.batch * self.hidden_size


LARGE = Shape(256, 64, 512)
SMALL = Shape(128, 32, 256)
OVER_SEQ_LEN = tuple(Shape(seq_len, 32, 256) for seq_len in (32, 64, 128, 256, 512))
# Two lengths of more than one chunk of time, so that the workspace has its full size.
OVER_SEQ_LEN_QUICK = tuple(Shape(seq_len, 32, 32) for seq_len in (32, 64))

# Upper bounds of ratios. Memory: peak of a training step over that of nn.LSTM.
MEMORY_LIMITS = {LARGE: 0.15, SMALL: 0.20}
# Time of a training step over that of the other one.
GEMMS, KEPT_GEMMS = "GEMMs alone", "GEMMs alone, recompute=False"
SPEED_LIMITS = {
    (OURS, GEMMS): 1.15,
    (OURS, LSTM): 1.6,
    (OURS, LOOP): 1.05,
    (KEPT, KEPT_GEMMS): 1.15,
    (KEPT, LSTM): 1.2,
    (KEPT, LOOP): 0.85,
}
# Time of a backward pass whose adjoints decay through denormals over that of an ordinary one.
DENORMAL_LIMIT = 1.2


class Loop(nn.Module):
    """The cell as one writes it by hand, with the parameters of a StochasticGRU."""

    def __init__(self, rnn: fusedrnn.StochasticGRU) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, eps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Without eps every step draws its own noise, as such a loop does."""
        return reference.stochastic_gru(input, list(self.rnn.parameters()), hx, eps=eps)


Step = Callable[..., Tensor]
eager_step: Step = reference.stochastic_gru_step
# The step alone is compiled, once for a batch and width: with the loop inside of the graph,
# compilation would take minutes, and again for every sequence length.
compiled_step: Step = torch.compile(eager_step, dynamic=False, fullgraph=True)


class CompiledLoop(nn.Module):
    """The loop over a step that went through torch.compile."""

    def __init__(self, rnn: fusedrnn.StochasticGRU) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """From a state of zeros."""
        _, batch, _ = input.shape
        weights = list(self.rnn.parameters())
        h = input.new_zeros(batch, self.rnn.hidden_size)
        output = []
        for t, x in enumerate(input):
            eps = torch.randn(batch, self.rnn.latent_size)
            # The first state needs no gradient. That would be a second graph to compile.
            step = compiled_step if t > 0 else eager_step
            h = step(x, h, *weights, eps=eps)
            output.append(h)
        return torch.stack(output), h.unsqueeze(0)


def _stochastic_gru(hidden_size: int, *, recompute: bool = True) -> fusedrnn.StochasticGRU:
    return fusedrnn.StochasticGRU(hidden_size, hidden_size, recompute=recompute)


# From a width to a module that maps (T, B, H) to (output, state).
CONTENDERS: dict[str, Callable[[int], nn.Module]] = {
    LSTM: lambda hidden_size: nn.LSTM(hidden_size, hidden_size),
    GRU: lambda hidden_size: nn.GRU(hidden_size, hidden_size),
    LOOP: lambda hidden_size: Loop(_stochastic_gru(hidden_size)),
    COMPILED: lambda hidden_size: CompiledLoop(_stochastic_gru(hidden_size)),
    OURS: _stochastic_gru,
    KEPT: lambda hidden_size: _stochastic_gru(hidden_size, recompute=False),
}


class TrainingStep:
    """Forward and backward of one contender on random numbers, the same ones for all.

    The input needs no gradient, the output's gradient is given, and those of the weights are
    dropped after each step, as an optimizer's ``zero_grad`` does.
    """

    def __init__(self, name: str, shape: Shape) -> None:
        torch.manual_seed(0)
        size = (shape.seq_len, shape.batch, shape.hidden_size)
        self.input, self.grad_output = torch.randn(size), torch.randn(size)
        self.module = CONTENDERS[name](shape.hidden_size)

    def forward(self) -> Tensor:
        """The output, with its graph."""
        output: Tensor = self.module(self.input)[0]
        return output

    def backward(self, output: Tensor) -> None:
        """Computes the gradients, and drops them."""
        output.backward(self.grad_output)
        self.module.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Forward and backward."""
        self.backward(self.forward())

    def infer(self) -> None:
        """Forward without a graph."""
        with torch.no_grad():
            self.module(self.input)


def why_not_compiled(shapes: list[Shape]) -> str | None:
    """Compiles the step for these widths, out of every clock; says why that is not possible."""
    try:
        for shape in shapes:
            TrainingStep(COMPILED, Shape(3, shape.batch, shape.hidden_size)).train()
    except Exception as error:  # a compiler fails in many ways, each of them a fine answer
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"does not compile: {lines[0]}"
    return None
