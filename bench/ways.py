"""Where an H100 spent a step's time, and other ways to take it: ``python -m bench.ways``.

Prints the tables of docs/gpu.md from bench/results/gpu-h100-ways.json, in which programs of
bench.phases have said what they found. Ways that were tried once are in no program any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .contain import ROOT
from .phases import POINTS

FOUND = ROOT / "bench" / "results" / "gpu-h100-ways.json"
CELLS = {"gru": "GRU", "lstm": "LSTM", "stochastic_gru": "StochasticGRU"}
SIZES = ((16, 256), (64, 256), (64, 512), (16, 768), (32, 1024))
VARIANTS = {"forward": ("plain",), "backward": ("plain", "ring", "plain, ring")}

Rows = list[dict[str, Any]]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    rule = ["|:--", *["|--:"] * (len(head) - 1), "|"]
    rows = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return "\n".join([rows[0], "".join(rule), *rows[1:]])


def of(rows: Rows, program: str, size: tuple[int, int]) -> Rows:
    """What a program has said of a size."""
    return [
        row
        for row in rows
        if row.get("program") == program and (row["batch"], row["hidden_size"]) == size
    ]


def us(rows: Rows, way: str = "") -> float:
    """Microseconds per step, the median of all launches, or of those in one way."""
    found = [run for row in rows for run in (row["variants"] if way else [row])]
    launches = [x for run in found if not way or run["name"] == way for x in run["us"]]
    return float(median(launches)) / int(rows[0]["steps"])


def times(rows: Rows, direction: str) -> str:
    """Before, now, and in other ways."""
    ways = VARIANTS[direction]
    head = [f"{cell}: {what}" for cell in CELLS.values() for what in ("before", "now", *ways)]
    lines = []
    for size in SIZES:
        line = [str(size)]
        for cell in CELLS:
            before = of(rows, f"old_{cell}_{direction}_plain", size)
            now = of(rows, f"{cell}_{direction}_variants", size)
            line += [f"{us(before):.2f}", *(f"{us(now, way):.2f}" for way in ("package", *ways))]
        lines.append(line)
    return table(["(B, H)", *head], lines)


def cycles(rows: Rows) -> str:
    """Cycles of a step by the first warps, and a launch besides its steps, at 1,980 MHz."""
    lines = []
    for direction in VARIANTS:
        for cell in ("gru", "lstm"):
            for size in SIZES:
                (row,) = of(rows, f"{cell}_{direction}_clocks0", size)
                first = [seen for seen in row["observers"] if seen["warp"] == 0]
                count = row["steps"] * len(row["us"])
                points = [
                    median(seen["stages"][0]["cycles"][i] for seen in first) / count
                    for i in range(len(POINTS))
                ]
                loop = median(seen["whole"] for seen in first) / len(row["us"]) / 1980
                rest = median(row["us"]) - loop
                name = f"{CELLS[cell]} {direction}, {size}"
                lines.append([name, *(f"{c:,.0f}" for c in points), f"{rest:.0f}"])
    return table(["", *POINTS, "µs of a launch besides"], lines)


def tried(rows: Rows) -> str:
    """Forward in ways that were tried once, over the package of the same run."""
    lines = []
    for cell, name in CELLS.items():
        for size in SIZES:
            now = of(rows, f"{cell}_forward_variants", size)
            ways = list(dict.fromkeys(run["name"] for run in now[0]["variants"]))
            lines.append(
                [f"{name}, {size}", *(f"{us(now, w) / us(now, 'package'):.2f}" for w in ways[1:])]
            )
    return table(["", *ways[1:]], lines)


def main() -> None:
    """Prints all tables."""
    found = json.loads(FOUND.read_text())
    for title, text in (
        ("Forward, µs per step", times(found["second"], "forward")),
        ("Backward, µs per step", times(found["second"], "backward")),
        ("Cycles of a step", cycles(found["second"])),
        ("Tried once: forward / the package's", tried(found["first"])),
    ):
        print(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
