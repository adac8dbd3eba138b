"""The options of layers: each one is documented, typed, checked, and given its default here.

A new option is a key of one of the typed dicts, with its description, and a field of OptionValues,
with its default, that Options checks. Modules and functional forms then take it, document it, keep
it as an attribute and pass it on.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeGuard, TypeVar, get_args, get_type_hints

import torch
from torch.types import Device

from . import _helpers as helpers
from ._cells import CELLS, CellFacts

BACKENDS = helpers.BACKENDS
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class TorchOptions(TypedDict, total=False):
    """The options that torch.nn's recurrent layers have too.

    num_layers: Layers on top of each other; layer k > 0 reads the output of layer k - 1.
    bias: False for a layer without ``bias_*``.
    batch_first: True if input and output are (batch, seq_len, features). ``hx``, ``h_n`` and
        ``eps`` keep their shapes.
    dropout: Probability with which, in training, an element of the output of every layer but the
        last is zeroed.
    bidirectional: True for a second set of weights that reads the sequence from its end. The output
        of a step is then that of both directions, concatenated.
    """

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool


class FusedOptions(TypedDict, total=False):
    """The options that torch.nn's recurrent layers do not have.

    zoneout: Probability that a unit keeps its state through a step, in training; in evaluation the
        new state is the expectation. An LSTM also takes a pair, for h and for c.
        Krueger et al. 2017, "Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations".
    weight_dropout: Probability that an element of a recurrent weight matrix is zeroed, in training;
        the same elements in all steps of a call. All weights but ``weight_ih`` are recurrent. Wan
        et al. 2013, "Regularization of Neural Networks using DropConnect", as in Merity et al.
        2018, "Regularizing and Optimizing LSTM Language Models".
    return_sequence: False returns the last state of the last layer instead of its output, in memory
        that grows with sqrt(seq_len): only checkpoints of the state are saved, and backward
        recomputes the steps between them. With two directions and several layers this holds for
        the last layer; the layers below save their output.
    recompute: True has backward recompute the pre-activations of the gates. False saves them in
        forward, which gives the same output, and the same gradients up to rounding: 4 * hidden_size
        numbers for each step and row (a StochasticGRU 2 * latent_size more), in float32 or float64.
        None saves them in a call of several steps where that is little: where steps x batch x
        hidden_size x layers x directions are at most 2**19 (8 MiB), or in a layer where steps x
        batch are at most the features of input and h (about its weights' size). See
        :func:`fusedrnn.plan`. No effect with ``return_sequence=False``, which recomputes.
    chunk_size: Time steps per chunk. Memory for temporary results is proportional to it. None
        chooses: about 256 rows (steps x batch) on the CPU; on a GPU enough steps to make the fixed
        cost of a chunk small, within half or a quarter of the memory that torch.nn.LSTM takes
        (:func:`fusedrnn.plan` gives the number and the reason). Results are the same up to
        rounding.
    workspace_bytes: Upper bound on the temporary memory of forward and of backward, each, in bytes.
        Chunks are as long as it allows. Output, saved tensors and gradients are not counted. A call
        raises a RuntimeError if one step needs more. Excludes ``chunk_size``.
    backend: How a GPU goes through the steps. "stepwise" launches a matrix product and a kernel for
        each stage of each step. "persistent" launches one kernel for a whole chunk, which keeps the
        weights on chip; it needs 16-bit tensors, or float32 ones where torch allows TF32 in
        recurrent layers (``torch.backends.cudnn.rnn.fp32_precision``; it does by default). "auto"
        takes the faster one by the model of :func:`fusedrnn.plan`. If "persistent" is not possible,
        a call raises a RuntimeError that says why. The CPU has "stepwise" only.
    """

    zoneout: float | tuple[float, float]
    weight_dropout: float
    return_sequence: bool
    recompute: bool | None
    chunk_size: int | None
    workspace_bytes: int | None
    backend: str


class LayerOptions(TorchOptions, FusedOptions, total=False):
    """All options of a layer, as a functional form takes them."""


@dataclass(eq=False, kw_only=True)
class OptionValues:
    """The options that a layer has as attributes, with their defaults."""

    num_layers: int = 1
    bias: bool = True
    batch_first: bool = False
    dropout: float = 0.0
    bidirectional: bool = False
    zoneout: float | tuple[float, float] = 0.0
    weight_dropout: float = 0.0
    return_sequence: bool = True
    recompute: bool | None = None
    chunk_size: int | None = None
    workspace_bytes: int | None = None
    backend: str = "auto"
    proj_size: int = 0


@dataclass(kw_only=True)
class Options(OptionValues):
    """All options of a call. The constructor checks them, and nothing changes them later.

    An LSTM with a ``proj_size`` becomes the cell "projected_lstm".

    Raises:
        TypeError: An option is of a wrong type.
        ValueError: An option has a wrong value, or excludes another one.
    """

    cell: str
    training: bool = True

    def __post_init__(self) -> None:
        check_flag("bias", self.bias)
        check_flag("batch_first", self.batch_first)
        check_flag("bidirectional", self.bidirectional)
        check_flag("training", self.training)
        check_flag("return_sequence", self.return_sequence)
        check_flag("recompute", self.recompute is None or self.recompute, " or None")
        check_num_layers(self.num_layers)
        check_proj_size(self.proj_size)
        self.cell = cell_name(self.cell, self.proj_size)
        if self.proj_size and not self.facts.is_projected:
            raise ValueError(f"fusedrnn: proj_size must be 0 without an LSTM, got {self.proj_size}")
        check_probability("dropout", self.dropout)
        check_probability("weight_dropout", self.weight_dropout)
        _check_zoneout(self.zoneout, self.facts.has_cell_state)
        check_chunks(self.chunk_size, self.workspace_bytes)
        _check_backend(self.backend)

    def __hash__(self) -> int:
        """Computed once, because every call looks up what is remembered of its options."""
        known = self.__dict__
        if "_hash" not in known:
            known["_hash"] = hash(tuple(known.values()))
        found: int = known["_hash"]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which is another one in another process."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def facts(self) -> CellFacts:
        """Of the cell."""
        return CELLS[self.cell]

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def layer_directions(self) -> int:
        """How many states there are: one for each direction of each layer."""
        return self.num_layers * self.directions

    @property
    def zoneout_pair(self) -> tuple[float, float]:
        """Of h, and of the cell state."""
        return self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout, self.zoneout)


def cell_name(cell: str, proj_size: int) -> str:
    """The cell in the table of cells: that of an LSTM depends on whether h is projected."""
    return "projected_lstm" if cell == "lstm" and proj_size else cell


FIELDS = {field.name: field for field in fields(Options)}
# What a user gives; the rest follows from the cell, its sizes and the training mode.
NAMES = (*TorchOptions.__annotations__, *FusedOptions.__annotations__)


def check_names(function: str, options: Mapping[str, Any]) -> None:
    """Refuses keywords that name no option.

    Raises:
        TypeError: There is such a keyword.
    """
    for name in options:
        if name not in NAMES:
            raise TypeError(f"fusedrnn: {function}() got an unexpected keyword argument {name!r}")


# --- Documentation -------------------------------------------------------------------------------

T = TypeVar("T", bound=Callable[..., Any])
_TYPES = get_type_hints(Options)
_REFERENCE = re.compile(r"^( *)options: See :class:`fusedrnn\._options\.(\w+)`\.$", re.MULTILINE)


def documented(function: T) -> T:
    """Has ``help()`` and IDEs show every option of a function or class: name, default, meaning.

    In the signature, the keys of a typed dict take the place of ``**options: Unpack[...]``. In the
    docstring, their descriptions take the place of the line that refers to the typed dict.
    """
    taker: Any = vars(function)["__init__"] if isinstance(function, type) else function
    signature = inspect.signature(taker, eval_str=True)  # else help() would show types in quotes
    *parameters, last = signature.parameters.values()
    (options,) = get_args(last.annotation)
    for name in options.__annotations__:
        kind, default = inspect.Parameter.KEYWORD_ONLY, FIELDS[name].default
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=_TYPES[name]))
    taker.__signature__ = signature.replace(parameters=parameters)
    if function.__doc__ is not None:  # python -OO has none
        function.__doc__ = _REFERENCE.sub(_descriptions, function.__doc__)
    return function


def _descriptions(reference: re.Match[str]) -> str:
    of: type = globals()[reference[2]]
    parts = (TorchOptions, FusedOptions) if of is LayerOptions else (of,)
    text = "\n".join(inspect.cleandoc(part.__doc__ or "").split("\n\n", 1)[1] for part in parts)
    return textwrap.indent(text, reference[1])


# --- Checks of single values ---------------------------------------------------------------------


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_positive(name: str, value: int) -> int:
    """A size or a count."""
    if not _is_int(value):
        raise TypeError(f"fusedrnn: {name} must be an int, got {kind_of(value)}")
    if value < 1:
        raise ValueError(f"fusedrnn: {name} must be a positive integer, got {value}")
    if value >= 2**63:
        raise ValueError(f"fusedrnn: {name} must be below 2^63, got {value}")
    return value


def check_num_layers(value: int) -> int:
    """No more layers than the operators can tell apart."""
    most = helpers.MOST_LAYERS // 2  # in two directions
    if check_positive("num_layers", value) > most:
        raise ValueError(f"fusedrnn: num_layers must be at most {most}, got {value}")
    return value


def check_proj_size(value: int, hidden_size: int | None = None) -> int:
    """``hidden_size``: of the module, if it is known."""
    if not _is_int(value):
        raise TypeError(f"fusedrnn: proj_size must be an int, got {kind_of(value)}")
    if value < 0 or (hidden_size is not None and value >= hidden_size):
        end = "" if hidden_size is None else f" and below hidden_size={hidden_size}"
        raise ValueError(f"fusedrnn: proj_size must be at least 0{end}, got {value}")
    return value


def check_flag(name: str, value: bool, or_else: str = "") -> bool:
    """Nothing but a bool counts as true or false: the text "False" would be true."""
    if not isinstance(value, bool):
        raise TypeError(f"fusedrnn: {name} must be a bool{or_else}, got {kind_of(value)}")
    return value


def check_truth(name: str, value: object) -> bool:
    """A value of any type that Python takes for true or false; an array of two numbers is not."""
    try:
        return bool(value)
    except Exception as error:  # whatever the value's type raises
        raise TypeError(f"fusedrnn: {name} must be a bool, got {kind_of(value)}") from error


def check_probability(name: str, value: float, or_else: str = "") -> float:
    """A value of a wrong type gets a ValueError too, as in torch.nn."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(
            f"fusedrnn: {name} must be a probability in [0, 1]{or_else}, got {text_of(value)}"
        )
    return value


def _check_zoneout(value: float | tuple[float, float], has_cell_state: bool) -> None:
    values: tuple[Any, ...] = (value,)
    if has_cell_state and isinstance(value, tuple) and len(value) == 2:
        values = value
    for p in values:
        check_probability("zoneout", p, ", or a tuple of two" if has_cell_state else "")


def check_chunks(chunk_size: int | None, workspace_bytes: int | None) -> None:
    for name, value in (("chunk_size", chunk_size), ("workspace_bytes", workspace_bytes)):
        if value is not None:
            if not _is_int(value):
                raise TypeError(f"fusedrnn: {name} must be an int or None, got {kind_of(value)}")
            check_positive(name, value)
    if chunk_size is not None and workspace_bytes is not None:
        raise ValueError(
            f"fusedrnn: chunk_size and workspace_bytes exclude each other, got {chunk_size} and "
            f"{workspace_bytes}"
        )


def _check_backend(value: str) -> None:
    if not isinstance(value, str) or value not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"fusedrnn: backend must be one of {names}, got {text_of(value)}")


def check_dtype(value: torch.dtype | None) -> torch.dtype:
    """The dtype of new weights: torch's default if None."""
    if value is None:
        value = torch.get_default_dtype()
    if not isinstance(value, torch.dtype):
        raise TypeError(f"fusedrnn: dtype must be a torch.dtype, got {kind_of(value)}")
    if value not in DTYPES:
        names = ", ".join(str(d) for d in DTYPES)
        raise RuntimeError(f"fusedrnn: dtype must be one of {names}, got {value}")
    return value


def check_device(value: Device) -> None:
    """Any device that torch knows by name, or None."""
    if isinstance(value, bool) or not isinstance(value, torch.device | str | int | None):
        raise TypeError(f"fusedrnn: device must be a torch.device or a name, got {kind_of(value)}")
    if isinstance(value, int) and not 0 <= value < 2**15:
        raise ValueError(f"fusedrnn: there is no device {text_of(value)}")


def kind_of(value: object) -> str:
    """The name of a value's type, for messages."""
    return type(value).__name__


def text_of(value: object) -> str:
    """A value in a message: written out if that is short, else its type."""
    if isinstance(value, str | int | float | tuple | None) and len(text := repr(value)) <= 40:
        return text
    return kind_of(value)
