"""The training text: the source code of Python's standard library, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Printable ASCII and line breaks; one more class stands for all other characters.
ALPHABET = b"\n" + bytes(range(32, 127))
CLASSES = len(ALPHABET) + 1
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Text:
    """A text as classes of characters (int64, 1-D), and a digest that identifies it.

    The end of the text, files that training has not seen, is for validation.
    """

    train: Tensor
    validation: Tensor
    files: int
    sha256: str


def standard_library() -> Text:
    """All modules of the standard library's top folder, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(path.read_bytes() for path in paths)
    class_of_byte = torch.full((256,), CLASSES - 1)
    class_of_byte[list(ALPHABET)] = torch.arange(len(ALPHABET))
    text = class_of_byte[torch.frombuffer(bytearray(content), dtype=torch.uint8).int()]
    split = int(len(text) * (1 - VALIDATION_SHARE))
    digest = hashlib.sha256(content).hexdigest()
    return Text(text[:split], text[split:], len(paths), digest)


def windows(text: Tensor, batch: int, window: int) -> Tensor:
    """Cuts a text into ``batch`` parallel streams, and the streams into windows.

    Returns:
        (windows, window + 1, batch): the first ``window`` rows are input and the last ``window``
        rows are targets; each window continues the one before.
    """
    stream = (len(text) - 1) // batch // window * window
    if stream == 0:
        raise ValueError(f"{len(text)} characters are too few for {batch} x {window}")
    starts = torch.arange(batch) * stream
    rows = torch.arange(0, stream, window).view(-1, 1) + torch.arange(window + 1)
    return text[rows.unsqueeze(-1) + starts]
