"""The headers that generated libraries include: where they are, and which of them a text needs.

Imports nothing of the package, because setup.py runs this file to choose what the wheel ships.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

ROOTS = "program/stage_*.h"
"""What generated texts may include: the loops around stages, for a CPU and for a GPU."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def folder() -> Path:
    """The wheel has the headers in the package; a source tree has them where they are written."""
    shipped = Path(__file__).parents[1] / "include"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "csrc"


def needed(names: Iterable[str], root: Path) -> dict[str, bytes]:
    """These headers and all that they include, by their names in ``root``.

    An include under a condition counts too. Raises ValueError for a name outside of ``root``, and
    OSError for a header that is not there.
    """
    found: dict[str, bytes] = {}
    waiting = sorted({posixpath.normpath(name) for name in names}, reverse=True)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if name.startswith(("/", "../")):
            raise ValueError(f"fusedrnn: generated code must include headers of {root}, got {name}")
        found[name] = Path(root, name).read_bytes()
        beside = posixpath.dirname(name)
        for included in _INCLUDE.findall(found[name].decode()):
            waiting.append(posixpath.normpath(posixpath.join(beside, included)))
    return dict(sorted(found.items()))


def shipped(root: Path) -> list[str]:
    """The names of all headers that the wheel needs."""
    roots = [path.relative_to(root).as_posix() for path in root.glob(ROOTS)]
    if not roots:
        raise FileNotFoundError(f"there is no header {root / ROOTS}")
    return list(needed(roots, root))


@functools.cache
def _digest(names: tuple[str, ...], root: Path) -> str:
    digest = hashlib.sha256()
    for name, content in needed(names, root).items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def digest(text: str) -> str:
    """Of all headers that a text needs, as they were when this process first asked."""
    return _digest(tuple(_INCLUDE.findall(text)), folder())
