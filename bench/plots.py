"""Plots of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def peaks_over_seq_len(
    path: Path,
    title: str,
    seq_lens: Sequence[int],
    peak_bytes: Mapping[str, Sequence[int]],
    bold: str = "",
) -> None:
    """Draws the peak memory of each contender, one of them ``bold``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no plot is drawn")
        return
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, peaks in peak_bytes.items():
        mib = [peak / 2**20 for peak in peaks]
        axes.plot(seq_lens, mib, marker="o", label=name, linewidth=3 if name == bold else 1.5)
    axes.set_xlabel("sequence length T")
    axes.set_ylabel("peak memory of a training step, MiB")
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
