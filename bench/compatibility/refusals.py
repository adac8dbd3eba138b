"""Checks of inputs that must be refused: an error that says why, and nothing computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .rows import group
from .subjects import INPUT, Subject, hx_of
from .trial import Trial, must_raise

row = group("inputs")
_BAD: dict[str, tuple[str, Callable[[Trial], Any]]] = {
    "no steps": ("An input of no steps", lambda t: t.x[:0]),
    "complex": ("A complex input", lambda t: t.x.to(torch.complex128)),
    "integers": ("An input of integers", lambda t: t.x.to(torch.int64)),
    "another dtype": ("An input of another dtype than the weights", lambda t: t.x.float()),
    "other features": ("An input of another number of features", lambda t: t.x[..., 1:]),
    "four dimensions": ("An input of four dimensions", lambda t: t.x.unsqueeze(0)),
    "another device": ("An input on another device than the weights", lambda t: t.x.to("meta")),
    "sparse": ("A sparse input", lambda t: t.x.to_sparse()),
    "MKL-DNN": ("An input in MKL-DNN's layout", lambda t: t.x.float().to_mkldnn()),
    "float8": ("An input in float8", lambda t: t.x.to(torch.float8_e4m3fn)),
    "NumPy": ("A NumPy array as input", lambda t: t.x.numpy()),
    "a list": ("A list of tensors as input", lambda t: list(t.x)),
    "nested": (
        "A nested tensor as input",
        lambda t: torch.nested.nested_tensor([torch.randn(n, INPUT) for n in (3, 5)]).double(),
    ),
}


def _trial(s: Subject) -> Trial:
    """A trial in which no module refuses to take steps in Python, which would look the same."""
    return Trial(s.by_default, noise="mean")


def _prefix(s: Subject) -> str:
    return "fusedrnn: " if s.is_built_in else ""  # what a user's cell raises is passed on


def _add(name: str, sentence: str, bad: Callable[[Trial], Any]) -> None:
    @row(f"refused: {name}", says=f"{sentence} is a TypeError, a ValueError or a RuntimeError.")
    def refused(s: Subject) -> None:
        trial = _trial(s)
        argument = bad(trial)
        must_raise(lambda: trial.call(argument), prefix=_prefix(s))


for _name, (_sentence, _bad) in _BAD.items():
    _add(_name, _sentence, _bad)


@row("refused: states of another shape")
def other_states(s: Subject) -> None:
    """States of another batch, another width or another number of layers are refused."""
    trial = _trial(s)
    for bad in (
        [state[:, :2] for state in trial.states],
        [state[..., :3] for state in trial.states],
        [state.repeat(2, 1, 1) for state in trial.states],
    ):
        must_raise(lambda bad=bad: trial.call(trial.x, *bad), prefix=_prefix(s))  # type: ignore[misc]


@row("refused: a wrong number of states")
def number_of_states(s: Subject) -> None:
    """An LSTM that gets one state, or another cell that gets two, says so."""
    trial = _trial(s)
    given: Any = trial.states[0] if s.cell == "lstm" else (trial.states[0], trial.states[0])
    must_raise(lambda: trial.module(trial.x, given, **trial.given), prefix=_prefix(s))


@row("refused: lengths out of range")
def wrong_lengths(s: Subject) -> None:
    """Lengths of zero, beyond the sequence, or of another batch are refused."""
    s.needs("fusedrnn")
    trial = _trial(s)
    for bad in ([5, 0, 1], [5, 6, 1], [5, 3]):
        call = lambda bad=bad: trial.module(  # noqa: E731
            trial.x, hx_of(trial.states), lengths=bad, **trial.given
        )
        must_raise(call, "lengths", prefix="fusedrnn: ")
