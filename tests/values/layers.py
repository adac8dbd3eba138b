"""Layers of every cell in float64, for tests of what all layers have."""

import torch

import fusedrnn

KINDS = ["GRU", "LSTM", "ProjectedLSTM", "StochasticGRU"]


def make(kind, device, input_size=3, hidden_size=5, **options):
    if kind == "ProjectedLSTM":
        kind, options = "LSTM", options | {"proj_size": hidden_size - 1}
    return getattr(fusedrnn, kind)(
        input_size, hidden_size, dtype=torch.float64, device=device, **options
    )


def states_of(state):
    return list(state) if isinstance(state, tuple) else [state]


def random(*shape, device):
    return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
