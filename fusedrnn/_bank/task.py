"""One task of a bank: a module whose tensors are views of one block of host memory."""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._buffers import place_of, size_of
from .._flat_weights import FlatModule
from .block_layout import GradientLayout, Layout, Place, lay_out, tensors_of
from .engines import Event

TaskKey = int | str
"""The name of a task."""

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

    exchanges_of_tensors = 0
    """How often any task got other tensors than it had."""

    block: Tensor
    """The allocation of which its memory is a part."""

    def __init__(self, key: TaskKey, module: nn.Module, layout: Layout | None = None) -> None:
        """``place`` comes before anything else."""
        self.key, self.module = key, module
        self.layout = lay_out(module, self.name) if layout is None else layout
        self.swaps: list[Sequence[Tensor]] = []
        """What the module has in place of its own tensors, for each call: see tensor_swaps.py."""
        self.lists: list[tuple[Any, Any]] = []
        """What torch.nn's layers have as lists of weights, outside of calls."""
        self.tensors: list[Tensor] = []
        self._geometry: Any = None
        self._epochs: list[int] = []
        self.gradient_layouts: dict[tuple[int, ...], GradientLayout] = {}
        """By the indices of tensors that get one: see task_gradients.py."""
        self._groups: tuple[list[int], list[tuple[int, ...]]] | None = None
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
        """Moves the tensors into ``memory``, uint8 of ``nbytes``, with the values they have.

        Nothing changes before all that may fail is done.
        """
        tensors = [where[name] for (where, name), *_ in self._owners]
        formers = {p.names: t for p, t in zip(self.places, self.tensors, strict=False)}
        epochs = dict(zip(map(id, self.tensors), self._epochs, strict=True))
        with torch.inference_mode(False), torch.no_grad():
            moves = self._moves(tensors, memory)
            # Somebody may put a former one back, as torch.func.functional_call does.
            kept = [
                (former, former.detach().clone())
                for place, tensor in zip(self.places, tensors, strict=True)
                if (former := formers.get(place.names)) is not None and former is not tensor
            ]
            for former, data in kept:
                former.data = data
            for i, (part, value) in moves.items():
                part.copy_(value)
                if tensors[i].is_inference():
                    tensors[i] = self._replace(i, part)
                else:
                    tensors[i].data = part
            if [*map(id, tensors)] != [*map(id, self.tensors)]:
                Task.exchanges_of_tensors += 1
            self.memory, self.tensors = memory, tensors
            for flat in self._flats:
                whole = self._whole(flat)
                if whole is not None:
                    flat._place_buffer(whole)
        self.gradient_layouts.clear()
        self._geometry = _geometry(tensors)
        self._epochs = [
            next(_epochs) if i in moves else epochs.get(id(tensor), next(_epochs))
            for i, tensor in enumerate(tensors)
        ]

    def _moves(self, tensors: Sequence[Tensor], memory: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """For each tensor that is not in its place: the place in ``memory``, and its numbers."""
        found = {}
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        for i, (place, tensor) in enumerate(zip(self.places, tensors, strict=True)):
            if type(tensor).__name__ == "DTensor":
                raise RuntimeError(
                    f"fusedrnn: {place.names[0]} of {self.name} was sharded, and a bank needs "
                    "whole tasks: pass ignored_params=set(bank.task_parameters()) to fully_shard"
                )
            if not is_plain(tensor):
                raise RuntimeError(
                    f"fusedrnn: {place.names[0]} of {self.name} was replaced by a tensor without "
                    f"memory of its own on a device ({type(tensor).__name__}), as torch.func and "
                    f"tracers do: a bank copies memory. Use the module itself, bank[{self.key!r}]"
                )
            address = tensor.data_ptr()
            is_there = (address, tensor.shape) == (begin + place.offset, place.shape)
            if not is_there or tensor.stride() != place.stride or tensor.is_inference():
                value = tensor.detach()
                # Other tensors are written to this memory, perhaps before it is read.
                value = value.clone() if begin <= address < end else value
                found[i] = place.part(memory), value
        return found

    def _replace(self, i: int, part: Tensor) -> Tensor:
        """A tensor that torch counts changes of, in place of one made in inference mode."""
        (where, name), *_ = self._owners[i]
        former = where[name]
        made = nn.Parameter(part, former.requires_grad) if self.places[i].is_parameter else part
        made.__dict__.update(former.__dict__)
        for where, name in self._owners[i]:
            where[name] = made
        list_weights(self._rnns)
        return made

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

    def parameters(self) -> list[Tensor]:
        """Those that the bank has taken."""
        pairs = zip(self.tensors, self.places, strict=True)
        return [tensor for tensor, place in pairs if place.is_parameter]

    def has_grad(self) -> bool:
        """Whether the module's parameters of now have gradients. They may be others."""
        return any(parameter.grad is not None for parameter in self.module.parameters())

    def refresh(self, indices: Iterable[int] | None = None) -> None:
        """After numbers were changed in a way that torch does not count: forgets what is known.

        Args:
            indices: Of the tensors; None for all.
        """
        for i in range(len(self.tensors)) if indices is None else indices:
            self._epochs[i] = next(_epochs)

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
        if self.swaps:
            return True  # a call has put others in their place
        if any(children.get(name) is not child for children, name, child in self._tree):
            return False
        if any(len(where) != count for where, count in self._counts):
            return False
        for tensor, owners in zip(self.tensors, self._owners, strict=True):
            for where, name in owners:
                if where.get(name) is not tensor:
                    return False
        return _geometry(self.tensors) == self._geometry

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
        with_buffers = [m for m in unique if m._buffers]
        self._writers = [self.module, *with_buffers] if with_buffers else []

    def version(self) -> Version:
        """Of the numbers as they are now."""
        flat = tuple(flat._flat_buffer.version._version for flat in self._flats)
        return Version(flat, tuple(zip(self._epochs, versions_of(self.tensors), strict=True)))

    def version_of(self, i: int) -> tuple[int, int]:
        """Of one tensor."""
        return self._epochs[i], self.tensors[i]._version

    def trained(self) -> tuple[int, ...]:
        """Indices of the tensors that get a gradient."""
        return tuple(i for i, tensor in enumerate(self.tensors) if tensor.requires_grad)

    def counts_buffers(self) -> bool:
        """Whether torch counts what a call writes to buffers: batch norm's training does not."""
        return not any(module.training for module in self._writers)

    def indices_at(self, offset: int) -> tuple[int, ...]:
        """The parameter that has this byte of the block; several if they share memory."""
        if self._groups is None:
            self._groups = _groups(self.places)
        starts, indices = self._groups
        return indices[bisect_right(starts, offset) - 1]


def list_weights(rnns: Sequence[nn.RNNBase]) -> None:
    """Sets the lists that torch.nn's layers have of their weights.

    torch would set them by flatten_parameters(), which moves weights of a GPU, and would keep them
    afterwards.
    """
    for rnn in rnns:
        rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
        rnn._flat_weight_refs = [None if w is None else weakref.ref(w) for w in rnn._flat_weights]


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is nothing but memory."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return is_strided and not (tensor.is_meta or is_wrapped(tensor))


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each tensor was changed in place; -1 where torch does not count."""
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:  # some were made in inference mode
        return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _geometry(tensors: Sequence[Tensor]) -> Any:
    """Where tensors are, and how. In this form it is compared fast."""
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
    )


def _groups(places: Sequence[Place]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Where parameters begin, in order, and which they are; those that overlap as one."""
    starts: list[int] = []
    indices: list[tuple[int, ...]] = []
    end = 0
    spans = sorted((p.offset, p.span, i) for i, p in enumerate(places) if p.is_parameter and p.span)
    for begin, span, i in spans:
        if indices and begin < end:
            indices[-1] += (i,)
        else:
            starts.append(begin)
            indices.append((i,))
        end = max(end, begin + span)
    return starts, indices


def _dictionaries(module: nn.Module) -> Iterator[dict[str, Any]]:
    yield from (module._parameters, module._buffers, module._modules)
