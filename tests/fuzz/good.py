"""Right calls of all public functions and of the operators, to be spoilt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from calls.draw import sizes_of, usual
from calls.drawn import noting
from calls.trial import MODULES, Trial
from torch import Tensor

import fusedrnn
from fusedrnn import _library


@dataclass
class Good:
    """A right call whose arguments are to be spoilt."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    is_raw: bool = False

    def call(self) -> Any:
        return self.function(**self.arguments)


# What a call takes besides the options that were drawn for it.
OPTIONS: dict[str, Any] = {"dropout": 0.0, "zoneout": 0.0, "weight_dropout": 0.0}
OPTIONS |= {"workspace_bytes": None, "backend": "auto"}


def a_trial(rng: random.Random, form: str = "functional") -> Trial:
    """A small call of this form, with rows."""
    while True:
        call = usual(rng, most=7)
        if call.form == form and call.case.batch:
            return Trial(call, rng.getrandbits(32))


def functional(rng: random.Random) -> Good:
    function, arguments = a_trial(rng).given()
    return Good(function.__name__, function, OPTIONS | {"training": True} | arguments)


def constructor(rng: random.Random, form: str = "module") -> Good:
    trial = a_trial(rng, form)
    kind, arguments = trial.constructor()
    more = {"device": None} if form == "cell" else OPTIONS | {"device": None}
    return Good(kind.__name__, kind, more | arguments)


def module_call(rng: random.Random, form: str = "module") -> Good:
    module, arguments = a_trial(rng, form).given()
    return Good(f"{type(module).__name__}.forward", module, arguments)


def plan(rng: random.Random) -> Good:
    case = a_trial(rng).call.case
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
    calls: list[Any] = []
    trial = a_trial(rng, rng.choice(["functional", "module", "cell"]))
    with noting(lambda *call: calls.append(call)):
        trial.ours()
    name, given, named = rng.choice(calls)
    made = getattr(_library.operators, name)
    names = [argument.name for argument in made.default._schema.arguments]
    by_name = dict(zip(names, given, strict=False)) | named
    by_name = {key: detached(value) for key, value in by_name.items()}
    return Good(name, made, by_name, is_raw=True)


def detached(value: Any) -> Any:
    """Tensors, and lists of them, detached from their graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return [detached(one) for one in value] if isinstance(value, list) else value


KINDS: list[Callable[[random.Random], Good]] = [functional, functional, module_call, module_call]
KINDS += [constructor, partial(constructor, form="cell"), partial(module_call, form="cell")]
KINDS += [plan, conversion, switch, *[operator] * 5]
