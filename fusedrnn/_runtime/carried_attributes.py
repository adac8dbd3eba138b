"""States that a step keeps in attributes, where neither resets nor the ends of rows reach them."""

from __future__ import annotations

from torch import Tensor

from .._step.noise import Noise
from .._step.trees import Leaves
from .._step.watch import Watch
from .python_steps import PythonSteps, take_step
from .python_variables import VariableStates
from .step_changes import aside


def check_nothing_is_carried(
    steps: PythonSteps, inputs: Leaves, state: Leaves, constants: Leaves
) -> None:
    """Takes the first two steps; what they change is afterwards as before.

    Raises:
        RuntimeError: The second one reads a tensor with a row for each sequence that the first one
            has put into an attribute or a variable.
    """
    call, variables, random = steps.call, steps.variables, steps.generators.states()
    if call.seq_len < 2:
        return
    noise = Noise.for_trial()

    def take(i: int, state: Leaves) -> list[Tensor]:
        time = call.time(i)
        noise.chunk(time, 1, call.rows)
        steps.generators.put_back(random)
        x = tuple([leaf[time] for leaf in inputs])
        with Watch(noise):
            new, y = take_step(steps.step, call, noise, time, state, x, constants)
        return [*(leaf.clone() for leaf in new), *(leaf.clone() for leaf in y)]

    with aside(variables):
        try:
            before = variables.values()
            second = tuple(take(0, state)[: len(state)])
            set_now = variables.values()
            for key, now in set_now.items():
                tensors = [] if now.is_same(before.get(key, now)) else now.tensors
                if not any(_has_rows(tensor, call.rows) for tensor in tensors):
                    continue
                results = []
                for states in (set_now, _with_others(set_now, key)):
                    with variables.exchanged(states):
                        results.append(take(1, second))
                if not all(map(_is_equal, *results)):
                    raise RuntimeError(
                        f"fusedrnn: the step{call.place} keeps a state in {variables.name(key)}, "
                        "where reset, reset_to and lengths of a reverse cell do not reach it; take "
                        "it as the state instead: forward(self, x, state), which returns (output, "
                        "state), and initial_state(self, batch)"
                    )
        finally:
            steps.generators.put_back(random)


def _has_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.is_floating_point() and tensor.shape[:1] == (rows,)


def _with_others(states: VariableStates, key: tuple[int, str]) -> VariableStates:
    return states | {key: states[key].mapped(lambda tensor: tensor + 1, Tensor).apart()}


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a != a)).all())
