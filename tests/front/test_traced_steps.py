"""What the front of compiled cells promises: what is traced once, what is seen, what is refused.

Longer than 350 lines, because scans and single steps are traced as sequences of cells are.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiler.interpreted import interpreted
from runtime.plain import loop, loss_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn._front.traced_step import TracedStep

H = 4
F64 = torch.float64


class Scaled(nn.Module):
    """A cell whose attributes a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * H, H, dtype=F64)
        self.scale, self.sharp = 1.0, False

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        made = torch.tanh(self.linear(torch.cat([x, h], -1))) * self.scale
        return made.square() if self.sharp else made


def given(batch: int = 3, steps: int = 5) -> tuple[Tensor, Tensor]:
    x = torch.randn(steps, batch, H, dtype=F64, requires_grad=True)
    return x, torch.randn(batch, H, dtype=F64, requires_grad=True)


def check(rnn: fusedrnn.Recurrent, x: Any, h: Any) -> None:
    ours, expected = rnn(x, h), loop(rnn.cell, x, h)
    torch.testing.assert_close(ours, expected)
    leaves = [t for t in (*pytree.tree_leaves((x, h)), *rnn.parameters()) if t.requires_grad]
    found = torch.autograd.grad(loss_of(ours), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(loss_of(expected), leaves))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    """A step of each trace."""
    found: list[TracedStep] = []
    backend = TracedStep._backend

    def counted(self: TracedStep, *args: Any) -> Any:
        found.append(self)
        return backend(self, *args)

    monkeypatch.setattr(TracedStep, "_backend", counted)
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-12])
def test_cosine_similarity_of_short_vectors(scale: float) -> None:
    """Of norms below its eps, whose derivatives torch takes nevertheless."""

    class Compared(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            cosine = nn.functional.cosine_similarity(x, h[:, :1], dim=-1) + 1
            return (
                torch.tanh(h) + nn.functional.cosine_similarity(x, x, -1)[:, None] + cosine[:, None]
            )

    x, h = given()
    with interpreted():
        rnn = fusedrnn.Recurrent(Compared(), compile="require")
        check(rnn, (x.detach() * scale).requires_grad_(), h)


def new_class() -> type[Scaled]:
    """Of which no cell has been traced."""
    return type("Own", (Scaled,), {})


def test_classes_are_freed() -> None:
    """As of cells that are defined within functions."""
    gone = []
    with interpreted():
        for _ in range(3):
            made = new_class()
            fusedrnn.Recurrent(made(), compile="require")(*given())
            gone.append(weakref.ref(made))
            del made
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_one_trace_for_all_sizes_and_modes(traces: list[TracedStep]) -> None:
    rnn = fusedrnn.Recurrent(new_class()(), compile="require")
    with interpreted():
        for batch, steps in ((3, 5), (2, 1), (7, 40), (64, 2), (65, 2)):
            check(rnn, *given(batch, steps))
        x, h = given()
        with torch.no_grad():
            rnn(x, h)
        with torch.inference_mode():
            rnn(x, h)
        rnn(x.detach(), h.detach())
        assert len(traces) == 1
        check(rnn, *given(1))  # torch.compile has a graph of its own for one row
        check(rnn, *given(1, 9))
        assert len(traces) == 2


def test_cells_of_one_class_share_a_trace(traces: list[TracedStep]) -> None:
    kind = new_class()
    with interpreted():
        for _ in range(20):
            check(fusedrnn.Recurrent(kind(), compile="require"), *given())
    assert len(traces) == 1


def test_a_float_that_is_annealed(traces: list[TracedStep]) -> None:
    """The second value makes it an input of the program; others cost nothing."""
    cell = new_class()()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    for i in range(12):
        cell.scale = 1.0 - i / 16
        check(rnn, *given())
    assert len(traces) == 2


@pytest.mark.parametrize("function", [torch.mul, nn.functional.leaky_relu])
def test_a_float_that_is_annealed_in_a_batch_of_one_row(function: Callable[..., Tensor]) -> None:
    """As in larger batches: a program has it as an input, or is one for each value."""

    class Annealed(Scaled):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return function(super().forward(x, h), self.slope)

    cell: Any = Annealed()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    for rows, cell.slope in ((2, 0.5), (2, 0.6), (1, 0.5), (1, 0.7), (2, 0.8), (1, 0.9), (1, 0.5)):
        x, h = torch.randn(3, rows, H, dtype=F64), torch.randn(rows, H, dtype=F64)
        with interpreted():
            torch.testing.assert_close(rnn(x, h), loop(cell, x, h))


class Doubled(Tensor):
    """Whose products are twice as large."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})
        return 2 * made if function is nn.functional.linear else made


class Keyed(Scaled):
    def forward(self, x: Any, h: Tensor) -> Tensor:
        return super().forward(x["x"], h)


def test_a_class_of_tensors_after_plain_ones() -> None:
    """It is no call like one before."""
    rnn, h = fusedrnn.Recurrent(Keyed()), torch.zeros(2, H, dtype=F64)
    plain = torch.randn(3, 2, H, dtype=F64)
    own: Any = plain.as_subclass(Doubled)  # type: ignore[arg-type]
    with interpreted():
        expected = rnn({"x": own}, h)[0]
        for _ in range(2):
            rnn({"x": plain}, h)
        found = rnn({"x": own}, h)[0]
    assert type(found) is Doubled
    torch.testing.assert_close(found, expected)


def test_replaced_cells_are_freed() -> None:
    rnn, cells = fusedrnn.Recurrent(Scaled(), compile="require"), list[Any]()
    with interpreted():
        for rows in range(2, 6):
            rnn.cell = Scaled()
            cells.append(weakref.ref(rnn.cell))
            rnn(torch.randn(3, rows, H, dtype=F64), torch.zeros(rows, H, dtype=F64))
    gc.collect()
    assert [cell() is not None for cell in cells] == [False, False, False, True]


@pytest.mark.parametrize("compile", ["auto", "never"])
@pytest.mark.parametrize("module", [None, 7])
def test_classes_of_no_module(module: Any, compile: str) -> None:
    """As code that is run by exec() may define them."""
    there: dict[str, Any] = {"nn": nn, "__name__": module}
    exec("class Sum(nn.Module):\n  def forward(self, x, h): return x + h", there)
    x, h = torch.randn(3, 2, H, dtype=F64), torch.zeros(2, H, dtype=F64)
    with interpreted():
        output, _ = fusedrnn.Recurrent(there["Sum"](), compile=compile)(x, h)
    torch.testing.assert_close(output, x.cumsum(0))


def test_warnings_name_lines_of_no_module() -> None:
    """As of code that is run by exec()."""
    rnn, h = fusedrnn.Recurrent(Scaled(), compile="require"), torch.zeros(2, H, dtype=F64)
    x = torch.randn(3, 2, H, dtype=F64, requires_grad=True)
    there = {"torch": torch, "x": x, "of": lambda x: rnn(x, h)[0].square().sum()}
    code = compile("\n\ntorch.autograd.grad(of(x), x, create_graph=True)", "<cell>", "exec")
    with interpreted(), pytest.warns(UserWarning, match="plain loop") as said:
        exec(code, there)
    assert [(warning.filename, warning.lineno) for warning in said] == [("<cell>", 3)]


def test_attributes_decide(traces: list[TracedStep]) -> None:
    cell = new_class()()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    with interpreted():
        for sharp in (False, True, False, True):
            cell.sharp = sharp
            check(rnn, *given())
    assert len(traces) == 2


def test_more_traces_than_torch_compile_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module then has its own, and after these its steps are taken in Python."""
    from fusedrnn._front import traced_step

    monkeypatch.setattr(traced_step, "MOST_TRACES", 2)
    cell, (x, h) = new_class()(), given()
    cell.scale = None  # type: ignore[assignment]

    class Chosen(Scaled):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return h + x * len(self.names)

    chosen = Chosen()
    rnn = fusedrnn.Recurrent(chosen)
    with interpreted():
        for count in range(8):
            chosen.names = [f"{i}" for i in range(count)]  # type: ignore[assignment]
            torch.testing.assert_close(rnn(x, h), loop(chosen, x, h))


def test_scan_compiles() -> None:
    weight = torch.randn(H, H, dtype=F64, requires_grad=True)
    x, h = given()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        h = torch.tanh(x + h @ weight)
        return h, {"sum": h.sum(-1), "twice": [2 * h]}

    state, ys = fusedrnn.scan(step, h, x, compile="require")
    expected, sums = h, []
    for one in x:
        expected, y = step(expected, one)
        sums.append(y["sum"])
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(ys["sum"], torch.stack(sums))
    leaves = [weight, x, h]
    torch.testing.assert_close(
        torch.autograd.grad(loss_of(state, ys["sum"]), leaves),
        torch.autograd.grad(loss_of(expected, torch.stack(sums)), leaves),
    )
    explanation = fusedrnn.scan(step, h, x, explain=True)
    assert isinstance(explanation, fusedrnn.Explanation)
    assert explanation.is_compiled


def test_scan_of_steps_that_are_made_anew(traces: list[TracedStep]) -> None:
    """With tensors and modules of their own around them."""
    x, h = given()

    def run(weight: Tensor, cell: nn.Module) -> tuple[Tensor, Tensor]:
        return fusedrnn.scan(  # type: ignore[no-any-return]
            lambda h, x: (cell(x, h) @ weight, h), h, x, compile="require"
        )

    with interpreted():
        for _ in range(3):
            weight, cell = torch.randn(H, H, dtype=F64, requires_grad=True), Scaled()
            state, _ = run(weight, cell)
            expected = h
            for one in x:
                expected = cell(one, expected) @ weight
            torch.testing.assert_close(state, expected)
            leaves = [weight, *cell.parameters()]
            found, exact = (torch.autograd.grad(s.sum(), leaves) for s in (state, expected))
            torch.testing.assert_close(found, exact)
    assert len(traces) == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that go through torch.compile."""
    calls, take = [], TracedStep.__call__

    def counted(self: TracedStep, *given: Any) -> Any:
        calls.append(given)
        return take(self, *given)

    monkeypatch.setattr(TracedStep, "__call__", counted)
    return calls


def deciding(decides: bool, factor: float) -> Any:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h * factor)
        return (h * 0.5, h) if decides and h.sum() > 0 else (h, h)

    return step


def check_scan(step: Any) -> None:
    (x, state), outputs = given(), []
    found = fusedrnn.scan(step, state, x)
    for one in x:
        state, y = step(state, one)
        outputs.append(y)
    torch.testing.assert_close(found, (state, torch.stack(outputs)))


def test_a_refusal_holds_for_the_next_functions(asked: list[Any]) -> None:
    """Of the same code: torch.compile would trace each of them anew."""
    for i in range(6):
        check_scan(deciding(True, float(i)))
    assert len(asked) == 1


def test_a_refusal_does_not_hold_for_a_function_that_comes_again(asked: list[Any]) -> None:
    check_scan(deciding(True, 0.5))
    step = deciding(False, 0.5)
    with interpreted():
        for times_asked in (1, 2, 3):
            check_scan(step)
            assert len(asked) == times_asked


@pytest.mark.parametrize("kind", ["Laplace", "Exponential", "Weibull", "Gumbel"])
def test_distributions_that_make_tensors_of_a_shape(kind: str) -> None:
    """By ``tensor.new(shape)``, which takes a tuple for numbers."""

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.nn.functional.softplus(x + h)
        of_both = {"Laplace": (h, scale), "Weibull": (scale, scale), "Gumbel": (h, scale)}
        z = getattr(torch.distributions, kind)(*of_both.get(kind, (scale,))).rsample()
        return torch.tanh(z), z

    x, h = given()
    found = []
    with interpreted():
        for compile in ("require", "never"):
            torch.manual_seed(0)
            results = fusedrnn.scan(step, h, x, compile=compile)
            found.append((results, torch.autograd.grad(loss_of(*results), [x, h])))
    torch.testing.assert_close(*found)


def test_scan_with_params_and_never() -> None:
    x, h = given()
    params = {"w": torch.randn(H, H, dtype=F64, requires_grad=True)}

    def step(h: Tensor, x: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ params["w"])
        return h, h

    with interpreted():
        found = [
            torch.autograd.grad(
                loss_of(fusedrnn.scan(step, h, x, params, compile=compile)), [params["w"], x]
            )
            for compile in ("require", "never")
        ]
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="compile must be one of"):
        fusedrnn.scan(step, h, x, params, compile="always")


class Hidden(nn.Module):
    """Has its cell where torch.nn does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Scaled()]

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.hidden[0](x, h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_scan", [False, True])
def test_hooks_and_classes_of_modules_that_are_not_the_cells(
    by_scan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, (x, h) = Hidden(), given()
    rnn, inner = fusedrnn.Recurrent(cell, compile="require"), cell.hidden[0]

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = inner(x, h)
        return h, h

    def check() -> Tensor:
        found = fusedrnn.scan(step, h, x, compile="require")[::-1] if by_scan else rnn(x, h)
        expected = loop(cell, x, h)
        torch.testing.assert_close(found, expected)
        return found[0].detach()

    with interpreted():
        seen = [check()]
        handle = inner.linear.register_forward_hook(lambda module, given, made: 2 * made)
        seen.append(check())
        handle.remove()
        torch.testing.assert_close(check(), seen[0])
        forward = Scaled.forward
        monkeypatch.setattr(Scaled, "forward", lambda *given: forward(*given) / 2)
        seen.append(check())
    for i, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:i])


class Free(nn.Module):
    """A cell without an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)

    def forward(self, x: None, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


@pytest.mark.parametrize("compile", ["require", "never"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_without_an_input(compile: str, batch_first: bool) -> None:
    rnn = fusedrnn.Recurrent(Free(), batch_first=batch_first, compile=compile)
    h = torch.randn(3, H, dtype=F64, requires_grad=True)
    expected = [rnn.cell(None, h)]
    for _ in range(4):
        expected.append(rnn.cell(None, expected[-1]))
    with interpreted():
        for _ in range(2):
            y, last = rnn(None, h, length=5)
            torch.testing.assert_close(y, torch.stack(expected, 1 if batch_first else 0))
            torch.testing.assert_close(last, expected[-1])
        y, last = rnn(None, h, lengths=[2, 5, 1], length=5)
        torch.testing.assert_close(last[0], expected[1][0])
        step = rnn.step(None, h)
    torch.testing.assert_close(step, (expected[0], expected[0]))
    other = fusedrnn.Recurrent(Free(), batch_first=batch_first, compile=compile)
    assert other.explain(None, h, length=5).is_compiled == (compile == "require")
    for wrong, message in (
        (lambda: rnn(None, h), "unless length is given"),
        (lambda: rnn(None, length=5), "an input without tensors needs a state"),
        (lambda: rnn(None, h, length=0), "length must be"),
        (
            lambda: rnn(torch.zeros(4, 3, H, dtype=F64), h, length=5),
            "length must be [34], the number of steps of",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"return_sequence": False}], ids=str
)
def test_single_steps(options: dict[str, Any]) -> None:
    rnn = fusedrnn.Recurrent(Scaled(), compile="require", **options)
    x, h = torch.randn(3, H, dtype=F64), torch.randn(3, H, dtype=F64, requires_grad=True)
    with interpreted():
        y, last = rnn.step(x, h)
        torch.testing.assert_close(y, rnn.cell(x, h))
        torch.testing.assert_close(last, y)
        torch.testing.assert_close(rnn.step(x[0], h[0])[0], rnn.cell(x, h)[0])
    both = fusedrnn.Recurrent([Scaled(), Scaled()], bidirectional=True)
    with pytest.raises(ValueError, match="needs bidirectional=False"):
        both.step(x, (h, h))


class Surrogate(torch.autograd.Function):
    """A spike, with the derivative of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return g / (1 + 10 * u.abs()) ** 2


class Clipped(Surrogate):
    """What is done to large gradients alone shows in no trial."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return g.clamp(-3, 3) / (1 + u.abs())


class Spiking(nn.Module):
    def __init__(self, spike: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.spike = nn.Linear(H, H, dtype=F64), spike

    def forward(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        u = 0.9 * u + self.linear(x)
        s = self.spike.apply(u - 1)
        return s, u - s.detach() * u


def test_a_surrogate_derivative_compiles() -> None:
    with interpreted():
        check(fusedrnn.Recurrent(Spiking(Surrogate), compile="require"), *given())


def test_other_functions_of_autograd_do_not() -> None:
    rnn = fusedrnn.Recurrent(Spiking(Clipped))
    check(rnn, *given())
    assert "may only multiply the gradient" in rnn.explain(*given()).program


ASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad mode": lambda h: h * (1.0 if torch.is_grad_enabled() else 2.0),
    "gradient of the state": lambda h: h * (1.0 if h.requires_grad else 2.0),
    "one row": lambda h: h * (2.0 if len(h) == 1 else 1.0),
}


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(H, H, dtype=F64), ask

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.ask(h)) + x)


@pytest.mark.parametrize("name", ASKS)
def test_steps_that_ask_have_no_program(name: str) -> None:
    """Whether gradients are wanted, whether their state has one, and how many rows there are."""
    cell, options = Asking(ASKS[name]), {"rtol": 1e-12, "atol": 1e-12}
    never = fusedrnn.Recurrent(cell, compile="never")
    for first in (3, 1):
        rnn = fusedrnn.Recurrent(cell)
        for batch in (first, 4 - first, first):
            x, h = given(batch)
            for leaf in (h, h.detach()):
                torch.testing.assert_close(rnn(x, leaf), never(x, leaf), **options)
            with torch.no_grad():
                torch.testing.assert_close(rnn(x, h), never(x, h), **options)


def test_calls_of_a_compiled_cell_are_few() -> None:
    """Of functions of this package, in one call of a sequence without gradients."""
    rnn, (x, h) = fusedrnn.Recurrent(Scaled(), compile="require"), given()
    calls: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and "/fusedrnn/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_filename)

    with torch.no_grad():
        for _ in range(3):
            rnn(x, h)
        sys.setprofile(note)
        try:
            rnn(x, h)
        finally:
            sys.setprofile(None)
    assert len(calls) <= 120
    assert len(set(calls)) <= 12
