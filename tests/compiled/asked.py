"""Recurrent with a compiled step, where this version has them."""

from __future__ import annotations

import inspect
from typing import Any

import fusedrnn

HAS_COMPILE = "compile" in inspect.signature(fusedrnn.Recurrent.__init__).parameters


def recurrent(cell: Any, *, compile: str = "auto", **options: Any) -> fusedrnn.Recurrent:
    """Without the argument where it is unknown: then steps run by the generic recipe."""
    return fusedrnn.Recurrent(cell, **options, **({"compile": compile} if HAS_COMPILE else {}))
