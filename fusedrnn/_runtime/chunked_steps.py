"""A sequence by steps in Python, whose chunks are under torch.utils.checkpoint.

Forward keeps the state before each chunk. When backward comes to a chunk, it takes the steps again,
which must be as they were: with the same random numbers, variables and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointError, checkpoint

from .._step.generators import RandomStates, is_capturing
from .._step.noise import Noise
from .._step.trees import Leaves
from .._step.unusual_tensors import PLAIN
from .python_steps import Chunk, PythonSteps, Taken, add_note
from .python_variables import versions_of
from .sequence_slices import Outputs, cut
from .state_comparison import coarsest_eps, is_close
from .step_changes import Before, Changes, has_memory_of


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
    rest, results = list(inputs), Outputs(steps.call)
    given = *inputs, *state, *constants
    takes = _Checkpoints(steps, weights, given, results) if recompute else None
    for chunk in steps.chunks(chunk_size):
        parts = []
        for i, leaf in enumerate(rest):
            part, rest[i] = cut(leaf, chunk.part)
            parts.append(part)
        leaves = state, tuple(parts), constants, results.last
        if takes is None:
            noise = Noise(steps.call.seed, steps.call.layer)
            state, outputs, _ = steps.take(chunk, *leaves, noise)
        else:
            state, outputs = takes.take(chunk, leaves)
        results.add(chunk.part, outputs)
    outputs = results.joined()
    # A step may return what it gets, and the same tensor twice: users may write to results.
    return outputs, tuple(leaf.clone() for leaf in state)


class CannotCheckpoint(Exception):
    """A step takes gradients itself, which would have it taken again; nothing has happened."""


def refuses_checkpoints(error: RuntimeError) -> bool:
    """Whether torch.func says so, whose transforms allow no hooks of saved tensors."""
    return "support saved tensor hooks" in str(error)


class _Checkpoints:
    """Takes chunks in forward so that backward can take them again."""

    def __init__(
        self, steps: PythonSteps, weights: Sequence[Tensor], tensors: Leaves, results: Outputs
    ) -> None:
        # Of others autograd saves none: it would refuse the call.
        weights = [w for w in weights if not (is_lazy(w) or w.is_inference() or w.is_nested)]
        self._steps, self._changes = steps, Changes(steps.variables, weights)
        self._weights = weights
        # As they are now, if somebody sets their data, too.
        self._kept = [w.detach() if type(w) in PLAIN else w for w in weights]
        self._gradients = [
            (w, w.grad, w.grad is not None and versions_of([w.grad])) for w in weights if w.is_leaf
        ]
        self._results = results
        self._random = self._first = steps.generators.states()
        self._had_seed = steps.call.seed.is_drawn
        kind = steps.call.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._eps = coarsest_eps(autocast, (*tensors, *weights))

    def take(self, chunk: Chunk, given: tuple[Leaves, ...]) -> tuple[Leaves, Leaves]:
        seed, generators = self._steps.call.seed, self._steps.generators
        sizes = [len(leaves) for leaves in given]
        before = self._random
        kept = _Keep.apply(torch.empty(0, requires_grad=True), *self._kept)
        again = _ChunkTaken(
            self._steps,
            chunk,
            sizes,
            self._changes.before(),
            self._eps,
            kept,
            self._results,
            before,
        )
        had_seed, was_lent = seed.is_drawn, seed.is_lent
        made = checkpoint(
            again,
            *(leaf for leaves in given for leaf in leaves),
            use_reentrant=False,
            preserve_rng_state=False,  # generators of Python and NumPy are put back, too
            early_stop=False,  # so that states and outputs are compared
        )
        if again.error is not None or self._results.are_asked_for:
            self._raise(again)
        self._changes.note()
        for weight, kept in zip(self._weights, self._kept, strict=True):
            if kept.layout == torch.strided and not has_memory_of(weight, kept):
                raise RuntimeError(
                    f"fusedrnn: the step sets .data of a weight of shape {tuple(kept.shape)}, so "
                    "backward cannot recompute it with the old one; pass recompute=False"
                )
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
        refuses = isinstance(error, RuntimeError) and refuses_checkpoints(error)
        try:
            if error is None or refuses or self._results.are_asked_for:
                self._undo()
                raise CannotCheckpoint from error
            self._results.is_over = True
            raise error
        finally:
            del error  # whose traceback has this frame

    def _undo(self) -> None:
        self._changes.undo()
        self._steps.generators.put_back(self._first)
        seed = self._steps.call.seed
        if seed.is_from_torch and not self._had_seed:
            seed.draw_again(self._steps.call.device)
        for weight, gradient, version in self._gradients:
            if weight.grad is not gradient:
                weight.grad = gradient
            elif gradient is not None and versions_of([gradient]) != version:
                raise RuntimeError(
                    "fusedrnn: the step calls backward(), which has added to gradients, and is to "
                    "be taken again with its graph; pass recompute=False"
                )


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
    results: Outputs
    random: RandomStates
    """Before the chunk."""
    random_after: RandomStates | None = None
    is_dual: bool = False
    """Whether the steps have made tangents of forward mode."""
    has_begun: bool = False
    """Whether forward takes the steps, or has taken them."""
    draws_seed: bool = False
    """Whether one of its steps has drawn the seed of the call from torch's generators."""
    made: Leaves = ()
    """By forward: the state, and the outputs of the last step."""
    error: BaseException | None = None
    """That a step has raised in forward. torch 2.11 leaves its hooks there for one that passes."""

    def __call__(self, *leaves: Tensor) -> Leaves:
        # From their second run on, functions of TorchScript save other tensors when optimized.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            if self.has_begun:
                with torch.inference_mode(False), torch.enable_grad(), _without_transforms():
                    return self._take_again(tuple(map(_apart, leaves)))
            self.has_begun = True
            try:
                return self._take_first(leaves)
            except BaseException as error:
                self.error = error
                return ()

    def _take_first(self, leaves: Leaves) -> Leaves:
        taken = self._taken(leaves, Noise(self.steps.call.seed, self.steps.call.layer))
        # A step may write later to an output that it has not returned as its state.
        own = {id(leaf) for leaf in taken.state}
        outputs = [leaf if id(leaf) in own else leaf.clone() for leaf in taken.last_outputs]
        made = *taken.state, *outputs
        self.is_dual = any(_tangent(leaf) is not None for leaf in made)
        self.made = tuple([leaf.detach() for leaf in made])
        return *taken.state, *taken.outputs

    def _take_again(self, leaves: Leaves) -> Leaves:
        if not self.results.is_over:
            self.results.are_asked_for = True
            raise CannotCheckpoint
        if self.is_dual and forward_ad._current_level < 0:
            raise RuntimeError(_NOT_DUAL)
        steps, node = self.steps, cast(Any, self.kept.grad_fn)
        try:
            weights = node.saved_tensors
        except RuntimeError as error:
            add_note(error, _WRITTEN)
            raise
        noise = Noise(steps.call.seed, steps.call.layer)
        noise.draws_seed_again = self.draws_seed
        with (
            steps.variables.exchanged(self.before.states(weights)),
            steps.generators.as_of(self.random, self.random_after),
        ):
            try:
                taken = self._taken(leaves, noise)
            except CheckpointError as error:
                raise RuntimeError(self._not_again("graph of operations")) from error
            except Exception as error:
                add_note(error, "fusedrnn: backward has taken this step again")
                raise
        self._compare(taken)
        return *taken.state, *taken.outputs

    def _taken(self, leaves: Leaves, noise: Noise) -> Taken:
        rest = iter(leaves)
        state, parts, constants, last = (
            tuple([next(rest) for _ in range(size)]) for size in self.sizes
        )
        return self.steps.take(self.chunk, state, parts, constants, last, noise)

    def _compare(self, taken: Taken) -> None:
        """
        Raises:
            RuntimeError: It is not what forward has made.
        """
        if is_capturing(self.steps.call.device):
            return
        count, all_outputs = len(taken.state), self.results.part(self.chunk.part)
        first = self.made[:count] + (all_outputs or self.made[count:])
        made = taken.state + (taken.outputs if all_outputs else taken.last_outputs)
        with torch.no_grad():
            if all(map(torch.equal, made, first)):
                return
            names = [*self.steps.call.names.state, *["output"] * len(made)]
            for name, new, old in zip(names, made, first, strict=False):
                if not is_close(new, old, self.eps):
                    is_users = all_outputs and name == "output"
                    since = " (unless somebody has written to it since)" if is_users else ""
                    raise RuntimeError(self._not_again(name + since))

    def _not_again(self, what: str) -> str:
        times, place = self.chunk.part, self.steps.call.place
        return (
            f"fusedrnn: the step is not deterministic: recomputing the steps from {times.start} to "
            f"{times.stop - 1}{place} in backward gave a different {what}. A step may depend only "
            "on its arguments, weights, buffers, attributes and random numbers, not on iterators "
            "or clocks; and closed-over tensors must not change between forward and backward. "
            "recompute=False takes no step again, in the memory of a loop"
        )


def _apart(leaf: Tensor) -> Tensor:
    """The same out of the graph, with its tangent in forward mode."""
    made = leaf.detach().requires_grad_(leaf.requires_grad)
    tangent = _tangent(leaf)
    return made if tangent is None else forward_ad.make_dual(made, _apart(tangent))


def _tangent(leaf: Tensor) -> Tensor | None:
    """Its derivative in forward mode, within torch.autograd.forward_ad.dual_level()."""
    return forward_ad.unpack_dual(leaf).tangent if forward_ad._current_level >= 0 else None


_WRITTEN = (
    "fusedrnn: backward recomputes the steps with the weights of forward, and one of a module that "
    "the step holds has been changed in place since; recompute=False saves only what backward needs"
)
_NOT_DUAL = (
    "fusedrnn: the call was made within torch.autograd.forward_ad.dual_level(), so backward must "
    "run within it, too, since it recomputes the steps with their tangents; recompute=False keeps "
    "what backward needs"
)


def _without_transforms() -> AbstractContextManager[Any]:
    """Within, torch.func.vmap is off: of a batched backward, whose steps are those of forward."""
    is_on = torch._C._are_functorch_transforms_active()
    return temporarily_clear_interpreter_stack() if is_on else nullcontext()
