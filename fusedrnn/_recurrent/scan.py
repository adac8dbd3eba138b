"""The functional form: any step over a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._options import check_flag, check_positive, kind_of
from .._step.leaf_step import LeafStep
from .._step.noise import Seed
from .._step.sequence_call import Names, SequenceCall
from .._step.trees import Leaves, check_tensors, flatten
from .._tracers import never_in_graphs
from .explain import explained
from .layer_call import OneLayerCall, cell_memory_of
from .settings import Settings
from .user_step import UserStep


@never_in_graphs
def scan(
    step: Callable[..., tuple[Any, Any]],
    state: Any,
    inputs: Any = None,
    params: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    compile: str = "auto",
    cuda_graphs: bool = False,
    return_sequence: bool = True,
    recompute: bool = True,
    generator: torch.Generator | None = None,
    explain: bool = False,
) -> Any:
    """Carries a state through a sequence by a step of your own, in the memory of a few steps.

    Forward runs without a graph and keeps the state now and then; backward takes the steps again,
    chunk by chunk. Gradients are those of the plain loop. The interface is that of jax.lax.scan.

    Args:
        step: ``step(state, x)`` that returns ``(state, y)``, or ``step(state, x, params)`` if
            ``params`` is given: a function, a method or a torch.nn.Module. It must return new
            tensors, a state like the one that it gets, and outputs of one shape at all steps. It
            may draw random numbers and read tensors that it closes over, which get gradients, too;
            those that reach no function of torch itself, but only a torch.autograd.Function, must
            be in ``params``.
        state: Before the first step: a tensor, or tuples, lists and dicts of tensors.
        inputs: Tensors of (seq_len, ...), nested likewise; a step gets one place of each. None for
            steps without an input, which get None, as often as ``length`` says.
        params: Tensors, nested likewise, that every step gets.
        length: The number of steps. It must agree with ``inputs`` if both are given.
        reverse: Whether to go from the last step to the first. Outputs stay in their places.
        chunk_size, workspace_bytes, cuda_graphs, return_sequence, recompute:
            As those of :class:`Recurrent`.
        compile: The same. Steps are compiled whose state and inputs have the batch as the first
            dimension of all tensors, also functions that are defined anew in each call, with
            tensors and modules around them.
        generator: As in the call of a Recurrent.
        explain: True to return the :class:`Explanation` of how the call would run.

    Returns:
        state: After the last step.

        ys: The outputs, stacked to (seq_len, ...) each; with ``return_sequence=False`` the output
        of the last step.

    Raises:
        TypeError, ValueError, RuntimeError: An argument is wrong, or the step breaks a rule above;
            the message names the tensor and the step. What the step itself raises is passed on.

    Example::

        >>> def step(h, x):
        ...     h = torch.tanh(x + h @ weight)
        ...     return h, h.sum(-1)
        >>> weight = torch.randn(8, 8, requires_grad=True)
        >>> h, sums = fusedrnn.scan(step, torch.zeros(4, 8), torch.randn(100, 4, 8))
        >>> sums.shape
        torch.Size([100, 4])
    """
    if not callable(step):
        raise TypeError(f"fusedrnn: step must be callable, got {kind_of(step)}")
    settings = Settings(chunk_size, workspace_bytes, cuda_graphs, compile, recompute)
    check_flag("reverse", reverse)
    check_flag("return_sequence", return_sequence)
    check_flag("explain", explain)
    state_leaves, state_structure = flatten(state, "state")
    leaves, structure = flatten(inputs, "inputs")
    constants, constants_structure = flatten(params, "params")
    if not state_leaves:
        raise ValueError("fusedrnn: state must have at least one tensor, got none")
    names = Names(state_structure.names("state"), structure.names("inputs"))
    all_names = (*names.state, *names.input, *constants_structure.names("params"))
    device, given = state_leaves[0].device, (*state_leaves, *leaves, *constants)
    check_tensors(all_names, given, names.state[0], device)
    seq_len = _seq_len(leaves, names, length)
    has_params = params is not None

    def call(old: Any, x: Any, given: Any) -> tuple[Any, Any]:
        result = step(old, x, given) if has_params else step(old, x)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ValueError(
                f"fusedrnn: the step must return (state, y), got {kind_of(result)}"
                + (f" of length {len(result)}" if isinstance(result, tuple | list) else "")
            )
        return result[0], result[1]

    rows = state_leaves[0].shape[0] if state_leaves[0].dim() else 1
    sequence = SequenceCall(
        leaves,
        state_leaves,
        names,
        seq_len=seq_len,
        rows=rows,
        device=device,
        seed=Seed(generator),
        backwards=reverse,
        returns_sequence=return_sequence,
    )
    wrapper, more = ("scan_step_with", (params,)) if has_params else ("scan_step", ())
    user = UserStep(wrapper, step, structure.tree, state_structure.tree, more)

    def make_step() -> LeafStep:
        return LeafStep(call, state_structure, structure, constants_structure, has_rows=False)

    one = OneLayerCall(user, sequence, settings, cell_memory_of(step), make_step, constants)
    if explain:
        return explained(one)
    output, last = one.results()
    return last, output


def _seq_len(leaves: Leaves, names: Names, length: int | None) -> int:
    if length is not None:
        check_positive("length", length)
    elif not leaves:
        raise ValueError("fusedrnn: inputs must have at least one tensor, or length be given")
    for name, leaf in zip(names.input, leaves, strict=True):
        if not leaf.dim() or leaf.shape[0] != leaves[0].shape[:1].numel() or not leaf.shape[0]:
            raise ValueError(
                f"fusedrnn: {name} must have the steps as its first dimension, as many as "
                f"{names.input[0]}, at least one; got shape {tuple(leaf.shape)}"
            )
        if length not in (None, leaf.shape[0]):
            raise ValueError(
                f"fusedrnn: length must be that of {name}, {leaf.shape[0]}, got {length}"
            )
    return leaves[0].shape[0] if length is None else length
