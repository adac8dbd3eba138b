"""All experiments, and how each is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import Row, Scale, growth, no_memory, poison, processes, repetition, threads
from .isolation import Broken, isolated


@dataclass(frozen=True)
class Experiment:
    """Runs an experiment; returns its row of the table."""

    run: Callable[[Scale], Row]
    environment: Mapping[str, str]
    # A limit for hangs, several times what an experiment takes on two busy cores.
    seconds: float = 1_200

    def row(self, scale: Scale) -> Row:
        """Runs an experiment in a process of its own."""
        try:
            row: Row = isolated(self.run, scale, seconds=self.seconds, environment=self.environment)
        except Broken as broken:
            row = Row(done="", wrong=[str(broken)])
        return row


EXPERIMENTS = {
    "training": Experiment(growth.training, growth.ENVIRONMENT),
    "failing": Experiment(growth.failing, growth.ENVIRONMENT),
    "threads": Experiment(threads.threads, threads.ENVIRONMENT),
    "no memory": Experiment(no_memory.no_memory, no_memory.ENVIRONMENT),
    "forked": Experiment(processes.forked, processes.ENVIRONMENT),
    "spawned": Experiment(processes.spawned, processes.ENVIRONMENT),
    "poison": Experiment(poison.poison, threads.ENVIRONMENT),
    "repetition": Experiment(repetition.repetition, threads.ENVIRONMENT),
}
