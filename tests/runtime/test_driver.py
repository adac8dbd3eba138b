"""Values and gradients of programs by the driver of csrc/program, against loops in Python."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest
import torch
from layouts import strided
from runtime.driver_calls import (
    KEEP,
    ONE_ROW,
    ROWS,
    STEPS,
    TENSORS,
    ZERO,
    Memory,
    check,
    expected,
    found,
    random_call,
    resets,
    run,
)
from runtime.driver_cells import CELLS, NARROW, Cell, gru

from fusedrnn._compiler import program_operators

LENGTHS = {
    "none": None,
    "all": torch.tensor([7, 7, 7, 7]),
    "sorted": torch.tensor([7, 5, 2, 2]),
    "unsorted": torch.tensor([3, 7, 1, 5]),
    "empty": torch.tensor([2, 0, 3, 0]),
    "nothing": torch.tensor([0, 0, 0, 0]),
}


@pytest.fixture(params=CELLS, scope="module")
def cell(request: pytest.FixtureRequest) -> Cell:
    return CELLS[request.param]


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """Workspaces too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("saves", [False, True], ids=["made again", "saved"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    "lengths",
    [pytest.param(n, marks=[] if n == "unsorted" else [pytest.mark.slow]) for n in LENGTHS],
)
def test_values_and_gradients(cell: Cell, lengths: str, reverse: bool, saves: bool) -> None:
    for chunk, has_resets in itertools.product([1, 3, 7], [False, True]):
        reset = resets(7, 4) if has_resets else None
        options = {"chunk": chunk, "reverse": reverse, "saves": saves, "reset": reset}
        check(random_call(cell, lengths=LENGTHS[lengths], **options))


@pytest.mark.parametrize(
    "lengths", ["unsorted", *(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "empty"))]
)
@pytest.mark.parametrize("kind", [ZERO, ROWS, ONE_ROW, STEPS, KEEP])
def test_resets(cell: Cell, kind: int, lengths: str) -> None:
    kinds = [kind, STEPS if kind == ROWS else KEEP][: len(cell.program.carries)]
    for chunk, reverse in itertools.product([2, 7], [False, True]):
        options = {"chunk": chunk, "reverse": reverse, "reset": resets(7, 4, seed=chunk)}
        check(random_call(cell, lengths=LENGTHS[lengths], kinds=[*kinds], **options))


@pytest.mark.parametrize(("seq_len", "batch"), [(1, 1), (1, 3), (5, 1), (2, 40)])
def test_sizes(cell: Cell, seq_len: int, batch: int) -> None:
    for chunk in (0, 1, 100):
        check(random_call(cell, seq_len, batch, chunk=chunk))
        check(random_call(cell, seq_len, batch, chunk=chunk, reset=resets(seq_len, batch)))


def test_no_rows(cell: Cell) -> None:
    for name, tensor in found(random_call(cell, 3, 0)).items():
        is_of_all_rows = "weight" in name or "vector" in name
        assert (tensor == 0).all() if is_of_all_rows else tensor.numel() == 0


@pytest.mark.parametrize("dtype", NARROW)
def test_other_types(cell: Cell, dtype: torch.dtype) -> None:
    """At most twice the error of the loop in the same type, by the norm of each tensor."""
    slack = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1 / 4)
    for given, chunk in itertools.product(["none", "unsorted"], [2, 7]):
        reset = None if given == "none" else resets(7, 4)
        call = random_call(cell, lengths=LENGTHS[given], reset=reset, chunk=chunk).to(dtype)
        draws = call.draws(dtype)
        right = expected(call.to(torch.float64), [draw.double() for draw in draws])
        loop = expected(call, draws)
        for name, tensor in found(call).items():
            scale = right[name].norm() + 1e-30
            own = (tensor.double() - right[name]).norm() / scale
            other = (loop[name].double() - right[name]).norm() / scale
            assert own <= 2 * other + slack, (name, own, other)


@pytest.mark.parametrize("dtype", NARROW[1:])
def test_chunks_do_not_matter_in_16_bits(cell: Cell, dtype: torch.dtype) -> None:
    """Backward makes the numbers again that forward had."""
    call = random_call(cell).to(dtype)
    right = {name: tensor.double() for name, tensor in found(call).items()}
    for call.chunk, call.saves in [(1, False), (3, False), (7, True)]:
        for name, tensor in found(call).items():
            error = (tensor.double() - right[name]).norm() / right[name].norm()
            assert error <= 2 * torch.finfo(dtype).eps, (name, error)


def test_threads() -> None:
    for cell in CELLS.values():
        call = random_call(cell, 2, 2500, lengths=torch.arange(2500) % 3, reset=resets(2, 2500))
        one = found(call)
        threads = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            several = found(call)
        finally:
            torch.set_num_threads(threads)
        for name, tensor in several.items():
            torch.testing.assert_close(tensor, one[name], atol=1e-12, rtol=1e-12)


def test_draws_of_a_part() -> None:
    """A sequence that is a part of a longer one, in another layer, has the numbers of that."""
    call = random_call(CELLS["sample"], stream=3, first_step=11)
    check(call)
    others = found(random_call(CELLS["sample"]))
    assert not torch.allclose(found(call)["sequence 1"], others["sequence 1"])


@pytest.mark.parametrize("lengths", ["none", "unsorted"])
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
def test_strides(cell: Cell, dtype: torch.dtype, lengths: str) -> None:
    """Arguments may lie in memory as they like."""
    kinds = [ROWS, STEPS][: len(cell.program.carries)]
    options = {"kinds": kinds, "reset": resets(7, 4), "chunk": 3}
    call = random_call(cell, lengths=LENGTHS[lengths], **options).to(dtype)
    right = found(call)
    for name in TENSORS:
        setattr(call, name, [strided(tensor) for tensor in getattr(call, name)])
    for name, tensor in found(call).items():
        torch.testing.assert_close(tensor, right[name], atol=1e-5, rtol=1e-5)
    call.inputs = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in call.inputs]
    for name, tensor in found(call, transposed=False).items():
        torch.testing.assert_close(tensor, right[name], atol=1e-5, rtol=1e-5)


def test_expanded_gradients(cell: Cell) -> None:
    """Those of a sum have no memory of their own."""
    call = random_call(cell, chunk=3)
    call.grad_sequences = [torch.ones(()).double().expand(g.shape) for g in call.grad_sequences]
    call.grad_last = [torch.ones(()).double().expand(g.shape) for g in call.grad_last]
    check(call)
    call.grad_sequences = [
        torch.rand(g.shape[2]).double().expand(g.shape) for g in call.grad_sequences
    ]
    check(call)


def test_results_without_gradients(cell: Cell) -> None:
    """An empty tensor is a gradient of zeros."""
    call = random_call(cell, chunk=3)
    whole, last = call.grad_sequences, call.grad_last
    for i, j in itertools.product(range(len(whole)), range(len(last))):
        call.grad_sequences = [torch.zeros_like(g) if n == i else g for n, g in enumerate(whole)]
        call.grad_last = [torch.zeros_like(g) if n == j else g for n, g in enumerate(last)]
        right = found(call)
        nothing = torch.empty(0, dtype=torch.float64)
        call.grad_sequences = [nothing if n == i else g for n, g in enumerate(whole)]
        call.grad_last = [nothing if n == j else g for n, g in enumerate(last)]
        for name, tensor in found(call).items():
            assert torch.equal(tensor, right[name]), name


def test_unwanted_gradients(cell: Cell) -> None:
    """Each gradient by itself, and all but one."""
    for reset in (None, resets(7, 4)):
        kinds = [] if reset is None else [ROWS, STEPS][: len(cell.program.carries)]
        call = random_call(cell, chunk=3, reset=reset, kinds=kinds)
        right = found(call)
        for one in (name for name in right if name.startswith("grad")):
            for results in (
                found(call, lambda name, one=one: name == one),
                found(call, lambda name, one=one: name != one),
            ):
                for name, tensor in results.items():
                    torch.testing.assert_close(tensor, right[name], atol=1e-12, rtol=1e-12)


def test_chunk_sizes(cell: Cell) -> None:
    number = cell.number(torch.float64)

    def plan(*arguments: int) -> tuple[int, int, int]:
        return program_operators.chunk(number, 1000, 16, torch.float64, *arguments)

    steps, forward, backward = plan(0, 0)
    assert steps == 16 and 0 < forward < backward  # 256 rows
    assert plan(10_000, 0)[0] == 1000 and plan(7, 0)[0] == 7
    for limit in (backward, 2 * backward, 5 * backward, 1 << 40):
        steps, forward, backward = plan(0, limit)
        assert max(forward, backward) <= limit
        assert steps == 1000 or steps > 1
    assert steps == 1000
    with pytest.raises(RuntimeError, match="fusedrnn: workspace_bytes must be at least") as error:
        plan(0, 1)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert plan(0, least)[0] == 1
    with pytest.raises(RuntimeError, match="at least"):
        plan(0, least - 1)


def test_forward_alone(cell: Cell) -> None:
    """Without backward nothing needs to be kept."""
    call = random_call(cell)
    right, memory = found(call), Memory.of(call, wants=lambda name: False)
    memory.kept = []
    run(call, memory, has_backward=False)
    for name, tensor in memory.results().items():
        torch.testing.assert_close(tensor, right[name])


def test_numbers_that_are_infinite_or_none(cell: Cell) -> None:
    """A row's NaN stays in that row, and a reset ends it."""
    call = random_call(cell, reset=resets(7, 4))
    right = found(call)
    call.carries[0][2] = float("nan")
    call.inputs[0][3, 1] = float("inf")
    results = found(call)
    for name in ("sequence 0", "last 0", "grad input 0"):
        rows = [0, 3]
        mine, theirs = (t[..., rows, :] for t in (results[name], right[name]))
        torch.testing.assert_close(mine, theirs)


def test_an_interruption_ends_a_call() -> None:
    def handler(number: int, frame: object) -> None:
        raise KeyError("of the handler")

    call = random_call(gru(5, 800), 15_000, 1)  # takes seconds
    memory = Memory.of(call)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyError, match="of the handler"):
            run(call, memory)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert memory.sequences[0][-1].isnan().all()  # which is not done
