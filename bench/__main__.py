"""All benchmarks: memory, speed, and, on the CPU, a language model trained on real text."""

from __future__ import annotations

from . import memory, speed, train_text
from .report import main

main(
    [memory.run, speed.run, train_text.run],
    __doc__,
    on_cuda=[memory.run_on_cuda, speed.run_on_cuda],
)
