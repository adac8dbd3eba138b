"""Checks of torch.export, AOTInductor, ONNX, TorchScript, torch.fx, and of copies and pickles."""

from __future__ import annotations

import copy
import importlib.util
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

from .rows import group
from .subjects import HIDDEN, Skipped, Subject
from .trial import Around, Trial, expect, loss, same

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
    trial = _mean(s, num_layers=2, bidirectional=True)
    module = _exported(trial).module()
    trial.x = torch.randn_like(trial.x)
    trial.same_values(module(*_arguments(trial)))


@row("dynamic steps and batch")
def dynamic(s: Subject) -> None:
    """torch.export with a dynamic number of steps and rows, run at other sizes."""
    trial = _mean(s)
    _check(trial, _exported(trial, dynamic=True).module(), OTHER_SIZES)


@row("strict")
def strict(s: Subject) -> None:
    """The same with strict=True."""
    trial = _mean(s)
    _check(trial, _exported(trial, dynamic=True, strict=True).module(), OTHER_SIZES)


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


@row("saved and loaded")
def saved(s: Subject) -> None:
    """A program with dynamic sizes, saved and loaded, run at other sizes."""
    trial = _mean(s)
    buffer = io.BytesIO()
    torch.export.save(_exported(trial, dynamic=True), buffer)
    buffer.seek(0)
    _check(trial, torch.export.load(buffer).module(), OTHER_SIZES)


@row("in a fresh process", slow=True)
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


@row("run_decompositions")
def decompositions(s: Subject) -> None:
    """An exported program after run_decompositions, at other sizes."""
    trial = _mean(s)
    _check(trial, _exported(trial, dynamic=True).run_decompositions().module(), OTHER_SIZES)


@row("training after export")
def trained(s: Subject) -> None:
    """An exported module has the gradients of input, states and weights."""
    trial = _mean(s)
    module = _exported(trial).module()
    leaves = [t.clone().requires_grad_() for t in _arguments(trial)]
    outputs = module(*leaves)
    loss(tuple(outputs)).backward()
    _, grads = trial.expected()
    found = [leaf.grad for leaf in leaves]
    named = {name.removeprefix("rnn."): w.grad for name, w in module.named_parameters()}
    found += [named[name] for name in trial.weights]
    same(found, list(grads.values()), what="gradient")


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


@row("AOTInductor", slow=True)
def aot_inductor(s: Subject) -> None:
    """A package of AOTInductor, compiled, loaded and run with other values."""
    _packaged(s, dynamic=False)


@row("AOTInductor, dynamic steps and batch", slow=True)
def aot_inductor_dynamic(s: Subject) -> None:
    """The same with dynamic sizes, run at other ones."""
    _packaged(s, dynamic=True)


def _needs_onnx(*names: str) -> None:
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is a folder of that name
            raise Skipped(f"{name} is not installed")


def _onnx(s: Subject, *, dynamo: bool) -> None:
    _needs_onnx("onnx", *(["onnxscript"] if dynamo else []))
    trial = _mean(s, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(Around(trial), _arguments(trial), str(path), dynamo=dynamo, verbose=False)
        evaluator: Any = importlib.import_module("onnx.reference").ReferenceEvaluator(str(path))
        tensors = _arguments(trial)
        feeds = dict(zip(evaluator.input_names, (t.numpy() for t in tensors), strict=True))
        found = [torch.from_numpy(result) for result in evaluator.run(None, feeds)]
        trial.same_values(tuple(found))


@row("ONNX, from torch.export")
def onnx_dynamo(s: Subject) -> None:
    """torch.onnx.export with dynamo=True, run by onnx's reference evaluator."""
    _onnx(s, dynamo=True)


@row("ONNX, from TorchScript")
def onnx_torchscript(s: Subject) -> None:
    """torch.onnx.export with dynamo=False, run by onnx's reference evaluator."""
    _onnx(s, dynamo=False)


@row("jit.trace")
def traced(s: Subject) -> None:
    """torch.jit.trace, at the same and at other sizes."""
    trial = _mean(s)
    traced = torch.jit.trace(Around(trial), _arguments(trial), check_trace=False)
    _check(trial, traced, ((5, 3), *OTHER_SIZES))


@row("jit.trace, saved and loaded")
def traced_saved(s: Subject) -> None:
    """A traced module, saved and loaded, at other sizes."""
    trial = _mean(s)
    traced = torch.jit.trace(Around(trial), _arguments(trial), check_trace=False)
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    _check(trial, torch.jit.load(buffer), ((5, 3), *OTHER_SIZES))


@row("training after jit.trace")
def traced_training(s: Subject) -> None:
    """A traced module has the gradients of input, states and weights."""
    trial = _mean(s)
    traced = torch.jit.trace(Around(trial), _arguments(trial), check_trace=False)
    trial.trains(traced)


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
    """A model that torch.fx traces: its RNN is to be a leaf."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.before, self.rnn = nn.Identity(), trial.module
        self.given = dict(trial.given)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.before(x), **self.given)[0] * 2


@row("fx.symbolic_trace")
def symbolic_trace(s: Subject) -> None:
    """torch.fx.symbolic_trace of a model around it, run at other sizes."""
    trial = _mean(s)
    module = fx.symbolic_trace(_Symbolic(trial))
    for seq_len in (5, 7):
        x = torch.randn(seq_len, *trial.x.shape[1:], dtype=torch.float64)
        same(module(x), 2 * trial.truth(trial.detached, x)[0])


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
