"""Fused recurrent cells for PyTorch that save only their output for backward."""

from importlib.metadata import version as _version

from . import functional, reference
from ._library import set_chunk_replay, set_free_multiprocessors
from .conversion import ConversionReport, convert, to_torch
from .functional import gru, lstm, stochastic_gru
from .modules import GRU, LSTM, GRUCell, LSTMCell, StochasticGRU, StochasticGRUCell
from .planner import Plan, plan

__version__ = _version("fusedrnn")
__all__ = [
    "GRU",
    "LSTM",
    "ConversionReport",
    "GRUCell",
    "LSTMCell",
    "Plan",
    "StochasticGRU",
    "StochasticGRUCell",
    "convert",
    "functional",
    "gru",
    "lstm",
    "plan",
    "reference",
    "set_chunk_replay",
    "set_free_multiprocessors",
    "stochastic_gru",
    "to_torch",
]
