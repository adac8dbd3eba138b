"""Random schedules of calls, backward passes, steps and changes: a bank against nn.ModuleList.

Everything must have equal bits, throughout. Where the two differ on purpose: under save_on_cpu and
in a checkpoint that runs again torch goes on with other weights than those of forward, without a
word, and a bank raises; saved statistics of batch norm that changed raise in torch, and a bank has
copied them.
"""

from __future__ import annotations

import copy
import functools
import io
import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from bank.bank_modules import INPUT, KINDS, Tied
from bank.emulated_device import EmulatedDevice, Watch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import fusedrnn

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.AdamW, {"lr": 0.05, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
]
MODES = ["plain", "plain", "checkpoint", "offload", "twice", "active", "autocast"]
ACTIONS = {
    "forward": 10,
    "two": 4,
    "backward": 10,
    "step": 4,
    "zero": 2,
    "prefetch": 4,
    "eval": 3,
    "save": 1,
    "load": 1,
    "copy": 1,
    "assign": 1,
    "drop": 1,
    "train": 1,
    "flat_weight": 1,
}


def assert_equal(ours: Any, theirs: Any, where: str, *, near: bool = False) -> None:
    """Compares named tensors, of which some may be None.

    Args:
        near: Rounding may differ. Ours is then written to theirs.
    """
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        if near and a is not None and b is not None and torch.allclose(a, b, rtol=2e-2, atol=2e-3):
            b.copy_(a)
            continue
        is_same = (a is None) == (b is None) and (a is None or torch.equal(a, b))
        assert is_same, f"{where}: {name} differs"


@functools.cache
def has_bfloat16_lstm() -> bool:
    """torch's LSTM in bfloat16 fails on processors without AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True


class Schedule:
    """One schedule, by its kind and seed."""

    def __init__(self, kind: str, seed: int, *, is_mixed: bool = False, step_on: str = "host"):
        self.kind, self.random = kind, random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        self.has_tied = kind == "tied" or is_mixed
        models = [KINDS[kind]() for _ in range(self.random.choice([1, 2, 3, 5, 8]))]
        if is_mixed:  # tasks of other shapes
            models += [KINDS["mlp"](), Tied()]
        self.tasks = len(models)
        self.list = nn.ModuleList(copy.deepcopy(models))
        slots = self.random.choice([1, 2, 3])
        self.bank = fusedrnn.WeightBank(models, device="cpu", slots=slots, step_on=step_on)
        self.bank._use_engine(EmulatedDevice(seed))
        self.optimizer = self.random.choice(OPTIMIZERS)
        self.by_task = self.random.random() < 0.5
        self.new_optimizers()
        self.pending: list[Any] = []
        self.counts: Counter[str] = Counter()

    def new_optimizers(self) -> None:
        cls, options = self.optimizer
        trained = [p for p in self.bank.parameters() if p.requires_grad]
        self.ours = self.bank.optimizer(cls, **options) if self.by_task else cls(trained, **options)
        self.theirs = cls([p for p in self.list.parameters() if p.requires_grad], **options)

    def run(self, steps: int = 60) -> Counter[str]:
        # A cell is not compiled where a mode looks at its operations.
        with nullcontext() if self.kind == "recurrent" else Watch(self.bank):
            for step in range(steps):
                action = self.random.choices([*ACTIONS], [*ACTIONS.values()])[0]
                self.step = step
                self.t = self.random.randrange(self.tasks)
                getattr(self, f"do_{action}")()
                states = self.bank.state_dict().items(), self.list.state_dict().items()
                assert_equal(*states, f"after {action}")
        slots = self.bank._device.slots
        self.counts.update(copies=slots.copies, hits=slots.hits, extra=slots.extra)
        self.counts["reloads"] = self.bank._device.reloads
        return self.counts

    def call(self, is_bank: bool, t: int, x: Tensor, mode: str, seed: int) -> Tensor:
        torch.manual_seed(seed)
        model = self.bank if is_bank else self.list

        def run(x: Tensor) -> Tensor:
            return model(t, x) if is_bank else model[t](x)

        if mode == "checkpoint":
            return checkpoint(run, x, use_reentrant=False)
        if mode == "offload":
            with torch.autograd.graph.save_on_cpu():
                return run(x)
        if mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return run(x).float()
        if mode == "twice":
            return run(x) + run(x.flip(0))
        if mode == "active" and is_bank:
            with model.active(t) as module:
                return module(x)
        return run(x)

    def inputs(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(5, 2, INPUT)
        wants = self.random.random() < 0.3
        return x.clone().requires_grad_(wants), x.clone().requires_grad_(wants)

    def do_forward(self, is_two: bool = False) -> None:
        x, y = self.inputs()
        modes = [self.random.choice(MODES) for _ in range(2)]
        # A cell is not compiled under autocast.
        if self.kind == "recurrent" or (self.kind == "nn_lstm" and not has_bfloat16_lstm()):
            modes = ["plain" if mode == "autocast" else mode for mode in modes]
        if self.kind == "batch_norm" and not self.bank.training:
            # save_on_cpu leaves statistics where they are, so torch would go on with later ones.
            modes = ["plain" if mode == "offload" else mode for mode in modes]
        seeds = [self.random.randrange(1000) for _ in range(2)]
        u = self.random.randrange(self.tasks)
        a = self.call(True, self.t, x, modes[0], seeds[0]).square().mean()
        b = self.call(False, self.t, y, modes[0], seeds[0]).square().mean()
        if is_two:
            a = a + self.call(True, u, x, modes[1], seeds[1]).tanh().sum()
            b = b + self.call(False, u, y, modes[1], seeds[1]).tanh().sum()
        assert_equal([("loss", a)], [("loss", b)], "forward")
        self.pending.append((a, b, x, y, modes if is_two else modes[:1]))
        self.counts["forwards"] += 1

    def do_two(self) -> None:
        self.do_forward(is_two=True)

    def do_backward(self) -> None:
        if not self.pending:
            return
        a, b, x, y, modes = self.pending.pop(self.random.randrange(len(self.pending)))
        retain = self.random.random() < 0.2
        errors: list[Exception | None] = []
        for loss in (a, b):
            try:
                loss.backward(retain_graph=retain)
                errors.append(None)
            except RuntimeError as error:
                errors.append(error)
        self.counts["backwards"] += 1
        ours, theirs = errors
        if (ours is None) != (theirs is None):
            is_meant = ours is not None and bool({"offload", "checkpoint"} & set(modes))
            is_meant = is_meant or (ours is None and self.kind == "batch_norm")
            assert is_meant, f"backward of {modes}: bank {ours}, list {theirs}"
        if ours is not None or theirs is not None:
            self.counts["raised"] += 1
            if "checkpoint" in modes:  # one of the two may have run it again before it raised
                self.take_buffers()
            self.ours.zero_grad()
            self.theirs.zero_grad()
            self.pending.clear()
            return
        if retain:
            self.pending.append((a, b, x, y, modes))
        assert_equal([("x", x.grad)], [("x", y.grad)], f"backward of {modes}")
        # Under autocast torch casts a leaf once, and adds its gradients of all uses in 16 bits.
        uses_again = self.has_tied or self.kind == "recurrent_in_python"
        near = "autocast" in modes and uses_again
        self.compare_gradients(f"backward of {modes}", near)

    def compare_gradients(self, where: str, near: bool = False) -> None:
        ours = [(n, p.grad) for n, p in self.bank.named_parameters()]
        theirs = [(n, p.grad) for n, p in self.list.named_parameters()]
        assert_equal(ours, theirs, where, near=near)

    def do_step(self) -> None:
        self.ours.step()
        with _disable_current_modes():  # under a mode, torch's foreach counts no change
            self.theirs.step()
        if self.random.random() < 0.8:
            self.ours.zero_grad()
            self.theirs.zero_grad()

    def do_zero(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.zero_grad(set_to_none=self.step % 2 == 0)

    def do_prefetch(self) -> None:
        self.bank.prefetch(self.t)

    def do_eval(self) -> None:
        x = torch.randn(5, 2, INPUT)
        with self.random.choice([torch.no_grad, torch.inference_mode])():
            results = [
                [("y", self.call(is_bank, self.t, x, "plain", 3))] for is_bank in (True, False)
            ]
            assert_equal(*results, "eval")

    def do_save(self) -> None:
        files = io.BytesIO(), io.BytesIO()
        for model, file in zip((self.bank, self.list), files, strict=True):
            torch.save(model.state_dict(), file)
            file.seek(0)
        self.list.load_state_dict(torch.load(files[0]))
        self.bank.load_state_dict(torch.load(files[1]))

    def do_load(self) -> None:
        state = copy.deepcopy(self.list[self.t].state_dict())
        self.bank[self.t].load_state_dict(state)
        self.list[self.t].load_state_dict(state)

    def do_flat_weight(self) -> None:
        ours, theirs = self.bank[self.t], self.list[self.t]
        if isinstance(getattr(theirs, "rnn", None), fusedrnn.GRU | fusedrnn.LSTM):
            ours.rnn.flat_weight.mul_(0.9)
            theirs.rnn.flat_weight.mul_(0.9)

    def do_assign(self) -> None:
        state = copy.deepcopy(self.list[self.t].state_dict())
        for model in (self.bank[self.t], self.list[self.t]):
            before = dict(model.named_parameters(remove_duplicate=False))
            model.load_state_dict(copy.deepcopy(state), assign=True)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(before[name].requires_grad)
            if isinstance(model, Tied):
                model.b.weight = model.a.weight
        self.new_optimizers()
        self.pending.clear()

    def do_copy(self) -> None:
        twin = copy.deepcopy(self.bank)
        twin._use_engine(EmulatedDevice(1))
        x = torch.randn(5, 2, INPUT)
        with torch.no_grad():
            a = twin(self.t, x)
            b = self.list[self.t](x)
            if not isinstance(a, Tensor) or self.kind != "stochastic_gru":
                assert_equal([("y", a)], [("y", b)], "copy")
            for parameter in twin.parameters():
                parameter.add_(1)
        self.take_buffers()  # only the copy of the bank was called

    def take_buffers(self) -> None:
        """Where only the bank has changed them, or only the list."""
        for ours, theirs in zip(self.bank.buffers(), self.list.buffers(), strict=True):
            theirs.copy_(ours)

    def do_drop(self) -> None:
        self.pending.clear()

    def do_train(self) -> None:
        self.bank.train(self.step % 2 == 0)
        self.list.train(self.step % 2 == 0)
        if self.kind == "batch_norm":
            # Training does not count its changes of statistics, with which torch would go on in
            # backward of a call that was not training.
            self.pending.clear()
