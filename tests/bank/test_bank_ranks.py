"""Processes that train one bank together, by gloo: numbers, messages, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from bank.rank_processes import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

DDP = "ddp", "ddp+slots"
FSDP = "fsdp", "fsdp+slots"

SCHEDULES = "equal_tasks unequal_tasks several_tasks no_task_on_one_rank accumulation users"
KINDS = (
    "unequal_grus tied one_sided sparse dtypes batch_norm frozen freezing_between_steps clipping "
    "own_optimizer step_on_device checkpoints unused_parameters added_and_deleted_tasks shared "
    "gathered_anew"
)
GRADIENTS = (
    "hooks functions_that_return_gradients discarded_gradients changed_gradients "
    "frozen_between_calls gradients_by_other_ways hooks_of_unused_weights"
)
BEHAVIOUR = (
    "passes_that_fail bytes_sent buffers_stay_at_home outside_of_the_wrapper "
    "two_banks all_processes halves zero_redundancy"
)
ERRORS = (
    "another_number_of_passes other_tasks other_shapes other_names other_frozen_parameters "
    "other_weights modules_that_one_rank_changed wrapped_without_exclude a_replica "
    "banks_in_another_order sharded_tasks"
)


def check(folder: Path, file: str, names: str, ways: Sequence[str], ranks: int = 2) -> None:
    """Starts processes once, which takes seconds, for all these cases."""
    run(folder, f"bank.rank_{file}", list(itertools.product(names.split(), ways)), ranks)


def test_schedules(tmp_path: Path) -> None:
    check(tmp_path, "cases", SCHEDULES, ["ddp", "ddp+slots", "fsdp+slots"])


@pytest.mark.slow
def test_schedules_by_fsdp(tmp_path: Path) -> None:
    check(tmp_path, "cases", SCHEDULES, FSDP)


@pytest.mark.ci_has_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("ways", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_kinds_of_tasks(tmp_path: Path, ways: Sequence[str]) -> None:
    check(tmp_path, "cases", KINDS, ways)


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    check(tmp_path, "cases", "three_ranks", DDP + FSDP, ranks=3)


def test_behaviour(tmp_path: Path) -> None:
    check(tmp_path, "behaviour", BEHAVIOUR, DDP)


def test_gradients(tmp_path: Path) -> None:
    check(tmp_path, "gradients", GRADIENTS, DDP)


@pytest.mark.slow
def test_behaviour_by_fsdp(tmp_path: Path) -> None:
    check(tmp_path, "behaviour", BEHAVIOUR, FSDP)
    check(tmp_path / "other", "gradients", GRADIENTS, FSDP)


def test_errors(tmp_path: Path) -> None:
    check(tmp_path, "errors", ERRORS, ["ddp", "fsdp+slots"])


@pytest.mark.nightly
def test_errors_after_the_groups_timeout(tmp_path: Path) -> None:
    check(tmp_path, "errors", ERRORS, ["ddp+slots", "fsdp"])
    names = "a_rank_that_never_comes a_rank_that_forgets"
    check(tmp_path / "other", "errors", names, ["ddp", "fsdp+slots"])
