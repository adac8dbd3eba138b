from collections.abc import Callable, Sequence
from typing import Any

Gpu = tuple[str, int, int, int, int, int]

CELLS: dict[str, dict[str, Any]]
BACKENDS: tuple[str, ...]
TUNING: dict[str, int]
MODEL_US: dict[str, float]
MOST_ROWS: int
MOST_LAYERS: int

def layer_layout(
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    bias: bool,
) -> list[tuple[str, tuple[int, ...]]]: ...
def cell_program(
    *,
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    bias: bool,
    noise: bool,
) -> tuple[list[int], tuple[str, ...]]: ...
def check_sizes(
    *,
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    seq_len: int,
    batch: int,
) -> None: ...
def saved_columns(cell: str, hidden_size: int, latent_size: int, noise: bool) -> int: ...
def plan(
    *,
    cell: str,
    noise: bool,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    bias: bool,
    seq_len: int,
    batch: int,
    dtype: str,
    chunk_size: int,
    workspace_bytes: int,
    backend: str,
    tuning: int,
    gpu: Gpu | None,
    strides: Sequence[Sequence[int]] = ...,
) -> dict[str, Any]: ...
def chunk_counts(
    *,
    cell: str,
    backward: bool,
    persistent: bool,
    element_bytes: int,
    steps: int,
    recompute: bool,
) -> dict[str, int]: ...
def part_count(seq_len: int) -> int: ...
def known_gpus() -> dict[str, Gpu]: ...
def signal_check() -> int: ...
def variable(name: str) -> str: ...
def call_interruptibly(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any: ...

class ModuleGuard:
    def __init__(self, module: object) -> None: ...
    def look(self, module: object) -> int: ...
