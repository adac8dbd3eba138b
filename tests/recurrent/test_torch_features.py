"""PyTorch's features around users' cells, compiled or not: each works as around a loop.

Longer than 350 lines, because it has a test or two for each of many features.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import allow_tf32
from compiler.interpreted import interpreted
from runtime.plain import loop, loss_of
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusedrnn
from bench.clock import measure_memory, saved_sizes_bytes

T, B, H = 6, 3, 4
F64 = torch.float64


class Minimal(nn.Module):
    """A minimal gated unit, written in torch, and what a test makes of its state."""

    def __init__(
        self, then: Callable[[Any, Tensor], Tensor] | None = None, dtype: torch.dtype = F64
    ) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(2 * H, H, dtype=dtype) for _ in range(2))
        self.scale, self.then = 1.0, then

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        f = torch.sigmoid(self.gate(torch.cat([x, h], -1)))
        n = torch.tanh(self.value(torch.cat([x, f * h], -1)))
        h = h + f * (self.scale * n - h)
        return h if self.then is None else self.then(self, h)

    def initial_state(self, batch: int) -> Tensor:
        return self.gate.weight.new_zeros(batch, H)


def sequence(seq_len: int = T, batch: int = B, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(seq_len, batch, H, dtype=dtype, requires_grad=True)


def start(batch: int = B, dtype: torch.dtype = F64) -> Tensor:
    return torch.zeros(batch, H, dtype=dtype)


def required(cell: Any = None, **options: Any) -> fusedrnn.Recurrent:
    return fusedrnn.Recurrent(Minimal() if cell is None else cell, compile="require", **options)


Make = Callable[..., fusedrnn.Recurrent]


@pytest.fixture(params=["require", "never"])
def recurrent(request: pytest.FixtureRequest) -> Make:
    """Makes a module that runs a program, or that takes steps in Python."""
    return lambda cell=None: fusedrnn.Recurrent(
        Minimal() if cell is None else cell, compile=request.param
    )


def drawing() -> Minimal:
    return Minimal(lambda cell, h: h + torch.randn_like(h))


def auto(cell: Any = None, **options: Any) -> fusedrnn.Recurrent:
    return fusedrnn.Recurrent(Minimal() if cell is None else cell, compile="auto", **options)


def gradients(results: Any, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss_of(results), leaves, allow_unused=True))


def close(ours: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def check(rnn: fusedrnn.Recurrent, x: Tensor, h: Any = None, within: Any = None) -> None:
    """Values and gradients of a call, maybe within a context, are those of the loop."""
    cell: Any = rnn.cell
    if h is None:
        h = start(x.shape[1], x.dtype if x.is_floating_point() else F64)
    if within is None:
        ours = rnn(x, h)
    else:
        with within:
            ours = rnn(x, h)
    expected = loop(cell, x, h)
    close(ours, expected)
    every = [x, *pytree.tree_leaves(h), *cell.parameters()]
    if leaves := [leaf for leaf in every if leaf.requires_grad]:
        close(gradients(ours, leaves), gradients(expected, leaves))


def is_compiled(rnn: fusedrnn.Recurrent, x: Tensor) -> bool:
    return rnn.explain(x, start(x.shape[1], x.dtype)).is_compiled


# Other compilers and transforms.


@pytest.mark.parametrize(("backend", "is_first"), [("aot_eager", False), ("eager", True)])
def test_torch_compile_around(backend: str, is_first: bool, recurrent: Make) -> None:
    """The graph breaks at the call, also where it is the first one."""
    rnn, linear, x = recurrent(drawing()), nn.Linear(H, H, dtype=F64), sequence()
    if not is_first:
        rnn(x)
    leaves = [x, *linear.parameters(), *rnn.parameters()]
    expected = gradients(loop(rnn.cell, linear(x).tanh(), start())[0] * 3, leaves)

    def model(x: Tensor) -> Tensor:
        return rnn(linear(x).tanh(), generator=torch.Generator().manual_seed(0))[0] * 3  # type: ignore[no-any-return]

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        close(gradients(compiled(x), leaves), expected)


def test_fullgraph_and_jit_trace_are_errors() -> None:
    rnn, x = required(), sequence().detach()
    with pytest.raises(Exception, match="fusedrnn"):
        torch.compile(lambda x: rnn(x)[0] + 1, backend="eager", fullgraph=True)(x)
    other = auto(rnn.cell)
    with pytest.warns():
        traced = torch.jit.trace(other, x)
    close(traced(x), other(x))


def test_export() -> None:
    allow_tf32(True)  # export refuses what the fixture of all tests sets
    rnn, x = auto(), sequence().detach()
    rnn(x)
    exported = torch.export.export(rnn, (x,), strict=False)
    close(exported.module()(x), rnn(x))


@pytest.mark.filterwarnings("ignore:fusedrnn")
@pytest.mark.parametrize("compile", ["auto", "never"])
def test_torch_func(compile: str) -> None:
    rnn, x = fusedrnn.Recurrent(Minimal(), compile=compile), sequence()
    rnn(x)  # it may be compiled, and the program is not taken
    parameters = dict(rnn.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(rnn, values, (x,)))

    expected = gradients(rnn(x), list(parameters.values()))
    close(list(torch.func.grad(loss)(parameters, x).values()), expected)
    each = torch.func.vmap(torch.func.grad(loss), (None, 1))(parameters, x[:, :, None])
    apart = [gradients(rnn(x[:, i : i + 1]), list(parameters.values())) for i in range(B)]
    close([g.sum(0) for g in each.values()], [sum(g) for g in zip(*apart, strict=True)])
    tangent = torch.randn_like(x)
    _, found = torch.func.jvp(lambda x: loss_of(rnn(x)), (x.detach(),), (tangent,))
    (gradient,) = gradients(rnn(x), [x])
    close(found, (gradient * tangent).sum())
    with forward_ad.dual_level():
        made = loss_of(rnn(forward_ad.make_dual(x, tangent)))
        close(forward_ad.unpack_dual(made).tangent, found)


def test_functional_call() -> None:
    """Other weights for one call, also such that are no leaves."""
    rnn, x = required(), sequence()
    rnn(x)
    scale = torch.tensor(0.7, dtype=F64, requires_grad=True)
    other, found = fusedrnn.Recurrent(copy.deepcopy(rnn.cell), compile="never"), []
    for one in (rnn, other):
        values = {name: p.detach() * scale for name, p in one.named_parameters()}
        found.append(gradients(torch.func.functional_call(one, values, (x,)), [scale, x]))
    close(*found)
    check(rnn, x)


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_derivatives_of_gradients() -> None:
    rnn, x, h = required(), sequence(3, 2), torch.randn(2, H, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, h: rnn(x, h), (x, h))
    assert torch.autograd.gradgradcheck(lambda x, h: rnn(x, h), (x, h))
    leaves = [x, h, *rnn.parameters()]

    def second(results: Any) -> list[Tensor]:
        first = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    with pytest.warns(UserWarning, match="run as a plain loop over the steps") as said:
        found = second(rnn(x, h))
    assert {warning.filename for warning in said} == {__file__}  # the line that asked for it
    close(found, second(loop(rnn.cell, x, h)))


def test_batched_gradients(recurrent: Make) -> None:
    rnn, x = recurrent(), sequence()
    output, _ = rnn(x)
    vectors = torch.randn(5, *output.shape, dtype=F64)
    compiled = rnn.compile_cell == "require"
    with pytest.warns(UserWarning, match="plain loop") if compiled else nullcontext():
        (all_at_once,) = torch.autograd.grad(
            output, [x], vectors, is_grads_batched=True, retain_graph=True
        )
    apart = [torch.autograd.grad(output, [x], v, retain_graph=True)[0] for v in vectors]
    close(all_at_once, torch.stack(apart))


def test_autocast() -> None:
    """Steps in Python, whose products are rounded; in backward as in forward."""
    cell, x = Minimal(dtype=torch.float32), sequence(dtype=torch.float32)
    rnn = auto(cell)
    exact = rnn(x)[0]
    leaves = [x, *cell.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = rnn(x)[0]
        with pytest.raises(RuntimeError, match="autocast is on"):
            required(cell)(x)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    close(rounded, exact, 3e-2)
    close(gradients(rounded, leaves), gradients(exact, leaves), 0.1)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(required(cell)(x)[0], exact)


# What looks at all operations, and tensors without numbers.


def test_modes_that_look_at_all_operations() -> None:
    """Around a call, and around backward alone."""
    from torch.utils.flop_counter import FlopCounterMode

    cell, x = Minimal(), sequence()
    rnn = auto(cell)
    rnn(x)
    with FlopCounterMode(display=False) as ours:
        rnn(x.detach())
    with FlopCounterMode(display=False) as expected:
        loop(cell, x.detach(), start())
    assert ours.get_total_flops() == expected.get_total_flops()
    with (
        FlopCounterMode(display=False),
        pytest.raises(RuntimeError, match="a TorchDispatchMode is active"),
    ):
        required(cell)(x)
    made, leaves = rnn(x), [x, *rnn.parameters()]
    with FlopCounterMode(display=False):
        found = gradients(made, leaves)
    close(found, gradients(loop(cell, x, start()), leaves))


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        assert auto()(torch.randn(T, B, H, dtype=F64))[0].shape == (T, B, H)
    meta = torch.randn(T, B, H, dtype=F64, device="meta")
    for compile in ("auto", "require", "never"):
        rnn = fusedrnn.Recurrent(Minimal().to("meta"), compile=compile)
        with pytest.raises(RuntimeError, match="must have values, got a tensor on the device me"):
            rnn(meta)
    with pytest.raises(RuntimeError, match="weight is on meta, the input on cpu"):
        required(Minimal().to("meta"))(sequence(), start())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device(device: str) -> None:
    """The first call is within, with weights and inputs of the CPU."""
    rnn, x, h = required(), sequence(), start()
    with torch.device(device):
        made = rnn(x, h)
        found = gradients(made, [x]) if device == "cpu" else None
    close(made, loop(rnn.cell, x, h))
    if found is not None:
        close(found, gradients(loop(rnn.cell, x, h), [x]))


def test_a_default_dtype() -> None:
    """It may be what the step makes tensors of, so the step is another one."""
    rnn, x = required(Minimal(lambda cell, h: h * torch.tensor(0.1))), sequence()
    check(rnn, x)
    torch.set_default_dtype(F64)
    try:
        check(rnn, x)
        check(required(copy.deepcopy(rnn.cell)), x)
    finally:
        torch.set_default_dtype(torch.float32)
    check(rnn, x)


class Labelled(Tensor):
    """A subclass that sees all functions."""


def test_subclasses_of_tensors() -> None:
    rnn, x = auto(), sequence()
    expected = rnn(x)[0]
    made = rnn(x.detach().as_subclass(Labelled))[0]
    close(made.as_subclass(Tensor), expected)
    with pytest.raises(RuntimeError, match="a tensor of the input or the state is a Labelled"):
        required(rnn.cell)(x.detach().as_subclass(Labelled))


# Autograd.


def test_modes_without_gradients(recurrent: Make) -> None:
    """Around the first call, and around later ones."""
    for mode in (torch.no_grad, torch.inference_mode):
        rnn, x = recurrent(), sequence()
        with mode():
            rnn(x)
        check(rnn, x)
    expected = rnn(x)
    with torch.no_grad():
        made = rnn(x)
    assert not any(leaf.requires_grad for leaf in made)
    with torch.inference_mode():
        inferred = rnn(x)
        again = rnn(inferred[0])
    assert inferred[0].is_inference()
    close((*made, *inferred), (*expected, *expected))
    close(again, rnn(expected[0]))
    with torch.no_grad(), torch.enable_grad():
        check(rnn, x)


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("of_weights", ["all", "none", "gate.weight", "value.bias"])
def test_parts_that_need_gradients(of_input: bool, of_state: bool, of_weights: str) -> None:
    rnn, x, h = required(), sequence(), torch.randn(B, H, dtype=F64)
    x.requires_grad_(of_input)
    h.requires_grad_(of_state)
    for name, p in rnn.cell.named_parameters():
        p.requires_grad_(of_weights in ("all", name))
    check(rnn, x, h)
    wanted = of_input or of_state or of_weights != "none"
    assert rnn(x, h)[0].requires_grad == wanted


def test_weights_that_are_frozen_later() -> None:
    rnn, x = required(), sequence()
    for name in ("gate", "value", "gate"):
        check(rnn, x)
        getattr(rnn.cell, name).requires_grad_(False)
    check(rnn, x)
    rnn.requires_grad_()
    check(rnn, x)


def test_a_weight_that_the_step_does_not_read() -> None:
    rnn, x = required(), sequence()
    rnn.cell.other = nn.Parameter(torch.ones(3, dtype=F64))
    check(rnn, x)
    loss_of(rnn(x)).backward()
    assert rnn.cell.other.grad is None


def test_weights_change_between_calls() -> None:
    rnn, x = required(), sequence()
    optimizer = torch.optim.Adam(rnn.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(rnn(x)).backward()
        optimizer.step()
        check(rnn, x)
    rnn.cell.gate.weight.data = torch.randn(H, 2 * H, dtype=F64)
    check(rnn, x)
    rnn.cell.gate.weight = nn.Parameter(torch.randn(H, 2 * H, dtype=F64))
    check(rnn, x)
    for options in ({}, {"assign": True}):
        rnn.load_state_dict(required().state_dict(), **options)
        check(rnn, x)


IN_PLACE: dict[str, Callable[[fusedrnn.Recurrent, Tensor], Any]] = {
    "optimizer": lambda rnn, x: torch.optim.SGD(rnn.parameters(), lr=0.1).step(),
    "load_state_dict": lambda rnn, x: rnn.load_state_dict(required().state_dict()),
    "input": lambda rnn, x: x.zero_(),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_changes_in_place_before_backward(change: str, recurrent: Make) -> None:
    """As around a loop, whose backward needs these numbers."""
    rnn, x = recurrent(), sequence()
    for p in rnn.parameters():
        p.grad = torch.ones_like(p)
    loss = rnn(x)[0].sum()
    with torch.no_grad():
        IN_PLACE[change](rnn, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_that_is_changed_in_place_before_backward() -> None:
    """A program keeps its output for backward."""
    output, _ = required()(sequence())
    loss = output.sum()
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_last_state_may_be_changed_in_place() -> None:
    """And outputs under autograd: what backward needs is kept or noticed."""
    rnn, x = required(), sequence()
    expected = gradients(rnn(x)[0], [x])
    output, h = rnn(x)
    with torch.no_grad():
        h.zero_()
    close(gradients(output, [x]), expected)
    output, h = rnn(x)
    h.mul_(2)
    close(gradients(h, [x]), gradients(loop(rnn.cell, x, start())[1] * 2, [x]))


def test_changes_between_forward_and_backward() -> None:
    """Gradients are those of what forward had: weights that are replaced, modes, attributes."""
    rnn, x = required(), sequence()
    leaves = [x, *rnn.parameters()]
    expected = gradients(rnn(x), leaves)
    made = rnn(x)
    rnn.eval()
    rnn.cell.scale = 7.0
    rnn.cell.gate.weight = nn.Parameter(torch.zeros(H, 2 * H, dtype=F64))
    rnn.cell.value = nn.Linear(2 * H, H, dtype=F64)
    close(gradients(made, leaves), expected)


def test_twice_through_the_same_graph(recurrent: Make) -> None:
    rnn, x = recurrent(), sequence()
    loss = loss_of(rnn(x))
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, [x])[0], first[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [x])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool, recurrent: Make) -> None:
    rnn, x = recurrent(drawing()), sequence()
    found = []
    for run in (rnn, lambda x: checkpoint(rnn, x, use_reentrant=use_reentrant)):
        torch.manual_seed(1)
        rnn.zero_grad()
        x.grad = None
        loss_of(run(x)).backward()
        found.append([x.grad, *(p.grad for p in rnn.parameters())])
    close(found[1], found[0])


def test_saved_tensors_hooks(recurrent: Make) -> None:
    rnn, x = recurrent(), sequence()
    packed: list[Tensor] = []
    for within in (
        save_on_cpu(),
        saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t),  # type: ignore[func-returns-value]
        saved_tensors_hooks(lambda t: (t,), lambda t: t[0]),
    ):
        check(rnn, x, within=within)
    assert packed


def test_saved_tensors_that_are_rounded() -> None:
    rnn, x = required(), sequence()
    expected = gradients(rnn(x), [x, *rnn.parameters()])
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
        made = rnn(x)
    close(gradients(made, [x, *rnn.parameters()]), expected, 0.1)


def test_the_first_call_is_within_hooks_of_saved_tensors() -> None:
    check(required(), sequence(), within=saved_tensors_hooks(lambda t: (t,), lambda t: t[0]))
    rnn, x = required(), sequence()
    made, leaves = checkpoint(rnn, x, use_reentrant=False), [x, *rnn.parameters()]
    close(gradients(made, leaves), gradients(loop(rnn.cell, x, start()), leaves))


def test_anomaly_mode() -> None:
    rnn, x = required(), sequence()
    expected = gradients(rnn(x), [x])
    with pytest.warns(UserWarning, match="Anomaly"):
        mode = torch.autograd.detect_anomaly(check_nan=True)
    with mode:
        close(gradients(rnn(x), [x]), expected)


def test_numbers_that_are_not_finite() -> None:
    rnn, x = required(), sequence()
    expected = loop(rnn.cell, x, start())[0]
    with torch.no_grad():
        x[2, 0, 1], x[3, 1, 2] = math.nan, math.inf
    made, other = rnn(x), loop(rnn.cell, x, start())
    torch.testing.assert_close(made, other, equal_nan=True)
    assert torch.equal(made[0][:, 2], expected[:, 2]) or made[0][:, 2].isfinite().all()
    found, exact = gradients(made, [x]), gradients(other, [x])
    torch.testing.assert_close(found, exact, equal_nan=True)


def test_deterministic_algorithms(deterministic: Callable[[bool], None]) -> None:
    """Which fill new memory with NaN."""
    deterministic(True)
    rnn, x = required(), sequence()
    check(rnn, x)
    made = rnn(x, start(), lengths=[2, T, 1])
    assert all(leaf.isfinite().all() for leaf in (*made, *gradients(made, [x])))  # type: ignore[union-attr]


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_gradients_have_memory_of_their_own(cell: type[nn.RNNCellBase]) -> None:
    """autograd has one tensor for two biases that are added, and an optimizer changes each."""
    module, x = cell(3, 5).double(), torch.randn(4, 2, 3, dtype=F64)
    h = torch.zeros(2, 5, dtype=F64)
    found = []
    for compile in ("require", "never"):
        rnn = fusedrnn.Recurrent(module, compile=compile)
        module.zero_grad()
        with interpreted():
            for _ in range(3):
                y, _ = rnn(x, (h, h.clone()) if cell is nn.LSTMCell else h)
                y.square().sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        found.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    close(*found, 1e-9)


# Hooks and parametrizations.


def test_hooks_of_tensors_and_of_the_layer(recurrent: Make) -> None:
    """Each runs once."""
    rnn, x = recurrent(), sequence()
    counts: list[str] = []
    cell = rnn.cell
    cell.gate.weight.register_hook(lambda g: counts.append("weight") or g * 2)  # type: ignore[func-returns-value]
    cell.gate.bias.register_post_accumulate_grad_hook(lambda p: counts.append("bias"))
    x.register_hook(lambda g: counts.append("input") or g * 3)  # type: ignore[func-returns-value]
    rnn.register_forward_pre_hook(lambda m, args: counts.append("before"))
    rnn.register_forward_hook(lambda m, args, out: counts.append("after"))
    rnn.register_full_backward_hook(lambda m, of_input, of_output: counts.append("backward"))
    output, _ = rnn(x)
    output.register_hook(lambda g: counts.append("output") or g * 5)  # type: ignore[func-returns-value]
    loss_of(output).backward()
    kinds = ["after", "backward", "before", "bias", "input", "output", "weight"]
    assert sorted(counts) == kinds
    mine = [x.grad, cell.gate.weight.grad, cell.gate.bias.grad]
    x.grad = None
    rnn.zero_grad()
    other = loop(cell, x, start())[0]
    other.register_hook(lambda g: g * 5)
    loss_of(other).backward()
    close(mine, [x.grad, cell.gate.weight.grad, cell.gate.bias.grad])


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_modules_within_the_step(kind: str) -> None:
    """They are to be called in each step."""
    rnn, x, counts = auto(), sequence(), [0]

    def hook(*args: Any) -> None:
        counts[0] += 1

    check(rnn, x)
    assert is_compiled(rnn, x)
    handle = getattr(rnn.cell.gate, f"register_{kind}_hook")(hook)
    loss_of(rnn(x)).backward()
    assert counts[0] >= T
    check(rnn, x)
    with pytest.raises(
        RuntimeError, match=r"^fusedrnn: the cell cannot .*Linear has a (forward|backward) hook"
    ):
        required(rnn.cell)(x)
    handle.remove()
    check(rnn, x)
    check(required(rnn.cell), x)


def test_a_hook_that_changes_what_a_module_returns() -> None:
    rnn, x = auto(), sequence()
    check(rnn, x)
    for factor in (2, 3):
        handle = rnn.cell.gate.register_forward_hook(lambda m, args, out, f=factor: out * f)
        check(rnn, x)
        handle.remove()
    check(rnn, x)


def test_hooks_of_all_modules() -> None:
    rnn, x, counts = auto(), sequence(), [0]
    rnn(x)

    def hook(module: nn.Module, *args: Any) -> None:
        counts[0] += isinstance(module, nn.Linear)

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        rnn(x)
        assert counts[0] >= 2 * T
    finally:
        handle.remove()
    check(rnn, x)


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "spectral_norm": lambda gate: nn.utils.parametrizations.spectral_norm(gate).eval(),
    "old weight_norm": nn.utils.weight_norm,
}


@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_parametrizations(kind: str) -> None:
    rnn, x = auto(), sequence()
    check(rnn, x)
    PARAMETRIZATIONS[kind](rnn.cell.gate)
    check(rnn, x)
    with torch.no_grad():
        for p in rnn.parameters():
            p.mul_(1.5)
    check(rnn, x)


def test_spectral_norm_in_training() -> None:
    """What it keeps moves with each step."""
    cell, x = Minimal(), sequence()
    nn.utils.parametrizations.spectral_norm(cell.gate)
    other = copy.deepcopy(cell)
    close(auto(cell)(x, start()), loop(other, x, start()))
    close(dict(cell.named_buffers()), dict(other.named_buffers()))


# Copies, threads and memory.


def test_copies(recurrent: Make) -> None:
    rnn, x = recurrent(), sequence()
    expected = gradients(rnn(x), [x])
    stored = io.BytesIO()
    torch.save(rnn, stored)
    stored.seek(0)
    for other in (copy.deepcopy(rnn), copy.copy(rnn), torch.load(stored, weights_only=False)):
        assert repr(other) == repr(rnn)
        close(gradients(other(x), [x]), expected)
    fresh = recurrent()
    fresh.load_state_dict(rnn.state_dict())
    close(gradients(fresh(x), [x]), expected)


def test_other_dtypes_between_calls() -> None:
    rnn, x = required(), sequence()
    check(rnn, x)
    rnn.float()
    narrow = x.detach().float().requires_grad_()
    made, expected = rnn(narrow), loop(rnn.cell, narrow, start(dtype=torch.float32))
    assert made[0].dtype == torch.float32
    close(made, expected, 1e-5)
    close(gradients(made, [narrow]), gradients(expected, [narrow]), 1e-4)
    rnn.double()
    check(rnn, x)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_threads(with_gradient: bool) -> None:
    """That all start with the first call of one module, and some with one of their own."""
    shared, x = required(), sequence()
    own = [required() for _ in range(2)]
    rnns = [shared, shared, *own]
    expected = [loop(rnn.cell, x, start()) for rnn in rnns]
    exact = [gradients(e, [x, *r.parameters()]) for e, r in zip(expected, rnns, strict=True)]
    barrier, errors = threading.Barrier(len(rnns)), list[BaseException]()

    def work(i: int) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                with torch.set_grad_enabled(with_gradient):
                    made = rnns[i](x)
                close(made, expected[i])
                if with_gradient:
                    close(gradients(made, [x, *rnns[i].parameters()]), exact[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rnns))]
    calls = nn.Module.__call__, nn.Module.__getattr__
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors
    assert (nn.Module.__call__, nn.Module.__getattr__) == calls  # a tracer exchanges them


def test_memory_grows_with_results_alone() -> None:
    """The output and the gradient of the input; a workspace is that of a chunk."""
    rnn, wide, extra = required(), 64, []
    for steps in (64, 512):
        x = sequence(steps, wide)
        rnn(x)
        memory = measure_memory(lambda: rnn(x)[0].sum().backward())  # noqa: B023
        extra.append(memory.peak_bytes - 2 * x.nbytes)
    assert extra[1] < 1.5 * extra[0] + 50_000, extra


def test_what_autograd_keeps() -> None:
    """The output, and what there was before the call."""
    rnn, x = required(), sequence(50)
    output, _ = rnn(x)  # the trial of a program keeps tensors, too
    kept = saved_sizes_bytes(lambda: rnn(x)[0], known=[x, *rnn.parameters()])
    assert sum(kept) <= output.nbytes + start().nbytes


def test_no_cycles() -> None:
    """Reference counts alone free what a call has kept; and no program keeps weights alive."""
    rnn, x = required(), sequence()
    loss_of(rnn(x)).backward()
    gc.collect()
    gc.disable()
    try:
        output, h = rnn(x)
        kept = [weakref.ref(output), weakref.ref(output.grad_fn)]
        loss_of(output, h).backward()
        del output, h
        assert [reference() for reference in kept] == [None, None]
        other = required()
        other(x)
        gone = weakref.ref(other.cell), weakref.ref(other.cell.gate.weight)
        del other
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


# Forms of steps and of calls.


@pytest.mark.parametrize("sizes", [(1, 3), (5, 0), (1, 1), (1, 0)], ids=str)
def test_small_sizes(sizes: tuple[int, int]) -> None:
    rnn, x = auto(), sequence(*sizes)
    assert is_compiled(rnn, x) == (sizes[1] > 0)
    never = fusedrnn.Recurrent(rnn.cell, compile="never")
    leaves = [x, *rnn.parameters()]
    close(gradients(rnn(x), leaves), gradients(never(x), leaves))
    close(rnn(x), never(x))


def test_inputs_that_are_not_contiguous() -> None:
    rnn, x = required(), torch.randn(H, B, T, dtype=F64).permute(2, 1, 0).requires_grad_()
    h = torch.randn(H, B, dtype=F64).t().requires_grad_()
    check(rnn, x, h)
    check(rnn, torch.randn(1, 1, H, dtype=F64).expand(T, B, H).requires_grad_())
    check(rnn, torch.randn(2 * T, B, 2 * H, dtype=F64)[::2, :, 1::2].requires_grad_())
    check(rnn, torch.randn(T, B, H, dtype=F64).flip(0), torch.randn(1, H, dtype=F64).expand(B, H))
    z = torch.randn(T, B, H, dtype=torch.complex128)
    check(rnn, z.conj().imag)  # a lazy negation
    check(rnn, torch._neg_view(z.real))
    made = rnn(x, h)
    close(
        torch.autograd.grad(made[0].sum(), [x])[0],  # a gradient that is expanded
        torch.autograd.grad(loop(rnn.cell, x, h)[0].sum(), [x])[0],
    )
    weight = rnn.cell.gate.weight
    weight.data = weight.data.t().contiguous().t()
    check(rnn, x, h)


class Shared(nn.Module):
    """Two carries that become one tensor, an output that is the input, and one that comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h = torch.tanh(self.linear(state[0] + x) + self.linear(state[1]))
        return (x, h, h, state[0]), (h, h)


def test_results_that_are_the_same_tensor() -> None:
    rnn, x = auto(Shared()), sequence()
    state = tuple(torch.randn(B, H, dtype=F64, requires_grad=True) for _ in range(2))
    check(rnn, x, state)
    check(rnn, x, (state[0], state[0]))  # one tensor as two leaves
    outputs, last = rnn(x, state)
    pieces = [*outputs, *last]
    for i, piece in enumerate(pieces):  # each can be changed alone
        before = [other.detach().clone() for other in pieces]
        with torch.no_grad():
            piece.add_(1)
        for j, other in enumerate(pieces):
            if j != i:
                close(other.detach(), before[j])
    with torch.no_grad():
        assert not torch.equal(x, outputs[0])  # an output is no alias of the input


def test_one_parameter_in_several_places() -> None:
    cell, x = Minimal(), sequence()
    cell.value.weight = cell.gate.weight
    check(required(cell), x)
    cell.extra = cell.value
    check(required(cell), x)
    cell.value.bias = nn.Parameter(cell.gate.weight[0, :H].detach().clone())
    check(required(cell), x)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, H, dtype=F64)
        self.cell = Minimal()

    def forward(self, token: Tensor, h: Tensor) -> Tensor:
        return self.cell(self.table(token), h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_inputs_of_integers(dtype: torch.dtype) -> None:
    rnn, x = auto(Embedded()), torch.randint(5, (T, B), dtype=dtype)
    check(rnn, x)
    for wrong in (5, -1, 2**31 - 1):
        bad = x.clone()
        bad[3, 1] = wrong
        for one in (rnn, auto(rnn.cell), fusedrnn.Recurrent(rnn.cell, compile="never")):
            with pytest.raises(IndexError, match="index out of range"):
                one(bad, start())


def test_weights_are_parameters_for_the_step() -> None:
    class Asking(Minimal):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            tensors = (self.gate.weight, self.frozen, self.buffer)
            factor = sum(2.0 for t in tensors if isinstance(t, nn.Parameter))
            return super().forward(x, h) * factor

    cell = Asking()
    cell.frozen = nn.Parameter(torch.ones(H, dtype=F64), requires_grad=False)
    cell.register_buffer("buffer", torch.ones(H, dtype=F64))
    with interpreted():
        check(required(cell), sequence())


class Makes(Minimal):
    """Makes something of the state that it is given."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return super().forward(x, self.made(h))


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "eye": lambda h: h @ torch.eye(H, dtype=h.dtype),
    "eye(300)": lambda h: (h[:, :1] + torch.eye(300, H, dtype=h.dtype)[:1]) * 0.5,
    "arange(300)": lambda h: h * torch.arange(300, dtype=h.dtype)[-H:] / 300,
    "linspace": lambda h: h * torch.linspace(-1, 1, H, dtype=h.dtype),
    "triu": lambda h: h @ torch.ones(H, H, dtype=h.dtype).triu(),
    "full": lambda h: h + torch.full((H,), 0.25, dtype=h.dtype),
    "tensor": lambda h: h * torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=h.dtype),
}


@pytest.mark.parametrize("name", MADE)
def test_numbers_that_are_made_in_the_step(name: str) -> None:
    with interpreted():
        check(required(Makes(MADE[name])), sequence())


def test_all_these_numbers_in_one_library() -> None:
    def all_of_them(h: Tensor) -> Tensor:
        for made in MADE.values():
            h = made(h)
        return h

    check(required(Makes(all_of_them)), sequence())


# Arguments, reasons and errors.


@pytest.mark.parametrize("value", ["always", "", "Auto", "ALL", True, None, 3, ["auto"], b"auto"])
def test_wrong_values_of_compile(value: Any) -> None:
    kind = ValueError if isinstance(value, str) else (ValueError, TypeError)
    of = "one of 'auto', 'require'" if isinstance(value, str) else ""
    with pytest.raises(kind, match=rf"^fusedrnn: compile must be {of}"):
        fusedrnn.Recurrent(Minimal(), compile=value)


def test_a_workspace_that_is_too_small_for_the_program() -> None:
    """Steps in Python have the call if they can keep to it."""
    x, cell = sequence(), Minimal()
    program = required(cell, chunk_size=1).explain(x).workspace_bytes
    steps = fusedrnn.Recurrent(cell, chunk_size=1).explain(x).step_bytes
    assert steps < program
    rnn = auto(cell, workspace_bytes=steps)
    check(rnn, x)
    assert "workspace_bytes must be at least" in rnn.explain(x).program
    rnn.compile_cell = "require"
    with pytest.raises(RuntimeError, match=r"^fusedrnn: workspace_bytes must be at least"):
        rnn(x)
    rnn.workspace_bytes = 2 * program
    check(rnn, x)


def test_explain() -> None:
    rnn, x = required(), sequence()
    assert str(rnn.explain(x)).startswith("compiled: ")
    assert rnn.explain(x).is_compiled
    rnn(x)
    assert rnn.explain(x).is_compiled
    rnn.compile_cell = "never"
    assert "compile is 'never'" in str(rnn.explain(x))
    for compile in ("never", "auto"):
        rnn.compile_cell = compile
        with pytest.raises(RuntimeError):
            rnn(x[:, :, :2])
    assert rnn.explain(x).is_compiled


@pytest.mark.parametrize(
    ("cell", "faster"),
    [
        (nn.GRUCell, ("fusedrnn.GRU computes the same",)),
        (nn.LSTMCell, ("fusedrnn.LSTM computes the same",)),
        (nn.RNNCell, ()),  # torch.nn.RNN takes longer
    ],
)
def test_a_layer_that_is_faster(cell: type[nn.RNNCellBase], faster: tuple[str, ...]) -> None:
    found = required(cell(3, 5)).explain(torch.randn(4, 2, 3))
    assert found.is_compiled
    assert found.faster == faster


WRONG: dict[str, Callable[[fusedrnn.Recurrent], Any]] = {
    "width": lambda rnn: rnn(sequence()[:, :, :2], start()),
    "dtype": lambda rnn: rnn(sequence().float(), start()),
    "integers": lambda rnn: rnn(torch.ones(T, B, H, dtype=torch.int64), start()),
    "state's width": lambda rnn: rnn(sequence(), start()[:, :2]),
    "state's rows": lambda rnn: rnn(sequence(), start(2)),
    "state's dtype": lambda rnn: rnn(sequence(), start().float()),
    "state's form": lambda rnn: rnn(sequence(), (start(), start())),
    "lengths": lambda rnn: rnn(sequence(), start(), [1, 2]),
    "too long": lambda rnn: rnn(sequence(), start(), [1, 2, T + 1]),
    "reset": lambda rnn: rnn(sequence(), start(), reset=torch.ones(T, B)),
    "no steps": lambda rnn: rnn(sequence()[:0], start()),
    "two dimensions": lambda rnn: rnn(sequence()[0], start()),
    "no tensor": lambda rnn: rnn("x", start()),
    "meta state": lambda rnn: rnn(sequence(), start().to("meta")),
    "workspace": lambda rnn: setattr(rnn, "workspace_bytes", 1) or rnn(sequence(), start()),
}


@pytest.mark.parametrize("kind", WRONG)
def test_errors_are_those_of_steps_in_python(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And torch logs none of its own."""
    cell, found = Minimal(), []
    for compile in ("auto", "never"):
        rnn = fusedrnn.Recurrent(cell, compile=compile)
        rnn(sequence())
        try:
            made = WRONG[kind](rnn)
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            found.append(made[0].shape)
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert found[0] == found[1]
