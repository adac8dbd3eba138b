"""Checks of the operators as torch's library, dispatcher and tools see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedrnn._ops import LayerCall, LayerTensors

from .rows import group
from .subjects import INPUT, Subject
from .trial import DEEP, Trial, expect, loss, same

row = group("library")


def _arguments(trial: Trial, *, requires_grad: bool = False) -> dict[str, Any]:
    """A layer's arguments, as the module passes them to the operator."""
    trial.subject.needs("built-in")
    tensors = [t.clone() for t in (trial.x, *trial.states, *trial.detached.values())]
    if requires_grad:
        tensors = [t.requires_grad_() for t in tensors]
    count = 1 + len(trial.states)
    x, hx, *cx = tensors[:count]
    eps = trial.given.get("eps")
    named = LayerTensors(x, hx, tensors[count:], cx[0] if cx else None, eps)
    call = LayerCall(cell=trial.subject.cell)
    arguments = {"input": x, "hx": hx, "cx": named.cx, "weights": named.weights}
    return {"cell": call.index} | arguments | call.others | named.others()


def _backward_arguments(trial: Trial) -> dict[str, Any]:
    raw = _arguments(trial)
    output, h_n, c_n, _, cell_states = torch.ops.fusedrnn.forward(**raw)
    is_lstm = trial.subject.cell == "lstm"
    return raw | {
        "grad_output": torch.randn_like(output),
        "grad_h_n": torch.randn_like(h_n),
        "grad_c_n": torch.randn_like(c_n) if is_lstm else None,
        "chunk_cell_states": cell_states if is_lstm else None,
        "output": output,
        "needs": 1 + 2 + 4 * is_lstm + sum(16 << i for i in range(len(raw["weights"]))),
    }


def _opcheck(operator: Any, arguments: dict[str, Any], **options: Any) -> None:
    results = opcheck(operator.default, (), arguments, raise_exception=False, **options)
    failed = [f"{name}: {found}" for name, found in results.items() if found != "SUCCESS"]
    if failed:
        raise RuntimeError(failed[0])


@row("opcheck of forward")
def opcheck_forward(s: Subject) -> None:
    """All tests of torch.library.opcheck on fusedrnn::forward; its arguments need gradients."""
    _opcheck(torch.ops.fusedrnn.forward, _arguments(Trial(s), requires_grad=True))


@row("opcheck of backward")
def opcheck_backward(s: Subject) -> None:
    """All tests of torch.library.opcheck on fusedrnn::backward."""
    _opcheck(torch.ops.fusedrnn.backward, _backward_arguments(Trial(s)))


@row("opcheck of step")
def opcheck_step(s: Subject) -> None:
    """All tests of torch.library.opcheck on fusedrnn::step: rows, one alone, none; no states."""
    step = _of_step(_arguments(Trial(s, noise="mean")))
    seed = {"seed": torch.ones(1, dtype=torch.int64)} if s.has_noise else {}
    _opcheck(torch.ops.fusedrnn.step, step)
    tests = ("test_schema", "test_faketensor")
    for rows in (slice(None), 0, slice(0)):
        picked = {
            name: step[name][rows] for name in ("input", "hx", "cx") if step[name] is not None
        }
        for states in ({}, seed | {"hx": None, "cx": None}):
            _opcheck(torch.ops.fusedrnn.step, step | picked | states, test_utils=tests)


def _of_step(raw: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the first step of a layer."""
    step = raw | {"input": raw["input"][0], "hx": raw["hx"][0]}
    step["cx"] = None if raw["cx"] is None else raw["cx"][0]
    return step | ({"eps": raw["eps"][0, 0]} if "eps" in raw else {})


def _directly(trial: Trial, call: Callable[[dict[str, Any]], tuple[Tensor, ...]]) -> None:
    raw = _arguments(trial, requires_grad=True)
    leaves = [raw["input"], raw["hx"], *([raw["cx"]] if raw["cx"] is not None else [])]
    outputs = call(raw)
    expected, grads = trial.expected()
    same(outputs, expected, what="output")
    loss(outputs).backward()
    found = [leaf.grad for leaf in (*leaves, *raw["weights"])]
    same(found, list(grads.values()), what="gradient")


@row("the operators called directly")
def called_directly(s: Subject) -> None:
    """Backward after torch.ops.fusedrnn.forward, and .step, gives right gradients, or an error."""
    count = 1 + s.state_count
    _directly(Trial(s), lambda raw: torch.ops.fusedrnn.forward(**raw)[:count])

    def step(raw: dict[str, Any]) -> tuple[Tensor, ...]:
        states = [t[None] for t in torch.ops.fusedrnn.step(**_of_step(raw))[: s.state_count]]
        return (states[0], *states)

    _directly(Trial(s, seq_len=1), step)


def _described(tensors: Any) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in pytree.tree_leaves(tensors)]


@row("fake tensors")
def fake_tensors(s: Subject) -> None:
    """A training step over fake tensors has the shapes, dtypes and strides of a real one."""
    found = []
    for is_fake in (False, True):
        trial = Trial(s, num_layers=2, bidirectional=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        leaves = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
        if is_fake:
            leaves = [mode.from_tensor(t) for t in leaves]
            weights = {name: mode.from_tensor(w) for name, w in trial.weights.items()}
            with mode:
                outputs = trial.functional(weights, *leaves)
                grads = torch.autograd.grad(loss(outputs), [*leaves, *weights.values()])
        else:
            outputs = trial.call(*leaves)
            grads = torch.autograd.grad(loss(outputs), [*leaves, *trial.weights.values()])
        found.append((_described(outputs), [(g.shape, g.dtype) for g in grads]))
    expect(found[0] == found[1], "fake results have another shape, dtype or stride")


@row("meta tensors")
def meta(s: Subject) -> None:
    """A module on the meta device runs forward and backward, then to_empty and real weights."""
    trial = Trial(s)
    real = trial.module.state_dict()
    trial.module.to("meta")
    x = trial.x.to("meta").requires_grad_()
    given = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in trial.given.items()}
    outputs = trial.call(x, *(state.to("meta") for state in trial.states), **given)
    loss(outputs).backward()
    expect(x.grad is not None and x.grad.shape == x.shape, "the input has no gradient")
    expect(all(o.is_meta for o in outputs), "a result is not on the meta device")
    trial.module.to_empty(device="cpu").load_state_dict(real)
    trial.module.zero_grad()
    trial.trains()


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(f))
        return f(*args, **(kwargs or {}))


@row("__torch_dispatch__ mode")
def dispatch_mode(s: Subject) -> None:
    """A training step is right under a dispatch mode, which sees the operators."""
    trial = Trial(s)
    with _Seen() as mode:
        trial.trains()
    if s.is_built_in:
        for name in ("fusedrnn.forward", "fusedrnn.backward"):
            expect(any(name in seen for seen in mode.names), f"the mode does not see {name}")


class Wrapped(Tensor):
    """A tensor that holds another one and passes every operator on to it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner.detach()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapped({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
        given = pytree.tree_map(unwrap, (args, kwargs or {}))
        results = f(*given[0], **given[1])
        return pytree.tree_map(lambda t: Wrapped(t) if isinstance(t, Tensor) else t, results)


@row("__torch_dispatch__ subclass")
def dispatch_subclass(s: Subject) -> None:
    """A training step over a wrapper subclass; results and gradients are of the subclass too."""
    trial = Trial(s)
    x, *states = (Wrapped(t.clone().requires_grad_()) for t in (trial.x, *trial.states))
    outputs = trial.call(x, *states)
    expect(isinstance(outputs[0], Wrapped), "the output is not of the subclass")
    (grad,) = torch.autograd.grad(loss(outputs), x)
    expected, grads = trial.expected()
    plain = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
    same(tuple(map(plain, outputs)), expected, what="output")
    same(plain(grad), grads["x"], what="gradient")


@row("__torch_function__ mode")
def function_mode(s: Subject) -> None:
    """A training step is right under a torch-function mode."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    trial = Trial(s)
    with Mode():
        trial.trains()


class Traced(Tensor):
    """A subclass that sees the functions that are called with it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(f, "__name__", str(f)))
        return super().__torch_function__(f, types, args, kwargs or {})


@row("__torch_function__ subclass")
def function_subclass(s: Subject) -> None:
    """A training step over a subclass with __torch_function__, which is asked."""
    trial = Trial(s)
    Traced.seen.clear()
    trial.trains(lambda x, *states: trial.call(x.as_subclass(Traced), *states))
    expect(Traced.seen, "the subclass was not asked")


@row("profiler")
def profiler(s: Subject) -> None:
    """torch.profiler names the operators of forward and backward and records their shapes."""
    s.needs("built-in")
    trial = Trial(s)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        trial.trains()
    shapes = {event.key: event.input_shapes for event in recorded.key_averages(True)}
    for name in ("fusedrnn::forward", "fusedrnn::backward"):
        expect(name in shapes, f"the profiler does not name {name}")
        expect([5, 3, INPUT] in shapes[name], f"no shapes of {name}")


def _flops(call: Callable[[], Any]) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter:
        results = call()
    return counter.get_total_flops(), results


@row("FLOP counter")
def flops(s: Subject) -> None:
    """FlopCounterMode counts the products of the loop: in forward, backward, and recomputed."""
    projected = [{"proj_size": 2}, {"proj_size": 2, **DEEP}] if s.cell == "lstm" else []
    saved = [{"recompute": False, **DEEP}, {"recompute": False}] if s.is_ours else []
    for options in ({}, DEEP, {"bias": False, "num_layers": 2}, *saved, *projected):
        trial = Trial(s, **({"recompute": True} if s.is_ours else {}) | options)
        weights = {name: w.requires_grad_() for name, w in trial.detached.items()}
        x, *states = (t.clone().requires_grad_() for t in (trial.x, *trial.states))
        forward, outputs = _flops(lambda t=trial, x=x, st=states: t.call(x, *st))  # type: ignore
        truth, expected = _flops(
            lambda t=trial, w=weights, x=x, st=states: t.truth(w, x, *st)  # type: ignore
        )
        backward, _ = _flops(outputs[0].sum().backward)
        truth_backward, _ = _flops(expected[0].sum().backward)
        expect(forward == truth > 0, f"{forward} FLOPs in forward instead of {truth}")
        if s.is_ours and trial.module.recompute:
            truth_backward += truth
            # What a projection makes is the output, and is not computed again.
            products = [w.numel() for name, w in weights.items() if name.startswith("weight_hr")]
            truth_backward -= 2 * 5 * 3 * sum(products)
        expect(backward == truth_backward, f"{backward} in backward instead of {truth_backward}")
