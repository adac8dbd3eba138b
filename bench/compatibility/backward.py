"""Checks of first derivatives: training, what may come between forward and backward, threads."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as checkpoints

from .rows import group
from .subjects import Subject
from .trial import Trial, expect, loss, must_raise, same

row = group("autograd")
DEEP: dict[str, Any] = {"num_layers": 2, "bidirectional": True}


@row("training step")
def training(s: Subject) -> None:
    """Outputs and the gradients of input, states and weights; two layers, two directions."""
    Trial(s, **DEEP).trains()


@row("backward in eval mode")
def evaluation(s: Subject) -> None:
    """A module in eval mode has the same gradients."""
    trial = Trial(s, **DEEP)
    trial.module.eval()
    trial.trains()


@row("frozen weights")
def frozen(s: Subject) -> None:
    """With any one weight frozen, with all but one, and with all, the others have gradients."""
    names = list(Trial(s, num_layers=2).weights)
    choices = [[name] for name in names[::3]] + [names[1:], names[:-1], names]
    for choice in choices:
        trial = Trial(s, num_layers=2)
        for name in choice:
            trial.weights[name].requires_grad_(False)
        trial.trains()


@row("gradient of one argument")
def one_argument(s: Subject) -> None:
    """The gradient of input, state or weight alone, through each result alone."""
    trial = Trial(s)
    weights = {n: w.double().requires_grad_() for n, w in trial.detached.items()}
    for i in range(1 + len(trial.states)):
        leaves = [trial.x.clone(), *(state.clone() for state in trial.states)]
        leaves[i].requires_grad_()
        for k in range(1 + len(trial.states)):
            ours = torch.autograd.grad(loss((trial.call(*leaves)[k],)), leaves[i])
            truth = torch.autograd.grad(loss((trial.truth(weights, *leaves)[k],)), leaves[i])
            same(ours, truth, what="gradient")


@row("gradients accumulate")
def accumulate(s: Subject) -> None:
    """Two backward passes add to .grad; parts of a sequence with detached states too."""
    trial = Trial(s)
    loss(trial.call(trial.x, *trial.states)).backward()
    loss(trial.call(trial.x, *trial.states)).backward()
    _, grads = trial.expected()
    for name, weight in trial.weights.items():
        same(weight.grad, 2 * grads[name], what="gradient")


@row("retain_graph")
def retain_graph(s: Subject) -> None:
    """Backward through one graph twice gives the same; once more after it is freed is an error."""
    trial = Trial(s)
    x = trial.x.clone().requires_grad_()
    result = loss(trial.call(x, *trial.states))
    first = torch.autograd.grad(result, [x, *trial.weights.values()], retain_graph=True)
    second = torch.autograd.grad(result, [x, *trial.weights.values()])
    same(second, first, 0.0)
    same(first[0], trial.expected()[1]["x"])
    must_raise(lambda: torch.autograd.grad(result, x), "second time")


@row("no_grad")
def no_grad(s: Subject) -> None:
    """Under no_grad values are the same and nothing requires a gradient."""
    trial = Trial(s, **DEEP)
    with torch.no_grad():
        outputs = trial.call(trial.x.requires_grad_(), *trial.states)
    trial.same_values(outputs)
    expect(not any(o.requires_grad for o in outputs), "a result requires a gradient")


@row("inference_mode")
def inference_mode(s: Subject) -> None:
    """Under inference_mode values are the same; its results serve as input outside of it."""
    trial = Trial(s)
    with torch.inference_mode():
        outputs = trial.call(trial.x, *trial.states)
    trial.same_values(outputs)
    with torch.inference_mode():
        x = trial.x.clone()
    with torch.no_grad():
        trial.same_values(trial.call(x, *trial.states))


@row("gradcheck")
def gradcheck(s: Subject) -> None:
    """torch.autograd.gradcheck over input, states and all weights."""
    trial = Trial(s, seq_len=3, batch=2)
    names = list(trial.weights)
    leaves = [trial.x, *trial.states, *trial.detached.values()]
    n = 1 + len(trial.states)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return trial.functional(dict(zip(names, tensors[n:], strict=True)), *tensors[:n])

    torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in leaves], fast_mode=True)


@row("another thread")
def other_thread(s: Subject) -> None:
    """Backward in another thread, and whole training steps in two threads at once."""
    trial = Trial(s)

    def elsewhere(result: Tensor) -> None:
        thread = threading.Thread(target=result.backward)
        thread.start()
        thread.join()

    trial.trains(backward=elsewhere)
    errors: list[Exception] = []

    def train(own: Trial) -> None:
        try:
            for _ in range(10):
                own.trains()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(Trial(s, **DEEP),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@row("anomaly mode")
def anomaly(s: Subject) -> None:
    """A training step under detect_anomaly is the same, and a NaN gradient is reported."""
    trial = Trial(s)
    with torch.autograd.detect_anomaly():
        trial.trains()
        x = trial.x.clone()
        x[2] = float("nan")
        must_raise(lambda: loss(trial.call(x, *trial.states)).backward(), "nan")


@row("deterministic mode")
def deterministic(s: Subject) -> None:
    """A training step under use_deterministic_algorithms is right, and twice bitwise the same."""
    trial, found = Trial(s, **DEEP), []
    torch.use_deterministic_algorithms(True)
    try:
        trial.trains()
        for _ in range(2):
            x = trial.x.clone().requires_grad_()
            result = loss(trial.call(x, *trial.states))
            found.append(torch.autograd.grad(result, [x, *trial.weights.values()]))
    finally:
        torch.use_deterministic_algorithms(False)
    same(found[0], found[1], 0.0)


@row("checkpoint")
def checkpoint(s: Subject) -> None:
    """torch.utils.checkpoint, with reentrant backward and without."""
    for reentrant in (True, False):
        trial = Trial(s, **DEEP)

        def call(x: Tensor, *states: Tensor, t: Trial = trial, r: bool = reentrant) -> Any:
            return checkpoints.checkpoint(t.call, x, *states, use_reentrant=r)

        trial.trains(call)


@row("checkpoint of drawn noise")
def checkpoint_noise(s: Subject) -> None:
    """Checkpointed with noise that is drawn: forward's and backward's second run agree."""
    s.needs("noise")
    for reentrant in (True, False):
        results = []
        for checkpointed in (True, False):
            trial = Trial(s, noise="drawn")
            x = trial.x.clone().requires_grad_()
            torch.manual_seed(3)
            call = lambda x, t=trial: t.call(x)  # noqa: E731
            outputs = (
                checkpoints.checkpoint(call, x, use_reentrant=reentrant)
                if checkpointed
                else call(x)
            )
            loss(outputs).backward()
            results.append((outputs, trial.gradients(x)))
        same(results[0], results[1], 1e-12)


@row("selective checkpoint")
def selective(s: Subject) -> None:
    """A selective checkpoint that saves the results of all operators, or of none."""
    Policy = checkpoints.CheckpointPolicy
    for policy in (Policy.MUST_SAVE, Policy.PREFER_RECOMPUTE):
        trial = Trial(s)

        def contexts(p: Any = policy) -> Any:
            decide = lambda context, op, *args, **named: p  # noqa: E731
            return checkpoints.create_selective_checkpoint_contexts(decide)

        def call(x: Tensor, *states: Tensor, t: Trial = trial, c: Any = contexts) -> Any:
            return checkpoints.checkpoint(t.call, x, *states, use_reentrant=False, context_fn=c)

        trial.trains(call)


@row("hooks of saved tensors")
def saved_hooks(s: Subject) -> None:
    """Hooks that pack each saved tensor as a NumPy array and unpack it again."""
    trial = Trial(s, **DEEP)
    packed = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tensor)
        return tensor.detach().numpy().copy()

    with saved_tensors_hooks(pack, torch.from_numpy):
        trial.trains()
    expect(packed, "nothing was packed")


@row("save_on_cpu")
def saved_on_cpu(s: Subject) -> None:
    """A training step under torch.autograd.graph.save_on_cpu."""
    trial = Trial(s, **DEEP)

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        with save_on_cpu():
            return trial.call(x, *states)

    trial.trains(call)


@row("deepcopy between forward and backward")
def copied(s: Subject) -> None:
    """A copy of the module, made and trained before backward, changes nothing."""
    trial = Trial(s)

    def backward(result: Tensor) -> None:
        other = copy.deepcopy(trial.module)
        loss(trial.call(trial.x, *trial.states, module=other)).backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        result.backward()

    trial.trains(backward=backward)


@row("parts of a sequence")
def windows(s: Subject) -> None:
    """Truncated backpropagation: three windows, the states detached between them."""
    trial = Trial(s, seq_len=6)
    eps = trial.given.pop("eps", None)
    weights = {n: w.double().requires_grad_() for n, w in trial.detached.items()}
    ours, truth = list(trial.states), list(trial.states)
    for begin in range(0, 6, 2):
        x = trial.x[begin : begin + 2]
        noise = {} if eps is None else {"eps": eps[:, begin : begin + 2]}
        outputs, expected = (
            trial.call(x, *ours, **noise),
            trial.truth(weights, x, *truth, **noise),
        )
        loss(outputs).backward()
        loss(expected).backward()
        ours, truth = [o.detach() for o in outputs[1:]], [o.detach() for o in expected[1:]]
        same(outputs, expected, what="output")
    same([w.grad for w in trial.weights.values()], [w.grad for w in weights.values()])


@row("last state alone")
def last_state(s: Subject) -> None:
    """return_sequence=False: the last output and all gradients, over several parts."""
    s.needs("fusedrnn")
    trial = Trial(s, seq_len=40, num_layers=2, return_sequence=False)
    leaves = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
    loss(trial.call(*leaves)).backward()
    ours = trial.gradients(*leaves)
    expected = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
    weights = {n: w.requires_grad_() for n, w in trial.detached.items()}
    output, *last = trial.truth(weights, *expected)
    loss((output[-1], *last)).backward()
    same(list(ours.values()), [t.grad for t in (*expected, *weights.values())], what="gradient")
