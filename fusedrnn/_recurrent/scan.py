"""The functional form: any step over a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import torch

from .._options import check_flag, check_positive, kind_of
from .._step.leaf_step import LeafStep, as_it_runs
from .._step.noise import Seed
from .._step.sequence_call import Names, SequenceCall
from .._step.trees import Leaves, check_tensors, flatten
from .._tracers import never_in_graphs
from .explain import explained
from .explanation import Explanation
from .layer_call import OneLayerCall, cell_memory_of
from .settings import Settings
from .user_step import UserStep

if TYPE_CHECKING:
    from typing_extensions import Unpack

StateT = TypeVar("StateT")
InputT = TypeVar("InputT")
ParamsT = TypeVar("ParamsT")
OutputT = TypeVar("OutputT")


class _Options(TypedDict, total=False):
    """The keywords of :func:`scan` that do not change what it returns."""

    length: int | None
    reverse: bool
    chunk_size: int | None
    workspace_bytes: int | None
    compile: str
    return_sequence: bool
    recompute: bool
    generator: torch.Generator | None


@overload
def scan(
    step: Callable[[StateT, InputT], tuple[StateT, OutputT]],
    state: StateT,
    inputs: InputT | None = None,
    params: None = None,
    *,
    explain: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[StateT, OutputT]: ...


@overload
def scan(
    step: Callable[[StateT, InputT, ParamsT], tuple[StateT, OutputT]],
    state: StateT,
    inputs: InputT | None,
    params: ParamsT,
    *,
    explain: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[StateT, OutputT]: ...


@overload
def scan(
    step: Callable[..., tuple[Any, Any]],
    state: Any,
    inputs: Any = None,
    params: Any = None,
    *,
    explain: Literal[True],
    **options: Unpack[_Options],
) -> Explanation: ...


@overload
def scan(
    step: Callable[..., tuple[Any, Any]],
    state: Any,
    inputs: Any = None,
    params: Any = None,
    *,
    explain: bool,
    **options: Unpack[_Options],
) -> Any: ...


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
    return_sequence: bool = True,
    recompute: bool = True,
    generator: torch.Generator | None = None,
    explain: bool = False,
) -> Any:
    """Runs a step of your own over a sequence, and trains it in the memory of a few steps.

    ``state, ys = scan(step, state, inputs)`` has the values and gradients of ::

        ys = []
        for t in range(len(inputs)):                # with reverse=True, from the last to the first
            state, y = step(state, inputs[t])       # with params: step(state, inputs[t], params)
            ys.append(y)                            # y of step t becomes ys[t]
        ys = torch.stack(ys)

    The interface is that of jax.lax.scan. Forward saves the state every sqrt(seq_len) steps, or a
    compiled step its outputs alone; backward recomputes the steps chunk by chunk.

    Args:
        step: ``step(state, x)`` that returns ``(state, y)``, or ``step(state, x, params)`` if
            ``params`` is given: a function, a method or a torch.nn.Module. It must return new
            tensors, a state of the structure, shapes and dtypes that it receives, and outputs of
            the same shape at all steps. It may draw random numbers and read tensors that it closes
            over, which get gradients, too.
        state: The state before the first step: a tensor, or tuples, lists and dicts of tensors.
        inputs: Tensors of shape (seq_len, ...), or tuples, lists and dicts of such. Step t gets
            entry t of each. None for steps without an input, which get None ``length`` times.
        params: Tensors that every step gets, or tuples, lists and dicts of such.
        length: The number of steps. It must agree with ``inputs`` if both are given.
        reverse: Whether to go from the last step to the first. Outputs stay in their places.
        chunk_size, workspace_bytes, return_sequence, recompute:
            As in :class:`Recurrent`.
        compile: As in :class:`Recurrent`. A step can be compiled if all tensors of its state and
            inputs have the batch as their first dimension, also if it is a function that is defined
            anew in each call, with tensors and modules around it.
        generator: As in the call of a Recurrent.
        explain: True to return the :class:`Explanation` of how the call would run.

    Returns:
        state: The state after the last step.

        ys: The outputs, stacked to (seq_len, ...) each; with ``return_sequence=False`` the output
        of the last step.

    Raises:
        TypeError, ValueError, RuntimeError: An argument is wrong, or the step breaks a rule above;
            the message names the tensor and the step. Errors of the step itself are passed on.

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
    settings = Settings(chunk_size, workspace_bytes, compile, recompute)
    check_flag("reverse", reverse)
    check_flag("return_sequence", return_sequence)
    check_flag("explain", explain)
    state_leaves, state_structure = flatten(state, "state")
    leaves, structure = flatten(inputs, "inputs")
    constants, constants_structure = flatten(params, "params")
    if not state_leaves:
        raise ValueError(
            "fusedrnn: state must have at least one tensor, got none; a step that needs no state "
            "may get torch.zeros(batch, 1) and return it"
        )
    names = Names(state_structure.names("state"), structure.names("inputs"))
    all_names = (*names.state, *names.input, *constants_structure.names("params"))
    device, given = state_leaves[0].device, (*state_leaves, *leaves, *constants)
    check_tensors(all_names, given, names.state[0], device)
    seq_len = _seq_len(leaves, names, length)
    has_params = params is not None

    def call(old: Any, x: Any, given: Any) -> tuple[Any, Any]:
        one = as_it_runs(step)
        result = one(old, x, given) if has_params else one(old, x)
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
        raise ValueError(
            "fusedrnn: inputs must have at least one tensor unless length is given, got none"
        )
    for name, leaf in zip(names.input, leaves, strict=True):
        if not leaf.dim() or leaf.shape[0] != leaves[0].shape[:1].numel() or not leaf.shape[0]:
            raise ValueError(
                f"fusedrnn: {name} must have seq_len as its first dimension, at least 1 and the "
                f"same for all inputs, got shape {tuple(leaf.shape)}"
            )
        if length not in (None, leaf.shape[0]):
            raise ValueError(
                f"fusedrnn: length must be {leaf.shape[0]}, the number of steps of {name}, "
                f"got {length}"
            )
    return leaves[0].shape[0] if length is None else length
