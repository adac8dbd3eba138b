"""One step of the user's own Python beside its graph.

torch.compile does not tell what a step asks of its surroundings: whether gradients are wanted, or
whether its state has one. Such a step computes something else in one of three modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._step.generators import global_generators, states_of
from .._step.noise import Noise
from .._step.trees import Leaves, differentiable
from .._step.watch import Watch
from .compile_lock import Busy
from .flat_step import FlatStep
from .refusals import CannotCompile
from .step_graph import Given, StepGraph
from .traceable_graph import WithLines

_TRIES = 4
"""Another thread may change weights meanwhile, which some functions get as they are."""
_ASKS = (
    "the step depends on whether gradients are enabled, or it does something that torch.compile's "
    "trace of it does not do"
)

Take = Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]
"""Input and state to the new state and the output."""


def difference(
    graph: StepGraph,
    given: Given,
    in_python: Take,
    x: Leaves,
    state: Leaves,
    others: Mapping[str, Tensor],
) -> str:
    """Says that the step does not compute what its graph does; or nothing.

    Args:
        x, state: Of which kinds are the tensors that both get.
        others: What the step may read besides its graph's constants, by name.

    Raises:
        CannotCompile: The step changes what it reads, or it raises.
        Busy: Another thread changes it.
    """
    rows = state[0].shape[0]

    def versions() -> list[int]:
        return [c._version for c in given.constants if not c.is_inference()]

    with _generators_put_back(state[0].device):
        _check_changes(graph, given, x, state)
        for needs_grad, is_grad in ((False, True), (True, True), (False, False)):
            for _ in range(_TRIES):
                before, copies = versions(), _Copies(given.constants, others)
                own = given._replace(constants=tuple(copies.constants))

                def by_graph(x: Leaves, state: Leaves, own: Given = own) -> tuple[Leaves, Leaves]:
                    return graph.take(own, x, state, rows)

                error: Exception | None = None
                try:
                    pairs = [
                        _results(by_graph, x, state, copies, needs_grad, True, False),
                        _results(in_python, x, state, copies, needs_grad, is_grad, True),
                    ]
                    if all(map(_are_close, *pairs)):
                        break
                except Exception as raised:
                    error = raised
                if what := copies.changed(graph.names):
                    raise CannotCompile(f"the step changes {what} in place")
                if before != versions():
                    continue
                if error is not None:
                    said = str(error).split("\n")[0][:200]
                    what = f"in a trial the step raises {type(error).__name__}: {said}"
                    raise CannotCompile(what) from error
                drawn = _Drawn()
                with suppress(Exception), drawn:  # modes know not all of what graphs may have
                    _results(by_graph, x, state, copies, needs_grad, True, False)
                draws = f"the step draws by {drawn.name} from torch's own generator"
                return draws if drawn.name else _ASKS
            else:
                raise Busy("another thread changes the weights")
            if what := copies.changed(graph.names):
                raise CannotCompile(f"the step changes {what} in place")
    return ""


def _check_changes(graph: StepGraph, given: Given, x: Leaves, state: Leaves) -> None:
    """Refuses a step that changes what it reads, of which a trial would leave other numbers there.

    Raises:
        CannotCompile: It does.
    """
    rows = state[0].shape[0]

    def step(
        constants: Sequence[Tensor], x: Sequence[Tensor], state: Sequence[Tensor]
    ) -> tuple[Leaves, Leaves]:
        own = given._replace(constants=tuple(constants))
        return graph.take(own, tuple(x), tuple(state), rows, WithLines(graph.module))

    copies = [[t.detach().clone() for t in leaves] for leaves in (given.constants, x, state)]
    constants, inputs, carries = copies
    flat = FlatStep(step, constants, inputs, carries, rows, graph.names)
    try:
        flat(*flat.arguments, notes_lines=False)
    except CannotCompile:
        raise
    except Exception:  # which the trial says better
        pass


@contextmanager
def _generators_put_back(device: torch.device) -> Iterator[None]:
    """Users get the same random numbers, whether their step is tried or not."""
    before = states_of(global_generators())
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for one in before:
            one.put_back()


def _results(
    take: Take,
    x: Leaves,
    state: Leaves,
    copies: _Copies,
    needs_grad: bool,
    is_grad: bool,
    is_in_python: bool,
) -> list[Tensor]:
    """Values, and gradients of what needs one."""
    random = torch.Generator().manual_seed(0)
    rows = state[0].shape[0]

    def like(tensor: Tensor) -> Tensor:
        if not differentiable(tensor):
            return tensor.detach().clone()
        made = torch.rand(tensor.shape, generator=random).to(tensor.device, tensor.dtype)
        return made.requires_grad_(needs_grad)

    xs, states = [like(leaf) for leaf in x], [like(leaf) for leaf in state]
    noise = Noise.for_trial()
    noise.chunk(0, 1, rows)
    noise.step(0)
    with Watch(noise), copies if is_in_python else nullcontext(), torch.set_grad_enabled(is_grad):
        # No leaves, for the step may change them in place.
        new, y = take(tuple(x.clone() for x in xs), tuple(leaf.clone() for leaf in states))
    results = [*new, *y]
    leaves = [leaf for leaf in (*xs, *states, *copies.constants) if leaf.requires_grad]
    totals = [y.square().sum().to(torch.float32) for y in results if y.requires_grad]
    if not leaves or not is_grad:
        return [result.detach() for result in results]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if totals:
        total = torch.stack(totals).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=is_in_python)
    gradients = [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)
    ]
    if is_in_python and totals:
        _add_of_originals(copies, totals, gradients)
    return [*(result.detach() for result in results), *gradients]


def _add_of_originals(
    copies: _Copies, totals: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Of weights that the step gives to no function of torch, but to a torch.autograd.Function.

    Args:
        gradients: Of all leaves; those of constants are the last.
    """
    # Not of weights with hooks, which are not to see this gradient.
    trained = [c for c in copies.originals if c.requires_grad]
    asked = [i for i, c in enumerate(trained) if not c._backward_hooks]
    if not asked:
        return
    found = torch.autograd.grad(
        torch.stack(list(totals)).sum(), [trained[i] for i in asked], allow_unused=True
    )
    for i, gradient in zip(asked, found, strict=True):
        if gradient is not None:
            gradients[len(gradients) - len(trained) + i].add_(gradient)


_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}


def _are_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = _TOLERANCES.get(a.dtype, 0.05)
    scale = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * (1 + scale), equal_nan=True)


class _Drawn(TorchDispatchMode):
    """Notes a function that draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        has_own = any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values()))
        is_draw = torch.Tag.nondeterministic_seeded in function.tags
        if is_draw and not has_own and function.namespace == "aten":
            self.name = f"aten.{function.overloadpacket.__name__}"
        return function(*args, **kwargs)


class _Copies(TorchFunctionMode):
    """Within, functions of torch compute with copies of the tensors that the step reads.

    Other threads may read and change weights at any time, so nothing is exchanged in a module. In
    one thread, functions of torch get copies where the step gives them the originals.
    """

    def __init__(self, constants: Sequence[Tensor], others: Mapping[str, Tensor]) -> None:
        """
        Args:
            constants: What the step's graph reads.
            others: What the step may read besides, by name.
        """
        super().__init__()
        self.originals = list(constants)
        self.constants = [_copy(tensor) for tensor in constants]
        known = set(map(id, constants))
        self._others = {name: (t, _copy(t)) for name, t in others.items() if id(t) not in known}
        pairs = [*zip(self.originals, self.constants, strict=True), *self._others.values()]
        self._copies = {id(original): copy for original, copy in pairs}

    def changed(self, names: Sequence[str]) -> str:
        """The name of what the step has changed; or nothing.

        Args:
            names: Of constants.
        """
        pairs = [*zip(names, self.constants, strict=False)]
        pairs += [(name, copy) for name, (_, copy) in self._others.items()]
        return next((name for name, copy in pairs if copy._version), "")

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        args, kwargs = pytree.tree_map_only(Tensor, self._own, given, is_leaf=_is_size)
        return function(*args, **kwargs)

    def _own(self, tensor: Tensor) -> Tensor:
        return self._copies.get(id(tensor), tensor)


def _is_size(value: Any) -> bool:
    """Which must not become a tuple: those are the numbers of ``tensor.new``, and no shape."""
    return isinstance(value, torch.Size)


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
