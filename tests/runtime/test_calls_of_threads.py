"""Calls of several threads, and the locks that let the threads of autograd pass."""

from __future__ import annotations

import ctypes
import sys
import threading
import types

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn import _locks as locks

pytestmark = pytest.mark.usefixtures("steps_in_python")

SEQ_LEN, BATCH, H = 16, 2, 3


def test_two_threads() -> None:
    """Backward of one thread exchanges weights; the other one's gradients must not get lost."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=torch.float64))
    x = torch.randn(SEQ_LEN, BATCH, H, dtype=torch.float64)
    rnn(x)[0].sum().backward()
    expected = [p.grad.clone() for p in rnn.parameters()]
    rnn.zero_grad()

    def work() -> None:
        for _ in range(20):
            rnn(x)[0].sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(rnn.cell.weight_ih, nn.Parameter)
    for parameter, gradient in zip(rnn.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 40 * gradient)


def test_a_lock_lets_those_pass_who_work_for_its_holder() -> None:
    lock, done = locks.CallerLock(), []

    def work(caller: object | None) -> None:
        if caller is not None:  # as autograd does for its threads
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(caller))  # torch 2.11 gives it back
            torch._C._stash_obj_in_tls(locks._KEY, caller)
        with lock:
            done.append(caller)

    with lock, lock:
        caller = torch._C._get_obj_in_tls(locks._KEY)
        threads = [threading.Thread(target=work, args=(c,)) for c in (caller, None)]
        for thread in threads:
            thread.start()
        threads[0].join(30)
        assert done == [caller]
    threads[1].join(30)
    assert done[1:] == [None]


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="of a later torch")
def test_a_thread_keeps_nothing_of_a_lock() -> None:
    """At its end torch would ask for the interpreter, and abort if that is gone by then."""
    first, second = locks.CallerLock(), locks.CallerLock()
    with first:
        with second, first:
            pass
        assert torch._C._is_key_in_tls(locks._KEY)
    assert not torch._C._is_key_in_tls(locks._KEY)


def test_while_another_thread_imports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the modules then, but without its names."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H))
    x = torch.randn(SEQ_LEN, BATCH, H, requires_grad=True)
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    rnn(x)[0].sum().backward()
    assert x.grad is not None
