"""One task of a bank: a module whose tensors are views of one block of host memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._buffers import place_of, size_of
from .._locks import CallerLock
from ..weights import FlatModule
from .engines import Event
from .layout import Layout, Place, lay_out, tensors_of

_epochs = itertools.count()


class Version(NamedTuple):
    """What the numbers of a task were at one moment: equal while nothing has changed them."""

    epoch: int
    """Tensors that replaced others may have their numbers of changes."""
    flat: tuple[int, ...]
    """Of writes through ``flat_weight``, which are none of a weight's own."""
    tensors: tuple[int, ...]


class Task:
    """theta[t]."""

    def __init__(self, key: int | str, module: nn.Module, layout: Layout | None = None) -> None:
        """``place`` comes before anything else."""
        self.key, self.module = key, module
        self.layout = lay_out(module, self.name) if layout is None else layout
        self.lock = CallerLock()
        """For the length of a call, as its module has other tensors meanwhile."""
        self._find_owners()

    @property
    def name(self) -> str:
        """For messages."""
        return f"task {self.key!r}"

    @property
    def places(self) -> tuple[Place, ...]:
        return self.layout.places

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    # --- host memory ------------------------------------------------------------------------------

    def place(self, memory: Tensor) -> None:
        """Moves the tensors into ``memory``, uint8 of ``nbytes``, with the values they have."""
        self.memory = memory
        self.tensors = [where[name] for (where, name), *_ in self._owners]
        with torch.inference_mode(False), torch.no_grad():
            for place, tensor in zip(self.places, self.tensors, strict=True):
                part = place.part(memory)
                if part.data_ptr() != tensor.data_ptr():
                    part.copy_(tensor.detach())
                    tensor.data = part
            for flat in self._flats:
                whole = self._whole(flat)
                if whole is not None:
                    flat._place_buffer(whole)
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._epoch = next(_epochs)

    def _whole(self, flat: FlatModule) -> Tensor | None:
        """The flat buffer of one of the module's layers, if its weights lie side by side."""
        if flat._obstacle() is not None:
            return None
        weights = flat._plain_weights()
        place = place_of(flat._slots, weights, [self.memory.untyped_storage()])
        return None if isinstance(place, str) else place.tensor(weights[0], size_of(flat._slots))

    def bytes(self) -> Tensor:
        """What a copy to the device reads."""
        return self.memory[: self.nbytes]

    def was_read(self, event: Event) -> None:
        """A copy of ``bytes()`` is done when this event comes."""

    def refresh(self) -> None:
        """Forgets all that is known of the numbers, which were changed in a way that nobody sees."""
        self._epoch = next(_epochs)

    def check(self) -> None:
        """Brings tensors that were replaced (``assign=True``, a new Parameter) into the block.

        Raises:
            RuntimeError: The module has other tensors now, or of another shape or dtype.
        """
        is_same = all(children.get(name) is child for children, name, child in self._tree)
        is_same = is_same and all(len(where) == count for where, count in self._counts)
        if is_same:
            for tensor, address, owners in zip(
                self.tensors, self._addresses, self._owners, strict=True
            ):
                for where, name in owners:
                    is_same = is_same and where.get(name) is tensor
                is_same = is_same and tensor.data_ptr() == address
        if not is_same:
            self._check_alike()
            self._find_owners()
            self.place(self.memory)

    def _check_alike(self) -> None:
        now = [
            Place(names, is_parameter, 0, tuple(t.shape), (), t.dtype)
            for names, is_parameter, t in tensors_of(self.module)
        ]
        before = [place._replace(offset=0, stride=()) for place in self.places]
        for old, new in itertools.zip_longest(before, now):
            if old != new:
                was = "absent" if old is None else str(old).partition(" is ")[2]
                now_is = "absent" if new is None else str(new).partition(" is ")[2]
                raise RuntimeError(
                    f"fusedrnn: {(new or old).names[0]} of {self.name} was {was} when the bank "
                    f"took it, and is {now_is}: a task keeps its tensors' names, shapes and "
                    "dtypes. Delete the task and add the new module; convert a whole bank by to()"
                )

    def _find_owners(self) -> None:
        modules = dict(self.module.named_modules(remove_duplicate=False))
        self._owners: list[list[tuple[dict[str, Any], str]]] = []
        for place in self.places:
            owners = []
            for path, _, name in (full.rpartition(".") for full in place.names):
                owner = modules[path]
                owners.append((owner._parameters if place.is_parameter else owner._buffers, name))
            self._owners.append(owners)
        unique = list(self.module.modules())
        self._tree = [(m._modules, name, c) for m in unique for name, c in m._modules.items()]
        self._counts = [(where, len(where)) for m in unique for where in _dictionaries(m)]
        self._flats = [m for m in unique if isinstance(m, FlatModule)]
        self._rnns = [m for m in unique if isinstance(m, nn.RNNBase)]

    def version(self) -> Version:
        """Of the numbers as they are now."""
        flat = tuple(flat._flat_buffer.version._version for flat in self._flats)
        return Version(self._epoch, flat, versions_of(self.tensors))

    def trained(self) -> tuple[int, ...]:
        """Indices of the tensors that get a gradient."""
        return tuple(i for i, tensor in enumerate(self.tensors) if tensor.requires_grad)

    # --- calls ------------------------------------------------------------------------------------

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor]) -> Iterator[nn.Module]:
        """The module with other tensors in place of its own. For the holder of ``lock`` alone."""
        before = [where[name] for owners in self._owners for where, name in owners]
        lists = [(rnn._flat_weights, rnn._flat_weight_refs) for rnn in self._rnns]
        owners_of = list(zip(self._owners, tensors, strict=True))
        for owners, tensor in owners_of:
            for where, name in owners:
                where[name] = tensor
        # torch.nn's layers have lists of their weights. They are set here, because torch would set
        # them by flatten_parameters(), which moves weights of a GPU, and would keep them afterwards.
        for rnn in self._rnns:
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
            rnn._flat_weight_refs = [None if w is None else weakref.ref(w) for w in rnn._flat_weights]
        try:
            yield self.module
        finally:
            former = iter(before)
            for owners, _ in owners_of:
                for where, name in owners:
                    where[name] = next(former)
            for rnn, (weights, refs) in zip(self._rnns, lists, strict=True):
                rnn._flat_weights, rnn._flat_weight_refs = weights, refs


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each tensor was changed in place; -1 where torch does not count."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _dictionaries(module: nn.Module) -> Iterator[dict[str, Any]]:
    yield from (module._parameters, module._buffers, module._modules)
