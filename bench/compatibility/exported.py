"""Checks of torch.export, AOTInductor, ONNX, TorchScript, torch.fx, and of copies and pickles.

Longer than 350 lines, because its checks are of one topic and share their helpers.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from .rows import group, table
from .subjects import HIDDEN, Subject, package
from .trial import DEEP, Around, Trial, expect, loss, must_raise, same

row = group("export")
OTHER_SIZES = ((7, 2), (3, 5), (1, 1))
# Longer than the parts in which return_sequence=False runs a sequence.
LONG = 40


def _arguments(trial: Trial) -> tuple[Tensor, ...]:
    return (trial.x, *trial.states)


def _dynamic(trial: Trial) -> Any:
    steps, batch = Dim("steps", min=1, max=4096), Dim("batch", min=1, max=4096)
    return ({0: steps, 1: batch}, *({1: batch} for _ in trial.states))


def _exported(trial: Trial, *, dynamic: bool = False, strict: bool = False) -> Any:
    around = Around(trial)
    # All arguments of forward(x, *states) but the first belong to one name.
    x, *states = _dynamic(trial)
    shapes = (x, tuple(states)) if dynamic else None
    return torch.export.export(around, _arguments(trial), dynamic_shapes=shapes, strict=strict)


def _check(trial: Trial, module: Callable[..., Any], sizes: Any = ((5, 3),)) -> None:
    """Compares an exported module, which samples nothing, with the loop at these sizes."""
    for seq_len, batch in sizes:
        other = Trial(trial.subject, noise="mean", seq_len=seq_len, batch=batch, **trial.options)
        x, states = other.x.to(trial.dtype), [state.to(trial.dtype) for state in other.states]
        expected = trial.truth(trial.detached, x, *states)
        same(tuple(module(x, *states)), expected, trial.tolerance, f"output at T={seq_len}")


def _mean(s: Subject, **options: Any) -> Trial:
    trial = Trial(s, noise="mean", **options)
    trial.module.eval()
    return trial


@row("static shapes")
def static(s: Subject) -> None:
    """torch.export of two layers in two directions, run with other values."""
    trial = _mean(s, **DEEP)
    module = _exported(trial).module()
    trial.x = torch.randn_like(trial.x)
    trial.same_values(module(*_arguments(trial)))


def _at_other_sizes(
    s: Subject, way: Callable[[Any], Any] = lambda p: p, strict: bool = False
) -> None:
    trial = _mean(s)
    _check(trial, way(_exported(trial, dynamic=True, strict=strict)).module(), OTHER_SIZES)


def _loaded(program: Any, library: Any = torch.export) -> Any:
    """The program, saved and loaded."""
    buffer = io.BytesIO()
    library.save(program, buffer)
    buffer.seek(0)
    return library.load(buffer)


table(
    row,
    _at_other_sizes,
    (
        "dynamic steps and batch",
        "torch.export with a dynamic number of steps and rows, run at other sizes.",
        {},
    ),
    ("strict", "The same with strict=True.", {"strict": True}),
    ("saved and loaded", "The same, saved and loaded.", {"way": _loaded}),
    (
        "run_decompositions",
        "The same after run_decompositions.",
        {"way": lambda program: program.run_decompositions()},
    ),
)


@row("dynamic, lengths and reset")
def dynamic_masked(s: Subject) -> None:
    """torch.export of a call with lengths= and reset=, at dynamic sizes."""
    s.needs("lengths")
    trial = _mean(s)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = trial.module

        def forward(self, x: Tensor, lengths: Tensor, reset: Tensor) -> Any:
            return self.rnn(x, lengths=lengths, reset=reset, **trial.given)[0]

    steps, batch = Dim("steps", min=1, max=4096), Dim("batch", min=1, max=4096)
    shapes = ({0: steps, 1: batch}, {0: batch}, {0: steps, 1: batch})

    def arguments(seq_len: int, rows: int) -> tuple[Tensor, ...]:
        x = torch.randn(seq_len, rows, trial.x.shape[2], dtype=torch.float64)
        return x, torch.arange(rows) % seq_len + 1, torch.rand(seq_len, rows) < 0.3

    module = torch.export.export(Masked(), arguments(5, 3), dynamic_shapes=shapes).module()
    for size in ((5, 3), *OTHER_SIZES):
        x, lengths, reset = arguments(*size)
        expected = trial.truth(trial.detached, x, lengths=lengths, reset=reset)
        same(module(x, lengths, reset), expected[0], what="output")


@row("in a fresh process", speed="slow")
def fresh_process(s: Subject) -> None:
    """A saved program, loaded and run by another process, at other sizes if it takes them."""
    trial = _mean(s)
    try:
        program = _exported(trial, dynamic=True)
    except Exception:  # another row says so
        program = _exported(trial)
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, f"{folder}/program.pt2")
        torch.save(_arguments(trial), f"{folder}/arguments.pt")
        code = (
            "import sys, torch, fusedrnn; folder = sys.argv[1]\n"
            "module = torch.export.load(folder + '/program.pt2').module()\n"
            "results = module(*torch.load(folder + '/arguments.pt'))\n"
            "torch.save([r.detach() for r in results], folder + '/results.pt')\n"
        )
        command = [sys.executable, "-c", code, folder]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ended.returncode:
            raise RuntimeError(ended.stderr.strip().splitlines()[-1])
        trial.same_values(tuple(torch.load(f"{folder}/results.pt")))


def _trained(s: Subject, *, dynamic: bool) -> None:
    trial = _mean(s)
    module = _exported(trial, dynamic=dynamic).module()
    if dynamic:
        weights, trial = trial.module, Trial(s, noise="mean", seq_len=7, batch=2)
        trial.module = weights
    leaves = [t.clone().requires_grad_() for t in _arguments(trial)]
    outputs = module(*leaves)
    loss(tuple(outputs)).backward()
    _, grads = trial.expected()
    found = [leaf.grad for leaf in leaves]
    named = {name.removeprefix("rnn."): w.grad for name, w in module.named_parameters()}
    found += [named[name] for name in trial.weights]
    same(found, list(grads.values()), what="gradient")


@row("training after export")
def trained(s: Subject) -> None:
    """An exported module has the gradients of input, states and weights."""
    _trained(s, dynamic=False)


@row("training after export, dynamic")
def trained_dynamic(s: Subject) -> None:
    """The same with dynamic sizes, at other ones."""
    _trained(s, dynamic=True)


@row("drawn noise")
def drawn(s: Subject) -> None:
    """An exported module draws new noise in each call: that of the module after the same seed."""
    s.needs("noise")
    trial = Trial(s, noise="drawn")
    module = _exported(trial).module()
    for seed in (3, 4):
        torch.manual_seed(seed)
        found = module(*_arguments(trial))
        torch.manual_seed(seed)
        same(tuple(found), trial.call(*_arguments(trial)))


@row("return_sequence=False, dynamic steps")
def last_state(s: Subject) -> None:
    """torch.export with return_sequence=False and a dynamic number of steps."""
    s.needs("fusedrnn")
    trial = _mean(s, return_sequence=False, seq_len=LONG)
    module = _exported(trial, dynamic=True).module()
    for seq_len in (LONG, 70, 3):
        x = torch.randn(seq_len, *trial.x.shape[1:], dtype=torch.float64)
        expected = trial.truth(trial.detached, x, *trial.states)
        same(tuple(module(x, *trial.states)), (expected[0][-1], *expected[1:]), what="output")


def _packaged(s: Subject, *, dynamic: bool) -> None:
    trial = _mean(s, seq_len=3, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(
            _exported(trial, dynamic=dynamic), package_path=f"{folder}/model.pt2"
        )
        module = torch._inductor.aoti_load_package(path)
        with torch.no_grad():
            _check(trial, module, ((3, 3), *(OTHER_SIZES if dynamic else ())))


@row("AOTInductor", speed="nightly")
def aot_inductor(s: Subject) -> None:
    """A package of AOTInductor, compiled, loaded and run with other values."""
    _packaged(s, dynamic=False)


@row("AOTInductor, dynamic steps and batch", speed="nightly")
def aot_inductor_dynamic(s: Subject) -> None:
    """The same with dynamic sizes, run at other ones."""
    _packaged(s, dynamic=True)


def _onnx(s: Subject, *, dynamo: bool) -> None:
    onnx = package("onnx.reference")
    if dynamo:
        package("onnxscript")
    trial = _mean(s, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(Around(trial), _arguments(trial), str(path), dynamo=dynamo, verbose=False)
        evaluator = onnx.ReferenceEvaluator(str(path))
        tensors = _arguments(trial)
        feeds = dict(zip(evaluator.input_names, (t.numpy() for t in tensors), strict=True))
        found = [torch.from_numpy(result) for result in evaluator.run(None, feeds)]
        trial.same_values(tuple(found))


@row("ONNX, from torch.export", speed="slow")
def onnx_dynamo(s: Subject) -> None:
    """torch.onnx.export with dynamo=True, run by onnx's reference evaluator."""
    _onnx(s, dynamo=True)


@row("ONNX, from TorchScript")
def onnx_torchscript(s: Subject) -> None:
    """torch.onnx.export with dynamo=False, run by onnx's reference evaluator."""
    _onnx(s, dynamo=False)


def _jit_traced(trial: Trial) -> Any:
    return torch.jit.trace(Around(trial), _arguments(trial))


@row("jit.trace")
def traced(s: Subject) -> None:
    """torch.jit.trace, at the same and at other sizes, with the gradients of all arguments."""
    trial = _mean(s)
    traced = _jit_traced(trial)
    _check(trial, traced, ((5, 3), *OTHER_SIZES))
    trial.trains(traced)


@row("jit.trace, saved and loaded")
def traced_saved(s: Subject) -> None:
    """A traced module, saved and loaded, at other sizes."""
    trial = _mean(s)
    _check(trial, _loaded(_jit_traced(trial), torch.jit), ((5, 3), *OTHER_SIZES))


@row("jit.trace of cells")
def traced_cells(s: Subject) -> None:
    """torch.jit.trace of a cell, with gradients and without, at other batches."""
    trial = _mean(s, batch=5)
    model = _Symbolic(trial, trial.cell())
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            traced = torch.jit.trace(model, trial.x[0, :2])
            same(traced(trial.x[1]), model(trial.x[1]))


class _Scripted(nn.Module):
    """A model that torch.jit.script compiles."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@row("jit.script")
def scripted(s: Subject) -> None:
    """torch.jit.script of a model around it."""
    trial = _mean(s)
    module = torch.jit.script(_Scripted(trial.module))
    expect(module(trial.x).shape == (*trial.x.shape[:2], HIDDEN), "the output has another shape")
    if not s.has_noise:  # which a scripted module draws
        same(module(trial.x), trial.truth(trial.detached, trial.x)[0], what="output")


class _Symbolic(nn.Module):
    """A model that torch.fx traces: its RNN is to be one node."""

    def __init__(self, trial: Trial, rnn: nn.Module) -> None:
        super().__init__()
        self.before, self.rnns = nn.Identity(), nn.Sequential(rnn)
        self.given = dict(trial.given)
        self.is_one = rnn is not trial.module and trial.subject.cell != "lstm"

    def forward(self, x: Tensor, h: Any = None, c: Any = None) -> Tensor:
        results = self.rnns[0](self.before(x), h if c is None else (h, c), **self.given)
        return (results if self.is_one else results[0]) * 2


def _traced_by_fx(model: nn.Module, state_count: int) -> nn.Module:
    left_out = dict.fromkeys(["h", "c"][state_count:])
    traced = fx.symbolic_trace(model, concrete_args=left_out)
    nodes = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    expect(nodes == ["before", "rnns.0"], f"the nodes are {nodes}")
    return traced


@row("fx.symbolic_trace")
def symbolic_trace(s: Subject) -> None:
    """torch.fx.symbolic_trace of a model around it, with states or not: one node; a copy trains."""
    trial = _mean(s)
    for states in ([], trial.states):
        model = _Symbolic(trial, trial.module)
        traced = copy.deepcopy(_traced_by_fx(model, len(states)))
        expect(list(traced.state_dict()) == list(model.state_dict()), "other names of weights")
        for seq_len in (5, 7):
            x = torch.randn(seq_len, *trial.x.shape[1:], dtype=torch.float64)
            same(traced(x, *states), 2 * trial.truth(trial.detached, x, *states)[0])
        model.zero_grad()
        for module in (model, traced):
            module(trial.x, *states).sin().sum().backward()
        grads = [[w.grad for w in module.parameters()] for module in (model, traced)]
        same(grads[1], grads[0], what="gradient")
    if s.is_ours:
        must_raise(lambda: fx.symbolic_trace(trial.module), "as a node of a larger module")


@row("fx.symbolic_trace of cells")
def symbolic_trace_cells(s: Subject) -> None:
    """The same of a model around a cell."""
    trial = _mean(s)
    model = _Symbolic(trial, trial.cell())
    traced = _traced_by_fx(model, 0)
    for batch in (3, 2):
        same(traced(trial.x[0, :batch]), model(trial.x[0, :batch]), 0.0)


@row("deepcopy")
def copied(s: Subject) -> None:
    """A deep copy trains on its own, with the same gradients."""
    trial = Trial(s, num_layers=2)
    before, trial.module = trial.module, copy.deepcopy(trial.module)
    trial.trains()
    expect(all(w.grad is None for w in before.parameters()), "the copy shares its gradients")


@row("pickle")
def pickled(s: Subject) -> None:
    """A module through pickle, and through torch.save and torch.load, trains right."""
    for way in ("pickle", "torch"):
        trial = Trial(s, num_layers=2)
        buffer = io.BytesIO()
        if way == "pickle":
            trial.module = pickle.loads(pickle.dumps(trial.module))
        else:
            torch.save(trial.module, buffer)
            buffer.seek(0)
            trial.module = torch.load(buffer, weights_only=False)
        trial.trains()


@row("torch.package")
def packaged(s: Subject) -> None:
    """A module through torch.package, its library left outside."""
    trial = Trial(s)
    buffer = io.BytesIO()
    with torch.package.PackageExporter(buffer) as exporter:
        exporter.extern(["fusedrnn.**", "torch.**", "bench.**", "sys", "io"])
        exporter.save_pickle("model", "model.pkl", trial.module)
    buffer.seek(0)
    trial.module = torch.package.PackageImporter(buffer).load_pickle("model", "model.pkl")
    trial.trains()
