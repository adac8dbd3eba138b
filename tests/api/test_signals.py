"""An interruption ends a long call, and is not lost."""

import signal
import subprocess
import sys

import pytest
import torch

import fusedrnn


def test_an_interruption_that_is_swallowed_is_raised_in_the_end():
    """The exception is raised by that call, not by a later one."""
    seen = []

    def handler(number, frame):
        raise KeyError("of the handler")

    x = torch.randn(20_000, 32, 64)  # takes far more than half a second
    rnn = fusedrnn.GRU(64, 256)
    flat = list(rnn.parameters())
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)

        def call():
            try:
                gru = fusedrnn._cells.CELLS["gru"].index
                with torch.no_grad():
                    torch.ops.fusedrnn.forward(gru, x, torch.zeros(1, 32, 256), None, flat)
            except RuntimeError as error:
                seen.append(str(error))

        with pytest.raises(KeyError, match="of the handler"):
            fusedrnn._helpers.call_interruptibly(call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == ["fusedrnn: a signal has ended the call"]
    assert fusedrnn._helpers.call_interruptibly(len, "later") == 5


INTERRUPTED = """
import os, signal, sys, threading, time
import torch, fusedrnn

rnn = fusedrnn.GRU(64, 512)
x = torch.randn(20_000, 32, 64)  # minutes
small = x[:9].requires_grad_()
before = rnn(small)[0]
call = lambda: rnn(x)
if sys.argv[1] == "backward":
    # Ten seconds, after forward took a third of that.
    total = rnn(x[:2_000].requires_grad_())[0].sum()
    call = total.backward
seen = []
# As usual, also where a shell that is not a terminal's has started this in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGUSR1, lambda *_: seen.append(torch.tensor(1e-40) * 1))
stop = threading.Event()

def others():  # calls of other threads neither take the exception nor lose it
    while not stop.is_set():
        rnn(small)

busy = [threading.Thread(target=others, daemon=True) for _ in range(2)]
for thread in busy:
    thread.start()
signals = [signal.SIGUSR1, signal.SIGINT]  # a handler that returns does not end the call

def send():
    for number in signals:
        time.sleep(0.3)
        os.kill(os.getpid(), number)

threading.Thread(target=send, daemon=True).start()
state = torch.get_rng_state()
try:
    call()
except KeyboardInterrupt:
    print("interrupted")
stop.set()
for thread in busy:
    thread.join()
assert torch.equal(state, torch.get_rng_state())
assert len(seen) == 1 and seen[0] > 0  # denormals are not flushed in handlers
after = rnn(small)[0]
assert torch.equal(before, after)
grads = [torch.autograd.grad(output.sum(), small)[0] for output in (before, after)]
assert torch.equal(*grads)
print("nothing lost")
"""


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_signals_end_a_long_call(what):
    """The limit is generous, since this is not a measurement."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, what], capture_output=True, text=True, timeout=500
    )
    assert run.stdout.splitlines() == ["interrupted", "nothing lost"], run.stderr
