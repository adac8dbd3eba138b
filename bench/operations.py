"""Puts the operations that compile into docs/your-own-cell.md: ``python -m bench.operations``.

They are those of fusedrnn/_compiler/operations.py. Measures nothing.
"""

from __future__ import annotations

from fusedrnn._compiler import operations

from .readme import ROOT, replaced

DOCUMENT, NAME = ROOT / "docs/your-own-cell.md", "operations"

MADE = """
    cumsum cumprod prod softmax log_softmax logsumexp var std var_mean std_mean linalg_vector_norm
    layer_norm group_norm rms_norm floor_divide constant_pad_nd mish log_sigmoid selu relu6 glu
    prelu lerp addcmul addcdiv logaddexp logaddexp2 logit nan_to_num deg2rad
"""
"""By fusedrnn/_compiler/decompositions.py, or by torch: what people look for."""


def table() -> str:
    """The block between the markers of the document."""
    every = {
        kind: [row.name for row in rows if "." not in row.name]
        for kind, rows in operations.OPERATIONS.items()
    }
    every["over features"] = [packet.__name__ for packet in operations.REDUCTIONS]
    every["made of these"] = MADE.split()
    every["choices of columns"] = sorted(
        name
        for name in (packet.__name__ for packet in operations.MOVES)
        if not name.startswith(("_", "lift", "unsafe")) and not name.endswith("_copy")
    )
    every["numbers"] = sorted(packet.__name__ for packet in operations.FILLED)
    rows = [(kind, " ".join(f"`{name}`" for name in names)) for kind, names in every.items()]
    lines = ["| kind | operations of `torch.ops.aten` |", "|:--|:--|"]
    return "\n".join([*lines, *(f"| {kind} | {names} |" for kind, names in rows)]) + "\n"


def main() -> None:
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), NAME, table()))


if __name__ == "__main__":
    main()
