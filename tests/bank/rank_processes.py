"""Processes that train one bank together, by gloo: each runs a list of cases."""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bank.emulated_device import emulated
from torch import nn

from fusedrnn import WeightBank

PATIENCE = timedelta(seconds=20)
"""For a message. A rank that failed has others wait for so long."""


class Here(NamedTuple):
    """One rank in one case."""

    rank: int
    world: int
    group: Any
    way: str
    """ "ddp" or "fsdp", with "+slots" on an emulated device."""

    @property
    def is_ddp(self) -> bool:
        return self.way.startswith("ddp")

    @property
    def has_slots(self) -> bool:
        return self.way.endswith("+slots")

    def bank(self, modules: Any, *args: Any, **options: Any) -> WeightBank:
        bank = WeightBank(modules, *args, device="cpu", process_group=self.group, **options)
        return emulated(bank, seed=self.rank) if self.has_slots else bank

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        """The model under DistributedDataParallel, or FSDP2, which leaves its banks alone."""
        if self.is_ddp:
            WeightBank.exclude(model)
            return nn.parallel.DistributedDataParallel(model, process_group=self.group, **options)
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        banks = [module for module in model.modules() if isinstance(module, WeightBank)]
        ignored = {
            parameter
            for bank in banks
            for key in bank.keys()  # noqa: SIM118
            for parameter in bank[key].parameters()
        }
        mesh = DeviceMesh.from_group(self.group, "cpu")
        return fully_shard(model, mesh=mesh, ignored_params=ignored)

    def everywhere(self, value: Any) -> list[Any]:
        """What each rank has given."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found


Cases = Sequence[tuple[str, str]]
"""The name of a function that takes a ``Here``, and the way."""


def work(rank: int, folder: str, world: int, module: str, cases: Cases) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    functions = vars(importlib.import_module(module))
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    failures = []
    for number, (name, way) in enumerate(cases):
        # A group for each case, so that messages of one that failed are in no other.
        group = dist.new_group(timeout=PATIENCE)
        torch.manual_seed(0)
        try:
            functions[name](Here(rank, world, group, way))
        except BaseException:  # also of pytest.raises
            failures.append(f"--- {name}, {way}, rank {rank} ---\n{traceback.format_exc()}")
        store.set(f"case {number} of {rank}", "over")
        store.wait([f"case {number} of {r}" for r in range(world)], 6 * PATIENCE)
    Path(folder, f"failures of {rank}.txt").write_text("\n".join(failures))
    os._exit(0)  # gloo's threads sometimes abort a process that takes its group down


def run(folder: Path, module: str, cases: Cases, world: int = 2) -> None:
    """Runs the cases of a module in ``world`` processes.

    Raises:
        AssertionError: Some have failed.
    """
    folder.mkdir(exist_ok=True)
    mp.spawn(work, (str(folder), world, module, cases), nprocs=world)
    failures = [Path(folder, f"failures of {rank}.txt").read_text() for rank in range(world)]
    assert not any(failures), "\n".join(failures)
