"""Replicas of torch.nn.DataParallel, whose weights are attributes and no parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_FORMER = "_former_parameters"
_OF_EVERY_MODULE = frozenset(
    [*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_is_replica", _FORMER]
)
"""Two are torch.nn.RNNBase's, and follow its weights; the last two are a replica's."""


def is_replica(module: nn.Module) -> bool:
    return _FORMER in module.__dict__


def parameters_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """A module's own, or what a replica has in their places."""
    names: Iterable[str] = module.__dict__.get(_FORMER, ())
    own = module._parameters
    return {**own, **{name: getattr(module, name) for name in names}} if names else own


def names_of_torch(module: nn.Module) -> frozenset[str]:
    """Attributes that are torch's, not the user's."""
    former = module.__dict__.get(_FORMER)
    return _OF_EVERY_MODULE if former is None else _OF_EVERY_MODULE.union(former)


class Replicas(nn.ModuleList):
    """Modules whose parameters are attributes."""

    @staticmethod
    def if_any(modules: Sequence[nn.Module]) -> nn.ModuleList:
        """A list of modules, of which some may be replicas."""
        return (Replicas if any(map(is_replica, modules)) else nn.ModuleList)(modules)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As of any module, in the same order."""
        yield from self._named_members(
            lambda module: parameters_of(module).items(),
            prefix=prefix,
            recurse=recurse,
            remove_duplicate=remove_duplicate,
        )
