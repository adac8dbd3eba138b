"""Named parameters that lie in one flat buffer.

A module must offer ``weight_ih_l0`` and its like as ordinary parameters: checkpoints, weight decay
per matrix, freezing, pruning and ``parametrize`` all go by name. What moves weights in bulk (a copy
to the host, an all-reduce, a matrix product over neighbours) wants a single buffer. Here the named
tensors lie side by side in one: code that goes by name and code that moves memory in bulk are both
served, and nothing is ever copied for a call. The forward pass takes the named tensors, each with
its own pointer; it is right, and equally fast, when they do not lie in one buffer.

Longer than 350 lines, because all that torch does to the weights of a module is answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.types import Device

from ._buffers import (
    DEVICES,
    FlatBuffer,
    Place,
    Slot,
    address_of,
    are_all_of_a_storage,
    buffer_of,
    is_used_elsewhere,
    joined_gradients,
    memory_kind,
    new_version,
    place_of,
    remember,
    set_gradients,
    size_of,
    version_of,
)
from ._cells import Layout
from ._tracers import is_compiling, is_traced

# What a module finds again by itself after it was copied or pickled.
_NOT_PICKLED = (
    "_slots",
    "_flat_buffer",
    "_flat_version",
    "_plain_class",
    "_first_id",
    "_first_address",
)


class FlatModule(nn.Module):
    """A module whose weights are named parameters and, at the same time, parts of one flat buffer.

    A subclass says in ``_layout`` where each weight lies, and calls ``_make_weights`` once in its
    constructor.
    """

    _slots: tuple[Slot, ...]
    _flat_buffer: FlatBuffer
    _first_id: int
    """Of the first weight when it was last looked up, which takes microseconds; or 0."""
    _first_address: int
    """Of its numbers."""

    def _layout(self) -> Layout:
        """Where every weight lies, in the order in which they are registered and passed on."""
        raise NotImplementedError

    def _make_weights(self, device: Device, dtype: torch.dtype) -> None:
        """Registers every weight as a part of a new buffer, with values still to be set."""
        self._slots = self._read_layout()
        size = size_of(self._slots)
        if size >= 2**63:  # torch's own error is about an int that it cannot read
            raise RuntimeError(f"fusedrnn: no {size:,} weights of {dtype} can be made: too many")
        try:
            flat = torch.zeros(size, device=device, dtype=dtype)
        except (RuntimeError, AssertionError) as error:  # no such device, or too little memory
            cls = type(error) if isinstance(error, RuntimeError) else RuntimeError
            reason = f"no {size:,} weights of {dtype} can be made: {error}"
            raise cls(f"fusedrnn: {reason}") from None
        for slot in self._slots:
            self.register_parameter(slot.name, nn.Parameter(slot.part(flat)))
        self._flat_buffer = FlatBuffer(new_version(flat.device))
        self._place_buffer(flat)

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
                return cast("list[Tensor]", found)
            except KeyError:
                pass  # a name leads to something other than a parameter
        return [getattr(self, slot.name) for slot in self._slots]

    def _version_of(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The version of the buffer that the first weight is a part of, for a call with a graph."""
        if not torch.is_grad_enabled():
            return None
        if is_compiling():
            return self._flat_buffer.version
        first = weights[0]
        is_known = id(first) == self._first_id and type(first) is nn.Parameter
        if is_known and first.data_ptr() == self._first_address:  # .data may have changed that
            return self._flat_buffer.version
        return version_of(first)  # a functional call's, or another module's

    @property
    def flat_weight(self) -> Tensor:
        """All weights as one 1-D tensor that shares their memory; no copy, detached from autograd.

        Writing to it changes the weights. It holds them in the order of ``state_dict()``,
        row-major. Ask for it anew after the module was moved or converted: an older one keeps the
        former buffer. It follows a module that is shared with other processes by
        ``share_memory()``, or sent to one. Torch moves a single tensor that is sent by itself, so
        share the module first. Torch does not know that weights share this memory: one compiled
        graph must not write to it and also run the module.

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
        place, first = self._place(), self._plain_weights()[0]
        if isinstance(place, str):
            way_out = "call flatten_parameters() to bring them there again"
            if first.is_cpu and first.is_shared():
                way_out = "call share_memory() of the module before its tensors are shared or sent"
            raise RuntimeError(
                "fusedrnn: flat_weight is not available because the weights do not lie in one "
                f"buffer (see {place}); {way_out}"
            )
        flat = place.tensor(first, size_of(self._slots))
        if first.is_inference():  # it has no version
            return flat
        self._place_buffer()
        return self._flat_buffer.flat_weight(flat)

    @property
    def flat_grad(self) -> Tensor | None:
        """All gradients as one 1-D tensor that shares their memory, in the order of flat_weight.

        None where they do not lie side by side. A backward pass leaves those of one layer, with
        both its directions, side by side. For several layers, or for the same memory in each step,
        set it once: after ``rnn.flat_grad = torch.zeros_like(rnn.flat_weight)`` the ``grad`` of
        each weight is a part of that tensor, and backward adds to it. ``zero_grad`` sets gradients
        to None by default, and they are elsewhere afterwards; ``zero_grad(set_to_none=False)``
        keeps them there. After converting, moving or copying the module, set it anew.

        Raises:
            TypeError, ValueError: It is set to something other than None or a contiguous 1-D tensor
                of the size, dtype and device of ``flat_weight``.
            RuntimeError: It is set, and weights are tied, parametrized, sharded or not alike.
        """
        if self._obstacle() is not None:
            return None
        return joined_gradients(self._slots, self._plain_weights())

    @flat_grad.setter
    def flat_grad(self, value: Tensor | None) -> None:
        if (obstacle := self._obstacle()) is not None:
            raise RuntimeError(f"fusedrnn: flat_grad cannot be set because {obstacle}")
        set_gradients(self._slots, self._plain_weights(), value)

    def flatten_parameters(self) -> None:
        """Brings the weights into one buffer again, so that ``flat_weight`` is available.

        Never needed for a right or a fast ``forward``, and called wherever torch moves the weights
        (``to``, ``copy.deepcopy``, unpickling, ``load_state_dict``). Call it after weights were
        replaced by hand, or by ``from_pretrained`` of transformers. The parameters stay the same
        objects, so an optimizer made earlier stays valid. Each weight gets a storage of its own in
        that buffer.

        Does nothing if the weights are flat, or cannot be: on the meta device, sharded,
        parametrized, tied, of several dtypes, or in memory shared with other processes.
        """
        if is_compiling() or is_traced() or torch._C._len_torch_dispatch_stack() > 0:
            return  # a tracer would look at it
        if self._obstacle() is None:
            self._flatten()

    def _flatten(self, *, may_be_shared: bool = False, is_anew: bool = False) -> None:
        """
        Args:
            may_be_shared: Memory that is shared between processes is known to this one alone. There
                the weights remain views of one storage, which torch shares as a whole.
            is_anew: The weights come from a file or the like, so nobody looks at their memory.

        Requires that ``_obstacle`` is None.
        """
        weights, place = self._plain_weights(), self._place()
        first, size = weights[0], size_of(self._slots)
        is_shared = any(w.is_cpu and w.is_shared() for w in weights)
        if is_shared and not (may_be_shared and isinstance(place, str)):
            return  # another process looks at this memory
        if isinstance(place, Place):
            if not are_all_of_a_storage(weights):
                return  # with storages of their own, or in somebody's buffer on purpose
            if is_used_elsewhere(weights):
                if not (is_anew and first.is_cpu):
                    return
                place = ""
        # Weights made in inference mode need a buffer made in it; other weights must not have one.
        with torch.inference_mode(first.is_inference()), torch.no_grad():
            if isinstance(place, Place):
                flat = place.tensor(first, size)
            else:  # zeros, so that no gap between the weights, where a layout has any, holds a NaN
                flat = torch.zeros(size, dtype=first.dtype, device=first.device)
                for slot, weight in zip(self._slots, weights, strict=True):
                    slot.view(flat).copy_(weight)
            if is_shared:
                flat.share_memory_()
            for slot, weight in zip(self._slots, weights, strict=True):
                weight.data = slot.view(flat).data if is_shared else slot.part(flat)
        former = self._flat_buffer
        self._place_buffer(flat)
        if is_shared:
            former.follow(flat)

    def __dir__(self) -> list[str]:  # torch.jit reads all that is listed here
        names = cast(list[str], super().__dir__())
        is_flat = self._obstacle() is None and isinstance(self._place(), Place)
        return names if is_flat else [name for name in names if name != "flat_weight"]

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
            if weight.device.type not in DEVICES or weight.layout != torch.strided:
                return f"{slot.name} is a {weight.layout} tensor on device {weight.device}"
            if id(weight) in seen:
                return f"{slot.name} and {seen[id(weight)]} are one parameter"
            seen[id(weight)] = slot.name
            first = weight if first is None else first
            kinds = memory_kind(weight), memory_kind(first)
            if kinds[0] != kinds[1]:
                return f"{slot.name} is {kinds[0]}, but {self._slots[0].name} is {kinds[1]}"
        return None

    def _place(self) -> Place | str:
        """Where the weights lie side by side, or the first that is not where the layout has it.

        Requires that ``_obstacle`` is None.
        """
        weights = self._plain_weights()
        buffer = buffer_of(weights[0])
        known = None if buffer is None else buffer.storage()
        return place_of(self._slots, weights, [weights[0].untyped_storage(), known])

    def _to_be_kept_flat(self) -> bool:
        """Whether the weights should be flat again after torch has moved them.

        True if they are flat, or have no memory yet. Weights that someone has placed elsewhere stay
        there: memory shared between processes, a trainer's own buffer.
        """
        if any(w is not None and w.is_meta for w in self._parameters.values()):
            return True
        return self._obstacle() is None and isinstance(self._place(), Place)

    def _place_buffer(self, flat: Tensor | None = None) -> None:
        """Has ``_flat_buffer`` be that of the weights' memory, and its version on their device.

        A graph of torch.compile needs it there.

        Args:
            flat: What the weights have just become parts of. A call before that may have saved the
                version, and is to notice what is written to the new memory.
        """
        first = next((w for w in self._parameters.values() if w is not None), None)
        if first is None:
            return
        known = buffer_of(first) if flat is None else None
        if known is None:
            version = self._flat_buffer.version
            is_new = flat is None or version.device != first.device
            # detach: another tensor with the same version
            version = new_version(first.device) if is_new else version.detach()
            known = FlatBuffer(version, first if flat is None else flat)
        self._flat_buffer = known
        is_flat = self._obstacle() is None and isinstance(self._place(), Place)
        remember(known, self._plain_weights() if is_flat or flat is not None else [first])
        self._first_id = self._first_address = 0
        if address_of(first) != 0:
            self._first_id, self._first_address = id(first), first.data_ptr()

    # The places where torch gives weights other memory. copy.deepcopy goes through __setstate__.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        keep = self._to_be_kept_flat()
        super()._apply(fn, recurse)
        if keep and self._obstacle() is None:
            self._flatten(may_be_shared=True)
        self._place_buffer()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: value for name, value in state.items() if name not in _NOT_PICKLED}
        super().__setstate__(kept)
        self._slots = self._read_layout()
        self._flat_buffer = FlatBuffer(new_version(None))
        if self._obstacle() is None:
            self._flatten(is_anew=True)
        self._place_buffer()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, cls._sent)

    def _sent(self) -> tuple[Any, ...]:
        """The module as torch.multiprocessing sends it: flat on both sides, in the same memory.

        Torch sends storages, those of a CPU after it has moved them to shared memory, and those of
        a GPU only from where they were allocated. So here all weights go as views of one.
        """
        place = self._place() if self._obstacle() is None else ""
        if isinstance(place, Place) and place.storage.device.type == "cpu":
            self.share_memory()
        reduced: Any = self.__reduce_ex__(2)
        made_by, arguments, state, *others = reduced
        if isinstance(place, Place) and place.storage.device.type == "cuda":
            weights = self._plain_weights()
            flat = place.tensor(weights[0], size_of(self._slots))
            parts = zip(self._slots, weights, strict=True)
            views = {s.name: nn.Parameter(s.view(flat).data, w.requires_grad) for s, w in parts}
            state = state | {"_parameters": self._parameters | views}
        return made_by, arguments, state, *others

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        keep = self._to_be_kept_flat()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if keep and self._obstacle() is None:
            self._flatten(is_anew=local_metadata.get("assign_to_params_buffers", False))
        self._place_buffer()
