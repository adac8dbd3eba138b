"""Compiled cells in processes: those that train together, forks, workers, and a call that waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from recurrent.test_distributed import check_two_processes, needs_distributed
from torch import Tensor, nn

import fusedrnn
from fusedrnn._front import traced_step

T, B, H = 6, 4, 5


class Model(nn.Module):
    """A linear layer, and a cell that must run as a program."""

    def __init__(self, compile: str = "require") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(H, H)
        self.rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), compile=compile)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.enter(x))[0]  # type: ignore[no-any-return]


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(T, B, H, dtype=torch.float64)


def loss_and_gradients(model: nn.Module) -> list[Tensor]:
    loss = model(rows()).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def expected() -> list[Tensor]:
    return loss_and_gradients(Model("never"))


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@needs_distributed
def test_two_processes_start_at_once(folder: Path, tmp_path: Path) -> None:
    """Both compile the same cell, which nobody has compiled before."""
    check_two_processes(tmp_path, "require")
    assert len(list(folder.rglob("*.so"))) == 1


def in_fork(function: Callable[[], Any], seconds: float = 60) -> None:
    """Runs a function in a forked process, which must end well."""
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert status == 0
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the forked process hangs")


def test_forks(folder: Path) -> None:
    """Before the first use, after it, and while another thread compiles."""
    exact, model = expected(), Model()
    # Without backward: autograd of torch refuses to run in a fork of a process that has used it.
    inference = torch.no_grad()

    def infer() -> None:
        with inference:
            close(model(rows()).square().sum(), exact[0])

    def infer_by_another_class() -> None:
        models = [Model(compile) for compile in ("require", "never")]
        for model in models:
            model.rnn.cell = nn.RNNCell(H, H).double()
        models[1].load_state_dict(models[0].state_dict())
        with inference:
            close(*(model(rows()) for model in models))

    in_fork(infer)
    close(loss_and_gradients(model), exact)
    in_fork(infer)
    in_fork(infer_by_another_class)  # which the child compiles
    # Made here: threads that set the seed of torch's one generator take each other's numbers.
    single, given, others = Model().float(), rows().float(), [Model() for _ in range(3)]
    thread = threading.Thread(target=lambda: single(given))
    thread.start()
    for other in others:

        def infer_by_another(other: nn.Module = other) -> None:
            with inference:
                close(other(rows()).square().sum(), exact[0])

        in_fork(infer_by_another)
        time.sleep(0.1)
    thread.join(60)
    close(loss_and_gradients(model), exact)


@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_forks_while_another_thread_traces(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork waits for it, or the child has a lock of its own."""
    from torch._dynamo import convert_frame

    monkeypatch.setattr(traced_step, "_LONGEST_WAIT", 1.0)
    module, x = Model().bfloat16(), rows().bfloat16()
    has_lock = threading.Event()

    def trace() -> None:
        with convert_frame.compile_lock:
            has_lock.set()
            time.sleep(seconds)

    thread = threading.Thread(target=trace)
    thread.start()
    has_lock.wait()

    def infer() -> None:
        with torch.no_grad():
            module(x)

    in_fork(infer)
    thread.join()
    infer()


class Encoded(torch.utils.data.Dataset[Tensor]):
    """What a model makes of its rows, computed in workers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return B

    def __getitem__(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.model(rows()[:, i : i + 1])[:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_loader(start: str, folder: Path) -> None:
    model = Model()
    exact = Model("never")(rows()).detach().transpose(0, 1)
    context = mp.get_context(start)
    loader = torch.utils.data.DataLoader(
        Encoded(model), batch_size=2, num_workers=2, multiprocessing_context=context, timeout=100
    )
    close(torch.cat(list(loader)), exact)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt(folder: Path) -> None:
    """Of a long call: it ends, and so do later calls, with right results."""
    model = Model()
    exact = expected()
    close(loss_and_gradients(model), exact)
    long = torch.randn(20_000, 16, H, dtype=torch.float64)
    for seconds in (0.005, 0.05):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):
                model(long).sum().backward()
        timer.join()
        close(loss_and_gradients(model), exact)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_compiler(folder: Path) -> None:
    """While it traces, and while it builds: nothing is remembered, and the next call compiles."""
    exact, interrupts = expected(), 0
    for seconds in (0.05, 0.5, 1.0, 0.1):
        model = Model()
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            while timer.is_alive():  # until the signal is sent, which no call may outrun
                model(rows())
            model(rows())
        except KeyboardInterrupt:
            interrupts += 1
        timer.join()
        close(loss_and_gradients(model), exact)
    # Python loses what comes in a callback of a weak reference, and torch what comes in a guard.
    assert interrupts >= 2
    assert not list(folder.rglob("*.tmp"))
