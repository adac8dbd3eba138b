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
                "fusedrnn: the step reads a tensor that an earlier step has kept in "
                f"{kept[id(leaf)][1]}, and its gradient would be lost there; make it a part of the "
                "state, or detach it"
            )
    twice = {id(leaf) for leaf in foreign_leaves(_all(take()), leaves)} if found else ()
    for leaf in found:
        if id(leaf) in twice:
            raise RuntimeError(
                f"fusedrnn: backward reaches a tensor of shape {tuple(leaf.shape)} that needs a "
                "gradient and that forward has not seen: it is neither an argument of the step nor "
                "a parameter of its module, and the first and the last step do not read it. Pass "
                "it in the input or the state (to scan: in params), replace it only after "
                "backward, and keep nothing computed from it between steps, as "
                "torch.nn.utils.parametrize.cached does"
            )
    return taken


def _all(taken: Taken) -> list[Tensor]:
    state, outputs = taken
    return [*state, *(leaf for output in outputs for leaf in output)]
