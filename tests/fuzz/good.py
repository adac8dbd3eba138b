"""Right calls of all public functions and of the operators, to be spoilt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cases import CELLS, Case
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fusedrnn
from fusedrnn import _library

from .trial import MODULES


@dataclass
class Good:
    """A right call whose arguments are to be spoilt."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    is_raw: bool = False

    def call(self) -> Any:
        return self.function(**self.arguments)


def options_of(rng: random.Random, cell: str) -> dict[str, Any]:
    """Options of functional forms and constructors."""
    options: dict[str, Any] = {
        "dropout": rng.choice([0.0, 0.3]),
        "zoneout": (0.1, 0.2) if cell == "lstm" and rng.random() < 0.3 else rng.choice([0.0, 0.2]),
        "weight_dropout": rng.choice([0.0, 0.0, 0.3]),
        "return_sequence": rng.random() < 0.8,
        "recompute": rng.random() < 0.7,
        "chunk_size": rng.choice([None, 2]),
        "workspace_bytes": None,
        "backend": "auto",
    }
    return options


def a_case(rng: random.Random) -> Case:
    """A small case."""
    cell = rng.choice(CELLS)
    return Case(
        cell,
        seq_len=rng.choice([1, 4, 6]),
        batch=rng.choice([1, 3]),
        num_layers=rng.choice([1, 2]),
        bias=rng.random() < 0.7,
        bidirectional=rng.random() < 0.3,
        proj_size=2 if cell == "lstm" and rng.random() < 0.3 else 0,
        noise=rng.choice(["seed", "eps", "none"]),
        dtype=rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        lengths=rng.random() < 0.4,
        reset=rng.random() < 0.3,
    )


def tensors_of(case: Case, rng: random.Random, has_seed: bool) -> dict[str, Any]:
    """Tensors for calls of modules and functional forms."""
    a = case.tensors()
    for leaf in a.differentiable():
        leaf.requires_grad_(rng.random() < 0.7)
    found: dict[str, Any] = {"input": a.input, "hx": a.hx if a.cx is None else (a.hx, a.cx)}
    found |= {"lengths": a.lengths, "reset": a.reset}
    if rng.random() < 0.3:
        lengths = torch.randint(1, case.seq_len + 1, (case.batch,)).clamp(max=case.seq_len)
        lengths[rng.randrange(case.batch)] = case.seq_len
        found["input"] = pack_padded_sequence(a.input, lengths, enforce_sorted=False)
        found["lengths"] = None
    if case.cell == "stochastic_gru":
        found |= {"eps": a.eps, "sample": case.noise != "none", "generator": None}
        if has_seed:
            found["seed"] = a.seed
        elif case.noise == "seed" and rng.random() < 0.5:
            found["generator"] = torch.Generator()
    return found


def functional(rng: random.Random) -> Good:
    case = a_case(rng)
    arguments = tensors_of(case, rng, has_seed=True) | case.sizes | options_of(rng, case.cell)
    arguments |= {"weights": case.tensors().weights, "training": rng.random() < 0.7}
    arguments |= {"batch_first": False}
    return Good(case.cell, getattr(fusedrnn, case.cell), arguments)


def sizes_of(case: Case) -> dict[str, Any]:
    """The sizes of a constructor."""
    names = ("input_size", "hidden_size", "num_layers", "bias", "bidirectional")
    sizes = {name: getattr(case, name) for name in names}
    if case.cell == "stochastic_gru":
        sizes["latent_size"] = case.latent_size
    return sizes | ({"proj_size": case.proj_size} if case.cell == "lstm" else {})


def constructor(rng: random.Random) -> Good:
    case = a_case(rng)
    arguments = sizes_of(case) | options_of(rng, case.cell)
    arguments |= {"batch_first": False, "device": None, "dtype": case.dtype}
    kind = MODULES[case.cell][0]
    return Good(kind.__name__, kind, arguments)


def module_call(rng: random.Random) -> Good:
    case = a_case(rng)
    kind = MODULES[case.cell][0]
    module = kind(**sizes_of(case), **options_of(rng, case.cell), dtype=case.dtype)
    arguments = tensors_of(case, rng, has_seed=False)
    return Good(f"{kind.__name__}.forward", module, arguments)


def cell_constructor(rng: random.Random) -> Good:
    case = a_case(rng)
    kind = MODULES[case.cell][1]
    arguments = {"input_size": 5, "hidden_size": 7, "bias": case.bias}
    return Good(kind.__name__, kind, arguments | {"device": None, "dtype": case.dtype})


def cell_call(rng: random.Random) -> Good:
    case = replace(a_case(rng), proj_size=0)
    kind = MODULES[case.cell][1]
    cell = kind(5, 7, bias=case.bias, dtype=case.dtype)
    h = torch.randn(3, 7, dtype=case.dtype)
    arguments: dict[str, Any] = {"input": torch.randn(3, 5, dtype=case.dtype)}
    arguments["hx"] = (h, h) if case.cell == "lstm" else h
    if case.cell == "stochastic_gru":
        arguments |= {"eps": None, "generator": torch.Generator(), "sample": True}
    return Good(f"{kind.__name__}.forward", cell, arguments)


def plan(rng: random.Random) -> Good:
    case = a_case(rng)
    sizes = sizes_of(case) | {"cell": case.cell, "chunk_size": rng.choice([None, 3])}
    module: Any = sizes
    if rng.random() < 0.3:
        module = MODULES[case.cell][0](**sizes_of(case))
    shape: Any = [case.seq_len, case.batch, case.input_size]
    device = rng.choice(["cpu", "H100", "A100", "RTX 4090"])
    arguments = {"module": module, "input_shape": shape, "dtype": case.dtype, "device": device}
    return Good("plan", fusedrnn.plan, arguments | {"sample": True})


def conversion(rng: random.Random) -> Good:
    function = rng.choice([fusedrnn.convert, fusedrnn.to_torch])
    module = rng.choice([torch.nn.GRU(3, 4), fusedrnn.LSTM(3, 4), torch.nn.LSTMCell(3, 4)])
    return Good(function.__name__, function, {"module": torch.nn.Sequential(module)})


def switch(rng: random.Random) -> Good:
    return Good("set_chunk_replay", fusedrnn.set_chunk_replay, {"enabled": False})


def operator(rng: random.Random) -> Good:
    """Calls with the arguments that fusedrnn itself gives to its operators."""
    case, calls = a_case(rng), []
    operators = _library.operators

    def recorded(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append((name, arguments, named))
            return getattr(operators, name)(*arguments, **named)

        return call

    operated = ("forward", "backward", "step", "last_states", "last_states_backward")
    instead = SimpleNamespace(**{name: recorded(name) for name in operated})
    with mock.patch.object(_library, "operators", instead):
        function, arguments = getattr(fusedrnn, case.cell), tensors_of(case, rng, has_seed=True)
        options = case.options | {"zoneout": rng.choice([0.0, 0.2]), "dropout": 0.3}
        output, _ = function(weights=case.tensors().to(case.dtype).weights, **arguments, **options)
        data = output.data if isinstance(output, PackedSequence) else output
        data.sum().backward()
    name, given, named = rng.choice(calls)
    made = getattr(operators, name)
    names = [argument.name for argument in made.default._schema.arguments]
    by_name = dict(zip(names, given, strict=False)) | named
    by_name = {key: detached(value) for key, value in by_name.items()}
    return Good(name, made, by_name, is_raw=True)


def detached(value: Any) -> Any:
    """Tensors, and lists of them, detached from their graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return [detached(one) for one in value] if isinstance(value, list) else value


KINDS = [functional, functional, module_call, module_call, constructor, cell_constructor, cell_call]
KINDS += [plan, conversion, switch, *[operator] * 5]
