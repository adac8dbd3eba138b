"""Replacing torch.nn's recurrent modules inside a model by those of fusedrnn, and back.

The new module holds the very Parameters of the old one, so optimizers, ties and checkpoints go on.
Whatever cannot be carried over without a change of behaviour is kept as it is, with a reason.

Longer than 350 lines, because each reason to keep a module is a few lines, and both ways share
them all.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from . import _library
from ._flat_weights import FlatModule
from ._held_outside import modules_outside
from ._modules import GRU, LSTM, GRUCell, LSTMCell

# Classes, and the classes that replace them.
Counterparts = Mapping[type[nn.Module], type[nn.Module]]

_TO_FUSED: Counterparts = {nn.GRU: GRU, nn.LSTM: LSTM, nn.GRUCell: GRUCell, nn.LSTMCell: LSTMCell}
_TO_TORCH: Counterparts = {of_ours: of_torch for of_torch, of_ours in _TO_FUSED.items()}
_TORCH_NAMES = ("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell")

# Options that change memory and time but no result: a class without them may be the replacement.
_COST_ONLY = ("recompute", "chunk_size", "workspace_bytes", "backend")

# What every module has besides tensors and submodules: the training mode and hooks of all kinds.
_STATE = tuple(n for n in vars(nn.Module()) if n not in ("_parameters", "_buffers", "_modules"))

M = TypeVar("M", bound=nn.Module)


class Replaced(NamedTuple):
    """A module that was replaced."""

    name: str
    """Its name in the model, as in ``named_modules()``; empty for the model itself."""
    before: str
    """The old module, in words."""
    after: str
    """The new module, in words."""
    lost: tuple[str, ...] = ()
    """Options that the new module does not have. None of them changes a result."""

    def __str__(self) -> str:
        lost = f" (without {', '.join(self.lost)})" if self.lost else ""
        return f"{self.name or '(the model)'}: {self.before} -> {self.after}{lost}"


class Kept(NamedTuple):
    """A recurrent module that was left as it is."""

    name: str
    """Its name in the model, as in ``named_modules()``; empty for the model itself. Of a module
    that is no submodule its place, such as ``encoder.layers[0]``."""
    module: str
    """The module, in words."""
    reason: str
    """Why it was kept."""

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.module}: {self.reason}"


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` and :func:`to_torch` did; print it.

    A module that stands under several names is listed once, under the first.
    """

    replaced: list[Replaced] = field(default_factory=list)
    """The modules that were replaced, in the model's order."""
    kept: list[Kept] = field(default_factory=list)
    """The recurrent modules that could not be replaced, and why."""
    outside: list[Kept] = field(default_factory=list)
    """The recurrent modules that the model holds in a plain list, tuple, set or dict, and so were
    not replaced: only submodules are."""
    advice: list[str] = field(default_factory=list)
    """What other code must do otherwise now."""

    def __str__(self) -> str:
        lines = []
        for title, entries in (
            ("Replaced", self.replaced),
            ("Kept", self.kept),
            ("Outside of submodules, so not replaced", self.outside),
        ):
            if entries:
                lines += [f"{title} {len(entries)}:", *(f"  {entry}" for entry in entries)]
        if self.advice:
            lines += ["In other code:", *(f"  {line}" for line in self.advice)]
        return "\n".join(lines) or "Nothing to replace."


def _advice(replaced: list[Replaced]) -> list[str]:
    """What code around a model of fusedrnn's modules must do, for the classes that it has now."""
    names = sorted({entry.after.split("(", 1)[0].rpartition(".")[2] for entry in replaced})
    lines = [
        f"isinstance(m, nn.{name}) is False now: initialise earlier, or ask for fusedrnn.{name} too"
        for name in names
    ]
    lines.append(
        "torch.ao.quantization finds torch.nn's modules only: call fusedrnn.to_torch(model) before"
    )
    return lines


def convert(module: M) -> tuple[M, ConversionReport]:
    """Replaces every torch.nn.GRU, LSTM, GRUCell and LSTMCell in a model by fusedrnn's.

    Results stay the same up to rounding, names in ``state_dict()`` stay the same, and so do the
    Parameters themselves: an optimizer made before stays valid, tied weights stay tied, gradients
    and ``requires_grad`` stay. Training mode, hooks and further attributes are carried over.

    The model is changed in place, as by ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``; pass
    ``copy.deepcopy(model)`` to keep the original. Call it before torch.compile, and look at the
    report: a module that cannot be replaced without a change of behaviour is kept, and is listed
    there with the reason. This applies to subclasses, to parametrized, weight-normed, pruned,
    quantized, sharded, scripted and compiled modules, to modules whose forward was overridden, and
    to options, dtypes and devices that fusedrnn does not have.

    Only submodules are replaced. A plain list, tuple, set or dict goes on holding the old module,
    which still works, with the same Parameters; the report names such places. It cannot name those
    in closures and other objects. docs/from-nn-lstm.md says what else changes.

    Args:
        module: The model, on any device or on meta, or a recurrent module by itself.

    Returns:
        model: ``module``, or the new module if ``module`` itself is a recurrent one and was
        replaced; type checkers take it for the old type.

        report: What was replaced, what was kept and why, and what must change in other code.

    Raises:
        TypeError: ``module`` is not a torch.nn.Module.

    Example::

        >>> model = nn.ModuleDict({"a": nn.LSTM(12, 32), "b": nn.RNN(12, 32)})
        >>> model, report = fusedrnn.convert(model)
        >>> print(report)
        Replaced 1:
          a: torch.nn.LSTM(12, 32) -> fusedrnn.LSTM(12, 32)
        Kept 1:
          b: torch.nn.RNN(12, 32): fusedrnn has no counterpart of torch.nn.RNN
        In other code:
          isinstance(m, nn.LSTM) is False now: initialise earlier, or ask for fusedrnn.LSTM too
          torch.ao.quantization finds torch.nn's modules only: call fusedrnn.to_torch(model) before
    """
    return _replace_all(module, _TO_FUSED)


def to_torch(module: M) -> tuple[M, ConversionReport]:
    """Replaces every fusedrnn.GRU, LSTM, GRUCell and LSTMCell in a model by torch.nn's.

    The way back of :func:`convert`: in place, with the same Parameters. ``recompute``,
    ``chunk_size``, ``workspace_bytes`` and ``backend`` have no counterpart; the report says where
    they were lost. A StochasticGRU is kept, because torch has none. Calls with ``lengths`` or
    ``reset`` raise a TypeError afterwards, because torch's modules do not take them.

    Args:
        module: As for :func:`convert`.

    Returns:
        model: ``module``, or the new module if ``module`` itself was replaced.

        report: What was replaced, and what was kept and why.

    Raises:
        TypeError: ``module`` is not a torch.nn.Module.

    Example::

        >>> model, report = fusedrnn.to_torch(nn.Sequential(fusedrnn.GRU(12, 32, recompute=False)))
        >>> print(report)
        Replaced 1:
          0: fusedrnn.GRU(12, 32, recompute=False) -> torch.nn.GRU(12, 32) (without recompute=False)
    """
    return _replace_all(module, _TO_TORCH)


class _CannotReplace(Exception):
    """The reason why a module is kept."""


def _replace_all(root: M, counterparts: Counterparts) -> tuple[M, ConversionReport]:
    if not isinstance(root, nn.Module):
        raise TypeError(f"fusedrnn: module must be a torch.nn.Module, got {type(root).__name__}")
    report = ConversionReport()
    # torch.compile's wrapper calls the module that it was made for, whatever replaces it.
    compiled = {m._modules["_orig_mod"] for m in root.modules() if "_orig_mod" in m._modules}
    done: dict[nn.Module, nn.Module] = {}
    names: dict[nn.Module, str] = {}  # of modules that were replaced

    def visit(module: nn.Module, name: str, parent: nn.Module | None = None) -> nn.Module:
        if module in done:
            return done[module]
        done[module] = module
        if _is_recurrent(module, counterparts):
            try:
                if module in compiled:
                    raise _CannotReplace("torch.compile has wrapped it; replace it before that")
                _check_weight_drop(module, parent)
                new, lost = _counterpart(module, counterparts)
            except _CannotReplace as reason:
                report.kept.append(Kept(name, _words(module), str(reason)))
            else:
                report.replaced.append(Replaced(name, _words(module), _words(new), lost))
                done[module], names[module] = new, name
                return new
            if _is_quantized(module):
                return module  # its parts have the names of whole modules
        # Not named_children(), which leaves out the second name of a child.
        for key, child in list(module._modules.items()):
            if child is not None:
                new = visit(child, f"{name}.{key}" if name else key, module)
                if new is not child:
                    module.add_module(key, new)
        return module

    model = cast(M, visit(root, ""))
    for place, module in modules_outside(model):
        if _is_recurrent(module, counterparts):
            name = names.get(module)
            reason = "a torch.nn.ModuleList would make it a submodule"
            if name is not None:
                reason = f"{name or 'the model'} was this one; put the new one here, too"
            report.outside.append(Kept(place, _words(module), reason))
    if report.replaced and counterparts is _TO_FUSED:
        report.advice.extend(_advice(report.replaced))
    return model, report


def _is_recurrent(module: nn.Module, counterparts: Counterparts) -> bool:
    """Whether the report lists the module, as replaced or as kept."""
    if counterparts is _TO_TORCH:
        return isinstance(module, FlatModule)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return True
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, "original_name", None) in _TORCH_NAMES
    return _is_quantized(module)


def _is_quantized(module: nn.Module) -> bool:
    """Whether it is a recurrent module of torch.ao, whose classes do not derive from torch.nn's."""
    cls = type(module)
    return cls.__module__.startswith("torch.ao.") and cls.__name__ in _TORCH_NAMES


def _check_weight_drop(old: nn.Module, parent: nn.Module | None) -> None:
    """Refuses a module whose weights a WeightDrop wrapper sets before each call.

    Such wrappers (fastai and PyTorch-NLP have one) keep the weights under other names, in the
    module or in the wrapper that holds it.
    """
    for holder in (old, parent):
        if holder is None:
            continue
        own = [name for name, _ in holder.named_parameters(recurse=False)]
        names = [
            n.removesuffix("_raw") for n in own if n.startswith("weight_") and n.endswith("_raw")
        ]
        if not names:
            continue
        p = getattr(holder, "weight_p", None)  # fastai's
        option = f"weight_dropout={p}" if isinstance(p, float) else "weight_dropout=p"
        raise _CannotReplace(
            f"WeightDrop sets {', '.join(names)} before each call; to convert it, unwrap it, and "
            f"give the new module {option}, which does the same"
        )


def _counterpart(old: nn.Module, counterparts: Counterparts) -> tuple[nn.Module, tuple[str, ...]]:
    """The new module with everything that the old one holds, and the options that it lacks.

    Raises:
        _CannotReplace: No module does exactly the same.
    """
    cls = _counterpart_class(old, counterparts)
    new, lost = _with_options_of(old, cls)
    _check_tensors(old, new)
    attributes = _own_attributes(old, new)

    # The same dicts of hooks, so that the handles that remove them keep working.
    for name in _STATE:
        if name in vars(old):
            new.__dict__[name] = vars(old)[name]
    new.__dict__.update(attributes)
    for name, weight in old._parameters.items():
        setattr(new, name, weight)
    # Weights that lie in a larger buffer were placed there on purpose, and stay.
    if isinstance(new, FlatModule | nn.RNNBase) and _has_memory_of_its_own(new):
        new.flatten_parameters()
    return new, lost


def _counterpart_class(old: nn.Module, counterparts: Counterparts) -> type[nn.Module]:
    if isinstance(old, torch.jit.ScriptModule):
        raise _CannotReplace("it is compiled by TorchScript")
    if parametrize.is_parametrized(old):
        names = ", ".join(cast(nn.ModuleDict, old.parametrizations))
        raise _CannotReplace(f"it is parametrized: {names}")
    cls = counterparts.get(type(old))
    if cls is not None:
        return cls
    for known in counterparts:
        if isinstance(old, known):
            raise _CannotReplace(
                f"it is of a subclass of {_class_name(known)}, which may compute something else"
            )
    package = "torch.nn" if counterparts is _TO_TORCH else "fusedrnn"
    raise _CannotReplace(f"{package} has no counterpart of {_class_name(type(old))}")


def _with_options_of(old: nn.Module, cls: type[nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
    """A ``cls`` on the meta device with the options of ``old``, and the options that it lacks."""
    options, lost = {}, []
    accepted = _constructor_options(cls)
    for name, default in _constructor_options(type(old)).items():
        value = getattr(old, name, default)
        if value == (default, default):  # zoneout of an LSTM's h and c
            value = default
        if name in accepted:
            options[name] = value
        elif value != default and name in _COST_ONLY:
            lost.append(f"{name}={value}")
        elif value != default:
            raise _CannotReplace(f"{_class_name(cls)} has no {name}")
    weight = next(old.parameters(), None)
    dtype = None if weight is None else weight.dtype
    if weight is not None:
        _check_device(weight.device, cls)
    try:
        with warnings.catch_warnings():  # the old module has warned of its dropout already
            warnings.simplefilter("ignore")
            new = cls(**options, device="meta", dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _CannotReplace(str(error).removeprefix("fusedrnn: ")) from error
    return new, tuple(lost)


def _constructor_options(cls: type) -> dict[str, Any]:
    """The arguments of a constructor and their defaults, without device and dtype."""
    for base in cls.__mro__:  # torch.nn.LSTM passes its arguments on to the base class
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            break
    return {
        name: p.default
        for name, p in parameters.items()
        if name not in ("self", "mode", "device", "dtype")
    }


def _check_device(device: torch.device, cls: type) -> None:
    if not issubclass(cls, FlatModule):
        return
    if device.type not in ("cpu", "cuda", "meta"):
        raise _CannotReplace(f"fusedrnn does not run on {device}")
    if device.type == "cuda" and _library.cuda_obstacle is not None:
        raise _CannotReplace(f"it is on {device}, but {_library.cuda_obstacle}")


def _check_tensors(old: nn.Module, new: nn.Module) -> None:
    """Refuses a module whose tensors are not exactly the parameters of ``new``."""
    others = [
        *old._buffers,
        *old._modules,
        *(n for n in old._parameters if n not in new._parameters),
    ]
    if others:
        names = ", ".join(sorted(others))
        raise _CannotReplace(
            f"it has more than its usual weights: {names} (as weight_norm and pruning add)"
        )
    for name, expected in new._parameters.items():
        weight = old._parameters.get(name)
        # Exactly this type: DTensor and its like have weights of another kind.
        if type(weight) is not type(expected):
            raise _CannotReplace(f"{name} is not a plain nn.Parameter")
        if weight is None or expected is None:
            continue
        if (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
            raise _CannotReplace(
                f"{name} is {tuple(weight.shape)} of {weight.dtype}, where "
                f"{tuple(expected.shape)} of {expected.dtype} was expected"
            )


def _own_attributes(old: nn.Module, new: nn.Module) -> dict[str, Any]:
    """The attributes that users have set on this module, if ``new`` can have them too."""
    if any(getattr(hook, "with_module", False) for hook in old._load_state_dict_pre_hooks.values()):
        raise _CannotReplace("a hook for load_state_dict is bound to this very module")
    usual = vars(type(old)(1, 1, device="meta"))
    own = {name: value for name, value in vars(old).items() if name not in usual}
    for name in own:
        if hasattr(type(old), name) or hasattr(type(new), name) or name in vars(new):
            raise _CannotReplace(f"{name} was overridden on this very module")
    return own


def _has_memory_of_its_own(module: nn.Module) -> bool:
    """Whether the memory of this module's weights holds nothing else."""
    used: Counter[int] = Counter()
    size = {}
    for weight in module.parameters():
        memory = weight.untyped_storage()
        used[memory.data_ptr()] += weight.nbytes
        size[memory.data_ptr()] = memory.nbytes()
    return used == size


def _class_name(cls: type) -> str:
    if getattr(nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    if cls.__module__.startswith("fusedrnn."):
        return f"fusedrnn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _words(module: nn.Module) -> str:
    return f"{_class_name(type(module))}({module.extra_repr()})"
