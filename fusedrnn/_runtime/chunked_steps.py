"""A sequence by steps in Python, whose chunks are under torch.utils.checkpoint.

Forward keeps the state before each chunk. When backward comes to a chunk, it takes the steps again,
which must be as they were: with the same random numbers, variables and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointError, checkpoint

from .._step.generators import RandomStates, is_capturing
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .python_steps import Chunk, PythonSteps
from .sequence_slices import Join, Write, cut
from .state_comparison import coarsest_eps, is_close
from .step_changes import Before, Changes


def take_all(
    steps: PythonSteps,
    inputs: Leaves,
    state: Leaves,
    constants: Leaves,
    weights: Sequence[Tensor],
    chunk_size: int,
    recompute: bool,
) -> tuple[Leaves, Leaves]:
    """Outputs and the last state.

    Args:
        weights: Of the step's modules, with and without gradient.
        chunk_size: Steps of a chunk.
        recompute: Whether backward takes the steps again; else their graph is kept, if there
            is one.
    """
    call, rest = steps.call, list(inputs)
    takes = _Checkpoints(steps, weights, (*inputs, *state, *constants)) if recompute else None
    results = _Results(call)
    for chunk in steps.chunks(chunk_size):
        parts = []
        for i, leaf in enumerate(rest):
            part, rest[i] = cut(leaf, chunk.part)
            parts.append(part)
        given = state, tuple(parts), constants, results.last
        if takes is None:
            state, outputs, _ = steps.take(chunk, *given, Noise(call.seed, call.layer))
        else:
            state, outputs = takes.take(chunk, given)
        results.add(chunk, outputs)
    if takes is not None:
        takes.end()
    # A step may return what it gets, and the same tensor twice: users may write to results.
    return results.outputs(), tuple(leaf.clone() for leaf in state)


class CannotCheckpoint(Exception):
    """A step calls torch.func.grad or the like, which refuses checkpoints; nothing has happened."""


def refuses_checkpoints(error: RuntimeError) -> bool:
    """Whether torch.func says so, whose transforms allow no hooks of saved tensors."""
    return "support saved tensor hooks" in str(error)


class _Results:
    """Outputs of all steps in one tensor for each leaf, or the last ones."""

    def __init__(self, call: SequenceCall) -> None:
        self._call = call
        self._sequences: list[Tensor] = []
        self._parts: list[tuple[int, Leaves]] = []
        self.last: Leaves = ()

    def add(self, chunk: Chunk, outputs: Leaves) -> None:
        if not self._call.returns_sequence:
            self.last = outputs
            return
        if all(type(leaf) is Tensor for leaf in outputs):
            if not self._parts:
                size = self._call.seq_len
                self._sequences = [leaf.new_empty((size, *leaf.shape[1:])) for leaf in outputs]
            places = zip(outputs, self._sequences, strict=True)
            outputs = tuple([Write.apply(leaf, sequence[chunk.part]) for leaf, sequence in places])
        self._parts.append((chunk.part.start, outputs))

    def outputs(self) -> Leaves:
        if not self._call.returns_sequence:
            return tuple(leaf.clone() for leaf in self.last)
        in_time = sorted(self._parts, key=lambda part: part[0])
        parts = list(zip(*(part for _, part in in_time), strict=True))
        if not self._sequences:
            return tuple(map(torch.cat, parts))
        both = zip(self._sequences, parts, strict=True)
        return tuple(Join.apply(sequence, *some) for sequence, some in both)


class _Checkpoints:
    """Takes chunks in forward so that backward can take them again."""

    def __init__(self, steps: PythonSteps, weights: Sequence[Tensor], tensors: Leaves) -> None:
        # Of others autograd saves none: it would refuse the call.
        self._weights = [w for w in weights if not (is_lazy(w) or w.is_inference() or w.is_nested)]
        self._steps, self._changes = steps, Changes(steps.variables, self._weights)
        self._random = self._first = steps.generators.states()
        self._had_seed = steps.call.seed.is_drawn
        kind = steps.call.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._eps = coarsest_eps(autocast, (*tensors, *self._weights))

    def take(self, chunk: Chunk, given: tuple[Leaves, ...]) -> tuple[Leaves, Leaves]:
        seed, generators = self._steps.call.seed, self._steps.generators
        sizes = [len(leaves) for leaves in given]
        before = self._random
        kept = _Keep.apply(torch.empty(0, requires_grad=True), *self._weights)
        again = _ChunkTaken(
            self._steps, chunk, sizes, self._changes.before(), self._eps, kept, before
        )
        had_seed, was_lent = seed.is_drawn, seed.is_lent
        made = checkpoint(
            again,
            *(leaf for leaves in given for leaf in leaves),
            use_reentrant=False,
            preserve_rng_state=False,  # generators of Python and NumPy are put back, too
            early_stop=False,  # so that states and outputs are compared
        )
        if again.error is not None:
            self._raise(again)
        self._changes.note()
        self._random = generators.states(before)
        if seed.is_lent and not was_lent:
            before = seed.lent_states(before)
        if seed.is_from_torch and not had_seed:
            with generators.as_of(before, self._random):
                seed.draw_again(self._steps.call.device)
                is_all = generators.states().is_same(self._random)
            before = self._random if is_all else before
            again.draws_seed = not is_all
        again.random, again.random_after = before, self._random
        return tuple(made[: sizes[0]]), tuple(made[sizes[0] :])

    def _raise(self, again: _ChunkTaken) -> None:
        """The error of a chunk's steps."""
        error, again.error = again.error, None
        assert error is not None
        try:
            if isinstance(error, RuntimeError) and refuses_checkpoints(error):
                self._undo()
                raise CannotCheckpoint from error
            raise error
        finally:
            del error  # whose traceback has this frame

    def _undo(self) -> None:
        self._changes.undo()
        self._steps.generators.put_back(self._first)
        seed = self._steps.call.seed
        if seed.is_from_torch and not self._had_seed:
            seed.draw_again(self._steps.call.device)

    def end(self) -> None:
        self._changes.end()


class _Keep(torch.autograd.Function):
    """Has autograd save tensors, as operations of steps would, so that hooks see them."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.clone()

    @staticmethod
    def jvp(ctx: Any, *_: Tensor | None) -> Tensor:
        return torch.zeros(0)


@dataclass
class _ChunkTaken:
    """Takes the steps of a chunk, in forward and again in backward."""

    steps: PythonSteps
    chunk: Chunk
    sizes: Sequence[int]
    """How many tensors are the state, inputs, constants and last outputs."""
    before: Before
    eps: float
    """Of the coarsest dtype that steps compute in."""
    kept: Tensor
    """Whose node of autograd keeps the weights."""
    random: RandomStates
    """Before the chunk."""
    random_after: RandomStates | None = None
    is_dual: bool = False
    """Whether the steps have made tangents of forward mode."""
    has_begun: bool = False
    """Whether forward takes the steps, or has taken them."""
    draws_seed: bool = False
    """Whether one of its steps has drawn the seed of the call from torch's generators."""
    made: Leaves | None = None
    """By forward: the state, and the outputs of the last step."""
    error: BaseException | None = None
    """That a step has raised in forward. torch 2.11 leaves its hooks there for one that passes."""

    def __call__(self, *leaves: Tensor) -> Leaves:
        # From their second run on, functions of TorchScript save other tensors when optimized.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            if not self.has_begun:
                try:
                    return self._take(leaves)
                except BaseException as error:
                    self.error = error
                    return ()
            with torch.inference_mode(False), torch.enable_grad():
                return self._take(leaves)

    def _take(self, leaves: Sequence[Tensor]) -> Leaves:
        if self.has_begun:  # a gradient that a step takes must not go on into earlier chunks
            leaves = [_apart(leaf) for leaf in leaves]
        steps, rest = self.steps, iter(leaves)
        state, parts, constants, last = (
            tuple([next(rest) for _ in range(size)]) for size in self.sizes
        )
        given = self.chunk, state, parts, constants, last
        noise = Noise(steps.call.seed, steps.call.layer)
        if not self.has_begun:
            self.has_begun = True
            try:
                taken = steps.take(*given, noise)
            except AssertionError as error:
                if "activation checkpoint" not in str(error):
                    raise
                raise RuntimeError(
                    "fusedrnn: a step that takes gradients itself must detach what it gets before "
                    "it computes what they are of, since steps before it are recomputed; "
                    "recompute=False keeps them"
                ) from error
            # A step may write later to an output that it has not returned as its state.
            own = {id(leaf) for leaf in taken.state}
            outputs = [leaf if id(leaf) in own else leaf.clone() for leaf in taken.last_outputs]
            made = *taken.state, *outputs
            self.is_dual = any(_tangent(leaf) is not None for leaf in made)
            self.made = tuple([leaf.detach() for leaf in made])
            return *taken.state, *taken.outputs
        if self.is_dual and forward_ad._current_level < 0:
            raise RuntimeError(_NOT_DUAL)
        if self.made is None:  # a step of the chunk takes a gradient itself
            steps.takes_gradients = True
        node: Any = self.kept.grad_fn
        weights = node.saved_tensors  # an error if one has been written meanwhile
        noise.draws_seed_again = self.draws_seed
        with (
            steps.variables.exchanged(self.before.states(weights)),
            steps.generators.as_of(self.random, self.random_after),
        ):
            try:
                taken = steps.take(*given, noise)
            except CheckpointError as error:
                raise RuntimeError(_NOT_AGAIN.format("graph of operations")) from error
        if self.made is not None:
            self._compare((*taken.state, *taken.last_outputs), self.made)
        return *taken.state, *taken.outputs

    def _compare(self, made: Leaves, first: Leaves) -> None:
        """
        Args:
            first: What forward has made.

        Raises:
            RuntimeError: They differ.
        """
        if is_capturing(made[0].device):
            return
        with torch.no_grad():
            if all(map(torch.equal, made, first)):
                return
            names = [*self.steps.call.names.state, *["output"] * len(made)]
            for name, new, old in zip(names, made, first, strict=False):
                if not is_close(new, old, self.eps):
                    raise RuntimeError(_NOT_AGAIN.format(name))


def _apart(leaf: Tensor) -> Tensor:
    """The same out of the graph, with its tangent in forward mode."""
    made = leaf.detach().requires_grad_(leaf.requires_grad)
    tangent = _tangent(leaf)
    return made if tangent is None else forward_ad.make_dual(made, _apart(tangent))


def _tangent(leaf: Tensor) -> Tensor | None:
    """Its derivative in forward mode, within torch.autograd.forward_ad.dual_level()."""
    return forward_ad.unpack_dual(leaf).tangent if forward_ad._current_level >= 0 else None


_NOT_DUAL = (
    "fusedrnn: the call was made within torch.autograd.forward_ad.dual_level(), so backward must "
    "run within it, too, since it recomputes the steps with their tangents; recompute=False keeps "
    "what backward needs"
)
_NOT_AGAIN = (
    "fusedrnn: the step is not deterministic: recomputing it in backward gave a different {}. A "
    "step may depend only on its arguments, weights, buffers, attributes and random numbers, not "
    "on iterators or clocks, nor on arrays of NumPy that it changes; and weights and closed-over "
    "tensors must not change between forward and backward"
)
