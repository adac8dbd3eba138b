"""Fused recurrent cells for PyTorch that save only their output for backward."""

from importlib.metadata import version as _version

from .functional import stochastic_gru
from .modules import StochasticGRU, StochasticGRUCell

__version__ = _version("fusedrnn")
__all__ = ["StochasticGRU", "StochasticGRUCell", "stochastic_gru"]
