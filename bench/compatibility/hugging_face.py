"""Checks of files by huggingface_hub, accelerate and transformers, which write safetensors."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from .checkpoints import resumed, round_trip
from .rows import group
from .subjects import SUBJECTS, Subject, package
from .trial import Trial, expect, same

row = group("checkpoints")
SHARD = 2_000  # bytes, of 3 kB or more: there are several files


def _library(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # is read when huggingface_hub is imported
    return package(name)


@row("huggingface_hub, save_torch_model")
def hub_model(s: Subject) -> None:
    """save_torch_model and load_torch_model, in several files."""
    library = _library("huggingface_hub")

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        library.save_torch_model(module, folder, max_shard_size=SHARD)
        expect(len(list(folder.glob("*.safetensors"))) > 1, "there is one file")
        library.load_torch_model(other, folder, strict=False)  # of each file, in older versions
        return other

    round_trip(s, way)


@row("huggingface_hub, save_torch_state_dict")
def hub_state_dict(s: Subject) -> None:
    """save_torch_state_dict and load_state_dict_from_file."""
    library = _library("huggingface_hub")

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        library.save_torch_state_dict(module.state_dict(), folder)
        other.load_state_dict(library.load_state_dict_from_file(folder / "model.safetensors"))
        return other

    round_trip(s, way)


@row("huggingface_hub, PyTorchModelHubMixin")
def hub_mixin(s: Subject) -> None:
    """save_pretrained and from_pretrained of a model with PyTorchModelHubMixin."""

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        model = _mixed(_library("huggingface_hub"))(s.name)
        model.rnn = module
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).rnn

    round_trip(s, way)


@functools.cache
def _mixed(library: Any) -> Any:
    class Model(nn.Module, library.PyTorchModelHubMixin):  # type: ignore[misc]
        def __init__(self, column: str) -> None:
            super().__init__()
            self.rnn = SUBJECTS[column].module(dtype=torch.float64, num_layers=2)

    return Model


@contextmanager
def _accelerate() -> Iterator[Any]:
    """The library; nothing that it keeps about the process is left."""
    library = _library("accelerate")
    states = package("accelerate.state")
    try:
        with mock.patch.object(gc, "collect"):  # takes longer than all else
            yield library
    finally:
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()


@row("accelerate, save_state")
def accelerate_state(s: Subject) -> None:
    """save_state and load_state of a module and an optimizer: training goes on as before."""

    def way(first: Trial, optimizer: Any, second: Trial, other: Any, folder: Path) -> None:
        for trial, own, is_first in ((first, optimizer, True), (second, other, False)):
            with _accelerate() as library:
                accelerator = library.Accelerator(cpu=True)
                accelerator.prepare(trial.module, own)
                if is_first:
                    accelerator.save_state(str(folder))
                else:
                    accelerator.load_state(str(folder))

    resumed(s, way)


@row("accelerate, save_model")
def accelerate_model(s: Subject) -> None:
    """Accelerator.save_model and load_checkpoint_in_model."""

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        with _accelerate() as library:
            library.Accelerator(cpu=True).save_model(module, folder)
            library.load_checkpoint_in_model(other, folder, strict=True)
        return other

    round_trip(s, way, is_flat=False)


@row("accelerate, init_empty_weights")
def accelerate_empty(s: Subject) -> None:
    """load_checkpoint_and_dispatch of a module made under init_empty_weights."""

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        with _accelerate() as library:
            library.Accelerator(cpu=True).save_model(module, folder)
            with library.init_empty_weights():
                empty = s.module(dtype=torch.float64, num_layers=2)
            return library.load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"})

    round_trip(s, way, is_flat=False)


@row("accelerate, offloaded")
def accelerate_offloaded(s: Subject) -> None:
    """cpu_offload and disk_offload, which fetch the weights for each call and drop them again."""
    for name in ("cpu_offload", "disk_offload"):
        trial = Trial(s, num_layers=2)
        values = trial.detached
        with _accelerate() as library, tempfile.TemporaryDirectory() as folder:
            places = [folder] if name == "disk_offload" else []
            getattr(library, name)(trial.module, *places, execution_device="cpu")
            for _ in range(2):
                with torch.no_grad():
                    outputs = trial.call(trial.x, *trial.states)
                same(outputs, trial.truth(values, trial.x, *trial.states), what="output")
                expect(all(w.is_meta for w in trial.weights.values()), "the weights are kept")


def _transformed(s: Subject, save: dict[str, Any], load: dict[str, Any]) -> None:
    library = _library("transformers")
    library.utils.logging.disable_progress_bar()

    def way(module: nn.Module, other: nn.Module, folder: Path) -> nn.Module:
        config_class, model_class = _pretrained(library)
        model = model_class(config_class(s.name))
        model.rnn = module
        model.save_pretrained(folder, **save)
        loaded, found = model_class.from_pretrained(folder, output_loading_info=True, **load)
        expect(not any(found.values()), f"{found}")
        return loaded.rnn

    round_trip(s, way, is_flat=False)


@row("transformers, save_pretrained")
def pretrained(s: Subject) -> None:
    """A PreTrainedModel by save_pretrained and from_pretrained, which makes it without memory."""
    _transformed(s, {}, {})


@row("transformers, device_map")
def pretrained_mapped(s: Subject) -> None:
    """The same in several files, with device_map, by which accelerate places the weights."""
    _library("accelerate")
    _transformed(s, {"max_shard_size": SHARD}, {"device_map": {"": "cpu"}})


@functools.cache
def _pretrained(library: Any) -> tuple[Any, Any]:
    class Config(library.PretrainedConfig):  # type: ignore[misc]
        model_type = "recurrent"

        def __init__(self, column: str = "LSTM", **options: Any) -> None:
            self.column = column
            super().__init__(**options)

    class Model(library.PreTrainedModel):  # type: ignore[misc]
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.rnn = SUBJECTS[config.column].module(dtype=torch.float64, num_layers=2)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

    return Config, Model
