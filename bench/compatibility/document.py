"""docs/compatibility.md: the table as a document, and what a document says of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ..report import Table, cpu_name, markdown_rows
from .rows import ERROR, GROUPS, LOOP, NOT_AVAILABLE, SKIPPED, SLOW, WORKS, WRONG, Outcome, Row
from .subjects import SUBJECTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
TITLES = {
    "inputs": "Inputs",
    "autograd": "Autograd",
    "func": "torch.func",
    "library": "Operators and tools",
    "amp": "Mixed precision",
    "compile": "torch.compile",
    "export": "Export and copies",
    "checkpoints": "Checkpoints and distributed training",
}
_SHOWN = {
    WORKS: "✓",
    LOOP: "✓ loop",
    NOT_AVAILABLE: "–",
    ERROR: "error",
    WRONG: "**wrong**",
    SLOW: "slow",
    SKIPPED: "skipped",
}
_KINDS = {shown: kind for kind, shown in _SHOWN.items()}
_HEAD = """# What works with which feature of PyTorch

`python -m bench.compatibility` ran every check below for every column, with torch {torch} on \
{cpu}, and wrote this document. Each check compares values, and gradients where there are any, \
with the plain loop in float64. *Plain loop* is the StochasticGRU of `fusedrnn.reference`, written \
in plain torch. *Recurrent* is a `fusedrnn.Recurrent` around a GRU's step that is written by hand, \
compiled wherever that is possible.

| | |
|:--|:--|
| ✓ | works: the results are right |
| ✓ loop | the same, but the steps run in Python |
| error | raises an error, and no result is wrong; the message is below the table |
| **wrong** | a result is wrong or missing without an error, or a wrong call passes |
| slow | right, but `torch.compile` compiles more often than it should |
| – | the module does not have the feature |
| skipped | a package that the check needs is not installed |
"""

Outcomes = Mapping[tuple[str, str], Outcome]  # by the key of the row and the column


def table(group: str, rows: list[Row], outcomes: Outcomes) -> Table:
    """The rows of a group."""
    shown = [[row.name, *(_cell(outcomes, row, column) for column in SUBJECTS)] for row in rows]
    return Table(TITLES[group], ["", *SUBJECTS], shown)


def _cell(outcomes: Outcomes, row: Row, column: str) -> str:
    found = outcomes.get((row.key, column))
    return "" if found is None else _SHOWN[found.kind]


def markdown(rows: Mapping[str, Row], outcomes: Outcomes) -> str:
    """The document."""
    parts = [_HEAD.format(torch=torch.__version__, cpu=cpu_name())]
    for group in GROUPS:
        own = [row for row in rows.values() if row.group == group]
        shown = table(group, own, outcomes)
        sentences = Table(
            "",
            [*shown.columns, "what is checked"],
            [[*cells, row.says] for cells, row in zip(shown.rows, own, strict=True)],
        )
        text = markdown_rows(sentences).replace("|--:|\n", "|:--|\n", 1)
        parts.append(f"## {TITLES[group]}\n\n{text}")
        remarks = [note for row in own for note in notes(row, outcomes)]
        if remarks:
            parts.append("\n".join(remarks) + "\n")
    return "\n".join(parts)


def notes(row: Row, outcomes: Outcomes) -> list[str]:
    """A line for each message about a row, with the columns that it is about."""
    by_text: dict[str, list[str]] = {}
    for column in SUBJECTS:
        found = outcomes.get((row.key, column))
        if found is not None and found.note:
            by_text.setdefault(found.note, []).append(column)
    return [f"- {row.name}, {', '.join(of)}: {_quoted(text)}" for text, of in by_text.items()]


def _quoted(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def written(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """What a document says: by title of a group and name of a row, the kind for each column.

    The sentence of the row is there too, under "says".
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if title and len(cells) == len(SUBJECTS) + 2 and cells[0] and cells[0] != ":--":
            kinds = {c: _KINDS.get(cell, "") for c, cell in zip(SUBJECTS, cells[1:], strict=False)}
            found[title, cells[0]] = kinds | {"says": cells[-1]}
    return found
