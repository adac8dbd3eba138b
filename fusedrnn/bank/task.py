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

SHARED = "shared"
"""The name of what all tasks add."""

_epochs = itertools.count()


class Version(NamedTuple):
    """What the numbers of a task were at one moment: equal while nothing has changed them."""

    flat: tuple[int, ...]
    """Of writes through ``flat_weight``, which are none of a weight's own."""
    tensors: tuple[tuple[int, int], ...]
    """Of each its epoch, since one that replaced another may have its number of changes, and that
    number."""


class Task:
    """theta[t]."""

    block: Tensor
    """The allocation of which its memory is a part."""

    def __init__(self, key: int | str, module: nn.Module, layout: Layout | None = None) -> None:
        """``place`` comes before anything else."""
        self.key, self.module = key, module
        self.layout = lay_out(module, self.name) if layout is None else layout
        self.lock = CallerLock()
        """For the length of a call, as its module has other tensors meanwhile."""
        self._swaps = 0
        self.tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._epochs: list[int] = []
        self.gradient_layouts: dict[tuple[int, ...], Any] = {}
        """By the indices of tensors that get one: see gradients.py."""
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
        self.gradient_layouts.clear()
        formers = {p.names: t for p, t in zip(self.places, self.tensors, strict=False)}
        known = zip(map(id, self.tensors), self._addresses, strict=True)
        before = dict(zip(known, self._epochs, strict=True))
        self.tensors = [where[name] for (where, name), *_ in self._owners]
        was = [tensor.data_ptr() for tensor in self.tensors]
        with torch.inference_mode(False), torch.no_grad():
            for place, tensor in zip(self.places, self.tensors, strict=True):
                former = formers.get(place.names)
                if former is not None and former is not tensor:
                    # Somebody may put it back, as torch.func.functional_call does.
                    former.data = former.detach().clone()
                part = place.part(memory)
                if part.data_ptr() != tensor.data_ptr():
                    part.copy_(tensor.detach())
                    tensor.data = part
            for flat in self._flats:
                whole = self._whole(flat)
                if whole is not None:
                    flat._place_buffer(whole)
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._epochs = [
            before.get(key, next(_epochs)) for key in zip(map(id, self.tensors), was, strict=True)
        ]

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
        """After the numbers were changed in a way that nobody sees: forgets what is known."""
        self._epochs = [next(_epochs) for _ in self.tensors]

    def check(self) -> None:
        """Brings tensors that were replaced (``assign=True``, a new Parameter) into the block.

        Raises:
            RuntimeError: The module has other tensors now, or of another shape or dtype.
        """
        if not self.is_in_place():
            self._check_alike()
            self._find_owners()
            self.place(self.memory)

    def is_in_place(self) -> bool:
        """Whether the module has the tensors that it had, where they were."""
        if self._swaps:
            return True  # a call has put others in their place
        if any(children.get(name) is not child for children, name, child in self._tree):
            return False
        if any(len(where) != count for where, count in self._counts):
            return False
        for tensor, address, owners in zip(
            self.tensors, self._addresses, self._owners, strict=True
        ):
            if tensor.data_ptr() != address or any(w.get(n) is not tensor for w, n in owners):
                return False
        return True

    def _check_alike(self) -> None:
        now = {
            (names, is_parameter): f"{t.dtype} {tuple(t.shape)}"
            for names, is_parameter, t in tensors_of(self.module)
        }
        before = {(p.names, p.is_parameter): f"{p.dtype} {p.shape}" for p in self.places}
        for key in before | now:
            if before.get(key) != now.get(key):
                raise RuntimeError(
                    f"fusedrnn: {key[0][0]} of {self.name} was {before.get(key, 'absent')} when "
                    f"the bank took it, and is {now.get(key, 'absent')}: a task keeps its tensors' "
                    "names, shapes and dtypes. Delete the task and add the new module; convert a "
                    "whole bank by to()"
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
        return Version(flat, tuple(zip(self._epochs, versions_of(self.tensors), strict=True)))

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
        self._swaps += 1
        for owners, tensor in owners_of:
            for where, name in owners:
                where[name] = tensor
        # torch.nn's layers have lists of their weights, which are set here: torch would set them by
        # flatten_parameters(), which moves weights of a GPU, and would keep them afterwards.
        for rnn in self._rnns:
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
            rnn._flat_weight_refs = [
                None if w is None else weakref.ref(w) for w in rnn._flat_weights
            ]
        try:
            yield self.module
        finally:
            former = iter(before)
            for owners, _ in owners_of:
                for where, name in owners:
                    where[name] = next(former)
            for rnn, (weights, refs) in zip(self._rnns, lists, strict=True):
                rnn._flat_weights, rnn._flat_weight_refs = weights, refs
            self._swaps -= 1


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each tensor was changed in place; -1 where torch does not count."""
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:  # some were made in inference mode
        return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _dictionaries(module: nn.Module) -> Iterator[dict[str, Any]]:
    yield from (module._parameters, module._buffers, module._modules)
