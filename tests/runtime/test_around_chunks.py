"""Steps in Python beside other threads, hooks, checkpoints, and autograd within steps."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from recurrent.loops import F64, By, check_same, double, linear, plain_loop
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fusedrnn

T, B, H = 11, 3, 4
START = torch.zeros(B, H, dtype=F64)


def never(cell: nn.Module, **options: Any) -> fusedrnn.Recurrent:
    return fusedrnn.Recurrent(cell, compile="never", **options)


def test_other_threads_see_nothing() -> None:
    """Neither in forward nor in backward."""
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    parameters, wrong, ended = list(cell.parameters()), list[str](), threading.Event()
    exact = torch.autograd.grad(cell(x[0], START).square().sum(), parameters)

    def look() -> None:
        while not ended.is_set():
            if any(a is not b for a, b in zip(cell.parameters(), parameters, strict=True)):
                wrong.append("another parameter")
            found = torch.autograd.grad(cell(x[0], START).square().sum(), parameters)
            if not all(map(torch.equal, found, exact)):
                wrong.append("another gradient")

    thread = threading.Thread(target=look)
    thread.start()
    rnn = never(cell)
    for _ in range(20):
        rnn(x)[0].sum().backward()
    ended.set()
    thread.join()
    assert not wrong, set(wrong)


def test_two_threads_pass_one_graph_backward() -> None:
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    output, found = never(cell)(x)[0], list[Any]()
    expected = torch.autograd.grad(
        output.square().sum(), [x, *cell.parameters()], retain_graph=True
    )

    def work() -> None:
        for _ in range(5):
            loss = output.square().sum()
            found.append(torch.autograd.grad(loss, [x, *cell.parameters()], retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for gradients in found:
        torch.testing.assert_close(gradients, expected)


def test_two_threads_pass_calls_of_a_counting_cell_backward() -> None:
    """Each finds the count that its steps had, and leaves that of now."""

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        c.count += 1
        return torch.tanh(c.linear(h) + x) * (1 if c.count % 3 else 0.5)

    cell, x = By(step, linear=linear(H), count=0), double(T, B, H)
    rnn, found = never(cell, chunk_size=2), [[], []]
    calls = [[rnn(x, START)[0].square().sum() for _ in range(10)] for _ in found]
    cell.count, expected = 0, []
    for _ in range(20):
        expected.append(torch.autograd.grad(plain_loop(cell, x, START)[0].square().sum(), x))

    def work(some: list[Tensor], gradients: list[Any]) -> None:
        for loss in some:
            gradients.append(torch.autograd.grad(loss, x))

    both = zip(calls, found, strict=True)
    threads = [threading.Thread(target=work, args=one) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close([*found[0], *found[1]], expected)
    assert cell.count == 20 * T


def test_hooks_of_saved_tensors_have_the_weights() -> None:
    """Here they keep copies, so that a change of the weights before backward does not matter."""
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    parameters = list(cell.parameters())
    expected = torch.autograd.grad(plain_loop(cell, x, START)[0].sum(), [x, *parameters])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = never(cell)(x)[0].sum()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    torch.testing.assert_close(torch.autograd.grad(loss, [x, *parameters]), expected)
    assert all(a is b for a, b in zip(cell.parameters(), parameters, strict=True))
    loss = never(cell)(x)[0].sum()
    with torch.no_grad():
        cell.weight_hh.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Reads(nn.Module):
    """At some steps alone, what somebody changes before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.part, self.table = linear(H), linear(H), torch.ones(T, 1, dtype=F64)
        self.register_buffer("scale", torch.ones(H, dtype=F64))

    def forward(self, x: Tensor, state: Any) -> Any:
        h, count = state
        h = torch.tanh(self.linear(x) + h * self.scale)
        read = self.part(h) * self.table[count[0]] * (count < 3)[:, None]
        return read.square(), (h, count + 1)


def replace_data(cell: Any) -> None:
    cell.linear.weight.data = cell.linear.weight.data * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a buffer": lambda cell: cell.scale.mul_(1 + 1e-9),
    "a tensor": lambda cell: cell.table[1::3].mul_(5.0),
    "a part": lambda cell: setattr(cell, "part", nn.Identity()),
    "another buffer": lambda cell: setattr(cell, "scale", torch.zeros(H, dtype=F64)),
    "data of a weight": replace_data,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_before_backward(change: Callable[[Any], Any]) -> None:
    """Backward has what was there in forward; afterwards what has come since is there."""
    cell, x = Reads(), double(T, B, H)
    y, _ = never(cell)(x, (START, torch.zeros(B, dtype=torch.int64)))
    leaves = [x, *cell.linear.parameters()]
    expected = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    change(cell)
    now = {**dict(cell.named_buffers()), **vars(cell)}
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), leaves), expected))
    assert all(value is now[name] for name, value in vars(cell).items())


def test_a_closed_over_tensor_with_gradient_that_changes() -> None:
    weight, x = double(H, H), double(T, B, H)
    step = lambda h, x: (torch.tanh(h @ weight + x), h)  # noqa: E731
    _, y = fusedrnn.scan(step, START, x, compile="never")
    with torch.no_grad():
        weight.mul_(1 + 1e-9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_batched_gradients_by_torch_func() -> None:
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    y, directions = never(cell)(x, START)[0], torch.randn(2, T, B, H, dtype=F64)
    take = lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0]  # noqa: E731
    torch.testing.assert_close(
        torch.func.vmap(take)(directions), torch.stack([*map(take, directions)])
    )


def test_within_a_checkpoint() -> None:
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    rnn = never(cell)
    check_same(
        lambda: checkpoint(rnn, x, START, use_reentrant=False),
        lambda: plain_loop(cell, x, START),
        [x, *cell.parameters()],
    )


def tangents(run: Any, x: Tensor, dual: dict[str, Tensor]) -> list[Any]:
    """Of the outputs, of the gradients, and the gradients of tangents, within a dual level."""
    made, last = run(x)
    leaves, tangent = [x, *dual.values()], forward_ad.unpack_dual(made).tangent
    again = torch.autograd.grad(tangent.square().sum(), leaves, retain_graph=True)
    first = torch.autograd.grad((made**3).sum() + last.square().sum(), leaves, create_graph=True)
    found = [made, tangent, *again, *first, *(forward_ad.unpack_dual(g).tangent for g in first)]
    return [leaf.detach() for leaf in found]


def test_forward_mode() -> None:
    """Of inputs, states and weights, over backward and under it."""
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    rnn = never(cell)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor, h: Tensor) -> Any:
            return plain_loop(self.cell, x, h)

    def called(module: nn.Module, dual: dict[str, Tensor]) -> Any:
        start = forward_ad.make_dual(START, torch.ones_like(START))
        return lambda x: torch.func.functional_call(module, dual, (x, start))

    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("error", "fusedrnn")
        dual = {f"cell.{n}": forward_ad.make_dual(p, p.cos()) for n, p in cell.named_parameters()}
        y = forward_ad.make_dual(x, torch.ones_like(x))
        ours, loops = (tangents(called(module, dual), y, dual) for module in (rnn, Loop()))
        with torch.no_grad():
            without = forward_ad.unpack_dual(called(rnn, dual)(y)[0]).tangent
        outputs, _ = rnn(y)
    torch.testing.assert_close([*ours, without], [*loops, loops[1]], rtol=1e-10, atol=1e-10)
    if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # torch 2.11, which keeps the graph
        outputs.sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"within torch.autograd.forward_ad.dual_level\(\), so"):
        outputs.sum().backward()


def slope(c: Any, x: Tensor, h: Tensor) -> Tensor:
    h = torch.tanh(c.linear(h.detach()) + x + 0.1 * torch.randint(3, h.shape))
    (slope,) = torch.autograd.grad(h.square().sum(), c.linear.weight, create_graph=True)
    return h - 0.1 * slope.sum() * (c.count % 3)


def slope_through_all(c: Any, x: Tensor, h: Tensor) -> Tensor:
    h = torch.tanh(c.linear(h) + x)
    return h - torch.autograd.grad(h.sum(), c.linear.weight, retain_graph=True)[0].sum()


def slope_by_torch_func(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Which refuses checkpoints."""
    h = h + 0.1 * torch.randint(3, h.shape)
    slope = torch.func.grad(lambda h: torch.tanh(c.linear(h)).square().sum())(h)
    return torch.tanh(h - 0.1 * slope + x)


def backward(c: Any, x: Tensor, h: Tensor) -> Tensor:
    c.linear(h.detach()).square().mean().backward()
    return torch.tanh(c.linear(h) + x)


@pytest.mark.parametrize("step", [slope, slope_through_all, slope_by_torch_func, backward])
def test_steps_that_take_gradients(step: Any) -> None:
    """The call starts anew, and keeps its graph: counts, numbers and gradients are the loop's."""

    def counting(c: Any, x: Tensor, h: Tensor) -> Tensor:
        c.count += 1
        return step(c, x, h)

    cell, x = By(counting, linear=linear(H), count=0), double(T, B, H)
    rnn, found = never(cell), []
    for run in (rnn, rnn, lambda x, h: plain_loop(cell, x, h)):
        cell.count, cell.linear.weight.grad = 0, None
        torch.manual_seed(0)
        y, _ = run(x, START)
        taken = cell.linear.weight.grad
        found.append([y, taken, *torch.autograd.grad(y.square().sum(), [x, *cell.parameters()])])
        assert cell.count == T
    torch.testing.assert_close(found[:2], [found[2]] * 2, rtol=1e-10, atol=1e-10)
    assert "since it takes gradients itself" in rnn.explain(x, START).chunk_reason
    rnn(x, START, reset=torch.rand(T, B) < 0.3)  # whose trial is under autograd, too


def test_parametrizations_cached_in_forward_alone() -> None:
    cell: Any = parametrizations.weight_norm(nn.GRUCell(H, H, dtype=F64), "weight_hh")
    x, leaves = double(T, B, H), list(cell.parameters())

    def ours() -> Any:
        with parametrize.cached():
            return never(cell)(x)

    check_same(ours, lambda: plain_loop(cell, x, START), [x, *leaves])


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) * x.sigmoid()


class CallsScript(nn.Module):
    """In a method, by a function of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(H)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.activated(self.linear(x) + h)

    def activated(self, x: Tensor) -> Tensor:
        return activation(x)


def activation(x: Tensor) -> Tensor:
    return scripted(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_steps_that_call_torchscript_keep_their_graph() -> None:
    cell, x = CallsScript(), double(T, B, H)
    rnn = never(cell)
    for _ in range(3):
        check_same(
            lambda: rnn(x, START), lambda: plain_loop(cell, x, START), [x, *cell.parameters()]
        )
    assert rnn.explain(x, START).chunk_reason == "the whole sequence, since it runs TorchScript"


def test_an_error_of_a_step_leaves_no_hooks() -> None:
    """While somebody holds it, as an interactive session does."""
    cell = By(lambda c, x, h: c.linear(h) @ x, linear=linear(H))
    with pytest.raises(RuntimeError, match="in the step at time 0") as held:
        never(cell)(double(T, B, H), START)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    del held


def test_backward_in_inference_mode() -> None:
    x = double(T, B, H)
    loss = never(nn.GRUCell(H, H, dtype=F64))(x)[0].sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.inference_mode():
        loss.backward()
    torch.testing.assert_close(x.grad, expected)
