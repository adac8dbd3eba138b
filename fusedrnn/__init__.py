"""Fused recurrent cells for PyTorch that save only their output for backward."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

# First, so that an import says what is missing if nothing is built.
from . import _library  # noqa: F401  # isort: skip
from . import (
    _fakes,  # noqa: F401, so that tracers know the operators
    _flops,  # noqa: F401, so that torch counts their products
    _kernels,  # noqa: F401, so that they can be differentiated
    _optimizers,  # noqa: F401, so that autograd notices their steps
    functional,
    reference,
)
from ._bank import BankPlan, WeightBank
from ._conversion import ConversionReport, convert, to_torch
from ._modules import GRU, LSTM, GRUCell, LSTMCell, StochasticGRU, StochasticGRUCell
from ._planner import PassPlan, Plan, PlanMemory, plan
from ._tuning import set_chunk_replay, set_free_multiprocessors
from .functional import gru, lstm, stochastic_gru

if _TYPE_CHECKING:
    from ._recurrent import Explanation, Recurrent, scan
else:

    def __getattr__(name: str) -> object:
        """Loads what compiles users' cells when it is first asked for: the built-in layers have no
        use for it, and it takes as long as all else here."""
        if name not in ("Explanation", "Recurrent", "scan"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(_import_module("._recurrent", __name__), name)
        return found

    def __dir__() -> list[str]:
        return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


__version__ = _version("fusedrnn")
__all__ = [
    "GRU",
    "LSTM",
    "BankPlan",
    "ConversionReport",
    "Explanation",
    "GRUCell",
    "LSTMCell",
    "PassPlan",
    "Plan",
    "PlanMemory",
    "Recurrent",
    "StochasticGRU",
    "StochasticGRUCell",
    "WeightBank",
    "convert",
    "functional",
    "gru",
    "lstm",
    "plan",
    "reference",
    "scan",
    "set_chunk_replay",
    "set_free_multiprocessors",
    "stochastic_gru",
    "to_torch",
]
