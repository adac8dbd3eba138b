"""Whether a program computes what the step does: values and all gradients.

What a program is made of does not show everything: custom autograd.Functions, hooks, changes in
place. So the graph of the step is run a few times under autograd, in float64, and its program is
run by the interpreter.

Longer than 350 lines, because the program and its library are compared to the same trial.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import _ops
from .._runtime.program_autograd import backward
from .._runtime.program_call import Call
from .._runtime.program_forward import forward
from .._runtime.sequence_parts import Part
from .._step.noise import MOST_DRAWS, Draw, Noise, TrialSeed
from .._step.sequence_call import Names, SequenceCall
from .._step.trees import Leaves, differentiable
from .._step.watch import Watch
from .trace import CannotCompile, Refused

if TYPE_CHECKING:
    from .._front.step_graph import Given, StepGraph
    from .compiled_step import Program

STEPS, BATCH = 3, 2
"""The batch is another one than that of the trace, in case that its size is in the graph."""
STEPS_OF_KNOWN = 2
"""A step that has a record has passed all trials before."""
_FEW = 16381
"""Normal numbers that are added to weights."""
_NEARBY = 1 + 1e-12
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative: a step may have numbers that depend on the dtype of its weights, such as an eps."""


Numbers = Callable[[Tensor], Tensor]
"""Makes special numbers of random ones."""


class Corner(NamedTuple):
    """What a step is tried with, too."""

    numbers: Numbers
    batch: int | None
    """None for that of the call."""


CORNERS = (
    Corner(torch.zeros_like, 2),
    Corner(lambda x: x[..., :1].expand_as(x).clone(), 5),
    Corner(lambda x: 100 * x, 2),
    Corner(torch.clone, 1),
    Corner(torch.clone, None),
)
"""Zeros, columns that are equal, and large numbers, where functions have limits and kinks; and
batches of other sizes, by which a step may decide."""


class Trial:
    """Tensors for a few steps, and what the step makes of them."""

    def __init__(
        self,
        constants: Leaves,
        trained: Sequence[bool],
        inputs: Leaves,
        state: Leaves,
        take_steps: Callable[[Trial], tuple[Sequence[Tensor], Sequence[Tensor]]],
        used: Sequence[bool] | None = None,
        corner: Numbers | None = None,
        batch: int = BATCH,
        *,
        dtype: torch.dtype,
        steps: int = STEPS,
        computes_in: torch.dtype = torch.float64,
    ) -> None:
        """
        Args:
            trained: Which constants have gradients.
            take_steps: From a trial with tensors to what the steps return, and to the last state.
            used: Which of these results have gradients; all by default.
            corner: What inputs and states are; constants are then as they come.
            batch: Rows.
            dtype: Of the program. But at corners, numbers are such as float32 has, if it is that;
                so its library is compared to the same trial.
            steps: How many are taken.
            computes_in: The dtype of all floating-point tensors.
        """
        self._random = torch.Generator().manual_seed(1)
        self._dtype = torch.float32 if dtype == torch.float32 else torch.float64
        self._computes_in = computes_in
        self._few: Tensor | None = None
        self._made: tuple[Any, list[Tensor], list[Tensor]] | None = None
        self._corner, self.batch, self.steps, self._originals = corner, batch, steps, constants
        self.constants = [self._constant(c, t) for c, t in zip(constants, trained, strict=True)]
        self.inputs = [self._input(leaf) for leaf in inputs]
        self.state = [self._state(leaf) for leaf in state]
        self.noise = _TrialNoise(self._dtype)
        outputs, last = take_steps(self)
        if any(y.shape[1:2] != (batch,) for y in outputs) or any(
            leaf.shape[:1] != (batch,) for leaf in last
        ):
            raise CannotCompile(
                "a result has the rows of the batch that was traced, also in a batch of another "
                "size"
            )
        self.outputs = [y.reshape(*y.shape[:2], -1) for y in outputs]
        self.last = [leaf.reshape(batch, -1) for leaf in last]
        results = (*self.outputs, *self.last)
        self.cotangents = [
            self._normal(*y.shape) * is_used
            for y, is_used in zip(results, used or [True] * len(results), strict=True)
        ]
        try:
            self.gradients = self.gradients_of([*self.outputs, *self.last])
        except RuntimeError as error:
            raise Refused(f"its backward raises: {str(error).splitlines()[0]}") from error

    @property
    def is_at_corner(self) -> bool:
        return self._corner is not None

    def leaves(self) -> list[Tensor]:
        return [t for t in (*self.constants, *self.inputs, *self.state) if t.requires_grad]

    def gradients_of(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Of the leaves."""
        pairs = [(y, g) for y, g in zip(results, self.cotangents, strict=True) if y.requires_grad]
        leaves = self.leaves()
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        # A sum, because torch imports its compiler for the gradients of several results.
        total = torch.stack([(y * g).sum() for y, g in pairs]).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        ]

    def rounded(self, dtype: torch.dtype, scale: float) -> Trial:
        """The same with numbers that a dtype has, still in float64.

        Args:
            scale: Of inputs and states, for another trial.
        """

        def of(tensor: Tensor, scale: float = 1.0) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            own = (tensor.detach() * scale).to(dtype).double()
            return own.requires_grad_(tensor.requires_grad)

        if dtype == self._dtype and scale == 1 and not self.is_at_corner:
            return self
        made = copy.copy(self)
        made._dtype, made._made = dtype, None
        made.constants = [of(c) for c in self.constants]
        made.inputs = [of(x, scale) for x in self.inputs]
        made.state = [of(leaf, scale) for leaf in self.state]
        made.cotangents = [of(g) for g in self.cotangents]
        return made

    def _draws(self, distribution: int, number: int, width: int) -> Tensor:
        """What the loop has drawn, (seq_len, batch, width), or what a program draws."""
        return _ops.draw(
            self.noise.seed.on(torch.device("cpu")),
            self.steps,
            self.batch,
            width,
            stream=number * MOST_DRAWS,
            distribution=distribution,
            dtype=self._dtype,
        ).double()

    def _normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        # Drawn in float32, because float64 takes six times longer.
        return torch.randn(shape, generator=self._random).to(dtype or self._computes_in)

    def _noise_like(self, weight: Tensor) -> Tensor:
        """A few normal numbers again and again: to draw one for each weight takes longer than the
        steps. Their count is prime, so rows and columns of weights differ."""
        if self._few is None:
            self._few = self._normal(_FEW, dtype=self._dtype)
        first, count = int(torch.randint(_FEW, (), generator=self._random)), weight.numel()
        repeated = self._few.repeat(-(-(first + count) // _FEW))
        return repeated[first : first + count].view(weight.shape)

    def _constant(self, constant: Tensor, is_trained: bool) -> Tensor:
        """Near the real one: what is zero now hides what is wrong."""
        value = constant.detach().cpu()
        if not differentiable(value):
            return value.clone()
        if self._corner is not None:
            return value.to(self._computes_in, copy=True).requires_grad_(is_trained)
        value = value.to(self._dtype)
        noise = self._noise_like(value)
        if is_trained:
            value = torch.add(value, noise, alpha=0.05, out=noise)
        else:  # maybe a variance, so it stays positive; zeros are filled, which would hide an error
            value = torch.where(value == 0, 0.05 * noise.abs(), value * (1 + 0.1 * noise.tanh()))
        return value.to(self._computes_in).requires_grad_(is_trained)

    def _input(self, leaf: Tensor) -> Tensor:
        shape = (self.steps, self.batch, *leaf.shape[2:])
        if leaf.dtype == torch.bool:
            return torch.rand(shape, generator=self._random) < 0.5
        if not leaf.is_floating_point():  # maybe places in a table: only what came is safe
            flat = leaf.detach().cpu().reshape(-1, *leaf.shape[2:])
            return flat[torch.arange(self.steps * self.batch) % flat.shape[0]].reshape(shape)
        made = self._normal(*shape)
        return (made if self._corner is None else self._corner(made)).requires_grad_()

    def _state(self, leaf: Tensor) -> Tensor:
        made = self._normal(self.batch, *leaf.shape[1:])
        # Positive, since some states are divided by, or have a logarithm.
        made = made.abs() if self._corner is None else self._corner(made)
        return made.requires_grad_()

    @staticmethod
    def of_graph(
        graph: StepGraph,
        given: Given,
        trained: Sequence[bool],
        inputs: Leaves,
        state: Leaves,
        corner: Numbers | None = None,
        batch: int = BATCH,
        *,
        is_known: bool = False,
    ) -> Trial:
        """What a step's graph makes.

        Args:
            trained: Which constants have gradients.
            is_known: The step has a record, which one that changes weights in place never has. So
                that is not looked for, fewer steps are taken, and float32 is computed in float32.

        Raises:
            CannotCompile: It cannot be tried.
        """
        dtype = state[0].dtype
        computes_in = dtype if is_known and dtype == torch.float32 else torch.float64
        return Trial(
            given.constants,
            trained,
            inputs,
            state,
            lambda trial: trial._loop(graph, given, not is_known),
            corner=corner,
            batch=batch,
            dtype=dtype,
            steps=STEPS_OF_KNOWN if is_known else STEPS,
            computes_in=computes_in,
        )

    @staticmethod
    def of_program(
        program: Program,
        constants: Leaves,
        trained: Sequence[bool],
        inputs: Leaves,
        state: Leaves,
        used: Sequence[bool],
    ) -> Trial:
        """What a program makes that is known to be right.

        Raises:
            CannotCompile: Its derivatives are not finite.
        """

        def take_steps(trial: Trial) -> tuple[list[Tensor], list[Tensor]]:
            return program.interpreter(
                trial.constants,
                trial.inputs,
                trial.state,
                trial.numbers(program).__getitem__,
                trial.steps,
            )

        return Trial(constants, trained, inputs, state, take_steps, used, dtype=program.dtype)

    def numbers(self, program: Program) -> dict[int, Tensor]:
        """What a program draws in these steps, by the numbers of its draws."""
        draws = program.made().plan.lowered.draws
        return {i: self._draws(d.distribution, i, d.width) for i, d in enumerate(draws)}

    def by_interpreter(self, program: Program) -> tuple[list[Tensor], list[Tensor]]:
        """What a program makes of the same, and gradients of the leaves."""
        if self._made is None or self._made[0] is not program.printed:
            numbers = self.numbers(program)
            with torch.enable_grad():
                outputs, last = program.interpreter(
                    self.constants, self.inputs, self.state, numbers.__getitem__, self.steps
                )
                results = [*outputs, *last]
                gradients = self.gradients_of(results)
            self._made = program.printed, [y.detach() for y in results], gradients
        return self._made[1:]

    def _loop(
        self, graph: StepGraph, given: Given, looks_for_changes: bool
    ) -> tuple[Leaves, Leaves]:
        """All steps by the graph."""
        module = graph.on_cpu(self._computes_in)
        own = given._replace(constants=tuple(self.constants))
        before = [c.detach().clone() for c in self.constants] if looks_for_changes else []
        state, outputs = tuple(self.state), list[Leaves]()
        self.noise.chunk(0, self.steps, self.batch)
        try:
            with torch.enable_grad(), Watch(self.noise), _WithoutHooks():
                for time in range(self.steps):
                    self.noise.step(time)
                    x = tuple(leaf[time] for leaf in self.inputs)
                    state, y = graph.take(own, x, state, self.batch, module)
                    outputs.append(y)
        except CannotCompile:
            raise
        except Exception as error:
            raise Refused(
                f"in float64 it raises {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            ) from error
        for name, constant, old in zip(graph.names, self.constants, before, strict=False):
            if not torch.equal(constant.detach(), old):  # also what .data hides from versions
                raise CannotCompile(f"the step changes {name} in place")
        return tuple(torch.stack(y) for y in zip(*outputs, strict=True)), state


class _TrialNoise(Noise):
    """Numbers of one dtype, as those of another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(TrialSeed(), 0)
        self._dtype = dtype

    def _numbers(self, draw: Draw) -> Tensor:
        return super()._numbers(draw._replace(dtype=self._dtype)).to(draw.dtype)


class _WithoutHooks(TorchFunctionMode):
    """Within, the step has no hooks for backward: they may do something to rare gradients alone."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.register_hook:
            raise CannotCompile("the step has a hook for backward")
        return function(*args, **(kwargs or {}))


def verify(
    program: Program,
    trial: Trial,
    again: Callable[[float], Trial | None] = lambda scale: None,
) -> None:
    """Compares a program to the step, at a corner where the step has finite numbers.

    Args:
        again: The same trial of the step with inputs and states times a number. At a corner it
            shows what roundings do to the step itself, if numbers cancel there.

    Raises:
        CannotCompile: They differ.
    """
    results, gradients = trial.by_interpreter(program)
    tolerance = _TOLERANCES[program.dtype]
    is_corner = trial.is_at_corner
    exact = [*trial.outputs, *trial.last]
    for ours, theirs, what in (
        (results, exact, "values"),
        (gradients, trial.gradients, "derivatives"),
    ):
        try:
            compare(ours, theirs, tolerance, what, is_corner)
        except CannotCompile:
            others = again(_NEARBY) if is_corner else None
            if others is None:
                raise
            moved = [*others.outputs, *others.last] if what == "values" else others.gradients
            noise = [10 * (a - b).abs() for a, b in zip(theirs, moved, strict=True)]
            compare(ours, theirs, tolerance, what, is_corner, noise)


_LIBRARY_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
}
"""Relative to the largest number."""
_TRIALS = 4
_OFF = {torch.bfloat16: 0.25, torch.float16: 0.25}
"""A rounding may make a choice another one, or a derivative at a kink. So steps with choices are
tried several times, and in 16 bits a share of the numbers may be off."""

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The same where a library is compared to the step itself, in the same dtype."""


def is_close(program: Program, trial: Trial, device: torch.device) -> bool:
    """Whether the library of a program that has passed every trial in another process computes what
    the step itself does, to a few roundings. In 16 bits they are too large to say so.

    Raises:
        Exception: The program is of other shapes.
    """
    of_step = [*trial.outputs, *trial.last], trial.gradients
    try:
        _compare_library(program, trial, device, of_step, _CLOSE[program.dtype])
    except CannotCompile:  # or a rounding has made a choice another one
        return False
    return True


def verify_library(program: Program, trial: Trial, device: torch.device) -> None:
    """Compares what a program's library computes, on its device and in its dtype, to the program.

    Raises:
        CannotCompile: They differ.
    """
    has_choices = program.printed.has_choices
    failure: CannotCompile | None = None
    for number in range(_TRIALS if has_choices else 1):
        try:
            rounded = trial.rounded(program.dtype, 1 - number / 8)
            exact, tolerance = rounded.by_interpreter(program), _LIBRARY_TOLERANCES[program.dtype]
            return _compare_library(program, rounded, device, exact, tolerance)
        except CannotCompile as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _compare_library(
    program: Program,
    trial: Trial,
    device: torch.device,
    exact: tuple[list[Tensor], list[Tensor]],
    tolerance: float,
) -> None:
    """``exact``: results, and gradients of the leaves."""
    dtype = program.dtype
    results, gradients = _by_operators(program, trial, device)
    off = _OFF.get(dtype, 0.0) if program.printed.has_choices else 0.0
    for ours, theirs in ((results, exact[0]), (gradients, exact[1])):
        for a, b in zip(ours, theirs, strict=True):
            a, b = a.detach().cpu().to(b.dtype, copy=True).reshape(b.shape), b.detach()
            scale = _largest(b)
            if not math.isfinite(scale):
                raise CannotCompile(f"its numbers in {dtype} are not finite")
            difference, most = a.sub_(b), tolerance * (1 + scale)
            if _largest(difference) <= most:
                continue
            wrong = ~(difference.abs() <= most)
            if int(wrong.sum()) > off * wrong.numel():
                raise CannotCompile(
                    f"the library does not compute what the program does in {dtype} on {device}"
                )


def _by_operators(
    program: Program, trial: Trial, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of a trial's leaves, as the interpreter and the trial give them."""
    groups = trial.inputs, trial.state, trial.constants
    tensors = [
        t.detach().to(device, program.dtype if t.is_floating_point() else t.dtype)
        for group in groups
        for t in group
    ]
    needs = [t.requires_grad for group in groups for t in group]
    inputs, states = len(trial.inputs), len(trial.state)
    steps = trial.steps
    call = Call(
        SequenceCall((), (), Names([], []), steps, trial.batch, device, trial.noise.seed),
        (inputs, states, 0),
        None,
        (),
        program,
        program,
        steps - 1,  # three make a whole chunk and a shorter one
        [Part(0, steps)],
        saves_sums=False,
    ).with_program(program)
    seed = trial.noise.seed
    results = forward(call, seed, tensors, for_backward=True)
    cotangents = [g.to(device, program.dtype) for g in trial.cotangents]
    found = backward(call, seed, tensors, results.for_backward, needs, cotangents)
    leaves = [
        torch.zeros_like(t) if g is None else g
        for t, g, need in zip(tensors, found, needs, strict=True)
        if need
    ]
    constants = sum(needs[: inputs + states])  # where these begin, which a trial has first
    return [*results.outputs, *results.last], [*leaves[constants:], *leaves[:constants]]


def compare(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    tolerance: float,
    what: str,
    is_corner: bool = False,
    noise: Sequence[Tensor] | None = None,
) -> None:
    """
    Args:
        is_corner: What is infinite or NaN in ``theirs`` may be any number.
        noise: By how much each number may be off besides.

    Raises:
        CannotCompile: They differ.
    """
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.detach().double(), b.detach().double()
        scale = _largest(b)
        if math.isfinite(scale) and noise is None:
            difference = _largest(a - b)
        elif is_corner:
            finite = b.isfinite()
            more = torch.zeros_like(b) if noise is None else noise[i].detach().expand(b.shape)
            a, b, more = a[finite], b[finite], more[finite].nan_to_num(torch.inf)
            scale = _largest(b)
            difference = ((a - b).abs() - more).max().item() if b.numel() else 0.0
        else:
            raise CannotCompile(f"{what} of the step on random numbers are not finite")
        if not difference <= tolerance * (1 + scale):
            where = " on zeros, equal or large numbers, or in another batch" if is_corner else ""
            hint = (
                ""
                if what == "values" or is_corner
                else ": does it have a custom autograd.Function, a hook, or a change in place "
                "without a graph?"
            )
            raise CannotCompile(
                f"{what} of the program are not those of the step itself{where}{hint}"
            )


def _largest(numbers: Tensor) -> float:
    """Of the magnitudes; NaN if one is, and 0 if there are none."""
    if not numbers.numel():
        return 0.0
    least, most = torch.aminmax(numbers)
    return max(-least.item(), most.item())


def examples(leaves: Sequence[Tensor], rows: int, of_steps: bool) -> list[Tensor]:
    """Leaves of ``rows`` rows to trace with."""
    found: list[Any] = []
    for leaf in leaves:
        shape = (rows, *leaf.shape[(2 if of_steps else 1) :])
        if leaf.is_floating_point():
            random = torch.Generator().manual_seed(len(found))
            numbers = torch.rand(shape, generator=random) + 0.25
            found.append(numbers.to(leaf.dtype))
        else:
            flat = leaf.detach().reshape(-1, *shape[1:])
            found.append(flat[torch.arange(rows) % flat.shape[0]].cpu())
    return found
