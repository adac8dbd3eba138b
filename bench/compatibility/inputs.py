"""Checks of what a module takes as input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import rnn as packing

from .rows import group
from .subjects import HIDDEN, Subject, flat, hx_of
from .trial import Trial, expect, loss, same

row = group("inputs")
LENGTHS = torch.tensor([5, 3, 1])
UNSORTED = torch.tensor([3, 5, 1])


def _packed(trial: Trial, lengths: Tensor, *, enforce_sorted: bool = True) -> None:
    """A training step over a packed batch, against the loop over the padded one."""
    trial.subject.needs("packed")
    batch_first = bool(trial.options.get("batch_first"))
    if trial.subject.has_noise:
        trial.given = {"sample": False}  # noise belongs to a place in the sorted batch

    def call(x: Tensor, *states: Tensor, **_: Any) -> tuple[Tensor, ...]:
        given = packing.pack_padded_sequence(
            x, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted
        )
        output, *last = flat(trial.module(given, hx_of(states), **trial.given))
        return (packing.pad_packed_sequence(output, batch_first=batch_first)[0], *last)

    x, *states = (t.clone().requires_grad_() for t in (trial.x, *trial.states))
    outputs = call(x, *states)
    loss(outputs).backward()
    expected, grads = trial.expected(lengths=lengths)
    same(outputs, expected, what="output")
    same(trial.gradients(x, *states), grads, what="gradient")


@row("PackedSequence, sorted")
def packed_sorted(s: Subject) -> None:
    """A training step over sequences packed in falling order of length."""
    _packed(Trial(s), LENGTHS)


@row("PackedSequence, unsorted")
def packed_unsorted(s: Subject) -> None:
    """A training step over sequences packed with enforce_sorted=False."""
    _packed(Trial(s), UNSORTED, enforce_sorted=False)


@row("PackedSequence, batch_first and bidirectional")
def packed_both_ways(s: Subject) -> None:
    """A packed training step of two layers in two directions, packed from a batch-first tensor."""
    trial = Trial(s, num_layers=2, bidirectional=True, batch_first=True)
    _packed(trial, UNSORTED, enforce_sorted=False)


@row("PackedSequence, one sequence")
def packed_one_row(s: Subject) -> None:
    """A packed training step over a batch of one sequence."""
    _packed(Trial(s, batch=1), torch.tensor([5]))


@row("PackedSequence from a list, moved")
def packed_from_a_list(s: Subject) -> None:
    """pack_sequence of a list, converted to another dtype and back by its methods, then run."""
    s.needs("packed")
    trial = Trial(s, noise="mean")
    rows = [trial.x[:n, i] for i, n in enumerate(LENGTHS)]
    packed = packing.pack_sequence(rows).to("cpu", torch.float64).cpu().double()
    output, *last = flat(trial.module(packed, hx_of(trial.states), **trial.given))
    outputs = (packing.pad_packed_sequence(output)[0], *last)
    trial.same_values(outputs, lengths=LENGTHS)


@row("unbatched")
def unbatched(s: Subject) -> None:
    """A single sequence without a dimension for the batch, with its gradients."""
    s.needs("unbatched")
    trial = Trial(s, batch=1)
    if "eps" in trial.given:
        trial.given["eps"] = trial.given["eps"][:, :, 0]

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        output, *last = trial.call(x[:, 0], *(state[:, 0] for state in states))
        return (output.unsqueeze(1), *(state.unsqueeze(1) for state in last))

    x, *states = (t.clone().requires_grad_() for t in (trial.x, *trial.states))
    outputs = call(x, *states)
    loss(outputs).backward()
    if "eps" in trial.given:
        trial.given["eps"] = trial.given["eps"].unsqueeze(2)
    expected, grads = trial.expected()
    same(outputs, expected, what="output")
    same(trial.gradients(x, *states), grads, what="gradient")


def _viewed(s: Subject, view: Any) -> None:
    trial = Trial(s)

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        viewed = view(x)
        assert torch.equal(viewed, x)
        return trial.call(viewed, *(view(state) for state in states))

    trial.trains(call)


@row("non-contiguous")
def non_contiguous(s: Subject) -> None:
    """A training step whose input and states are transposed in memory."""
    _viewed(s, lambda t: t.transpose(0, 2).contiguous().transpose(0, 2))


@row("a slice with an offset")
def sliced(s: Subject) -> None:
    """A training step whose input and states are slices of larger tensors, every other column."""
    _viewed(s, lambda t: torch.stack([t.detach() * 7, t], -1)[..., 1])


@row("negative view")
def negative_view(s: Subject) -> None:
    """A training step over tensors with the negative bit, as imaginary parts of conj() have."""
    _viewed(s, lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag)


@row("expanded")
def expanded(s: Subject) -> None:
    """A training step over an input that repeats one row by expand; its gradients add up."""
    trial = Trial(s)
    one = trial.x[:, :1].clone()
    trial.x = one.expand(-1, 3, -1)
    leaf = one.clone().requires_grad_()
    states = [state.clone().requires_grad_() for state in trial.states]
    outputs = trial.call(leaf.expand(-1, 3, -1), *states)
    loss(outputs).backward()
    expected, grads = trial.expected()
    same(outputs, expected, what="output")
    same(leaf.grad, grads["x"].sum(1, keepdim=True), what="gradient")


@row("batch_first")
def batch_first(s: Subject) -> None:
    """A training step with batch_first=True, two layers, two directions."""
    Trial(s, batch_first=True, num_layers=2, bidirectional=True).trains()


@row("proj_size")
def projected(s: Subject) -> None:
    """A training step of an LSTM with projected states."""
    Trial(s, proj_size=2, num_layers=2).trains()


@row("no initial states")
def no_states(s: Subject) -> None:
    """Without hx the states start at zero."""
    trial = Trial(s)
    trial.states = trial.zeros(3)
    trial.same_values(trial.call(trial.x))


@row("a NaN stays in its row")
def nan_rows(s: Subject) -> None:
    """A NaN in one sequence of the batch leaves values and gradients of the others as they were."""
    trial = Trial(s)
    x = trial.x.clone()
    x[2, 1] = float("nan")
    x.requires_grad_()
    outputs = trial.call(x, *trial.states)
    rest = tuple(o[:, [0, 2]] for o in outputs)
    (grad,) = torch.autograd.grad(loss(rest), x)
    expected, grads = trial.expected()
    same(rest, tuple(o[:, [0, 2]] for o in expected), what="output")
    same(grad[:, [0, 2]], grads["x"][:, [0, 2]], what="gradient")
    expect(outputs[0][3:, 1].isnan().all(), "the NaN does not go on in its own row")


@row("empty batch")
def empty_batch(s: Subject) -> None:
    """A training step over a batch of no sequences gives gradients of zero."""
    trial = Trial(s, batch=0)
    x = trial.x.clone().requires_grad_()
    outputs = trial.call(x, *trial.states)
    loss(outputs).backward()
    expect(outputs[0].shape == (5, 0, HIDDEN), "the output has another shape")
    same([w.grad for w in trial.weights.values()], [0 * w for w in trial.weights.values()])


@row("one step, one sequence")
def one_step(s: Subject) -> None:
    """A training step over a single step, and over a batch of one."""
    Trial(s, seq_len=1).trains()
    Trial(s, batch=1).trains()
    Trial(s, seq_len=1, batch=1).trains()


@row("lengths as tensor and list")
def lengths(s: Subject) -> None:
    """A training step with lengths= as a tensor, as a list and as a tuple of ints."""
    s.needs("lengths")
    for given in (UNSORTED, UNSORTED.tolist(), tuple(UNSORTED.tolist())):
        trial = Trial(s)
        trial.trains(lengths=given)


@row("lengths under a default device")
def lengths_default_device(s: Subject) -> None:
    """lengths as a list while torch.set_default_device is a device other than the input's."""
    s.needs("lengths")
    trial = Trial(s)
    with torch.device("meta"):
        outputs = trial.call(trial.x, *trial.states, lengths=UNSORTED.tolist())
    trial.same_values(outputs, lengths=UNSORTED)


@row("NaN in the padding")
def nan_padding(s: Subject) -> None:
    """What lies behind a sequence's length may be NaN, and has a gradient of zero."""
    s.needs("lengths")
    trial = Trial(s)
    for i, n in enumerate(UNSORTED):
        trial.x[n:, i] = float("nan")
    trial.trains(lengths=UNSORTED)


@row("reset")
def reset(s: Subject) -> None:
    """A training step with reset= in several places, the first step among them."""
    s.needs("lengths")
    trial = Trial(s, num_layers=2, bidirectional=True)
    where = torch.zeros(5, 3, dtype=torch.bool)
    where[0, 0] = where[2, 1] = where[4, 2] = where[3, 0] = True
    trial.trains(reset=where)


@row("dtypes")
def dtypes(s: Subject) -> None:
    """A training step in float32, bfloat16 and float16, within the rounding of each."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        trial = Trial(s, dtype=dtype)
        trial.trains()
        expect(trial.call(trial.x)[0].dtype == dtype, "the output has another dtype")


@row("arguments are left as they are")
def arguments_kept(s: Subject) -> None:
    """A training step changes none of its arguments, and results share no memory with them."""
    trial = Trial(s, seq_len=1)
    before = [t.clone() for t in (trial.x, *trial.states)]
    outputs = trial.call(trial.x, *trial.states)
    loss(outputs).backward()
    with torch.no_grad():
        for o in outputs:
            o.detach().zero_()
    same([trial.x, *trial.states], before, 0.0, "an argument")


class Marked(Tensor):
    """A subclass without code of its own."""


@row("a Tensor subclass as input")
def tensor_subclass(s: Subject) -> None:
    """A training step over a plain subclass of Tensor, and over a Parameter as input."""
    trial = Trial(s)
    trial.trains(lambda x, *states: trial.call(x.as_subclass(Marked), *states))
    parameter = torch.nn.Parameter(trial.x.clone())
    trial.same_values(trial.call(parameter, *trial.states))


@row("a state shared by the batch")
def shared_state(s: Subject) -> None:
    """A learned initial state, expanded over the batch, gets the sum of the gradients."""
    trial = Trial(s)
    trial.states = [state[:, :1].expand(-1, 3, -1) for state in trial.states]
    leaves = [state[:, :1].clone().requires_grad_() for state in trial.states]
    loss(trial.call(trial.x, *(leaf.expand(-1, 3, -1) for leaf in leaves))).backward()
    _, grads = trial.expected()
    for i, leaf in enumerate(leaves):
        same(leaf.grad, grads[f"state {i}"].sum(1, keepdim=True), what="gradient")


@row("a long sequence, a large batch")
def long_sequence(s: Subject) -> None:
    """A training step over 300 steps, and over a batch of 300: more than one chunk."""
    Trial(s, seq_len=300, batch=2).trains(tolerance=1e-8)
    Trial(s, seq_len=3, batch=300).trains()
