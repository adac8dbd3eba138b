"""What ``explain()`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How a call would run; print it."""

    is_compiled: bool
    """Whether this package has compiled the cell, which then runs as a program of its kernels."""
    program: str
    """What the program is, and its library; or why steps are taken in Python."""
    is_recorded: bool
    """Whether whole chunks run as CUDA graphs, from the second call on."""
    record_reason: str
    """Why they do not."""
    chunk_steps: int
    """Steps of a chunk."""
    chunk_reason: str
    step_bytes: int
    """What autograd keeps of one step of one layer and direction, measured."""
    kept_bytes_per_step: int
    """What is kept from forward to backward besides arguments and outputs, on average over the
    steps, in all layers and directions."""
    workspace_bytes: int
    """Temporary memory of backward, about: what autograd keeps of a chunk."""
    faster: tuple[str, ...]
    """What would make it faster."""
    traces: int = 0
    """How often torch.compile has traced steps of this class or this function, of all modules."""

    def __str__(self) -> str:
        in_python = f"steps in Python, because {self.program}"
        first = f"compiled: {self.program}" if self.is_compiled else in_python
        recorded = "yes" if self.is_recorded else f"no, {self.record_reason}"
        lines = [first, f"chunks of {self.chunk_steps:,} steps: {self.chunk_reason}"]
        if self.is_compiled:
            lines.append(f"traced {self.traces} time{'s' * (self.traces != 1)} by torch.compile")
        else:
            lines.append(f"CUDA graphs: {recorded}")
        lines += [
            f"  {'a plain loop keeps, per step':36} {self.step_bytes:>16,} bytes",
            f"  {'kept until backward, per step':36} {self.kept_bytes_per_step:>16,} bytes",
            f"  {'workspace of backward':36} {self.workspace_bytes:>16,} bytes",
        ]
        return "\n".join([*lines, *(f"faster: {advice}" for advice in self.faster)])
