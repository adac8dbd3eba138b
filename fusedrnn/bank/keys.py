"""What tells whether the numbers in a slot are those of now."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .task import Version


class Key(NamedTuple):
    """What the numbers in a slot were made of."""

    task: Version
    shared: tuple[Hashable, ...]
    """Of each weight that is added: a version, or ``Unseen`` where versions do not tell."""


class Unseen:
    """In place of a version. It equals no other."""
