"""What torch.compile has made of a step: a graph, and what its inputs and outputs are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from .._step.trees import Leaves
from .._step.user_lines import in_brackets, last_line
from .graph_text import text_of
from .marked_step import OUTPUT, STATE, result
from .refusals import CannotTrace
from .torch_refusals import as_users_write


class Given(NamedTuple):
    """What a step gets besides input and state, in one call."""

    constants: Leaves
    """Tensors that it reads, then floats that have changed between calls, if these are tensors."""
    numbers: tuple[Any, ...]
    """Floats that are numbers, then other numbers; None for the rows of the batch."""


Roles = list[tuple[str, int]]
"""Of each input of a graph what it is, and its number among those."""
_LEAVES = "input", "state"


class StepGraph:
    """A step as a function of tensors, without modules and without effects."""

    def __init__(self, module: fx.GraphModule) -> None:
        """
        Raises:
            CannotTrace: The step keeps a tensor besides its results, or calls what hides its work.
        """
        _check_functions(module)
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        values = [node.meta.get("example_value") for node in places]
        self._sizes = [(str(value), _first_size(value)) for value in values]
        """Of each input what it is in words, for a number, and how many rows it has."""
        self._names = [_name_of(node) for node in places]
        (outs,) = next(node for node in module.graph.nodes if node.op == "output").args
        self.outs: list[tuple[int, int]] = []
        """Of each output of torch.compile's graph, which result it is: kind and place."""
        sources: dict[tuple[int, int], fx.Node] = {}
        for out in outs:
            if not isinstance(out, fx.Node) or out.target not in (result, result.default):
                raise CannotTrace(f"the step keeps a tensor that it does not return{_line_of(out)}")
            source, kind, place = cast(tuple[fx.Node, int, int], out.args)
            self.outs.append((kind, place))
            sources[kind, place] = source
        self.states = sum(kind == STATE for kind, _ in sources)
        self.outputs = sum(kind == OUTPUT for kind, _ in sources)
        wanted = [(STATE, i) for i in range(self.states)]
        wanted += [(OUTPUT, i) for i in range(self.outputs)]
        self._float_at = [i for i, n in enumerate(places) if _is_float(values[i], n)]
        floats = {user: places[i] for i in self._float_at for user in places[i].users}
        self.module = _pure(module, floats, [sources[one] for one in wanted])
        """From all inputs to new states and outputs."""
        self.text, self.is_text_whole = text_of(self.module)
        """What it does, in words that no other graph of this process has; and whether they say all
        of it in each process."""
        _forget_origin(self.module)
        self._first: dict[str, Any] = {}
        """What the first call has said, of whatever thread: to set a default is one step."""
        self.is_known = False
        """Whether somebody has said what the inputs are."""
        self._on_cpu: dict[torch.dtype, fx.GraphModule] = {}
        self.programs: dict[Any, Any] = {}
        """What has been found for it, by the numbers of calls: programs, or why there are none."""

    # What the inputs are.

    def know(self, args: Sequence[Any], inputs: Leaves, states: Leaves) -> None:
        """Finds out what the inputs are, from those of a call; of several threads, the first one.

        Args:
            inputs, states: The stand-ins among them.
        """
        x = {id(leaf): i for i, leaf in enumerate(inputs)}
        state = {id(leaf): i for i, leaf in enumerate(states)}
        roles, constants, numbers, floats = list[tuple[str, int]](), 0, 0, set(self._float_at)
        for i, value in enumerate(args):
            if i in floats:
                roles.append(("float", self._float_at.index(i)))
            elif not isinstance(value, Tensor):
                roles.append(("number", numbers))
                numbers += 1
            elif id(value) in x:
                roles.append(("input", x[id(value)]))
            elif id(value) in state:
                roles.append(("state", state[id(value)]))
            else:
                roles.append(("constant", constants))
                constants += 1
        roles = self._first.setdefault("roles", roles)
        self.constant_at = [i for i, (role, _) in enumerate(roles) if role == "constant"]
        self._number_at = [i for i, (role, _) in enumerate(roles) if role == "number"]
        rows = {self._sizes[i][1] for i, (role, _) in enumerate(roles) if role in _LEAVES} - {""}
        self._is_rows = [self._sizes[i][0] in rows for i in self._number_at]
        self._input_at = _inputs_of(roles)
        self.has_tensors_alone = not floats and all(self._is_rows)
        """Whether steps get nothing else that may change from call to call."""
        self.dtype = states[0].dtype
        self._is_on_cpu = states[0].device.type == "cpu"
        self.is_known = True

    def order_of(self, args: Sequence[Any], inputs: Leaves) -> Sequence[int] | None:
        """Which tensor of a call's input each of the graph's is, where these are not the same.

        What the guards do not ask for may be otherwise than in the first call: the order of a
        dict's keys, and keys that the step does not read.
        """
        count = len(inputs)
        if all([number < count and args[i] is inputs[number] for i, number in self._input_at]):
            return None
        place = {id(leaf): j for j, leaf in enumerate(inputs)}
        read = {number: place[id(args[i])] for i, number in self._input_at}
        others = [j for j in range(count) if j not in read.values()]
        order = [
            read[number] if number in read else others.pop(0) if others else 0
            for number in range(1 + max(read))
        ]
        return order + others

    def renumber_inputs(self, numbers: Sequence[int]) -> None:
        """Gives input i another number, before there is a program."""
        self._first["roles"] = roles = [
            (role, numbers[i] if role == "input" else i) for role, i in self.roles
        ]
        self._input_at = _inputs_of(roles)

    def check_states(self, structure: Any) -> None:
        """
        Args:
            structure: Of a call's state. Guards do not ask for the order of an OrderedDict.

        Raises:
            CannotTrace: The first call had another one.
        """
        if self._first.setdefault("structure of the state", structure) != structure:
            raise CannotTrace("the keys of the state are in another order than in earlier calls")

    @property
    def names(self) -> list[str]:
        """Of constants, and of floats behind them."""
        return [self._names[i] for i in (*self.constant_at, *self._float_at)]

    @property
    def roles(self) -> Roles:
        roles: Roles = self._first["roles"]
        return roles

    def given(self, args: Sequence[Any], floats_are_tensors: bool) -> Given:
        """What a call has."""
        constants = [args[i] for i in self.constant_at]
        if not self._number_at and not self._float_at:
            return Given(tuple(constants), ())
        numbers = tuple(
            [
                None if is_rows else args[i]
                for i, is_rows in zip(self._number_at, self._is_rows, strict=True)
            ]
        )
        floats = [args[i] for i in self._float_at]
        if floats_are_tensors:
            return Given((*constants, *floats), numbers)
        return Given(tuple(constants), (*[one.item() for one in floats], *numbers))

    def results(self, outputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """What torch.compile's graph returns."""
        return [(outputs if is_output else state)[place] for is_output, place in self.outs]

    @property
    def has_floats(self) -> bool:
        return bool(self._float_at)

    def arguments(self, given: Given, x: Leaves, state: Leaves, rows: int) -> list[Any]:
        """The inputs of the graph."""
        constants, floats = len(self.constant_at), len(self._float_at)
        are_tensors = len(given.constants) > constants
        first = 0 if are_tensors else floats
        made: list[Any] = []
        for role, i in self.roles:
            if role == "input":
                made.append(x[i])
            elif role == "state":
                made.append(state[i])
            elif role == "constant":
                made.append(given.constants[i])
            elif role == "float":
                made.append(given.constants[constants + i] if are_tensors else given.numbers[i])
            else:
                number = given.numbers[first + i]
                made.append(rows if number is None else number)
        return made

    def take(
        self, given: Given, x: Leaves, state: Leaves, rows: int, module: Any = None
    ) -> tuple[Leaves, Leaves]:
        """One step: the new state and the outputs.

        Args:
            module: What to run in the place of the graph.
        """
        # By itself, a GraphModule prints an error before it raises it.
        made = (module or self.module.forward)(*self.arguments(given, x, state, rows))
        return tuple(made[: self.states]), tuple(made[self.states :])

    def on_cpu(self, dtype: torch.dtype) -> fx.GraphModule:
        """The graph for tensors on a CPU, where it names the cell's dtype with this one."""
        if self._is_on_cpu and dtype == self.dtype:
            return self.module
        found = self._on_cpu.get(dtype)
        if found is None:
            found = self._on_cpu[dtype] = _renamed(self.module, self.dtype, dtype)
        return found


def _first_size(value: Any) -> str:
    """What torch.compile calls a tensor's number of rows; "" if it is always the same."""
    is_open = isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
    return str(value.shape[0]) if is_open else ""


def _is_float(value: Any, node: fx.Node) -> bool:
    """A float of Python that has changed between calls comes as a tensor and its item()."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 0
        and bool(node.users)
        and all(u.op == "call_method" and u.target == "item" for u in node.users)
    )


def _inputs_of(roles: Roles) -> list[tuple[int, int]]:
    return [(i, number) for i, (role, number) in enumerate(roles) if role == "input"]


def _pure(
    module: fx.GraphModule, floats: Mapping[fx.Node, fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """
    Args:
        floats: Numbers, and the inputs that they are of.
    """
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output" or node.target in (result, result.default):
            continue
        if node in floats:
            copies[node] = copies[floats[node]]
        else:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[one] for one in results))
    return fx.GraphModule(module, made)


def _forget_origin(module: fx.GraphModule) -> None:
    """Keeps lines alone of what torch.compile has noted: the rest holds the user's classes."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            node.meta = {name: v for name, v in node.meta.items() if name == "stack_trace"}


def _renamed(module: fx.GraphModule, old: torch.dtype, new: torch.dtype) -> fx.GraphModule:
    made = copy.deepcopy(module)

    def swap(value: Any) -> Any:
        if value is old:
            return new
        return torch.device("cpu") if isinstance(value, torch.device) else value

    for part in made.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, swap)
            node.kwargs = fx.node.map_aggregate(node.kwargs, swap)
            if node.op == "call_method" and node.target == _METHODS.get(old):
                node.target = _METHODS[new]
            if node.op == "call_method" and node.target == "cuda":
                node.target, node.args, node.kwargs = "cpu", node.args[:1], {}
        part.recompile()
    return made.to("cpu")


_LIBRARIES = ("torch", "_operator", "operator", "builtins", "math")


def _check_functions(module: fx.GraphModule) -> None:
    """Refuses functions that torch.compile calls without following them: they may decide by sizes.

    Raises:
        CannotTrace: There is one.
    """
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op != "call_function":
                continue
            library = (getattr(node.target, "__module__", None) or "torch").partition(".")[0]
            name = getattr(node.target, "__name__", str(node.target))
            if library not in _LIBRARIES or name == "flat_apply":  # of nonstrict_trace
                raise CannotTrace(
                    f"the step calls {name}, which torch.compile is told not to follow"
                    f"{_line_of(node)}"
                )


def _line_of(node: Any) -> str:
    stack = node.meta.get("stack_trace") if isinstance(node, fx.Node) else None
    return in_brackets(last_line(stack or ""))


_METHODS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}


def _name_of(place: fx.Node) -> str:
    """What users call an input of the graph."""
    source = getattr(place.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    return as_users_write(name) if isinstance(name, str) else place.name
