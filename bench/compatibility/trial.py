"""What a check works on: a module with arguments, and the same by the plain loop in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn import reference

from .subjects import HIDDEN, INPUT, LATENT, NotAvailable, Subject, Wrong, flat, hx_of

# More than one layer and direction, for checks in which both may matter.
DEEP: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
Weights = Mapping[str, Tensor]


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A number that depends on every element of every result, and not linearly."""
    return sum((o.sin() * _numbered(o)).sum() for o in outputs)  # type: ignore[return-value]


def _numbered(tensor: Tensor) -> Tensor:
    """Another factor for each element, so that elements in a wrong order are noticed."""
    numbers = torch.arange(1, tensor.shape[-1] + 1, device=tensor.device, dtype=tensor.dtype)
    return numbers.cos()


def same(actual: Any, expected: Any, tolerance: float = 1e-9, what: str = "") -> None:
    """Compares tensors in any nesting, each by the norm of the difference.

    Raises:
        Wrong: They differ by more than ``tolerance`` times the norm of what is expected.
    """
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        raise Wrong(f"{len(ours)} results instead of {len(theirs)}")
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if (a is None) != (b is None):
            raise Wrong("a gradient is missing" if a is None else "there is an unwanted gradient")
        if a is None:
            continue
        if a.shape != b.shape:
            raise Wrong(f"shape {tuple(a.shape)} instead of {tuple(b.shape)}")
        a, b = a.detach().double(), b.detach().double()
        if not torch.equal(a.isnan(), b.isnan()):
            raise Wrong("NaN in other places than expected")
        error = float((a - b).nan_to_num().norm() / max(float(b.nan_to_num().norm()), 1e-3))
        worst = max(worst, error)
    if worst > tolerance:
        raise Wrong(f"{what} differs by {worst:.0e}".strip())


def expect(condition: object, otherwise: str) -> None:
    """Raises Wrong unless the condition holds."""
    if not condition:
        raise Wrong(otherwise)


def must_raise(call: Callable[[], Any], *words: str, prefix: str = "") -> None:
    """Expects a TypeError, ValueError or RuntimeError whose message has one of the words."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        message = str(error)
        if not message.startswith(prefix) or (words and not any(w in message for w in words)):
            raise Wrong(f"the error does not say why: {message}") from error
    else:
        raise Wrong("no error was raised")


class Trial:
    """A module of a subject, and arguments for it.

    Args:
        noise: What a stochastic cell is given: "eps", or "mean" for none; "drawn" has it draw.
        options: Of the module.

    Attributes:
        x, states: Input and initial states, leaves without gradient.
        given: Keyword arguments of every call.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        dtype: torch.dtype = torch.float64,
        seq_len: int = 5,
        batch: int = 3,
        noise: str = "eps",
        **options: Any,
    ) -> None:
        self.subject, self.options, self.dtype = subject, options, dtype
        torch.manual_seed(0)
        self.module = subject.module(dtype=dtype, **options)
        self.rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        self.x = torch.randn(seq_len, batch, INPUT, dtype=dtype)
        if options.get("batch_first"):
            self.x = self.x.transpose(0, 1).contiguous()
        self.states = self.zeros(batch)
        for state in self.states:
            state.normal_(std=0.5)
        self.given: dict[str, Any] = {}
        if subject.has_noise and noise == "eps":
            self.given["eps"] = torch.randn(self.rows, seq_len, batch, LATENT, dtype=dtype)
        elif subject.has_noise and noise == "mean":
            self.given["sample"] = False

    def zeros(self, batch: int) -> list[Tensor]:
        """Initial states of zeros."""
        widths = [self.options.get("proj_size") or HIDDEN, HIDDEN][: self.subject.state_count]
        return [torch.zeros(self.rows, batch, width, dtype=self.dtype) for width in widths]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.module.named_parameters())

    @property
    def detached(self) -> dict[str, Tensor]:
        """Copies of the parameters that need no gradient."""
        return {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The submodule that has a weight, and the weight's name there."""
        path, _, leaf = name.rpartition(".")
        return self.module.get_submodule(path), leaf

    @property
    def tolerance(self) -> float:
        """What rounding may change in this dtype."""
        return TOLERANCES[self.dtype]

    def call(
        self, x: Tensor, *states: Tensor, module: Any = None, **arguments: Any
    ) -> tuple[Tensor, ...]:
        """The module, or another one in its place -> output and last states."""
        self._check(arguments)
        module = self.module if module is None else module
        return flat(module(x, hx_of(states), **(self.given | arguments)))

    def cell(self) -> nn.Module:
        """The class of single steps, with the weights of the module's one layer."""
        if self.subject.kind in ("loop", "recurrent"):
            raise NotAvailable("cells")
        name = type(self.module).__name__ + "Cell"
        sizes = [INPUT, HIDDEN, *([LATENT] if self.subject.has_noise else [])]
        cell: nn.Module = getattr(fusedrnn if self.subject.is_built_in else nn, name)(
            *sizes, bias=self.options.get("bias", True), dtype=self.dtype
        )
        for name, weight in self.weights.items():
            setattr(cell, name.removesuffix("_l0"), weight)
        return cell

    def steps(self, cell: nn.Module, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """A loop over single steps in place of the module."""
        now, outputs = hx_of([state[0] for state in states]), []
        for t, step in enumerate(x):
            eps = {"eps": self.given["eps"][0, t]} if "eps" in self.given else {}
            now = cell(step, now, **(self.given | eps))
            outputs.append(now if isinstance(now, Tensor) else now[0])
        last = (now,) if isinstance(now, Tensor) else now
        return (torch.stack(outputs), *(state.unsqueeze(0) for state in last))

    def functional(
        self, weights: Weights, x: Tensor, *states: Tensor, **arguments: Any
    ) -> tuple[Tensor, ...]:
        """The module with other weights."""
        self._check(arguments)
        given = self.given | arguments
        return flat(functional_call(self.module, dict(weights), (x, hx_of(states)), given))

    def truth(
        self, weights: Weights, x: Tensor, *states: Tensor, **arguments: Any
    ) -> tuple[Tensor, ...]:
        """The plain loop in float64."""
        sizes = ("num_layers", "bias", "batch_first", "bidirectional", "proj_size")
        options = {name: self.options[name] for name in sizes if name in self.options}
        given = {
            name: value.double() if name == "eps" and value is not None else value
            for name, value in (self.given | arguments).items()
        }
        loop: Any = getattr(reference, self.subject.cell)
        of_double = [w.double() for w in weights.values()]
        hx = hx_of([s.double() for s in states])
        return flat(loop(x.double(), of_double, hx, **options, **given))

    def same_values(self, outputs: tuple[Tensor, ...], **arguments: Any) -> None:
        """Compares results for ``x`` and ``states`` with the loop."""
        expected = self.truth(self.detached, self.x, *self.states, **arguments)
        same(outputs, expected, self.tolerance, "output")

    def trains(
        self,
        call: Callable[..., tuple[Tensor, ...]] | None = None,
        backward: Callable[[Tensor], object] = lambda loss: loss.backward(),
        *,
        tolerance: float | None = None,
        **arguments: Any,
    ) -> None:
        """Checks results and all gradients of a training step against the loop."""
        tolerance = self.tolerance if tolerance is None else tolerance
        x, *states = (t.clone().requires_grad_() for t in (self.x, *self.states))
        self.module.zero_grad()
        outputs = (call or self.call)(x, *states, **arguments)
        backward(loss(outputs))
        expected, grads = self.expected(**arguments)
        same(outputs, expected, tolerance, "output")
        same(self.gradients(x, *states), grads, tolerance, "gradient")

    def gradients(self, x: Tensor, *states: Tensor) -> dict[str, Any]:
        """What backward has left, as ``expected`` has it."""
        named = {"x": x} | {f"state {i}": s for i, s in enumerate(states)} | self.weights
        return {name: t.grad for name, t in named.items()}

    def expected(self, **arguments: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Results and gradients by the loop; None for the gradient of a frozen weight."""
        leaves = [t.double().clone().requires_grad_() for t in (self.x, *self.states)]
        weights = {n: w.double().requires_grad_() for n, w in self.detached.items()}
        outputs = self.truth(weights, *leaves, **arguments)
        loss(outputs).backward()
        frozen = {name for name, w in self.weights.items() if not w.requires_grad}
        grads: dict[str, Any] = {"x": leaves[0].grad}
        grads |= {f"state {i}": s.grad for i, s in enumerate(leaves[1:])}
        grads |= {name: None if name in frozen else w.grad for name, w in weights.items()}
        return outputs, grads

    def _check(self, arguments: Mapping[str, Any]) -> None:
        if self.subject.kind == "torch" and arguments.keys() & {"lengths", "reset"}:
            raise NotAvailable("lengths")


class Around(nn.Module):
    """A module that takes and returns tensors alone, for tracers; draws no noise by default."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.rnn = trial.module
        self.given = dict(trial.given)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """-> output and last states."""
        return flat(self.rnn(x, hx_of(states), **self.given))
