"""The modules: layers and single steps of each cell, with sizes, options and named weights."""

from .base import RNNBase, RNNCellBase
from .gru import GRU, GRUCell
from .lstm import LSTM, LSTMCell
from .stochastic_gru import StochasticGRU, StochasticGRUCell

__all__ = [
    "GRU",
    "LSTM",
    "GRUCell",
    "LSTMCell",
    "RNNBase",
    "RNNCellBase",
    "StochasticGRU",
    "StochasticGRUCell",
]
