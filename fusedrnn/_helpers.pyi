from typing import Any

Gpu = tuple[int, int, int]

def layout(
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    num_layers: int,
    directions: int,
    bias: bool,
) -> list[tuple[str, int, tuple[int, ...]]]: ...
def kept_columns(cell: str, hidden_size: int, latent_size: int, noise: bool) -> int: ...
def chunk_length(requested: int, seq_len: int, batch: int, cuda: bool = False) -> int: ...
def states(cell: str, seq_len: int, batch: int, chunk_size: int, cuda: bool) -> int: ...
def plan(
    backend: str,
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
    gpu: Gpu | None,
    tf32: bool,
) -> dict[str, Any]: ...
def known_gpus() -> dict[str, Gpu]: ...
