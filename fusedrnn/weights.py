"""Named parameters that lie in one flat buffer.

A module must offer ``weight_ih_l0`` and its like as ordinary parameters: checkpoints, weight decay
per matrix, freezing, pruning and ``parametrize`` all go by name. What moves weights in bulk (a copy
to the host, an all-reduce, a matrix product over neighbours) wants a single buffer. Here the names
are views of the buffer: code that goes by name and code that moves memory in bulk are both served,
and nothing is ever copied for a call. The forward pass takes the named tensors, each with its own
pointer; it is right, and equally fast, when they do not lie in one buffer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.types import Device

from .cells import Layout

# Devices whose memory can be compared and replaced. Elsewhere (meta, XLA) weights are left alone.
_DEVICES = ("cpu", "cuda")


class Slot(NamedTuple):
    """Where one weight lies: contiguous, ``shape``, from element ``offset`` of the flat buffer."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The offset just behind the last element."""
        return self.offset + math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This weight's part of ``flat``, without a copy."""
        return flat[self.offset : self.end].view(self.shape)


class FlatModule(nn.Module):
    """A module whose weights are named parameters and, at the same time, parts of one flat buffer.

    A subclass says in ``_layout`` where each weight lies, and calls ``_make_weights`` once in its
    constructor.
    """

    _slots: tuple[Slot, ...]
    _flat_version: Tensor
    """Empty. Its version is that of the flat buffer: each write through ``flat_weight`` is one of
    this tensor, as autograd counts them, so a layer that has saved it notices the write. Weights
    have versions of their own."""
    _first_id: int
    """Of the first weight when it was last looked up, which takes microseconds; or 0."""
    _first_address: int
    """Of its numbers."""

    def _layout(self) -> Layout:
        """Where every weight lies, in the order in which they are registered and passed on."""
        raise NotImplementedError

    def _make_weights(self, device: Device, dtype: torch.dtype) -> None:
        """Registers every weight as a view of a new buffer, with values still to be set."""
        self._slots = self._read_layout()
        size = _size(self._slots)
        if size >= 2**63:  # torch's own error is about an int that it cannot read
            raise RuntimeError(f"fusedrnn: no {size:,} weights of {dtype} can be made: too many")
        try:
            flat = torch.zeros(size, device=device, dtype=dtype)
        except (RuntimeError, AssertionError) as error:  # no such device, or too little memory
            cls = type(error) if isinstance(error, RuntimeError) else RuntimeError
            reason = f"no {size:,} weights of {dtype} can be made: {error}"
            raise cls(f"fusedrnn: {reason}") from None
        for slot in self._slots:
            # .data, so that each has a version of its own: autograd takes an in-place change of one
            # view for a change of all that share its version.
            self.register_parameter(slot.name, nn.Parameter(slot.view(flat).data))
        self._flat_version = _new_version(flat.device)
        self._place_version()

    def _read_layout(self) -> tuple[Slot, ...]:
        # The class whose weights can be read from _parameters, because none of its attributes hides
        # them. torch makes a new class to put a parametrization behind a name: not that one.
        cls, names = type(self), [name for name, _, _ in self._layout()]
        has_own = any(hasattr(cls, name) for name in names)
        is_plain = not has_own and cls.__getattr__ is nn.Module.__getattr__
        self.__dict__["_plain_class"] = cls if is_plain else None
        return tuple(Slot(name, offset, tuple(shape)) for name, offset, shape in self._layout())

    def _weights(self) -> list[Tensor]:
        """The weights as they are now, in layout order.

        Names are looked up at every call, so that whatever a name leads to (a parametrization, a
        pruned or swapped tensor, a replica's) is what gets used.
        """
        attributes, parameters = self.__dict__, self._parameters
        if attributes.get("_plain_class") is type(self) and not is_compiling():
            try:  # what getattr would find, in half the time
                found = [attributes.get(name, parameters[name]) for name, _, _ in self._slots]
                return cast(list[Tensor], found)
            except KeyError:
                pass  # a name leads to something other than a parameter
        return [getattr(self, slot.name) for slot in self._slots]

    def _version_of(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The version of the buffer that the first weight is a part of, for a call with a graph."""
        if not torch.is_grad_enabled():
            return None
        if is_compiling():
            return self._flat_version
        first = weights[0]
        is_known = id(first) == self._first_id and type(first) is nn.Parameter
        if is_known and first.data_ptr() == self._first_address:  # .data may have changed that
            return self._flat_version
        return version_of(first)  # a functional call's, or another module's

    @property
    def flat_weight(self) -> Tensor:
        """All weights as one 1-D tensor that shares their memory; no copy, detached from autograd.

        Writing to it changes the weights. It holds them in the order of ``state_dict()``,
        row-major. Ask for it anew after the module was moved or converted: an older one keeps the
        former buffer.

        Raises:
            RuntimeError: The weights do not lie in one buffer at the moment, because one was
                replaced, tied, parametrized, pruned or sharded, or has another dtype or device. The
                module works all the same.
        """
        obstacle = self._obstacle()
        if obstacle is not None:
            raise RuntimeError(
                f"fusedrnn: flat_weight is not available because {obstacle}; "
                "undo that and call flatten_parameters()"
            )
        stray = self._stray()
        if stray is not None:
            raise RuntimeError(
                "fusedrnn: flat_weight is not available because the weights do not lie in one "
                f"buffer (see {stray}); call flatten_parameters() to bring them there again"
            )
        first = self._plain_weights()[0]
        start = first.storage_offset() - self._slots[0].offset
        memory = first.detach().as_strided((_size(self._slots),), (1,), start)
        if first.is_inference():  # it has no version
            return memory
        self._place_version()
        flat = self._flat_version.detach()
        flat.data = memory
        return flat

    def flatten_parameters(self) -> None:
        """Brings the weights into one buffer again, so that ``flat_weight`` is available.

        Never needed for a right or a fast ``forward``, and called wherever torch moves the weights
        (``to``, ``copy.deepcopy``, unpickling, ``load_state_dict``). Call it after a weight was
        replaced by hand. The parameters stay the same objects, so an optimizer made earlier stays
        valid.

        Does nothing if the weights are flat, or cannot be: on the meta device, sharded,
        parametrized, tied, of several dtypes, or in memory shared with other processes.
        """
        if self._obstacle() is not None or self._stray() is None:
            return
        weights = self._plain_weights()
        if any(w.is_cpu and w.untyped_storage().is_shared() for w in weights):
            return  # another process looks at this memory
        dtype, device = weights[0].dtype, weights[0].device
        # Weights made in inference mode need a buffer made in it; other weights must not have one.
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
            # Zeros, so that no gap between the weights, where a layout has any, ever holds a NaN.
            flat = torch.zeros(_size(self._slots), dtype=dtype, device=device)
            for slot, weight in zip(self._slots, weights, strict=True):
                view = slot.view(flat)
                view.copy_(weight)
                weight.data = view
        self._place_version(is_moved=True)

    def _plain_weights(self) -> list[nn.Parameter]:
        """The parameters in layout order. Requires that ``_obstacle`` is None."""
        return [cast(nn.Parameter, self._parameters[slot.name]) for slot in self._slots]

    def _obstacle(self) -> str | None:
        """Why the weights can share no buffer, as part of a sentence; None if they can.

        Looks into ``_parameters``, not at attributes: reading a parametrized weight computes it,
        and may change the state of the parametrization.
        """
        seen: dict[int, str] = {}
        first: nn.Parameter | None = None
        for slot in self._slots:
            weight = self._parameters.get(slot.name)
            # Exactly this type: DTensor, FakeTensor and their like have no memory of this kind.
            if weight is None or type(weight) is not nn.Parameter:
                return f"{slot.name} is not a plain nn.Parameter of this module"
            if tuple(weight.shape) != slot.shape:
                return f"{slot.name} must have shape {slot.shape}, got {tuple(weight.shape)}"
            if weight.device.type not in _DEVICES or weight.layout != torch.strided:
                return f"{slot.name} is a {weight.layout} tensor on device {weight.device}"
            if id(weight) in seen:
                return f"{slot.name} and {seen[id(weight)]} are one parameter"
            seen[id(weight)] = slot.name
            first = weight if first is None else first
            if _kind(weight) != _kind(first):
                return (
                    f"{slot.name} is {_kind(weight)}, but {self._slots[0].name} is {_kind(first)}"
                )
        return None

    def _stray(self) -> str | None:
        """The first weight that is not where the layout has it relative to the very first, or None.

        Requires that ``_obstacle`` is None.
        """
        weights = self._plain_weights()
        memory = weights[0].untyped_storage()
        start = weights[0].storage_offset() - self._slots[0].offset
        for slot, weight in zip(self._slots, weights, strict=True):
            same_memory = weight.untyped_storage().data_ptr() == memory.data_ptr()
            in_place = weight.storage_offset() == start + slot.offset and weight.is_contiguous()
            if not (same_memory and in_place):
                return slot.name
        return None

    def _to_be_kept_flat(self) -> bool:
        """Whether the weights should be flat again after torch has moved them.

        True if they are flat, or have no memory yet. Weights that someone has placed elsewhere stay
        there: memory shared between processes, a trainer's own buffer.
        """
        if any(w is not None and w.is_meta for w in self._parameters.values()):
            return True
        return self._obstacle() is None and self._stray() is None

    def _place_version(self, *, is_moved: bool = False) -> None:
        """Has ``_flat_version`` be that of the weights' memory, and on their device.

        A graph of torch.compile needs it there. ``is_moved``: a call before that may have saved the
        former version, and is to notice what is written to the new memory.
        """
        first = next((w for w in self._parameters.values() if w is not None), None)
        if first is None:
            return
        known, address = version_of(first), _address(first)
        if known is not None:
            self._flat_version = known
        elif is_moved and first.device == self._flat_version.device:
            self._flat_version = self._flat_version.detach()  # another tensor with the same version
        else:
            self._flat_version = _new_version(first.device)
        self._first_id = self._first_address = 0
        if address != 0:
            _versions[address] = self._flat_version
            self._first_id, self._first_address = id(first), first.data_ptr()

    # The places where torch gives weights other memory. copy.deepcopy goes through __setstate__.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        keep = self._to_be_kept_flat()
        super()._apply(fn, recurse)
        if keep:
            self.flatten_parameters()
        self._place_version()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._flat_version = _new_version(None)
        # The pickled layout is that of the release which wrote it.
        self._slots = self._read_layout()
        self.flatten_parameters()
        self._place_version()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        keep = self._to_be_kept_flat()
        super()._load_from_state_dict(*args, **kwargs)
        if keep:
            self.flatten_parameters()
        self._place_version()


# By the address of a buffer its version, as long as a module has it. Weights may belong to several
# modules, and be passed to a functional form.
_versions: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def version_of(weight: Tensor) -> Tensor | None:
    """``FlatModule._flat_version`` of a weight's module; None of other tensors."""
    version = _versions.get(_address(weight))  # there is none for an address of 0
    return None if version is None or version.device != weight.device else version


def _address(weight: Tensor) -> int:
    """Of the memory that a weight is a part of; 0 where it has none of the usual kind."""
    if type(weight) not in (nn.Parameter, Tensor) or weight.device.type not in _DEVICES:
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return 0
    return weight.untyped_storage().data_ptr()


def _new_version(device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):  # tensors made in that mode have no version
        return torch.empty(0, device=device)


def _kind(weight: Tensor) -> str:
    """The properties that all tensors in one buffer share, in words for the user."""
    made = " and made in inference mode" if weight.is_inference() else ""
    return f"{weight.dtype} on {weight.device}{made}"


def _size(slots: Sequence[Slot]) -> int:
    return max(slot.end for slot in slots)
