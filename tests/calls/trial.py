"""A call with its tensors, by fusedrnn, by a plain loop, and by torch's own kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from cases import Arguments, TorchLibrary
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fusedrnn

from . import Call, oracle
from .changes import changes
from .draw import sizes_of
from .drawn import Drawn, recorded_draws
from .memory import any_memory

MODULES = {
    "gru": (fusedrnn.GRU, fusedrnn.GRUCell),
    "lstm": (fusedrnn.LSTM, fusedrnn.LSTMCell),
    "stochastic_gru": (fusedrnn.StochasticGRU, fusedrnn.StochasticGRUCell),
}
BATCH_DIMS = {"hx": 1, "cx": 1, "eps": 2}
SEEDS: list[Any] = [-5, [3], [[2**62]]]
Tensors = dict[str, Tensor]


class Trial:
    """A call with its tensors, in the form that a user gives them.

    Attributes:
        leaves: The tensors that may have a gradient, by name.
        along: The gradients of the results, or None for some; set by the first call.
    """

    def __init__(self, call: Call, seed: int = 0):
        self.call, self.seed, case = call, seed, call.case
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        a = case.tensors()
        if call.change:
            with torch.no_grad():
                changes(case.cell)[call.change](case, a)
        self.sorted = self.unsorted = self.batch_sizes = None
        self.lengths, reset = a.lengths, a.reset
        values = {"input": a.input, "hx": a.hx, "cx": a.cx, "eps": a.eps}
        if call.rows == "packed":
            self.lengths = lengths = a.lengths.clone()
            lengths[rng.randrange(case.batch)] = case.seq_len
            if call.is_sorted:
                self.lengths = lengths = lengths.sort(descending=True)[0]
            packed = pack_padded_sequence(a.input, lengths, enforce_sorted=call.is_sorted)
            values["input"], self.batch_sizes, self.sorted, self.unsorted = packed
        elif call.rows == "single":
            values = {
                name: None if value is None else value.squeeze(BATCH_DIMS.get(name, 1))
                for name, value in values.items()
            }
            reset = None if reset is None else reset.squeeze(1)
        if call.batch_first and call.rows == "batch":
            values["input"] = a.input.transpose(0, 1)
        if call.batch_first and call.rows != "single" and reset is not None:
            reset = reset.t()
        if not call.has_state:
            values["hx"] = values["cx"] = None
        every = {k: v for k, v in values.items() if v is not None}
        if call.form == "cell":
            every = {name: value.squeeze(0) for name, value in every.items()}
            if "eps" in every:
                every["eps"] = every["eps"].squeeze(0)
        every |= {f"weights[{i}]": w for i, w in enumerate(a.weights)}
        self.reset = None if reset is None else self._memory(reset)
        needs_none = rng.random() < 0.05
        wants_all = rng.random() < 0.5
        self.leaves: Tensors = {}
        for name, value in every.items():
            in_module = call.form != "functional" and name.startswith("weights")
            leaf = value if in_module else self._memory(value)
            wanted = (wants_all or rng.random() < 0.5) and not needs_none
            self.leaves[name] = leaf.detach().requires_grad_(wanted or call.is_plain)
        self.generator = torch.Generator().manual_seed(rng.getrandbits(60))
        self.noise_seed = a.seed if call.is_plain else torch.tensor(rng.choice(SEEDS))
        self.along: list[Tensor | None] | None = None
        if call.is_plain:
            self.along = list(a.cotangents())
            if not call.return_sequence:
                self.along[0] = None  # it has no steps then
        self.drawn = Drawn()
        self._others: list[Tensors] = []
        self._orders = 0

    def _memory(self, values: Tensor) -> Tensor:
        return values if self.call.is_plain else any_memory(values, self.rng)

    # By fusedrnn

    def given(self, leaves: Tensors | None = None) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function of the call, and all its arguments. Weights of modules become leaves."""
        call, case = self.call, self.call.case
        leaves = self.leaves if leaves is None else leaves
        hx, device = leaves.get("hx"), leaves["input"].device
        tensors: dict[str, Any] = {"input": leaves["input"]}
        tensors["hx"] = (hx, leaves["cx"]) if "cx" in leaves else hx
        if self.batch_sizes is not None:
            sizes = (self.batch_sizes, self.sorted, self.unsorted)
            tensors["input"] = PackedSequence(leaves["input"], *sizes)
        if call.form != "cell":
            tensors["reset"] = None if self.reset is None else self.reset.to(device)
            tensors["lengths"] = self._lengths_given()
        if case.cell == "stochastic_gru":
            tensors |= {"eps": leaves.get("eps"), "sample": call.noise != "none"}
            tensors["generator"] = self.generator if call.noise == "generator" else None
            if call.form == "functional":
                tensors["seed"] = self.noise_seed.to(device) if call.noise == "seed" else None
        if call.form == "functional":
            weights = [w for name, w in leaves.items() if name.startswith("weights")]
            tensors |= {"weights": weights} | call.options | self._options()
            return getattr(fusedrnn, case.cell), tensors
        return self._module(), tensors

    def _lengths_given(self) -> Any:
        """The lengths in the drawn form: tensor, list or array."""
        if self.lengths is None or self.call.rows == "packed":
            return None
        forms = {"list": self.lengths.tolist(), "numpy": list(np.array(self.lengths.numpy(), "i4"))}
        return forms.get(self.call.lengths_as, self.lengths)

    def constructor(self) -> tuple[Callable[..., torch.nn.Module], dict[str, Any]]:
        """The class of the call's module or cell, and all arguments of its constructor."""
        call, case = self.call, self.call.case
        options = sizes_of(case) | {"dtype": case.dtype}
        if call.form == "cell":
            sizes = ("input_size", "hidden_size", "latent_size", "bias", "dtype")
            return MODULES[case.cell][1], {k: v for k, v in options.items() if k in sizes}
        options |= {k: v for k, v in call.options.items() if k != "training"} | self._options()
        return MODULES[case.cell][0], options

    def _options(self) -> dict[str, Any]:
        call = self.call
        more = {"batch_first": call.batch_first, "return_sequence": call.return_sequence}
        return call.case.options | more

    def _module(self) -> torch.nn.Module:
        """The module of the call; its weights become leaves of this trial."""
        kind, arguments = self.constructor()
        module = kind(**arguments).train(self.call.options.get("training", True))
        for i, own in enumerate(module.parameters()):
            given = self.leaves[f"weights[{i}]"]
            with torch.no_grad():
                own.copy_(given)
            self.leaves[f"weights[{i}]"] = own.requires_grad_(given.requires_grad)
        return module

    def outputs(self, leaves: Tensors | None = None) -> tuple[Tensor, ...]:
        """Results of fusedrnn, as plain tensors; draws the same numbers each time."""
        torch.manual_seed(self.seed)
        function, arguments = self.given(leaves)
        with recorded_draws() as drawn, torch.autocast("cpu", enabled=self.call.autocast):
            found = function(**arguments)
        self.drawn = drawn
        if self.call.form == "cell":
            found = found if isinstance(found, tuple) else (found,)
        else:
            output, last = found
            output = output.data if isinstance(output, PackedSequence) else output
            found = (output, *(last if isinstance(last, tuple) else (last,)))
        if self.along is None:
            self.along = [self._drawn_along(i, output) for i, output in enumerate(found)]
        return found

    def _drawn_along(self, i: int, output: Tensor) -> Tensor | None:
        noise = torch.Generator().manual_seed(self.seed + i)
        values = torch.randn(output.shape, generator=noise, dtype=torch.float64)
        along = any_memory(values.to(output.dtype), self.rng)
        return along if self.rng.random() < 0.8 else None

    def results(self, outputs: tuple[Tensor, ...], leaves: Tensors) -> Tensors:
        """Results and gradients by name, in float64."""
        names = ("output", "h_n", "c_n")[self.call.form == "cell" :]
        found = dict(zip(names, outputs, strict=False))
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        assert self.along is not None
        pairs = [(o, c.to(o)) for o, c in zip(outputs, self.along, strict=True) if c is not None]
        if wanted and pairs and torch.is_grad_enabled():
            of, along = zip(*pairs, strict=True)
            grads = torch.autograd.grad(of, list(wanted.values()), along, materialize_grads=True)
            found |= {f"grad_{n}": g for n, g in zip(wanted, grads, strict=True)}
        return {name: tensor.detach().double().cpu() for name, tensor in found.items()}

    def ours(self, device: str = "cpu") -> Tensors:
        """Results of fusedrnn, by whatever ``computing`` has set up."""
        leaves = self.leaves
        if device != "cpu":
            leaves = {n: w.detach().to(device).requires_grad_() for n, w in leaves.items()}
        return self.results(self.outputs(leaves), leaves)

    # By others, after fusedrnn has drawn

    @cached_property
    def truth(self) -> Tensors:
        """Results in float64, without cancellation in gates."""
        leaves = self._copies(torch.float64)
        return self.results(self._loop(leaves, is_exact=True), leaves)

    def others(self, orders: int) -> list[Tensors]:
        """Results of torch and of the loop, in several orders of summation, in the call's dtype."""
        if not self._others:
            self._others = [*self._torchs(), self._other()]
        for seed in range(self._orders, orders):
            order = torch.Generator().manual_seed(seed)
            self._others.append(self._other(order=order))
            if self.call.dtype == torch.float64:  # else all would share the truth's roundings
                self._others.append(self._other(order=order, by_logarithm=True))
        self._orders = max(orders, self._orders)
        return self._others

    def _other(self, **how: Any) -> Tensors:
        leaves = self._copies(self.call.dtype)
        found = self.results(self._loop(leaves, **how), leaves)
        for name, leaf in self.leaves.items():
            # Under autocast a gradient is rounded to the leaf's dtype, where it may vanish.
            if (grad := found.get(f"grad_{name}")) is not None:
                found[f"grad_{name}"] = grad.to(leaf.dtype).double()
        return found

    def _torchs(self) -> Iterator[Tensors]:
        """Results of torch's own kernel, if it has one for a call of hostile scales."""
        call, case = self.call, self.call.case
        has_kernel = case.cell != "stochastic_gru" and not (case.lengths or case.reset)
        if call.change and has_kernel and not call.options:
            leaves = self._copies(call.dtype)
            a = self._padded(leaves)
            output, *last = a.call(TorchLibrary, **case.sizes)
            yield self.results(self._presented(output, last, None), leaves)

    def _copies(self, dtype: torch.dtype) -> Tensors:
        """Copies in another dtype of the values that the call sees."""
        return {
            name: leaf.detach().to(self.call.dtype).to(dtype).requires_grad_(leaf.requires_grad)
            for name, leaf in self.leaves.items()
        }

    def _padded(self, leaves: Tensors) -> Arguments:
        """The arguments of the loop, which takes a padded batch in the order of packed rows."""
        call, case, rows = self.call, self.call.case, self.call.rows
        x, dtype = leaves["input"], leaves["input"].dtype
        lengths, reset = self.lengths, self.reset
        states = {name: leaves[name] for name in BATCH_DIMS if name in leaves}
        if call.form == "cell":  # a cell runs a sequence of one step
            x, states = x[None], {name: s[None] for name, s in states.items()}
            if "eps" in states:
                states["eps"] = states["eps"][None]
        if rows == "packed":
            x, lengths = pad_packed_sequence(PackedSequence(x, self.batch_sizes))
        elif rows == "single":
            x = x.unsqueeze(1)
            states = {name: s.unsqueeze(BATCH_DIMS[name]) for name, s in states.items()}
            reset = None if reset is None else reset.unsqueeze(1)
        elif call.batch_first:
            x = x.transpose(0, 1)
        if reset is not None and call.batch_first and rows != "single":
            reset = reset.t()
        if self.sorted is not None:
            states = {n: s.index_select(BATCH_DIMS[n], self.sorted) for n, s in states.items()}
            reset = None if reset is None else reset[:, self.sorted]
        hx, cx, eps = (states.get(name) for name in BATCH_DIMS)
        shape = (case.num_layers * call.directions, x.shape[1])
        if hx is None:
            hx = torch.zeros(*shape, case.proj_size or case.hidden_size, dtype=dtype)
        if cx is None and case.cell == "lstm":
            cx = torch.zeros(*shape, case.hidden_size, dtype=dtype)
        weights = [w for name, w in leaves.items() if name.startswith("weights")]
        if self.drawn.kept_weights:
            keep = 1 - call.options["weight_dropout"]
            weights = [
                weight if kept is None else weight * (kept.double() / keep).to(dtype)
                for weight, kept in zip(weights, self.drawn.kept_weights, strict=True)
            ]
        seed, nothing = self.drawn.seed, None
        return Arguments(
            *(case.cell, x, hx, cx, weights, eps, None if seed is None else seed.cpu()),
            *(call.noise != "none", lengths, reset, nothing, nothing, nothing),
        )  # type: ignore[arg-type]

    def _loop(self, leaves: Tensors, **how: Any) -> tuple[Tensor, ...]:
        """Results of the plain loop, in the form of ``outputs``; ``how``: as the oracle's."""
        options, mask_seed = self.call.options, self.drawn.mask_seed
        zoneout = options.get("zoneout", 0.0)
        pair = zoneout if isinstance(zoneout, tuple) else (zoneout, zoneout)
        training, dropout = options.get("training", True), options.get("dropout", 0.0)
        regularization = oracle.Regularization(dropout, pair, training)
        if mask_seed is not None:
            regularization = replace(regularization, seed=int(mask_seed))
        a = self._padded(leaves)
        output, *last = oracle.call(self.call.case, a, regularization, **how)
        return self._presented(output, last, a.lengths)

    def _presented(
        self, output: Tensor, last: list[Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Results of a padded batch in the form of ``outputs``."""
        call, rows = self.call, self.call.rows
        if not call.return_sequence:
            output = torch.cat(last[0][-call.directions :].unbind(), -1)
        elif rows == "packed":
            output = pack_padded_sequence(output, lengths).data
        if self.unsorted is not None:
            last = [s.index_select(1, self.unsorted) for s in last]
            output = output if call.return_sequence else output.index_select(0, self.unsorted)
        if rows == "single":
            last = [s.squeeze(1) for s in last]
            output = output.squeeze(1 if call.return_sequence else 0)
        elif rows == "batch" and call.batch_first and call.return_sequence:
            output = output.transpose(0, 1)
        if call.form == "cell":
            return tuple(s.squeeze(0) for s in last)
        return output, *last
