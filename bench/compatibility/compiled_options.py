"""Checks of torch.compile with every option of a module and of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import rnn as packing

import fusedrnn

from .changes import write_flat
from .compiled import compiled_call, count_graphs, sized, trains_at_sizes
from .inputs import unbatched_step
from .rows import group
from .subjects import Slow, Subject, flat, hx_of
from .trial import DEEP, Trial, expect, loss, must_raise, same

row = group("compile")


def _as_eager(s: Subject, *, noise: str = "eps", seq_len: int = 5, **options: Any) -> None:
    """A compiled training step that draws numbers draws those of the module itself."""
    found = []
    for compiled in (True, False):
        trial = Trial(s, noise=noise, seq_len=seq_len, **options)
        call = compiled_call(trial) if compiled else trial.call
        x = trial.x.clone().requires_grad_()
        torch.manual_seed(11)
        outputs = call(x, *trial.states)
        loss(outputs).backward()
        found.append((outputs, trial.gradients(x)))
    same(found[0], found[1])


@row("drawn noise")
def drawn_noise(s: Subject) -> None:
    """Compiled, the noise that is drawn is that of the module itself after the same seed."""
    s.needs("noise")
    _as_eager(s, noise="drawn")


@row("generator=")
def generator(s: Subject) -> None:
    """With generator= the compiled noise is the module's; generators move on, and take 2 graphs."""
    s.needs("noise", "built-in")
    trial, counter = Trial(s, noise="drawn"), CompileCounterWithBackend("aot_eager")
    compiled = compiled_call(trial, backend=counter)
    for source in [torch.Generator(), torch.Generator()] * 2:
        found = []
        for call in (compiled, trial.call):
            source.manual_seed(4)
            found.append([call(trial.x, generator=source) for _ in range(2)])
        same(found[0], found[1])
        expect(not torch.equal(found[0][0][0], found[0][1][0]), "two calls have the same noise")
    if counter.frame_count > 2:
        raise Slow(f"{counter.frame_count} graphs for 2 generators")


@row("seed= and eps=")
def seed_and_eps(s: Subject) -> None:
    """The compiled functional form with seed=, and with eps= that needs a gradient."""
    s.needs("noise", "built-in")
    trial = Trial(s)
    function = torch.compile(fusedrnn.stochastic_gru, backend="aot_eager", fullgraph=True)
    weights = [w.detach().clone().requires_grad_() for w in trial.weights.values()]
    named = dict(zip(trial.weights, weights, strict=True))
    for given in ({"seed": torch.tensor([9])}, {"eps": trial.given["eps"].requires_grad_()}):
        leaves = [*weights, *([given["eps"]] if "eps" in given else [])]
        outputs = flat(function(trial.x, weights, trial.states[0], **given))
        found = torch.autograd.grad(loss(outputs), leaves)
        noise = {"eps": None} | given
        expected = trial.truth(named, trial.x, *trial.states, **noise)
        same(outputs, expected, what="output")
        same(found, torch.autograd.grad(loss(expected), leaves), what="gradient")


@row("lengths as a tensor")
def lengths_tensor(s: Subject) -> None:
    """Compiled with lengths= as a tensor: other values take no other graph."""
    s.needs("lengths")
    _lengths(s, as_list=False)


@row("lengths as a list", speed="slow")
def lengths_list(s: Subject) -> None:
    """Compiled with lengths= as a list: 4 lists, or 4 numbers of steps, take at most 2 graphs."""
    s.needs("lengths")
    _lengths(s, as_list=True)
    torch._dynamo.reset()
    sizes = ((5, 3), (7, 3), (9, 3), (12, 3))
    trains_at_sizes(s, None, sizes, lengths=lambda trial: [len(trial.x), len(trial.x) - 1, 3])


def _lengths(s: Subject, *, as_list: bool) -> None:
    trial = Trial(s)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled_call(trial, backend=counter)
    for values in ([5, 3, 1], [2, 5, 4], [5, 5, 5], [1, 2, 3]):
        trial.trains(call, lengths=values if as_list else torch.tensor(values))
    if counter.frame_count > 2:
        raise Slow(f"{counter.frame_count} graphs for 4 lists of lengths")


@row("wrong lengths")
def wrong_lengths(s: Subject) -> None:
    """A length of zero or beyond the sequence is refused when compiled too."""
    s.needs("lengths", "fusedrnn")
    for bad in ([5, 0, 1], [5, 6, 1]):
        for as_list in (True, False):
            trial = Trial(s)
            call = compiled_call(trial)
            given: Any = bad if as_list else torch.tensor(bad)
            must_raise(lambda c=call, t=trial, g=given: c(t.x, *t.states, lengths=g))  # type: ignore


@row("reset")
def reset(s: Subject) -> None:
    """Compiled with reset=, and with lengths= too, two layers, two directions, batch_first."""
    s.needs("lengths")
    for options in ({}, DEEP | {"batch_first": True}):
        trial = Trial(s, **options)
        call = compiled_call(trial)
        masks = {"lengths": torch.tensor([5, 2, 4])} if options else {}
        for _ in range(2):
            trial.trains(call, reset=torch.rand(trial.x.shape[:2]) < 0.3, **masks)


@row("return_sequence=False")
def last_state(s: Subject) -> None:
    """Compiled with return_sequence=False, over more than one part of the sequence."""
    s.needs("fusedrnn")
    _as_eager(s, return_sequence=False, seq_len=40)


@row("return_sequence=False, dynamic shapes")
def last_state_dynamic(s: Subject) -> None:
    """The same at 3 lengths takes at most 2 graphs."""
    s.needs("fusedrnn")
    first = Trial(s, return_sequence=False)

    def make(counter: Any) -> Any:
        module = torch.compile(first.module, fullgraph=True, backend=counter)

        def run(trial: Trial) -> None:
            expected = trial.truth(trial.detached, trial.x, *trial.states)
            outputs = trial.call(trial.x, *trial.states, module=module)
            same(outputs, (expected[0][-1], *expected[1:]), what="output")

        return run

    sizes = [(length, 3) for length in (30, 50, 41)]
    count_graphs(make, [sized(first, s, *size, return_sequence=False) for size in sizes])


@row("workspace_bytes and chunk_size")
def workspace(s: Subject) -> None:
    """Compiled with a limit of the workspace, and with a length of chunks: several of each."""
    s.needs("built-in")
    for options in ({"workspace_bytes": 12_000, **DEEP}, {"chunk_size": 2}):
        trial = Trial(s, seq_len=40, **options)
        steps = fusedrnn.plan(trial.module, trial.x.shape, device="cpu").chunk_steps  # type: ignore
        expect(steps < 40, "the sequence is one chunk")
        trial.trains(compiled_call(trial))


@row("dropout")
def dropout(s: Subject) -> None:
    """Compiled in training mode with dropout between layers: the masks of the module itself."""
    _as_eager(s, dropout=0.5, num_layers=2)


@row("zoneout and weight_dropout")
def zoneout(s: Subject) -> None:
    """The same with zoneout, in training and in evaluation, and with dropped weights."""
    s.needs("built-in")
    _as_eager(s, weight_dropout=0.5)
    _as_eager(s, zoneout=0.3)
    trial = Trial(s, zoneout=0.3)
    trial.module.eval()
    expected = trial.call(trial.x, *trial.states)
    same(compiled_call(trial)(trial.x, *trial.states), expected)


@row("PackedSequence", speed="slow")
def packed(s: Subject) -> None:
    """A compiled function that packs, runs and pads; graph breaks are allowed."""
    s.needs("packed")
    trial = Trial(s, noise="mean")
    lengths = torch.tensor([5, 3, 1])

    @torch.compile(backend="aot_eager")
    def call(x: Any, *states: Any) -> Any:
        given = packing.pack_padded_sequence(x, lengths)
        output, *last = flat(trial.module(given, hx_of(states), **trial.given))
        return (packing.pad_packed_sequence(output)[0], *last)

    x = trial.x.clone().requires_grad_()
    outputs = call(x, *trial.states)
    loss(outputs).backward()
    expected, grads = trial.expected(lengths=lengths)
    same(outputs, expected, what="output")
    same(x.grad, grads["x"], what="gradient")


@row("cells in a loop")
def cells(s: Subject) -> None:
    """A compiled loop over single steps of the cell class; a compiled cell without a batch."""
    trial = Trial(s)
    cell = trial.cell()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x: Any, *states: Any) -> Any:
        return trial.steps(cell, x, *states)

    trial.trains(call)
    compiled = torch.compile(cell, backend="aot_eager", fullgraph=True)
    mean = {"sample": False} if s.has_noise else {}
    same(compiled(trial.x[0, 0], **mean), cell(trial.x[0, 0], **mean))


@row("cells at other batches")
def cells_dynamic(s: Subject) -> None:
    """A compiled cell at 5 sizes of the batch takes at most 2 graphs."""
    trial = Trial(s, noise="mean", batch=13)
    cell, counter = trial.cell(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(cell, backend=counter, fullgraph=True)
    for batch in (4, 7, 9, 13, 5):
        same(compiled(trial.x[0, :batch], **trial.given), cell(trial.x[0, :batch], **trial.given))
    if counter.frame_count > 2:
        raise Slow(f"{counter.frame_count} graphs for 5 sizes")


@row("unbatched")
def unbatched(s: Subject) -> None:
    """A compiled training step over one sequence without a dimension for the batch."""
    s.needs("unbatched")
    unbatched_step(s, compiled_call)
    if s.cell == "lstm":
        unbatched_step(s, compiled_call, proj_size=2)


@row("flat_weight written before backward")
def flat_written(s: Subject) -> None:
    """Writing flat_weight between a compiled forward and its backward is an error."""
    write_flat(s, compiled_call)
