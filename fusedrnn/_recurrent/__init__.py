"""Cells that users write, with the memory of a few steps."""

from .._runtime.loop_chunks import Explanation
from .recurrent import Recurrent
from .scan import scan

__all__ = ["Explanation", "Recurrent", "scan"]
