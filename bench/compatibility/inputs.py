"""Checks of what a module takes as input.

Longer than 350 lines, because its checks are of one topic and share their helpers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import rnn as packing

from .rows import group, table
from .subjects import HIDDEN, Subject, flat, hx_of
from .trial import DEEP, Trial, expect, loss, must_raise, same

row = group("inputs")
LENGTHS = torch.tensor([5, 3, 1])
UNSORTED = torch.tensor([3, 1, 5])  # sorting them is not its own inverse
SHORT = torch.tensor([2, 1, 4])  # every row is shorter than the tensor


def _packed(
    trial: Trial, lengths: Tensor, *, enforce_sorted: bool = True, **arguments: Any
) -> None:
    """A training step over a packed batch, against the loop over the padded one.

    States, noise and resets belong to the rows as they were before packing sorted them.
    """
    trial.subject.needs("packed")
    batch_first = bool(trial.options.get("batch_first"))

    def call(x: Tensor, *states: Tensor, **_: Any) -> tuple[Tensor, ...]:
        given = packing.pack_padded_sequence(
            x, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted
        )
        noise = {name: eps[:, : lengths.max()] for name, eps in trial.given.items()}
        output, *last = flat(trial.module(given, hx_of(states), **noise, **arguments))
        same(list(output[1:]), list(given[1:]), 0.0, "the order of rows")
        padded, _ = packing.pad_packed_sequence(output, batch_first, total_length=5)
        return (padded, *last)

    trial.trains(call, lengths=lengths, **arguments)


@row("PackedSequence, sorted")
def packed_sorted(s: Subject) -> None:
    """A training step over sequences packed in falling order of length."""
    _packed(Trial(s), LENGTHS)


@row("PackedSequence, unsorted")
def packed_unsorted(s: Subject) -> None:
    """The same with enforce_sorted=False, and with rows that are all shorter than the tensor."""
    for lengths in (UNSORTED, SHORT):
        _packed(Trial(s), lengths, enforce_sorted=False)


@row("PackedSequence, batch_first and bidirectional")
def packed_both_ways(s: Subject) -> None:
    """A packed training step of two layers in two directions, packed from a batch-first tensor."""
    _packed(Trial(s, batch_first=True, **DEEP), UNSORTED, enforce_sorted=False)


@row("PackedSequence and reset")
def packed_reset(s: Subject) -> None:
    """A packed training step with reset= of the rows before packing; lengths= are refused."""
    s.needs("fusedrnn")
    trial, reset = Trial(s, batch_first=True, **DEEP), torch.rand(3, 5) < 0.4
    _packed(trial, UNSORTED, enforce_sorted=False, reset=reset)
    packed = packing.pack_padded_sequence(trial.x, LENGTHS, batch_first=True)
    must_raise(lambda: trial.module(packed, lengths=[5, 3, 1]), "must not be given with a Packed")


@row("PackedSequence, one sequence")
def packed_one_row(s: Subject) -> None:
    """A packed training step over a batch of one sequence."""
    _packed(Trial(s, batch=1), torch.tensor([5]))


@row("PackedSequence from a list, moved")
def packed_from_a_list(s: Subject) -> None:
    """pack_sequence of a list, converted by its methods, run, and unpacked to a list."""
    s.needs("packed")
    trial = Trial(s, noise="mean")
    rows = [trial.x[:n, i] for i, n in enumerate(LENGTHS)]
    packed = packing.pack_sequence(rows).to("cpu", torch.float64).cpu().double()
    output, *last = flat(trial.module(packed, hx_of(trial.states), **trial.given))
    outputs = (packing.pad_packed_sequence(output)[0], *last)
    trial.same_values(outputs, lengths=LENGTHS)
    each = [outputs[0][:n, i] for i, n in enumerate(LENGTHS)]
    same(packing.unpack_sequence(output), each, 0.0, "unpacked rows")


def unbatched_step(
    s: Subject, made: Callable[[Trial], Any] = lambda trial: trial.call, **options: Any
) -> None:
    """A training step over one sequence without a batch, called as ``made`` has it."""
    trial = Trial(s, batch=1, **options)
    module = made(trial)
    at = 0 if options.get("batch_first") else 1
    given = dict(trial.given)
    if "eps" in given:
        given["eps"] = given["eps"][:, :, 0]

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        output, *last = module(x.squeeze(at), *(state[:, 0] for state in states), **given)
        return (output.unsqueeze(at), *(state.unsqueeze(1) for state in last))

    trial.trains(call)


@row("unbatched")
def unbatched(s: Subject) -> None:
    """A single sequence without a dimension for the batch, with its gradients; batch_first too."""
    s.needs("unbatched")
    for options in ({}, DEEP, {"batch_first": True}, {"bias": False, "num_layers": 2}):
        unbatched_step(s, **options)


@row("cells")
def cells(s: Subject) -> None:
    """A training step by single steps of the cell class, with and without biases."""
    for bias in (True, False):
        trial = Trial(s, bias=bias)
        cell = trial.cell()
        trial.trains(lambda *tensors, t=trial, c=cell: t.steps(c, *tensors))


@row("cells, shapes")
def cells_shapes(s: Subject) -> None:
    """Steps without states, over a batch of none, without a batch, and with a list of states."""
    trial = Trial(s, noise="mean")
    cell, x = trial.cell(), trial.x[0]

    def step(x: Tensor, *states: Tensor) -> list[Tensor]:
        found = cell(x, hx_of(states), **trial.given)
        return [found] if isinstance(found, Tensor) else list(found)

    for states in ([state[0] for state in trial.states], [state[0] for state in trial.zeros(3)]):
        whole = step(x, *states)
        same(step(x[1], *(state[1] for state in states)), [t[1] for t in whole], 1e-12, "a row")
        same(step(x[:0], *(state[:0] for state in states)), [t[:0] for t in whole], what="no rows")
    same(step(x), whole, 0.0, "a step without states")
    same(step(x[1]), [t[1] for t in whole], 1e-12, "a row without states")


def _viewed(s: Subject, view: Callable[[Tensor], Tensor]) -> None:
    trial = Trial(s)
    expect(torch.equal(view(trial.x), trial.x), "the view has other values")
    trial.trains(lambda *tensors: trial.call(*map(view, tensors)))


table(
    row,
    _viewed,
    (
        "non-contiguous",
        "A training step whose input and states are transposed in memory.",
        {"view": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)},
    ),
    (
        "a slice with an offset",
        "A training step whose input and states are slices of larger tensors, every other column.",
        {"view": lambda t: torch.stack([t.detach() * 7, t], -1)[..., 1]},
    ),
    (
        "negative view",
        "A training step over tensors with the negative bit, as imaginary parts of conj() have.",
        {"view": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag},
    ),
)


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
    """A training step with batch_first=True, with biases and without, lengths and resets."""
    for bias in (True, False):
        Trial(s, batch_first=True, bias=bias, **DEEP).trains()
    if s.kind != "torch":
        Trial(s, batch_first=True, **DEEP).trains(lengths=UNSORTED, reset=torch.rand(3, 5) < 0.3)


@row("no initial states")
def no_states(s: Subject) -> None:
    """A training step without hx, whose states start at zero; an LSTM's hx may be a list."""
    trial = Trial(s, **DEEP)
    trial.states = []
    trial.trains()
    if s.cell == "lstm":
        trial = Trial(s)
        trial.same_values(flat(trial.module(trial.x, trial.states)))


@row("proj_size")
def projected(s: Subject) -> None:
    """A training step with projected states: padded, packed, unbatched, with other options."""
    for options in ({"num_layers": 2, "bias": False}, DEEP, {"batch_first": True, "num_layers": 2}):
        Trial(s, proj_size=2, **options).trains()
        _packed(Trial(s, proj_size=2, **options), UNSORTED, enforce_sorted=False)
        unbatched_step(s, proj_size=2, **options)


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
    trial = Trial(s, batch=0, **DEEP)
    masks = {"lengths": [], "reset": torch.zeros(5, 0, dtype=torch.bool)} if s.is_ours else {}
    x = trial.x.clone().requires_grad_()
    outputs = trial.call(x, *trial.states, **masks)
    loss(outputs).backward()
    expect(x.grad is not None and x.grad.shape == x.shape, "the gradient has another shape")
    expect(outputs[0].shape == (5, 0, 2 * HIDDEN), "the output has another shape")
    same([w.grad for w in trial.weights.values()], [0 * w for w in trial.weights.values()])


@row("one step, one sequence")
def one_step(s: Subject) -> None:
    """A training step over a single step, and over a batch of one."""
    Trial(s, seq_len=1).trains()
    Trial(s, batch=1).trains()
    Trial(s, seq_len=1, batch=1).trains()


@row("lengths as tensor and list")
def lengths(s: Subject) -> None:
    """A training step with lengths= as a tensor, as a list or tuple of ints, and by NumPy."""
    s.needs("lengths")
    for given in (UNSORTED, UNSORTED.tolist(), tuple(UNSORTED.tolist())):
        trial = Trial(s)
        trial.trains(lengths=given)
    if s.is_ours:
        array = UNSORTED.numpy()
        for numbers in (array, list(array)):
            outputs = trial.call(trial.x, *trial.states, lengths=numbers)
            trial.same_values(outputs, lengths=UNSORTED)


@row("lengths under a default device")
def lengths_default_device(s: Subject) -> None:
    """lengths as a list while torch.set_default_device is a device other than the input's."""
    s.needs("lengths")
    trial = Trial(s)
    with torch.device("meta"):
        outputs = trial.call(trial.x, *trial.states, lengths=LENGTHS.tolist())
    trial.same_values(outputs, lengths=LENGTHS)
    if s.is_ours:
        packed = packing.pack_padded_sequence(trial.x, LENGTHS)
        with torch.device("meta"):
            output, *last = flat(trial.module(packed, hx_of(trial.states), **trial.given))
        trial.same_values((packing.pad_packed_sequence(output)[0], *last), lengths=LENGTHS)


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
