"""What ``explain()`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How a call would run, as text by ``print`` or ``str``, and as attributes."""

    is_compiled: bool
    """Whether this package has compiled the cell; else it runs as steps in Python."""
    program: str
    """Of a compiled cell what it consists of, and its library; else why steps run in Python."""
    chunk_steps: int
    """Steps of a chunk."""
    chunk_reason: str
    """Why a chunk has so many steps."""
    step_bytes: int
    """Bytes that autograd saves of one step of one layer and direction, measured; 0 of a step in
    Python that calls torch.func.grad or the like, which allow no look."""
    kept_bytes_per_step: int
    """Bytes per step that are kept from forward to backward besides arguments and outputs: the
    average over the steps, summed over layers and directions."""
    workspace_bytes: int
    """About the temporary memory of backward, in bytes: what autograd saves of a chunk."""
    faster: tuple[str, ...]
    """What would make the call faster."""
    traces: int = 0
    """How often torch.compile has traced steps of this class or function, in all modules."""

    def __str__(self) -> str:
        in_python = f"steps in Python, because {self.program}"
        first = f"compiled: {self.program}" if self.is_compiled else in_python
        lines = [first, f"chunks of {self.chunk_steps:,} steps: {self.chunk_reason}"]
        if self.is_compiled:
            lines.append(f"traced {self.traces} time{'s' * (self.traces != 1)} by torch.compile")
        lines += [
            f"  {'a plain loop keeps, per step':36} {self.step_bytes:>16,} bytes",
            f"  {'kept until backward, per step':36} {self.kept_bytes_per_step:>16,} bytes",
            f"  {'workspace of backward':36} {self.workspace_bytes:>16,} bytes",
        ]
        return "\n".join([*lines, *(f"faster: {advice}" for advice in self.faster)])
