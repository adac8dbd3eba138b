"""Leaves that backward of some steps reaches though forward has not seen the steps read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .._step.gradients import nodes_behind


def foreign_leaves(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of the graph of ``results`` that are not among ``leaves``."""
    known = {id(leaf) for leaf in leaves}
    found = [r for r in results if r.grad_fn is None and r.requires_grad and id(r) not in known]
    for node in nodes_behind([r.grad_fn for r in results if r.grad_fn is not None]):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            found.append(variable)
    return found


Taken = tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]]]
"""The last state, and the outputs of each step."""


def check_nothing_missed(
    take: Callable[[], Taken], leaves: Sequence[Tensor], kept: Mapping[int, tuple[Tensor, str]]
) -> Taken:
    """What ``take()`` returns, whose graph must have no leaves from outside but ``leaves``.

    A step may read tensors with gradient that forward has not seen it read. Leaves that it makes
    itself are others when it is taken again.

    Args:
        kept: Leaves that an earlier step has kept in a variable, with its name, by id.

    Raises:
        RuntimeError: There is another leaf.
    """
    taken = take()
    found = foreign_leaves(_all(taken), leaves)
    for leaf in found:
        if id(leaf) in kept:
            raise RuntimeError(
                f"fusedrnn: the step reads what an earlier step has kept in {kept[id(leaf)][1]}, "
                "whose gradient would be lost there; make it a part of the state, or detach it"
            )
    twice = {id(leaf) for leaf in foreign_leaves(_all(take()), leaves)} if found else ()
    for leaf in found:
        if id(leaf) in twice:
            raise RuntimeError(
                "fusedrnn: backward of the steps reaches a tensor with gradient of shape "
                f"{tuple(leaf.shape)} by a way that forward has not seen: not as an argument of "
                "the step, nor as a parameter of its module, nor read by the first or the last "
                "step. Pass it in the input or the state, for scan in params=, exchange it only "
                "after backward, and keep nothing that is computed from it between steps, as "
                "torch.nn.utils.parametrize.cached does"
            )
    return taken


def _all(taken: Taken) -> list[Tensor]:
    state, outputs = taken
    return [*state, *(leaf for output in outputs for leaf in output)]
