"""Checks of files: what torch and safetensors write of a module, and a module loaded from that."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .rows import group, table
from .subjects import Subject, distributed, package
from .trial import Trial, expect, loss, same

row = group("checkpoints")
Way = Callable[[nn.Module, nn.Module, Path], nn.Module]
"""Writes the first module into the folder, and returns a module loaded from there: the second one,
whose values are others, or one of its own."""


def fresh(trial: Trial, **options: Any) -> nn.Module:
    """A module like the trial's, with other values."""
    module = trial.subject.module(dtype=trial.dtype, **trial.options, **options)
    for weight in module.parameters():
        nn.init.uniform_(weight, -0.3, 0.3)
    return module


def round_trip(s: Subject, way: Way, *, is_flat: bool = True) -> None:
    """Checks the files that ``way`` writes, and that its module goes on as the first one would.

    ``is_flat``: whether ``flat_weight`` is there without a call of ``flatten_parameters``.
    """
    trial = Trial(s, num_layers=2)
    first, values = trial.module, trial.detached
    with tempfile.TemporaryDirectory() as folder:
        trial.module = way(first, fresh(trial), Path(folder))
        for written in _written(Path(folder)):
            same_names = written.keys() == values.keys()
            expect(same_names, f"the file has {len(written)} of {len(values)} weights")
            same(written, {name: values[name] for name in written}, 0.0, "what the file has")
        goes_on(trial, values)
    same(dict(first.named_parameters()), values, 0.0, "the module that was saved")
    if s.is_built_in:
        is_flat_again(trial.module, is_flat=is_flat)


def _written(folder: Path) -> list[dict[str, Tensor]]:
    """What the files of safetensors have, if there are any."""
    paths = list(folder.rglob("*.safetensors"))
    if not paths:
        return []
    files = [package("safetensors.torch").load_file(path) for path in paths]
    return [{name.removeprefix("rnn."): t for file in files for name, t in file.items()}]


def goes_on(trial: Trial, values: dict[str, Tensor]) -> None:
    """Checks that a module has these weights, and that a training step with them is right."""
    same(trial.detached, values, 0.0, "a weight")
    expect(list(trial.weights) == list(values), "other names of weights")
    trial.trains()
    expected = {name: values[name] - 0.1 * w.grad for name, w in trial.weights.items()}  # type: ignore[operator]
    torch.optim.SGD(trial.module.parameters(), lr=0.1).step()
    same(trial.detached, expected, 1e-12, "a weight after a step")


def is_flat_again(module: Any, *, is_flat: bool) -> None:
    """Checks that ``flat_weight`` has all weights."""
    if not is_flat:
        module.flatten_parameters()
    with torch.no_grad():
        module.flat_weight.fill_(0.25)
    expect(all((w == 0.25).all() for w in module.parameters()), "flat_weight is of other memory")


def _bytes(thing: Any) -> int:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.tell()


def _as_small_as_copies(given: dict[str, Tensor]) -> None:
    copies = {name: weight.detach().clone() for name, weight in given.items()}
    written, least = _bytes({n: w.detach() for n, w in given.items()}), _bytes(copies)
    expect(written < least + 64, f"{written} bytes instead of {least}")


@row("torch.save of one weight")
def one_weight(s: Subject) -> None:
    """torch.save of a single weight writes as many bytes as that of a copy."""
    for name, weight in Trial(s, num_layers=2).weights.items():
        _as_small_as_copies({name: weight})


@row("torch.save of a part of a state dict")
def part(s: Subject) -> None:
    """The same of one layer's entries; they load with strict=False."""
    trial = Trial(s, num_layers=2)
    chosen = dict(list(trial.module.state_dict().items())[len(trial.weights) // 2 :])
    _as_small_as_copies(chosen)
    buffer = io.BytesIO()
    torch.save(chosen, buffer)
    buffer.seek(0)
    other = fresh(trial)
    others = {n: w.detach().clone() for n, w in other.named_parameters()}
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=False)
    trial.module = other
    goes_on(trial, others | {name: w.clone() for name, w in chosen.items()})


@row("torch.save and torch.load")
def state_dict(s: Subject) -> None:
    """A state dict by torch.save writes each weight once; loaded, it trains right."""
    _as_small_as_copies(Trial(s, num_layers=2).module.state_dict())

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        torch.save(module.state_dict(), folder / "weights.pt")
        other.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
        return other

    round_trip(s, way)


@row("torch.save of a module")
def whole_module(s: Subject) -> None:
    """A whole module by torch.save and torch.load trains right."""

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        torch.save(module, folder / "module.pt")
        return torch.load(folder / "module.pt", weights_only=False)

    round_trip(s, way)


def _assigned(s: Subject, *, on_meta: bool) -> None:
    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        torch.save(module.state_dict(), folder / "weights.pt")
        state = torch.load(folder / "weights.pt", mmap=True, weights_only=True)
        other = other.to("meta") if on_meta else other
        other.load_state_dict(state, assign=True)
        return other

    round_trip(s, way)


table(
    row,
    _assigned,
    (
        "load_state_dict, assign=True",
        "A state dict mapped into memory by torch.load, and taken by assign=True, trains right.",
        {"on_meta": False},
    ),
    (
        "assign=True, meta device",
        "The same of a module on the meta device.",
        {"on_meta": True},
    ),
)


def continued(trial: Trial, optimizer: Any) -> None:
    """Two steps of training."""
    for _ in range(2):
        optimizer.zero_grad()
        loss(trial.call(trial.x, *trial.states)).backward()
        optimizer.step()


def resumed(s: Subject, way: Callable[[Trial, Any, Trial, Any, Path], object]) -> None:
    """Checks that training goes on as before in another module and optimizer.

    ``way`` writes the first trial's module and the first optimizer, and loads the second ones.
    """
    first, second = Trial(s, num_layers=2), Trial(s, num_layers=2)
    second.module = fresh(first)
    pairs = [(t, torch.optim.AdamW(t.module.parameters(), lr=0.05)) for t in (first, second)]
    for trial, optimizer in pairs:  # the second one has states of another training
        continued(trial, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        way(*pairs[0], *pairs[1], Path(folder))
    for trial, optimizer in pairs:
        continued(trial, optimizer)
    same(second.detached, first.detached, 1e-12, "a weight")


@row("resumed training")
def with_optimizer(s: Subject) -> None:
    """Training that goes on from state dicts of module and optimizer is as without the break."""

    def way(first: Trial, optimizer: Any, second: Trial, other: Any, folder: Path) -> None:
        torch.save([first.module.state_dict(), optimizer.state_dict()], folder / "states.pt")
        states = torch.load(folder / "states.pt", weights_only=True)
        second.module.load_state_dict(states[0])
        other.load_state_dict(states[1])

    resumed(s, way)


@row("torch.distributed.checkpoint")
def distributed_checkpoint(s: Subject) -> None:
    """torch.distributed.checkpoint of a state dict, by one process."""
    dcp = distributed("checkpoint")

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        dcp.save(module.state_dict(), checkpoint_id=folder, no_dist=True)
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        expect(saved.keys() == module.state_dict().keys(), f"{len(saved)} weights were written")
        size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
        clones = [_bytes(w.detach().clone()) for w in module.parameters()]
        expect(size < sum(clones) + 64 * len(clones), f"{size} bytes instead of {sum(clones)}")
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        other.load_state_dict(state)
        return other

    round_trip(s, way)


@row("torch.distributed.checkpoint, resumed")
def distributed_checkpoint_resumed(s: Subject) -> None:
    """The same of get_state_dict and set_state_dict, with an optimizer: training goes on."""
    dcp, states = distributed("checkpoint"), distributed("checkpoint.state_dict")

    def way(first: Trial, optimizer: Any, second: Trial, other: Any, folder: Path) -> None:
        weights, moments = states.get_state_dict(first.module, optimizer)
        saved = {"weights": weights, "moments": moments}
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        weights, moments = states.get_state_dict(second.module, other)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=folder, no_dist=True)
        states.set_state_dict(
            second.module, other, model_state_dict=weights, optim_state_dict=moments
        )

    resumed(s, way)


@row("safetensors, save_file")
def safetensors_file(s: Subject) -> None:
    """safetensors' save_file and load_file of a state dict."""
    library = package("safetensors.torch")

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        library.save_file(module.state_dict(), folder / "model.safetensors")
        other.load_state_dict(library.load_file(folder / "model.safetensors"))
        return other

    round_trip(s, way)


@row("safetensors, save_model")
def safetensors_model(s: Subject) -> None:
    """safetensors' save_model and load_model."""
    library = package("safetensors.torch")

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        library.save_model(module, str(folder / "model.safetensors"))
        missing, unexpected = library.load_model(other, folder / "model.safetensors")
        expect(not missing and not unexpected, f"missing: {missing}, unexpected: {unexpected}")
        return other

    round_trip(s, way)
