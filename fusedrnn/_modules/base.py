"""What all layers share, and what all cells share: sizes, options, weights and their values."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.types import Device

from .._call import NO_NOISE, Noise, run_cell
from .._cells import CELLS, Layout, Sizes, layout
from .._flat_weights import FlatModule
from .._options import (
    FIELDS,
    NAMES,
    Options,
    cell_name,
    check_device,
    check_dtype,
    check_positive,
    check_proj_size,
    check_truth,
)
from .._tracers import is_compiling

if TYPE_CHECKING:  # a layer has an attribute for each option
    from .._options import OptionValues as _Attributes
else:
    _Attributes = object

T = TypeVar("T")

_ATTRIBUTES = ("proj_size", *NAMES)
_attributes_of = operator.attrgetter(*_ATTRIBUTES)  # takes half the time of a loop


class RNNBase(FlatModule, _Attributes):
    """A layer of any cell: sizes and options as attributes, weights, initialisation and repr.

    A subclass names its cell in ``_cell``, and has a constructor and a ``forward`` of its own.
    """

    _cell: str
    mode: str
    """The cell's name in capitals, as torch.nn's layers have it."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        options: Options,
        *,
        latent_size: int | None = None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = check_positive("input_size", input_size)
        self.hidden_size = check_positive("hidden_size", hidden_size)
        if CELLS[self._cell].has_latent:
            self.latent_size = _latent_size(latent_size, hidden_size)
        check_proj_size(options.proj_size, hidden_size)
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(options, name))
        if options.dropout > 0 and options.num_layers == 1:
            warnings.warn(
                f"fusedrnn: dropout={options.dropout} drops the inputs of layers after the first, "
                "so with num_layers=1 it does nothing",
                stacklevel=3,
            )
        check_device(device)
        self._make_weights(device, check_dtype(dtype))
        self.reset_parameters()

    def _sizes(self) -> Sizes:
        latent_size = getattr(self, "latent_size", 0)
        return Sizes(
            self.input_size, self.hidden_size, latent_size, self.proj_size or self.hidden_size
        )

    def _options(self) -> Options:
        """The options as the attributes are now: users may change them, as in torch.nn."""
        if is_compiling():  # torch does not know operator.attrgetter
            found = tuple(getattr(self, name) for name in _ATTRIBUTES)
        else:
            found = _attributes_of(self)
        values = (self._cell, self.training, *found)
        # The lookup would not compare the types of a tuple's elements.
        if is_compiling() or isinstance(self.zoneout, tuple):
            return _options(*values)
        try:
            return _remembered_options(*values)
        except TypeError:  # not hashable, such as a list, or of a wrong type
            return _options(*values)

    def _layout(self) -> Layout:
        # Not by _options, so that a module can be copied whose options do not go together now.
        cell, directions = cell_name(self._cell, self.proj_size), 2 if self.bidirectional else 1
        return layout(cell, self._sizes(), self.num_layers, directions, self.bias)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A module that was pickled by an older release lacks the options that are newer. One that
        # a subclass has made a property of its own is not in the state, and needs no default.
        kept = (state, *(state.get(of, ()) for of in ("_parameters", "_buffers", "_modules")))
        for name in _ATTRIBUTES:
            if not hasattr(type(self), name) and not any(name in names for names in kept):
                state = state | {name: FIELDS[name].default}
        super().__setstate__(state)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, in a list of their own, as in torch.nn."""
        return self._by_direction(self._weights())

    # Published code reads these of torch.nn's layers, most often to initialise weights by name.

    @property
    def _all_weights(self) -> list[list[str]]:
        """The names of ``all_weights``."""
        return self._by_direction(self._flat_weights_names)

    @property
    def _flat_weights_names(self) -> list[str]:
        return [slot.name for slot in self._slots]

    @property
    def _flat_weights(self) -> list[Tensor]:
        """What each name leads to now. A layer reads its names, so weights are set by name."""
        return _FlatWeights(getattr(self, name, None) for name in self._flat_weights_names)

    @_flat_weights.setter
    def _flat_weights(self, weights: Iterable[Tensor]) -> None:
        # Wrappers that set a weight by name then refresh this list.
        _check_same(list(weights or ()), self._flat_weights)

    def _by_direction(self, of_all: list[T]) -> list[list[T]]:
        size = len(of_all) // self._options().layer_directions
        return [of_all[i : i + size] for i in range(0, len(of_all), size)]

    def reset_parameters(self) -> None:
        """Draws all weights anew from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        _init_uniform(self, self.hidden_size)

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from their defaults."""
        return _repr(self, *_ATTRIBUTES)


class _FlatWeights(list[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        is_slice = isinstance(index, slice)
        _check_same(value if is_slice else [value], self[index] if is_slice else [self[index]])


def _check_same(weights: list[Any], expected: list[Any]) -> None:
    if [*map(id, weights)] != [*map(id, expected)]:
        raise RuntimeError(
            "fusedrnn: weights must be set by name, such as weight_hh_l0, got others in "
            "_flat_weights"
        )


def _layout_of_step(cell: str, sizes: Sizes, bias: bool) -> Layout:
    parameters = layout(cell, sizes, 1, 1, bias)
    return tuple((name.removesuffix("_l0"), offset, shape) for name, offset, shape in parameters)


_BIASES = {
    cell: [name for name, _, _ in _layout_of_step(cell, Sizes(), True) if name.startswith("bias_")]
    for cell in CELLS
}


class RNNCellBase(FlatModule):
    """One step of a cell, with torch.nn's interface: names of weights have no layer in them.

    A subclass names its cell in ``_cell``, and has a constructor and a ``forward`` of its own.
    """

    _cell: str

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        *,
        latent_size: int | None = None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = check_positive("input_size", input_size)
        self.hidden_size = check_positive("hidden_size", hidden_size)
        if CELLS[self._cell].has_latent:
            self.latent_size = _latent_size(latent_size, hidden_size)
        self.bias = check_truth("bias", bias)  # as in torch.nn; layers accept only a bool
        check_device(device)
        self._make_weights(device, check_dtype(dtype))
        if not self.bias:  # as in torch.nn, where the names exist in any case
            for name in _BIASES[self._cell]:
                self.register_parameter(name, None)
        self.reset_parameters()

    def _sizes(self) -> Sizes:
        # By facts, since a module takes a microsecond to find that it lacks an attribute.
        latent_size = self.latent_size if CELLS[self._cell].has_latent else 0
        return Sizes(self.input_size, self.hidden_size, latent_size, self.hidden_size)

    def _layout(self) -> Layout:
        return _layout_of_step(self._cell, self._sizes(), self.bias)

    def _run(
        self, input: Tensor, h: Tensor | None, c: Tensor | None = None, noise: Noise = NO_NOISE
    ) -> tuple[Tensor, Tensor | None]:
        """h and c after the step."""
        options = _options_of_cell if is_compiling() else _remembered_options_of_cell
        weights, bias = self._weights(), self.bias
        if len(weights) != len(self._slots):
            bias = len(weights) > len(CELLS[self._cell].weights)
        return run_cell(
            input,
            weights,
            h,
            c,
            options(self._cell, bias),
            self._sizes(),
            noise,
            flat_version=self._version_of(weights),
        )

    def _weights(self) -> list[Tensor]:
        """As in torch.nn, biases that are set after construction count, unless they are None."""
        weights = super()._weights()
        matrices = len(CELLS[self._cell].weights)
        if len(weights) > matrices and weights[-1] is not None:  # the usual case, in little time
            return weights
        biases = [getattr(self, name, None) for name in _BIASES[self._cell]]
        if all(bias is None for bias in biases):
            return weights[:matrices]
        return cast(list[Tensor], [*weights[:matrices], *biases])  # a single None is refused later

    def reset_parameters(self) -> None:
        """Draws all weights anew from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        _init_uniform(self, self.hidden_size)

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from their defaults."""
        return _repr(self, "bias")


def _options(cell: str, training: bool, *values: Any) -> Options:
    """``values``: of _ATTRIBUTES."""
    options = dict(zip(_ATTRIBUTES, values, strict=True))
    return Options(cell=cell, training=training, **options)


def _options_of_cell(cell: str, bias: bool) -> Options:
    return Options(cell=cell, bias=bias)


# Checks of options take longer than these dictionaries; with `typed`, 1 is not taken for True.
_remembered_options = functools.lru_cache(maxsize=256, typed=True)(_options)
_remembered_options_of_cell = functools.lru_cache(maxsize=16, typed=True)(_options_of_cell)


def _latent_size(latent_size: int | None, hidden_size: int) -> int:
    return check_positive("latent_size", hidden_size if latent_size is None else latent_size)


def _init_uniform(module: nn.Module, hidden_size: int) -> None:
    bound = 1 / math.sqrt(hidden_size)
    for weight in module.parameters():
        nn.init.uniform_(weight, -bound, bound)


def fx_node(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    """A call of ``module`` within torch.fx.symbolic_trace, as one node: so it is with torch.nn's.

    Raises:
        TypeError: The module is not inside of another one.
    """
    tracer = arguments[0].tracer
    if module is tracer.root:
        raise TypeError(
            f"fusedrnn: torch.fx can have {type(module).__name__} as a node of a larger module, "
            "but cannot trace it by itself"
        )
    given = {name: value for name, value in named.items() if value is not None}
    path = tracer.path_of_module(module)
    return tracer.create_proxy("call_module", path, arguments, given)


def _repr(module: RNNBase | RNNCellBase, *names: str) -> str:
    parts = [str(module.input_size), str(module.hidden_size)]
    defaults = {"latent_size": module.hidden_size} | {name: FIELDS[name].default for name in names}
    for name, default in defaults.items():
        value = getattr(module, name, default)
        if value != default:
            parts.append(f"{name}={value}")
    return ", ".join(parts)
