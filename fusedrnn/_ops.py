"""The operators of csrc/ops/ops.h as Python calls them.

Only this module calls them; _autograd.py makes them differentiable.

Longer than 350 lines, because each operator has its function here, with the types of its arguments
and results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import _helpers as helpers
from . import _library
from ._cells import CELL_NAMES, CELLS
from ._tracers import is_compiling

_BACKENDS = helpers.BACKENDS


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """How a layer is called, apart from its tensors."""

    cell: str
    noise_stream: int = 0
    """Tells random numbers of layers apart: its number in the stack, each direction counted."""
    first_step: int = 0
    """The first step's place in the sequence that this one is a part of; noise depends on it."""
    reverse: bool = False
    """Whether the only direction runs from the end of the sequence."""
    chunk_size: int = 0
    """Steps of a chunk, or 0 for as many as the plan has."""
    workspace_bytes: int = 0
    """An upper bound on the workspace, or 0 for none."""
    backend: str = "auto"
    recompute: bool | None = None
    """None for what ``_autograd.recomputes`` chooses."""
    layer_directions: int = 1
    """Of the whole stack, for that choice: what they save adds up."""
    dropout: float = 0.0
    """The probability with which an element of the layer's input is zeroed."""
    zoneout: float = 0.0
    """The probability with which a unit keeps its h; without a mask_seed, the average is taken."""
    cell_zoneout: float = 0.0
    """The same of the cell state."""
    tuning: int = 0
    """See _tuning.py."""

    index: int = field(init=False, repr=False, compare=False)
    """Of the cell."""
    others: dict[str, Any] = field(init=False, repr=False, compare=False)
    """Arguments of the operators that are not at their defaults; made once, for many calls."""

    def __post_init__(self) -> None:
        others = {
            "noise_stream": self.noise_stream,
            "first_step": self.first_step,
            "reverse": self.reverse,
            "chunk_size": self.chunk_size,
            "workspace_bytes": self.workspace_bytes,
            "backend": _BACKENDS.index(self.backend),
            "dropout": self.dropout,
            "zoneout": self.zoneout,
            "cell_zoneout": self.cell_zoneout,
            "tuning": self.tuning,
        }
        object.__setattr__(self, "index", CELLS[self.cell].index)
        object.__setattr__(self, "others", {k: value for k, value in others.items() if value})


class LayerTensors(NamedTuple):
    """The tensors of a layer's call, for D directions.

    P is the number of features of h: H, unless the cell projects h. In a packed batch, input is
    (rows of all steps, I).
    """

    input: Tensor
    """(T, B, I)."""
    hx: Tensor
    """(D, B, P)."""
    weights: Sequence[Tensor]
    """Of each direction, in the order of the layout."""
    cx: Tensor | None = None
    """(D, B, H), if the cell has a cell state."""
    eps: Tensor | None = None
    """(D, T, B, Z); neither this nor ``seed`` means no noise."""
    seed: Tensor | None = None
    """One int64 that eps is drawn from."""
    lengths: Tensor | None = None
    """(B,) int64 on the CPU: steps of each sequence of a padded batch."""
    batch_sizes: Tensor | None = None
    """(T,) int64 on the CPU: rows that take each step of a packed batch."""
    reset: Tensor | None = None
    """(T, B) bool: whether the state is zeroed before the step."""
    mask_seed: Tensor | None = None
    """One int64 that dropout and zoneout are drawn from."""
    flat_version: Tensor | None = None
    """Saved, and not read: its version changes when the weights are written as a whole."""

    def flat(self) -> tuple[Any, ...]:
        """All of them, one after the other; the weights come last, because their number varies."""
        input, hx, weights, *others = self
        return (input, hx, *others, *weights)

    @classmethod
    def of(cls, flat: Sequence[Any], *, has_version: bool = True) -> LayerTensors:
        """From what :meth:`flat` gives. ``has_version``: False leaves flat_version out."""
        first_weight = len(LayerTensors._fields) - 1
        input, hx, *others = flat[: first_weight if has_version else first_weight - 1]
        return cls(input, hx, flat[first_weight:], *others)

    def others(self) -> dict[str, Tensor]:
        """The tensors that most calls do not have, by name, as far as they are there."""
        named = zip(_OTHERS, self[4:], strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}


_OTHERS = LayerTensors._fields[4:]


def read(
    cell: int, input: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor], **named: Any
) -> tuple[LayerCall, LayerTensors, dict[str, Any]]:
    """A layer's call from an operator's arguments -> call, tensors, and what only that one has."""
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    if "backend" in options:
        options["backend"] = name_at(_BACKENDS, options["backend"], "backend")
    others = {name: named.pop(name) for name in LayerTensors._fields[4:] if name in named}
    call = LayerCall(cell=name_at(CELL_NAMES, cell, "cell"), **options)
    return call, LayerTensors(input, hx, weights, cx, **others), named


def name_at(names: Sequence[str], number: int, what: str) -> str:
    """The name that an operator's argument has the number of."""
    if not 0 <= number < len(names):
        raise RuntimeError(f"fusedrnn: there is no {what} {number}")
    return names[number]


_NO_OPTIONS = ("cell", "recompute", "layer_directions")
_OPTIONS = [f.name for f in fields(LayerCall) if f.name not in _NO_OPTIONS and f.init]


class ForwardResults(NamedTuple):
    """What forward returns."""

    output: Tensor
    """(T, B, D * P), or packed (rows, D * P)."""
    h_n: Tensor
    """(D, B, P)."""
    c_n: Tensor
    """(D, B, H), or (0, B, H) of a cell without cell state."""
    saved_gates: Tensor
    """The pre-activations, if they were to be saved."""
    chunk_cell_states: Tensor
    """(chunks, D, B, H), the cell state before each chunk; (0, D, B, H) without one."""


class LastStates(NamedTuple):
    """What last_states returns, for L layers of one direction."""

    h_n: Tensor
    """(L, B, P)."""
    c_n: Tensor
    """(L, B, H), or (0, B, H) of a cell without cell state."""
    part_h: Tensor
    """(parts, L, B, P), the states before each part of the sequence, in the order of work."""
    part_c: Tensor
    """(parts, L, B, H), or (0, L, B, H)."""


class Cotangents(NamedTuple):
    """Gradients of what forward returns."""

    output: Tensor | None
    h_n: Tensor | None
    c_n: Tensor | None


class Saved(NamedTuple):
    """What backward reads of ForwardResults."""

    output: Tensor
    saved_gates: Tensor | None
    chunk_cell_states: Tensor | None


class Gradients(NamedTuple):
    """What the backward operators return; a gradient that was not needed is empty."""

    input: Tensor
    hx: Tensor
    cx: Tensor
    eps: Tensor
    weights: Tensor
    """Of all weights, flat, one after the other."""


# Bits of `needs`, as in csrc/ops/ops.h.
NEEDS_INPUT, NEEDS_HX, NEEDS_CX, NEEDS_EPS, NEEDS_FIRST_WEIGHT = 1, 2, 4, 8, 16


def needs_of(flags: LayerTensors) -> int:
    """The number that tells backward which gradients are needed. ``flags``: a bool per tensor."""
    needs = NEEDS_INPUT * bool(flags.input) + NEEDS_HX * bool(flags.hx)
    needs += NEEDS_CX * bool(flags.cx) + NEEDS_EPS * bool(flags.eps)
    return needs + sum(NEEDS_FIRST_WEIGHT << i for i, need in enumerate(flags.weights) if need)


def needed_of(needs: int, tensors: LayerTensors) -> LayerTensors:
    """The inverse of :func:`needs_of`: for each tensor whether its gradient is needed."""
    weights = [bool(needs & NEEDS_FIRST_WEIGHT << i) for i in range(len(tensors.weights))]
    flags: Any = [needs & bit != 0 for bit in (NEEDS_INPUT, NEEDS_HX, NEEDS_CX, NEEDS_EPS)]
    return LayerTensors(flags[0], flags[1], cast(Any, weights), flags[2], flags[3])


def forward(call: LayerCall, tensors: LayerTensors, *, save_gates: bool) -> ForwardResults:
    """A layer over a sequence."""
    others = call.others | tensors.others()
    if save_gates:
        others["save_gates"] = True
    input, hx, weights, cx = tensors[:4]
    return ForwardResults(
        *call_operator(_library.operators.forward, call.index, input, hx, cx, weights, **others)
    )


def backward(
    call: LayerCall, needs: int, grads: Cotangents, saved: Saved, tensors: LayerTensors
) -> Gradients:
    """The gradients of a layer. ``needs``: which, see :func:`needs_of`."""
    others = call.others | tensors.others()
    output, saved_gates, chunk_cell_states = saved
    if saved_gates is not None:
        others["saved_gates"] = saved_gates
    if chunk_cell_states is not None:
        others["chunk_cell_states"] = chunk_cell_states
    input, hx, weights, cx = tensors[:4]
    arguments = (*grads, call.index, input, hx, cx, weights)
    return Gradients(
        *call_operator(
            _library.operators.backward, *arguments, output=output, needs=needs, **others
        )
    )


def last_states(call: LayerCall, inner_dropout: float, tensors: LayerTensors) -> LastStates:
    """Layers of one direction on top of each other, part by part, without their outputs.

    Args:
        call: Of the first layer; each further layer takes the next ``noise_stream``. ``recompute``
            has no effect.
        inner_dropout: The dropout of the inputs of all layers but the first.
        tensors: With layers L in place of directions. ``weights`` are those of all layers.
    """
    others = call.others | tensors.others()
    input, hx, weights, cx = tensors[:4]
    arguments = (call.index, input, hx, cx, weights)
    return LastStates(
        *call_operator(
            _library.operators.last_states, *arguments, inner_dropout=inner_dropout, **others
        )
    )


def last_states_backward(
    call: LayerCall,
    inner_dropout: float,
    needed: LayerTensors,
    grads: tuple[Tensor | None, Tensor | None],
    parts: tuple[Tensor, Tensor],
    tensors: LayerTensors,
) -> Gradients:
    """The gradients of what last_states did.

    Args:
        needed: For each tensor whether its gradient is needed.
        grads: Of h_n and c_n.
        parts: The states before each part.
    """
    others = call.others | tensors.others()
    input, hx, weights, cx = tensors[:4]
    if cx is not None:
        others["part_c"] = parts[1]
    flags = (needed.input, needed.hx, needed.cx, needed.eps, *needed.weights)
    arguments = (*grads, call.index, input, hx, cx, weights)
    return Gradients(
        *call_operator(
            _library.operators.last_states_backward,
            *arguments,
            part_h=parts[0],
            needs=[bool(flag) for flag in flags],
            inner_dropout=inner_dropout,
            **others,
        )
    )


def step(
    cell: str,
    input: Tensor,
    hx: Tensor | None,
    cx: Tensor | None,
    weights: Sequence[Tensor],
    eps: Tensor | None,
    seed: Tensor | None,
    tuning: int,
) -> tuple[Tensor, Tensor]:
    """One step, without gradients, on tensors without a dimension for steps or layers.

    -> h, and c, which is empty if the cell has no cell state. States that are None are zero.
    """
    others: dict[str, Any] = {}  # named arguments take a tenth of a small step's time
    if eps is not None or seed is not None or tuning != 0:
        others = {"eps": eps, "seed": seed, "tuning": tuning}
    arguments = (CELLS[cell].index, input, hx, cx, weights)
    results: tuple[Tensor, Tensor] = call_operator(_library.operators.step, *arguments, **others)
    return results


def step_backward(
    cell: str,
    grads: tuple[Tensor | None, Tensor | None],
    input: Tensor,
    hx: Tensor | None,
    cx: Tensor | None,
    weights: Sequence[Tensor],
    eps: Tensor | None,
    seed: Tensor | None,
    tuning: int,
    needs: int,
    flat_version: Tensor | None = None,
) -> list[Tensor]:
    """The gradients of :func:`step` that are needed: of input, hx, cx, eps and each weight.

    Args:
        grads: Of h and c.
        needs: Which are needed, see :func:`needs_of`.
    """
    others: dict[str, Any] = {"needs": needs}
    if eps is not None or seed is not None or tuning != 0:
        others |= {"eps": eps, "seed": seed, "tuning": tuning}
    if flat_version is not None:
        others["flat_version"] = flat_version
    arguments = (*grads, CELLS[cell].index, input, hx, cx, weights)
    results: list[Tensor] = call_operator(_library.operators.step_backward, *arguments, **others)
    return results


# The distributions of draw, as in csrc/step/step.h.
NORMAL, UNIFORM = 0, 1


def draw(
    seed: Tensor,
    steps: int,
    batch: int,
    width: int,
    *,
    stream: int,
    distribution: int = NORMAL,
    dtype: torch.dtype = torch.float32,
    first_step: int = 0,
) -> Tensor:
    """Random numbers, (steps, batch, width), each a function of the seed and of its place.

    Args:
        seed: One int64; the result is on its device.
        stream: The last word of the Philox counter, in [0, 2**32). Normals are those that
            :func:`._philox.philox_normal` has for the layer of this number.
        distribution: NORMAL, or UNIFORM for numbers strictly between 0 and 1, each from a word w of
            the same counters: (floor(w / 2**8) + 1/2) / 2**24, or (w + 1/2) / 2**32 in float64.
            What would be rounded to 0 or 1 is the nearest number of ``dtype`` in between.
        first_step: t of the first step, if these steps are a part of a longer sequence.
    """
    sizes = (first_step, steps, batch, width)
    drawn: Tensor = call_operator(
        _library.operators.draw, seed, *sizes, stream, distribution, dtype
    )
    return drawn


def reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A result in another shape that autograd takes for no view: ``detach_`` refuses views."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return tensor.reshape(shape)  # a trace would keep the numbers that it gives to torch.ops
    result: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return result


def call_operator(operator: Any, *arguments: Any, **named: Any) -> Any:
    """Calls an operator, whose errors are all RuntimeErrors: torch's stable ABI has no others."""
    if is_compiling():
        return operator(*arguments, **named)
    try:
        return helpers.call_interruptibly(operator, *arguments, **named)
    except RuntimeError as error:
        raise as_torch_raises(error, (*arguments, *named.values())) from None


def as_torch_raises(error: RuntimeError, given: Iterable[Any]) -> RuntimeError:
    """The error of an operator, as one of torch's would be."""
    is_full = "fusedrnn: out of memory" in str(error)
    if is_full and any(isinstance(t, Tensor) and t.is_cuda for t in given):
        return torch.OutOfMemoryError(str(error))
    return error
