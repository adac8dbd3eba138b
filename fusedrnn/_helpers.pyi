def layout(
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    num_layers: int,
    bias: bool,
) -> list[tuple[str, int, tuple[int, ...]]]: ...
def kept_columns(cell: str, hidden_size: int, latent_size: int, noise: bool) -> int: ...
def chunk_length(requested: int, seq_len: int, batch: int, cuda: bool = False) -> int: ...
