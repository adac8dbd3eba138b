"""Cells that users write, with the memory of a few steps."""

from .explanation import Explanation
from .recurrent import Recurrent
from .scan import scan

__all__ = ["Explanation", "Recurrent", "scan"]
