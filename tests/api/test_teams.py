"""The threads of a call: the same bits for any number of them, and no thread that hangs.

cpp/team_check.cpp has the team alone, under the thread sanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checks import HAS_OWN_PRODUCTS
from compiler.stage_library import COMPILER, WARNINGS
from torch import Tensor

import fusedrnn
from docs.examples.gated_cells import LayerNormLSTMCell, PeepholeLSTMCell

CPP = Path(__file__).parents[1] / "cpp"
TEAM = CPP.parents[1] / "csrc/cpu/team.cpp"
CELLS = ["StochasticGRU", "GRU", "LSTM"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
T, B, I, H = 24, 36, 40, 128  # noqa: E741


@pytest.mark.parametrize(
    "sanitizer", ["thread", pytest.param("address,undefined", marks=pytest.mark.slow)]
)
def test_a_team_alone(tmp_path: Path, sanitizer: str) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "team_check"
    flags = ["-std=c++20", "-O1", "-g", *WARNINGS, f"-fsanitize={sanitizer}", "-pthread"]
    command = [COMPILER, *flags, str(CPP / "team_check.cpp"), str(TEAM), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    # Shadow memory has fixed addresses, which some systems would randomise away.
    done = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def results_of_layer(layer: torch.nn.Module, input: Tensor, **options: object) -> list[Tensor]:
    """The outputs, and the gradients of everything."""
    torch.manual_seed(1)
    input = input.detach().requires_grad_()
    output, last = layer(input, **options)
    last = last if isinstance(last, tuple) else (last,)
    outputs = [o for o in (output, *last) if isinstance(o, Tensor)]
    total = torch.stack([o.float().square().sum() for o in outputs]).sum()
    found = torch.autograd.grad(total, [input, *layer.parameters()])
    return [*(o.detach() for o in outputs), *found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def assert_bits_do_not_depend_on_threads(
    threads: Callable[[int], None], results: Callable[[], list[Tensor]]
) -> None:
    threads(1)
    alone = results()
    assert all(tensor.isfinite().all() for tensor in alone)
    for count in (2, 3, 8):
        threads(count)
        for _ in range(3):  # members come early or late
            found = results()
            if HAS_OWN_PRODUCTS:
                assert same(alone, found), count
            else:
                torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_bits_of_layers(threads, cell: str, dtype: torch.dtype) -> None:
    layer = getattr(fusedrnn, cell)(I, H, dtype=dtype)
    input = torch.randn(T, B, I, dtype=dtype)
    assert_bits_do_not_depend_on_threads(threads, lambda: results_of_layer(layer, input))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_layer_that_has_a_team_in_forward_alone(threads, dtype: torch.dtype) -> None:
    layer, input = fusedrnn.LSTM(8, 8, dtype=dtype), torch.randn(48, 100, 8, dtype=dtype)
    assert_bits_do_not_depend_on_threads(threads, lambda: results_of_layer(layer, input))


# The weights of 256 units are too large for each thread to read all of them.
FORMS = {
    "layers": {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
    "last states": {"num_layers": 2, "return_sequence": False},
    "zoneout": {"zoneout": 0.3},
    "recomputed": {"recompute": True},
    "large": {"hidden_size": 256},
    **dict.fromkeys(("strided", "lengths", "resets", "few rows")),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_other_passes(threads, cell: str, form: str) -> None:
    """Copies of each kind are shared out too."""
    layer = getattr(fusedrnn, cell)(I, **({"hidden_size": H} | (FORMS[form] or {})))
    input = torch.randn(4 * T, 7, I) if form == "few rows" else torch.randn(T, B, I)
    if form == "strided":
        input = torch.randn(I, B, T).permute(2, 1, 0)
    options = {"lengths": torch.arange(B) % T + 1} if form == "lengths" else {}
    if form == "resets":
        options = {"reset": torch.rand(T, B) < 0.2}
    assert_bits_do_not_depend_on_threads(threads, lambda: results_of_layer(layer, input, **options))


class Gated(torch.nn.Module):
    """A cell with a product of its input and one of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.input = torch.nn.Linear(I, 2 * H)
        self.state = torch.nn.Linear(H, 2 * H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, new = (self.input(x) + self.state(h)).chunk(2, -1)
        gate = torch.sigmoid(gate)
        h = gate * h + (1 - gate) * torch.tanh(new)
        return h, h


def results_of_cell(recurrent: torch.nn.Module, input: Tensor) -> list[Tensor]:
    input = input.detach().requires_grad_()
    output, last = recurrent(input, torch.zeros(input.shape[1], H))
    total = output.square().sum() + last.sum()
    found = torch.autograd.grad(total, [input, *recurrent.parameters()])
    return [output.detach(), last.detach(), *found]


def test_bits_of_a_compiled_cell(threads) -> None:
    recurrent = fusedrnn.Recurrent(Gated(), compile="require")
    input = torch.randn(T, B, I)
    assert_bits_do_not_depend_on_threads(threads, lambda: results_of_cell(recurrent, input))


@pytest.mark.ci_has_every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["plain", "resets", "lengths"])
@pytest.mark.parametrize("cell", [LayerNormLSTMCell, PeepholeLSTMCell])
def test_bits_of_a_compiled_cell_with_two_states(threads, cell, form, dtype) -> None:
    """Their steps have vectors, norms, and a state that products do not read."""
    recurrent = fusedrnn.Recurrent(cell(I, H), compile="require").to(dtype)
    input = torch.randn(T, B, I, dtype=dtype)
    options = {"resets": {"reset": torch.rand(T, B) < 0.2}}
    options["lengths"] = {"lengths": torch.arange(B) % T + 1}

    def results() -> list[Tensor]:
        given = [input.detach().requires_grad_()]
        given += [torch.full((B, H), 0.1, dtype=dtype).requires_grad_() for _ in range(2)]
        output, last = recurrent(given[0], tuple(given[1:]), **options.get(form, {}))
        total = sum(tensor.float().square().sum() for tensor in (output, *last))
        found = torch.autograd.grad(total, [*given, *recurrent.parameters()])
        return [*(o.detach() for o in (output, *last)), *found]

    assert_bits_do_not_depend_on_threads(threads, results)


class Widths(torch.nn.Module):
    """A cell whose steps multiply states and values of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.state = torch.nn.Linear(I, 32), torch.nn.Linear(32, 32)
        self.wider, self.back = torch.nn.Linear(32, H), torch.nn.Linear(H, 32)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.tanh(self.wider(torch.tanh(self.input(x) + self.state(h))))
        return wide, torch.tanh(self.back(wide) + h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_compiled_cell_of_several_widths(threads, dtype) -> None:
    recurrent = fusedrnn.Recurrent(Widths(), compile="require").to(dtype)
    input = torch.randn(4 * T, B, I, dtype=dtype)

    def results() -> list[Tensor]:
        given = input.detach().requires_grad_()
        output, last = recurrent(given, torch.zeros(B, 32, dtype=dtype))
        total = output.float().square().sum() + last.float().sum()
        found = torch.autograd.grad(total, [given, *recurrent.parameters()])
        return [output.detach(), last.detach(), *found]

    assert_bits_do_not_depend_on_threads(threads, results)


def test_calls_of_several_threads_at_once(threads) -> None:
    layer = fusedrnn.LSTM(I, H)
    input = torch.randn(T, B, I)
    threads(2)
    expected = results_of_layer(layer, input)
    others: list[bool] = []

    def calls() -> None:
        torch.set_num_threads(2)  # a thread has its own number
        for _ in range(20):
            found = results_of_layer(layer, input)
            others.append(same(expected, found) if HAS_OWN_PRODUCTS else True)

    workers = [threading.Thread(target=calls) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert others == [True] * 80


FORKED = """
import os, signal, torch
import test_teams as t

torch.set_num_threads(2)
recurrent = t.fusedrnn.Recurrent(t.Gated(), compile="require")
layer = t.fusedrnn.LSTM(t.I, t.H)
input = torch.randn(7, t.B, t.I)  # few numbers: loops of torch would hang in the child
results = lambda: t.results_of_cell(recurrent, input) + t.results_of_layer(layer, input)
before = results()
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        found = results()
    except RuntimeError as error:  # of torch for CUDA, in forks of what has used torch.compile
        assert "fork-based multiprocessing" in str(error), error
        with torch.no_grad():
            recurrent(input, torch.zeros(t.B, t.H)), layer(input)
        os._exit(0)
    torch.set_num_threads(1)  # those of equal() would hang, too
    os._exit(0 if t.same(before, found) or not t.HAS_OWN_PRODUCTS else 1)
assert os.waitpid(child, 0)[1] == 0
assert t.same(before, results())  # the parent still has its threads
"""

INTERRUPTED = """
import signal, torch
import test_teams as t

torch.set_num_threads(2)
signal.signal(signal.SIGALRM, signal.default_int_handler)
layer = t.fusedrnn.LSTM(t.I, t.H)
input = torch.randn(t.T, t.B, t.I)
expected = t.results_of_layer(layer, input)
long = torch.randn(200_000, t.B, t.I)
for _ in range(3):
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        layer(long)
        raise SystemExit("the call was not interrupted")
    except KeyboardInterrupt:
        pass
    assert t.same(expected, t.results_of_layer(layer, input))

# A handler may itself call a layer, in the middle of another call.
short, seen = torch.randn(20_000, t.B, t.I), []

signal.signal(signal.SIGALRM, lambda *_: seen.append(layer(input)[0]))
signal.setitimer(signal.ITIMER_REAL, 0.1)
with torch.no_grad():
    first = layer(short)[0]
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert torch.equal(first, layer(short)[0])
assert seen and all(torch.equal(expected[0], found) for found in seen)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            FORKED,
            id="forked",
            marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
        ),
        pytest.param(INTERRUPTED, id="interrupted"),
    ],
)
def test_a_process(program: str) -> None:
    folders = [str(Path(__file__).parent), str(CPP.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
