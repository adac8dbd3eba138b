"""All benchmarks: memory, speed, calls, and, on the CPU, a language model trained on real text.

Ends within four minutes on two cores. With --all it takes twice as long, and measures every
contender, size and target.
"""

from __future__ import annotations

import argparse

from . import calls, memory, readme, speed, train_text
from .report import main


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --all, which is for the CPU; on a GPU, the time budget decides how much is measured."""
    parser.add_argument("--all", action="store_true", help="measure everything, on the CPU")


main(
    [memory.run, speed.run, calls.run, train_text.run],
    __doc__,
    add_options,
    on_cuda=[memory.run_on_cuda, speed.run_on_cuda, calls.run_on_cuda],
    afterwards=readme.afterwards,
)
