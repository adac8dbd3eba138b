"""Checks of first derivatives: training, what may come between forward and backward, threads.

Longer than 350 lines, because its checks are of one topic and share their helpers.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import checkpoint as checkpoints

from .rows import group
from .subjects import Subject
from .trial import DEEP, Trial, expect, loss, must_raise, same

row = group("autograd")


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
    """The gradient of input, state, noise or weight alone, through each result alone."""
    trial = Trial(s, **DEEP)
    masks: dict[str, Any] = {}
    if s.kind != "torch":
        masks = {"lengths": [5, 2, 4], "reset": torch.rand(5, 3) < 0.3}
    names, n = list(trial.detached), 1 + len(trial.states)
    tensors = [trial.x, *trial.states, *trial.detached.values(), *trial.given.values()]
    for i in range(len(tensors)):
        for k in range(n):
            found = []
            for function in (trial.functional, trial.truth):
                leaves = [t.clone().requires_grad_(j == i) for j, t in enumerate(tensors)]
                weights = dict(zip(names, leaves[n:], strict=False))
                given = masks | dict(zip(trial.given, leaves[n + len(names) :], strict=True))
                result = function(weights, *leaves[:n], **given)[k]
                # Last states of a layer depend on no weight of the next one.
                found += torch.autograd.grad(
                    loss((result,)), leaves[i], materialize_grads=True, allow_unused=True
                )
            same(found[0], found[1], what="gradient")


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
    for options in ({}, DEEP, *([{"recompute": False}] if s.is_ours else [])):
        trial = Trial(s, **options)
        x = trial.x.clone().requires_grad_()
        result = loss(trial.call(x, *trial.states))
        first = torch.autograd.grad(result, [x, *trial.weights.values()], retain_graph=True)
        second = torch.autograd.grad(result, [x, *trial.weights.values()])
        same(second, first, 0.0)
        same(first[0], trial.expected()[1]["x"])
        must_raise(lambda r=result, x=x: torch.autograd.grad(r, x), "second time")  # type: ignore


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
        run = functools.partial(checkpoints.checkpoint, trial.call, use_reentrant=reentrant)
        trial.trains(run)


@row("checkpoint of drawn noise")
def checkpoint_noise(s: Subject) -> None:
    """Checkpointed with drawn noise, lengths and resets: forward's and backward's runs agree."""
    s.needs("noise")
    masks: dict[str, Any] = {"lengths": [5, 2, 4], "reset": torch.rand(5, 3) < 0.3}
    for reentrant in (True, False):
        results = []
        for checkpointed in (True, False):
            trial = Trial(s, noise="drawn", **DEEP)
            x = trial.x.clone().requires_grad_()
            torch.manual_seed(3)
            call = lambda x, t=trial: t.call(x, **masks)  # noqa: E731
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
        decide = lambda *args, p=policy, **named: p  # noqa: E731
        contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, decide)
        options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
        trial.trains(functools.partial(checkpoints.checkpoint, trial.call, **options))


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


def train_in_windows(s: Subject, made: Callable[[Any], Any] = lambda module: module) -> None:
    """Truncated backpropagation by what ``made`` makes of the module, against the loop."""
    trial = Trial(s, seq_len=8)
    module, eps = made(trial.module), trial.given.pop("eps", None)
    weights = {n: w.double().requires_grad_() for n, w in trial.detached.items()}
    ours, truth = list(trial.states), list(trial.states)
    for begin in range(0, 8, 2):
        x = trial.x[begin : begin + 2]
        noise = {} if eps is None else {"eps": eps[:, begin : begin + 2].contiguous()}
        outputs = trial.call(x, *ours, module=module, **noise)
        expected = trial.truth(weights, x, *truth, **noise)
        loss(outputs).backward()
        loss(expected).backward()
        ours, truth = [o.detach() for o in outputs[1:]], [o.detach() for o in expected[1:]]
        same(outputs, expected, what="output")
    same([w.grad for w in trial.weights.values()], [w.grad for w in weights.values()])


@row("parts of a sequence")
def windows(s: Subject) -> None:
    """Truncated backpropagation: four windows, the states detached between them."""
    train_in_windows(s)


_REPARAMETRIZED: list[Callable[[Any, str], Any]] = [
    lambda rnn, name: parametrizations.weight_norm(rnn, name),
    lambda rnn, name: parametrizations.spectral_norm(rnn, name).eval(),
    lambda rnn, name: parametrizations.orthogonal(rnn, name),
    lambda rnn, name: parametrize.register_parametrization(rnn, name, nn.Tanh()),
    lambda rnn, name: prune.l1_unstructured(rnn, name, 0.5),
]


@row("parametrizations and pruning")
def reparametrized(s: Subject) -> None:
    """Gradients reach what a weight is computed from: norms, an orthogonal one, a mask."""
    for change in _REPARAMETRIZED:
        trial = Trial(s)
        names = list(trial.weights)
        change(*trial.place(names[1]))
        outputs = trial.call(trial.x, *trial.states)
        weights = {name: getattr(*trial.place(name)) for name in names}
        expected = trial.truth(weights, trial.x, *trial.states)
        same(outputs, expected, what="output")
        leaves = list(trial.module.parameters())
        found = [
            torch.autograd.grad(loss(o), leaves, retain_graph=True) for o in (outputs, expected)
        ]
        same(found[0], found[1], what="gradient")


@row("last state alone")
def last_state(s: Subject) -> None:
    """return_sequence=False: the last output and all gradients, over several parts."""
    s.needs("fusedrnn")
    projected = [{"proj_size": 2, **DEEP}] if s.cell == "lstm" else []
    for options in ({"num_layers": 2}, DEEP, *projected):
        trial = Trial(s, seq_len=40, return_sequence=False, **options)
        leaves = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
        outputs = trial.call(*leaves)
        loss(outputs).backward()
        ours = trial.gradients(*leaves)
        expected = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
        weights = {n: w.requires_grad_() for n, w in trial.detached.items()}
        _, *last = trial.truth(weights, *expected)
        output = torch.cat([*last[0][-2:]], -1) if options.get("bidirectional") else last[0][-1]
        same(outputs, (output, *last), what="output")
        loss((output, *last)).backward()
        truth = [t.grad for t in (*expected, *weights.values())]
        same(list(ours.values()), truth, what="gradient")


@row("dropout")
def dropout(s: Subject) -> None:
    """Dropout between layers is seeded, leaves the output alone and is off in evaluation."""
    trial = Trial(s, num_layers=2, dropout=0.5)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(trial.call(trial.x, *trial.states))
    same(outputs[0], outputs[1], 0.0)
    expect(not torch.equal(outputs[0][0], outputs[2][0]), "two seeds have the same masks")
    expect((outputs[0][0] != 0).all(), "the output itself is dropped")
    trial.module.eval()
    trial.trains()
    Trial(s, num_layers=2, dropout=0.0).trains()
    trial = Trial(s, num_layers=2, dropout=1.0)
    x = trial.x.clone().requires_grad_()
    trial.call(x, *trial.states)[0].sum().backward()
    expect(x.grad is not None and not x.grad.any(), "the input has a gradient")


def _learned(s: Subject, fused: bool) -> list[Tensor]:
    trial = Trial(s, **DEEP)
    call = trial.call if fused else lambda *tensors: trial.truth(trial.weights, *tensors)
    optimizer, losses = torch.optim.Adam(trial.module.parameters(), lr=0.01), []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(call(trial.x, *trial.states)[0].square().mean())
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(trial.module.parameters(), 0.1)
        optimizer.step()
    return losses


@row("20 steps of Adam")
def learning(s: Subject) -> None:
    """Training with clipped gradients has the losses of the loop, and these fall."""
    ours, truth = _learned(s, True), _learned(s, False)
    same(ours, truth, what="loss")
    expect(ours[-1] < ours[0], "the loss does not fall")
