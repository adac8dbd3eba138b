"""Cells that users write, with the memory of a few steps."""

from .choices import Explanation
from .function import scan
from .module import Recurrent

__all__ = ["Explanation", "Recurrent", "scan"]
