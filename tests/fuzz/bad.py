"""Wrong calls of all public functions, and of the operators themselves.

A good call with one to three wrong values is refused with one clear sentence, or is accepted and
gives results of the right shape. It changes nothing, and ends in finite time.
"""

from __future__ import annotations

import functools
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import Outcome, valid
from .good import KINDS, Good, operator
from .watch import Watch, faults_of, tensors_in
from .wrong import wrong

OF_ONE_SHAPE = ("hx", "eps", "weights", "lengths", "reset")  # if nothing else is changed
SECONDS = 4.0  # of processor time, within which a wrong call must be refused
good_call = valid.good_call
is_shown = False  # whether to show where errors come from


def kinds_of(value: Any) -> list[Any] | None:
    """The shapes and dtypes of tensors, or None if one of them has none."""
    try:
        return [(tuple(t.shape), t.dtype) for t in tensors_in(value)]
    except RuntimeError:
        return None


def spoil(good: Good, rng: random.Random) -> tuple[list[str], bool]:
    """Puts in one to three wrong values; returns their names, and whether one must be refused."""
    names, must_raise = [], False
    count = min(rng.choice([1, 1, 2, 3]), len(good.arguments))
    for name in rng.sample(list(good.arguments), count):
        value = good.arguments[name]
        before = kinds_of(value)
        if isinstance(value, dict):  # the arguments of a constructor
            key = rng.choice(list(value))
            value[key], is_wrong = wrong(value[key], rng)
            is_wrong &= not (key == "recompute" and value[key] is None)
            name = f"{name}[{key!r}]"
        else:
            good.arguments[name], is_wrong = wrong(value, rng)
            is_wrong &= not (name == "recompute" and good.arguments[name] is None)
        alone = count == 1 and name in OF_ONE_SHAPE and before is not None
        if alone and (now := kinds_of(good.arguments[name])) is not None:
            is_wrong |= len(now) == len(before) and now != before
        if name == "bias" and good.name.endswith("Cell"):
            is_wrong = False  # cells accept any value of bias, as torch.nn's do
        names.append(name)
        must_raise |= is_wrong and not good.is_raw
    return names, must_raise


def prepare() -> None:
    """Uses everything once that takes memory at its first use."""
    for seed in range(20):
        operator(random.Random(seed))


def words(value: Any) -> str:
    """An argument in short words."""
    if isinstance(value, PackedSequence):
        return f"PackedSequence({', '.join(map(words, value))})"
    if isinstance(value, Tensor):
        kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
        if value.layout != torch.strided or value.is_meta:
            return f"{kind}, {value.layout}, {value.device}"
        small = f" = {value.tolist()}" if value.numel() <= 6 else ""
        return f"{kind}, strides {value.stride()}{small}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(words, value))})"
    return repr(value)[:100]


def run(seed: int, note: Callable[[str], None]) -> Outcome:
    """Runs a case."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    good = rng.choice(KINDS)(rng)
    names, must_raise = spoil(good, rng)
    told = {name: good.arguments[name.split("[")[0]] for name in names}
    call = f"{good.name}: " + "; ".join(f"{n} = {safely(words, v)}" for n, v in told.items())
    note(call)
    return tried(good, Outcome("accepted", call), must_raise)


def safely(function: Callable[[Any], str], value: Any) -> str:
    try:
        return function(value)
    except Exception as error:
        return f"{type(value).__name__} ({type(error).__name__} when shown)"


def tried(
    good: Good, outcome: Outcome, must_raise: bool = False, most_seconds: float = SECONDS
) -> Outcome:
    """Makes the call, and returns what was wrong with it."""
    generators = [g for g in good.arguments.values() if isinstance(g, torch.Generator)]
    watch = Watch(good.arguments, generators)
    try:
        results = good.call()
        if is_misshapen(good, results):
            outcome.findings.append(("other shapes", safely(words, results)))
        use(results)
    except Exception as error:
        if is_shown:
            traceback.print_exc()
        outcome.what, must_raise = "raised", False
        outcome.findings += faults_of(error, good.is_raw)
    seconds = watch.seconds()
    may_draw = outcome.what == "accepted"
    outcome.findings += [("changed state", change) for change in watch.changes(may_draw)]
    if seconds > most_seconds:
        outcome.findings.append(("slow", f"{seconds:.1f} s"))
    if must_raise:
        outcome.findings.append(("accepted what is wrong", ""))
    return outcome


def is_misshapen(good: Good, results: Any) -> bool:
    """Whether an output lacks the shape and dtype that follow from the input."""
    input, sequence = good.arguments.get("input"), good.arguments.get("return_sequence", True)
    if good.is_raw or not isinstance(input, Tensor) or not isinstance(results, tuple):
        return False
    if not good.name.islower() or sequence is not True or not isinstance(results[0], Tensor):
        return False  # a module's results depend on its options
    return results[0].shape[:-1] != input.shape[:-1] or results[0].dtype != input.dtype


def use(results: Any) -> None:
    """Reads all numbers, and runs backward."""
    found = [t for t in tensors_in(results) if t.is_floating_point() and not t.is_meta]
    for t in found:
        t.detach().sum().item()
    total = [t.sum() for t in found if t.requires_grad and t.grad_fn is not None]
    if total:
        functools.reduce(torch.add, total).backward()
