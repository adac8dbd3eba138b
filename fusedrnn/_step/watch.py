"""What a step reads besides its state and its input: weights, buffers and closed-over tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._locks import CallerLock
from .._tracers import is_compiling
from .gradients import nodes_behind
from .held_modules import Held
from .noise import Source
from .replicas import Replicas, parameters_of
from .torch_draws import DRAWS


class Watch(TorchFunctionMode):
    """Sees the functions of torch that a step calls.

    It hands out random numbers, hands ``replacements`` to functions in place of the tensors with
    these ids, and with ``closed_over`` looks for tensors that nobody has passed to the step.
    """

    def __init__(
        self,
        noise: Source | None = None,
        replacements: dict[int, Tensor] | None = None,
        closed_over: ClosedOver | None = None,
    ) -> None:
        super().__init__()
        self._noise, self._replacements, self._closed_over = noise, replacements, closed_over
        self._level = _level()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_getter = getattr(function, "__name__", "") == "__get__"
        if self._closed_over is not None and not is_getter and function is not Tensor.detach:
            self._closed_over.look(args, kwargs)
        if self._replacements:
            args = [self._replaced(value) for value in args]
            kwargs = {name: self._replaced(value) for name, value in kwargs.items()}
        draw = None if self._noise is None else DRAWS.get(function)
        # Within torch.func.vmap a step sees one of many shapes; torch draws for all of them.
        if draw is None or _level() != self._level:
            result = function(*args, **kwargs)
        else:
            if kwargs.pop("generator", None) is not None:
                raise ValueError(_GENERATOR)
            result = draw(self._noise, *args, **kwargs)
        if self._closed_over is not None:
            if is_getter and isinstance(result, Tensor) and function not in _WITHOUT_GRADIENT:
                self._closed_over.look(args, kwargs)  # tensor.T; not tensor.shape
            self._closed_over.add_known(result)
        return result

    def _replaced(self, value: Any) -> Any:
        assert self._replacements is not None
        if isinstance(value, torch.Size):  # not a tuple of numbers for tensor.new()
            return value
        if isinstance(value, list | tuple):  # functions of torch nest tensors no other way
            return (list if isinstance(value, list) else tuple)(map(self._replaced, value))
        return self._replacements.get(id(value), value) if isinstance(value, Tensor) else value


def _level() -> int:
    """How many transforms of torch.func are around."""
    if is_compiling() or not torch._C._are_functorch_transforms_active():
        return 0
    return torch._C._functorch.maybe_current_level() or 0


_WITHOUT_GRADIENT = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("data", "grad"))
_GENERATOR = (
    "fusedrnn: a step must not draw from a generator of its own, whose numbers cannot be drawn "
    "again; draw without one, and pass generator= to the call of the whole sequence"
)


class ClosedOver:
    """Finds the tensors that a step reads though nobody has passed them to it."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in known}  # kept, and so are their ids
        self.with_gradient: dict[int, Tensor] = {}

    def look(self, args: Any, kwargs: Any) -> None:
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise ValueError(_GENERATOR)
        for leaf in _tensors((*args, *kwargs.values())):
            if leaf.requires_grad and id(leaf) not in self._known:
                self.with_gradient[id(leaf)] = leaf

    def add_known(self, result: Any) -> None:
        for leaf in _tensors((result,)):
            if id(leaf) not in self.with_gradient:
                self._known[id(leaf)] = leaf


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All in these; most values of functions are tensors or plain, which a tree need not walk."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, _PLAIN):
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)


_locks: WeakKeyDictionary[nn.Module, CallerLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=False):
        if getattr(module, "training", flag) != flag:  # a frozen one of torch.jit has none
            module.training = flag


class Weights(nn.Module):
    """What a step holds: parameters with gradient, and the buffers that it changes."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.used, self.held = Replicas.if_any(held.modules), held
        self._apart = {id(parameter) for parameter in held.parameters}
        self._known_slots: dict[str, list[str]] = {}

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()

    def trained(self) -> dict[str, Tensor]:
        """By name; a parameter with several names has the first one here."""
        with self.locked():  # else it may be what another thread has put there for a while
            named = [*self.used.named_parameters("used")]
        return {name: p for name, p in named if p.requires_grad}

    def buffer_versions(self) -> dict[str, tuple[int, int]]:
        """What differs once a buffer has been written or replaced."""
        return {
            name: (id(buffer), -1 if buffer.is_inference() else buffer._version)
            for name, buffer in self.used.named_buffers("used")
        }

    def changed(self, before: dict[str, tuple[int, int]], values: dict[str, Tensor]) -> list[str]:
        """Buffers of modules of which one was written or replaced since.

        Versions alone do not tell: batch norm writes its statistics without a new one. And the mean
        of states that are zero may stay as it is for a step.

        Args:
            values: Copies of that time.
        """
        now, buffers = self.buffer_versions(), dict(self.used.named_buffers("used"))
        modules = {
            _module_of(name)
            for name, version in now.items()
            if version != before.get(name)
            or (name in values and _differ(values[name], buffers[name]))
        }
        return [name for name in now if _module_of(name) in modules]

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of these buffers now."""
        buffers = dict(self.used.named_buffers("used"))
        return {name: buffers[name].detach().clone() for name in names}

    def tensors(self) -> list[Tensor]:
        """Whose values backward exchanges in the modules.

        Not parameters that the step may also read by themselves, nor buffers with a gradient.
        """
        tensors = [p for p in self.used.parameters() if id(p) not in self._apart]
        return tensors + [buffer for buffer in self.used.buffers() if not buffer.requires_grad]

    def write(self, buffers: dict[str, Tensor]) -> None:
        """Gives buffers these values."""
        now = dict(self.used.named_buffers("used"))
        for name, value in buffers.items():
            now[name].copy_(value)

    def frozen(self) -> dict[str, Tensor]:
        """Parameters without gradient, and buffers, by name."""
        with self.locked():
            named = dict(self.used.named_parameters("used"))
            buffers = dict(self.used.named_buffers("used"))
        return {name: p for name, p in named.items() if not p.requires_grad} | buffers

    def moved(self, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those that are no longer in their places, as after torch.func.functional_call."""
        now = self.frozen()
        return {name: old.detach() for name, old in frozen.items() if now.get(name) is not old}

    def _slots(self) -> dict[str, list[str]]:
        """For the name of each parameter and buffer all places that hold it, each once.

        torch.func.functional_call finds a module that is reachable by two ways twice, and would put
        back at the end what it has put there itself.
        """
        if not self._known_slots:
            places: dict[int, list[str]] = {}
            for prefix, module in self.named_modules():
                for name, tensor in (*parameters_of(module).items(), *module._buffers.items()):
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append(f"{prefix}.{name}")
            named = [*self.used.named_parameters("used"), *self.used.named_buffers("used")]
            self._known_slots = {name: places[id(tensor)] for name, tensor in named}
        return self._known_slots

    def call_with(self, values: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        """``function()`` while parameters and buffers of these names have other values."""
        if not values:
            return function()
        with self.locked():
            slots = self._slots()
            in_slots = {slot: value for n, value in values.items() for slot in slots.get(n, [n])}
            return torch.func.functional_call(self, in_slots, (function,), tie_weights=False)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within, no other thread exchanges values of these modules."""
        with ExitStack() as stack:
            for module in self.used:
                with _locks_lock:
                    lock = _locks.setdefault(module, CallerLock())
                stack.enter_context(lock)
            yield

    def training_flags(self) -> list[bool]:
        return [getattr(module, "training", False) for module in self.used.modules()]

    @contextmanager
    def with_training_flags(self, flags: Sequence[bool]) -> Iterator[None]:
        """Within, modules are in training or not as at another time."""
        modules = list(self.used.modules())
        now = [getattr(module, "training", False) for module in modules]
        try:
            _set_training(modules, flags)
            yield
        finally:
            _set_training(modules, now)


_MOST_STATISTICS = 2**20
"""Numbers of a buffer that is looked at: larger ones hold data, which is written with a version."""


def _differ(a: Tensor, b: Tensor) -> bool:
    try:
        return a.numel() <= _MOST_STATISTICS and not torch.equal(a, b)
    except (RuntimeError, TypeError, AttributeError):  # sparse ones and the like are not compared
        return False


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


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
