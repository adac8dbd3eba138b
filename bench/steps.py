"""Contenders: loops as people write them, and training steps of any module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedrnn
from fusedrnn import _tuning as tuning
from fusedrnn import reference


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
        return self.output_bytes_in(torch.float32)

    def output_bytes_in(self, dtype: torch.dtype) -> int:
        """Size of the output in a dtype."""
        return dtype.itemsize * self.seq_len * self.batch * self.hidden_size


class Loop(nn.Module):
    """The loop that people write by hand, with the parameters of a StochasticGRU."""

    def __init__(self, rnn: fusedrnn.StochasticGRU) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, eps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the loop; without eps every step draws its own noise, as such loops do."""
        return reference.stochastic_gru(input, list(self.rnn.parameters()), hx, eps=eps)


Step = Callable[..., Tensor]
eager_step: Step = reference.stochastic_gru_step
# The step alone is compiled, once for a batch and width: with the loop inside of the graph,
# compilation would take minutes, and again for every sequence length.
compiled_step: Step = torch.compile(eager_step, dynamic=False, fullgraph=True)


class CompiledLoop(nn.Module):
    """The loop over a step that torch.compile has compiled."""

    def __init__(self, rnn: fusedrnn.StochasticGRU) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the loop from a state of zeros."""
        _, batch, _ = input.shape
        weights = list(self.rnn.parameters())
        h = input.new_zeros(batch, self.rnn.hidden_size)
        output = []
        for t, x in enumerate(input):
            eps = torch.randn(batch, self.rnn.latent_size, dtype=x.dtype, device=x.device)
            # The first step is eager: its state needs no gradient, which would take another graph.
            step = compiled_step if t > 0 else eager_step
            h = step(x, h, *weights, eps=eps)
            output.append(h)
        return torch.stack(output), h.unsqueeze(0)


class CheckpointedLoop(Loop):
    """The loop in about sqrt(T) segments that keep their first state and run again in backward."""

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, eps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the loop; eps is drawn."""
        if hx is None:
            hx = input.new_zeros(1, input.shape[1], self.rnn.hidden_size)
        output = []
        for segment in input.split(math.isqrt(len(input))):
            part, hx = checkpoint(super().forward, segment, hx, use_reentrant=False)
            output.append(part)
        return torch.cat(output), hx


class OffloadedLoop(Loop):
    """The loop with saved tensors on the host, weights too, which hooks cannot distinguish."""

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, eps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the loop."""
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return super().forward(input, hx, eps=eps)


class CellLoop(nn.Module):
    """A loop over torch.nn.LSTMCell."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(input_size, hidden_size)

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs the loop from a state of zeros."""
        zeros = input.new_zeros(input.shape[1], self.cell.hidden_size)
        return self.steps(input, (zeros, zeros))

    def steps(
        self, input: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs the loop from any state."""
        output = []
        for x in input:
            state = self.cell(x, state)
            output.append(state[0])
        return torch.stack(output), state


class CheckpointedCellLoop(CellLoop):
    """The loop in about sqrt(T) segments that keep their first state and run again in backward."""

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs the loop from a state of zeros."""
        zeros = input.new_zeros(input.shape[1], self.cell.hidden_size)
        state, output = (zeros, zeros), []
        for segment in input.split(math.isqrt(len(input))):
            part, state = checkpoint(self.steps, segment, state, use_reentrant=False)
            output.append(part)
        return torch.cat(output), state


class TrainingStep:
    """Forward and backward of one contender on random numbers, the same ones for all.

    The input needs no gradient. The output's gradient is given. The gradients of the weights are
    dropped after each step, as by an optimizer's ``zero_grad``.
    """

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        shape: Shape,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        size = (shape.seq_len, shape.batch, shape.hidden_size)
        with torch.device(device):
            self.input, self.grad_output = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
            self.module = make(shape.hidden_size).to(dtype)
        self.weights = list(self.module.parameters())

    def forward(self) -> Tensor:
        """Runs forward; returns the output with its graph."""
        output: Tensor = self.module(self.input)[0]
        return output

    def backward(self, output: Tensor) -> None:
        """Runs backward, and drops the gradients."""
        output.backward(self.grad_output)
        for weight in self.weights:
            weight.grad = None

    def train(self) -> None:
        """Runs forward and backward."""
        self.backward(self.forward())

    def infer(self) -> None:
        """Runs forward without a graph."""
        with torch.no_grad():
            self.forward()


class LastStateStep(TrainingStep):
    """A training step of a module whose output is its last state."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.grad_output = self.grad_output[-1]


class CellStep(TrainingStep):
    """A training step of a cell that is called once per step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.grad_output = self.grad_output[-1]

    def forward(self) -> Tensor:
        state = None
        for x in self.input:
            state = self.module(x, state)
        output: Tensor = state[0] if isinstance(state, tuple) else state
        return output


class SwitchedStep(TrainingStep):
    """A training step with one of the package's settings turned on."""

    switch: str

    def forward(self) -> Tensor:
        with _switched_on(self.switch):
            return super().forward()

    def backward(self, output: Tensor) -> None:
        with _switched_on(self.switch):
            super().backward(output)

    def infer(self) -> None:
        with _switched_on(self.switch):
            super().infer()


@contextmanager
def _switched_on(switch: str) -> Iterator[None]:
    before = getattr(tuning.switches, switch)
    setattr(tuning.switches, switch, True)
    try:
        yield
    finally:
        setattr(tuning.switches, switch, before)


class ReplayedStep(SwitchedStep):
    """A training step whose chunks are replayed as CUDA graphs."""

    switch = "replay_chunks"


class FlaggedStep(SwitchedStep):
    """A training step whose persistent kernels exchange results by flags."""

    switch = "exchange_by_flags"


class OverlappedStep(SwitchedStep):
    """A training step with a second stream for work that the steps of a chunk do not wait for."""

    switch = "overlap_chunks"


class GraphedStep(TrainingStep):
    """A training step in a CUDA graph of the user; noise, or its seed, is drawn inside."""

    @functools.cached_property
    def _train(self) -> torch.cuda.CUDAGraph:
        return captured(super().train)

    @functools.cached_property
    def _infer(self) -> torch.cuda.CUDAGraph:
        return captured(super().infer)

    def train(self) -> None:
        """Captures a graph the first time, and replays it."""
        self._train.replay()

    def infer(self) -> None:
        """Captures a graph the first time, and replays it."""
        self._infer.replay()


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call, which runs once before it is captured."""
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # a failed capture would leave the current stream set
        call()  # work that libraries do once per stream must not be captured
        with torch.cuda.graph(graph, stream=stream):
            call()
    return graph


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for each stream that it has used."""
    return torch.cuda.Stream()
