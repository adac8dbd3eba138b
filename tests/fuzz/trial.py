"""A right call with its tensors, by fusedrnn and by a plain loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cases import Arguments
from hostile import oracle
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fusedrnn

from .drawing import draw
from .memory import any_memory

MODULES = {
    "gru": (fusedrnn.GRU, fusedrnn.GRUCell),
    "lstm": (fusedrnn.LSTM, fusedrnn.LSTMCell),
    "stochastic_gru": (fusedrnn.StochasticGRU, fusedrnn.StochasticGRUCell),
}


@dataclass
class Drawn:
    """What a call drew at random."""

    seed: Tensor | None = None  # of noise
    mask_seed: Tensor | None = None  # of dropout and zoneout
    # bool, what weight_dropout keeps of each weight; None for weights that it leaves alone.
    kept_weights: list[Tensor | None] = field(default_factory=list)


class Trial:
    """A call with its tensors, in the form that a user gives them."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.call = call = draw(rng)
        self.seed, case = seed, call.case
        torch.manual_seed(seed)
        a = case.tensors()
        self.sorted = self.unsorted = self.batch_sizes = None
        self.lengths = a.lengths
        reset = a.reset
        values = {"input": a.input, "hx": a.hx, "cx": a.cx, "eps": a.eps}
        if call.rows == "packed":
            self.lengths = lengths = a.lengths.clone()
            lengths[rng.randrange(case.batch)] = case.seq_len
            if call.is_sorted:
                self.lengths = lengths = lengths.sort(descending=True)[0]
            packed = pack_padded_sequence(a.input, lengths, enforce_sorted=call.is_sorted)
            values["input"], self.batch_sizes, self.sorted, self.unsorted = packed
        elif call.rows == "single":
            values["input"] = a.input.squeeze(1)
            for name in ("hx", "cx"):
                values[name] = None if values[name] is None else values[name].squeeze(1)
            if a.eps is not None:
                values["eps"] = a.eps.squeeze(2)
            reset = None if reset is None else reset.squeeze(1)
        if call.batch_first and call.rows == "batch":
            values["input"] = a.input.transpose(0, 1)
        if call.batch_first and call.rows != "single" and reset is not None:
            reset = reset.t()
        if not call.has_state:
            values["hx"] = values["cx"] = None
        if call.form == "cell":
            values["input"] = values["input"].squeeze(0)
            for name in ("hx", "cx", "eps"):
                if values[name] is not None:
                    values[name] = values[name].squeeze(0)
            if values["eps"] is not None:
                values["eps"] = values["eps"].squeeze(0)
        self.reset = None if reset is None else any_memory(reset, rng)
        every = {k: v for k, v in values.items() if v is not None}
        every |= {f"weights[{i}]": w for i, w in enumerate(a.weights)}
        needs_none = rng.random() < 0.05
        wants_all = rng.random() < 0.5
        self.leaves: dict[str, Tensor] = {}
        for name, value in every.items():
            in_module = call.form != "functional" and name.startswith("weights")
            leaf = value if in_module else any_memory(value, rng)
            wanted = (wants_all or rng.random() < 0.5) and not needs_none
            self.leaves[name] = leaf.detach().requires_grad_(wanted)
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(60))

    def ours(self) -> tuple[Tensor, ...]:
        """Results of fusedrnn, as plain tensors."""
        call, case = self.call, self.call.case
        options = dict(call.options)
        tensors: dict[str, Any] = {}
        if call.form != "cell":
            tensors["reset"] = self.reset
            tensors["lengths"] = self.lengths_given()
            options |= case.sizes | {"recompute": case.recompute, "chunk_size": case.chunk_size}
            options |= {"batch_first": call.batch_first, "return_sequence": call.return_sequence}
        if case.cell == "stochastic_gru":
            tensors |= {"eps": self.leaves.get("eps"), "sample": call.noise != "none"}
            if call.noise == "generator":
                tensors["generator"] = self.generator
            if call.noise == "seed":
                tensors["seed"] = torch.tensor(self.rng.choice([-5, [3], [[2**62]]]))
        hx = self.leaves.get("hx")
        state = (hx, self.leaves["cx"]) if "cx" in self.leaves else hx
        if call.form == "functional":
            function = getattr(fusedrnn, case.cell)
            found = function(self.input(), self.weights(), state, **tensors, **options)
        else:
            found = self.module(options)(self.input(), state, **tensors)
        if call.form == "cell":
            return found if isinstance(found, tuple) else (found,)
        output, last = found
        output = output.data if isinstance(output, PackedSequence) else output
        return (output, *(last if isinstance(last, tuple) else (last,)))

    def input(self) -> Tensor | PackedSequence:
        data = self.leaves["input"]
        if self.batch_sizes is None:
            return data
        return PackedSequence(data, self.batch_sizes, self.sorted, self.unsorted)

    def weights(self) -> list[Tensor]:
        return [w for name, w in self.leaves.items() if name.startswith("weights")]

    def lengths_given(self) -> Any:
        """The lengths in the drawn form: tensor, list or array."""
        if self.lengths is None or self.call.rows == "packed":
            return None
        forms = {"list": self.lengths.tolist(), "numpy": list(np.array(self.lengths.numpy(), "i4"))}
        return forms.get(self.call.lengths_as, self.lengths)

    def module(self, options: dict[str, Any]) -> torch.nn.Module:
        """The module of the call; its weights become leaves of this trial."""
        case = self.call.case
        sizes = {name: getattr(case, name) for name in ("input_size", "hidden_size", "bias")}
        if case.cell == "stochastic_gru":
            sizes["latent_size"] = case.latent_size
        training = options.pop("training", True)
        kind = MODULES[case.cell][self.call.form == "cell"]
        module = kind(**sizes | options, dtype=case.dtype).train(training)
        for i, own in enumerate(module.parameters()):
            given = self.leaves[f"weights[{i}]"]
            with torch.no_grad():
                own.copy_(given)
            self.leaves[f"weights[{i}]"] = own.requires_grad_(given.requires_grad)
        return module

    def copies(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies in another dtype of the values that the call sees."""
        return {
            name: leaf.detach().to(self.call.dtype).to(dtype).requires_grad_(leaf.requires_grad)
            for name, leaf in self.leaves.items()
        }

    def loop(
        self,
        leaves: dict[str, Tensor],
        drawn: Drawn,
        order: torch.Generator | None = None,
        is_exact: bool = False,
    ) -> tuple[Tensor, ...]:
        """Results of the plain loop, in the form of ``ours``; ``is_exact``: as the oracle's."""
        call, case, rows = self.call, self.call.case, self.call.rows
        x, dtype = leaves["input"], leaves["input"].dtype
        lengths, reset = self.lengths, self.reset
        states = [leaves.get(name) for name in ("hx", "cx", "eps")]
        if call.form == "cell":  # a cell runs a sequence of one step
            x, states = x[None], [None if s is None else s[None] for s in states]
            states[2] = None if states[2] is None else states[2][None]
        if rows == "packed":  # in the order of packed rows, which is the order of noise too
            x, lengths = pad_packed_sequence(PackedSequence(x, self.batch_sizes))
            if self.sorted is not None:
                states = [
                    None if s is None else s.index_select(dim, self.sorted)
                    for s, dim in zip(states, (1, 1, 2), strict=True)
                ]
        elif rows == "single":
            x = x.unsqueeze(1)
            states = [
                None if s is None else s.unsqueeze(dim)
                for s, dim in zip(states, (1, 1, 2), strict=True)
            ]
            reset = None if reset is None else reset.unsqueeze(1)
        elif call.batch_first:
            x = x.transpose(0, 1)
        if reset is not None and call.batch_first and rows != "single":
            reset = reset.t()
        if reset is not None and self.sorted is not None:
            reset = reset[:, self.sorted]
        shape = (case.num_layers * call.directions, x.shape[1])
        hx, cx, eps = states
        if hx is None:
            hx = torch.zeros(*shape, case.proj_size or case.hidden_size, dtype=dtype)
        if cx is None and case.cell == "lstm":
            cx = torch.zeros(*shape, case.hidden_size, dtype=dtype)
        weights = [w for name, w in leaves.items() if name.startswith("weights")]
        if drawn.kept_weights:
            keep = 1 - call.options["weight_dropout"]
            weights = [
                weight if kept is None else weight * (kept.double() / keep).to(dtype)
                for weight, kept in zip(weights, drawn.kept_weights, strict=True)
            ]
        nothing: Any = None
        a = Arguments(
            *(case.cell, x, hx, cx, weights, eps, drawn.seed, call.noise != "none"),
            *(lengths, reset, nothing, nothing, nothing),
        )
        how = call.how
        if drawn.mask_seed is not None:
            how = replace(how, seed=int(drawn.mask_seed) % 2**64)
        output, *last = oracle.call(case, a, how, order, is_exact)
        return self.presented(output, last, lengths)

    def presented(
        self, output: Tensor, last: list[Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Results of a padded batch in the form of ``ours``."""
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
