"""Random cells by compiled steps, against the plain loop: right, or taken in Python for a reason.

Also as steps of scan: scans.py.

Most programs are run by torch, and some by C++ that is compiled for them. What is found is printed
with the smallest cell that shows it.

Longer than 350 lines, because a trial has many parts.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from compiler.interpreted import interpreted
from runtime.plain import loop
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn._recurrent.compiled_calls import CompiledCalls
from fusedrnn._recurrent.running_call import NoProgram

from . import Outcome, step_tricks
from .step_calls import Call
from .step_source import Source, Writer
from .step_words import WORDS

TRICKS = step_tricks.TRICKS
TOLERANCE = 1e-8
BUILT = 20
"""Of so many cases one is compiled by the C++ compiler."""
OF_BATCHES = {"of_batch", "branch", "buffer_of_steps", "attribute", "choice_by_value"}
"""Words that may mix the rows of a batch."""
is_shown = False
_numbers = itertools.count()


def prepare() -> None:
    """Libraries of random cells do not go where those of the user are."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["FUSEDRNN_CACHE"] = folder


def good_call() -> str:
    """Nothing here may change what later calls give; the values of each case are compared."""
    return ""


def run(case: int, note: Callable[[str], None], by_scan: bool = False) -> Outcome:
    """One cell, in one or two calls."""
    trial = Trial(case, by_scan)
    note(trial.text)
    what, reason, findings = trial.judged()
    if findings:
        smaller = shrunk(trial, findings[0][0])
        findings = [(kind, f"{text}\n{smaller.text}") for kind, text in findings]
    return Outcome(what, trial.text, findings, reason)


def written(rng: random.Random) -> Source:
    """A cell of a few words, and maybe some tricks."""
    writer = Writer(rng)
    chosen = rng.choices([*WORDS], [*WORDS.values()], k=rng.randint(2, 9))
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 3])):
        chosen.insert(rng.randint(0, len(chosen)), *rng.choices([*TRICKS], [*TRICKS.values()]))
    for word in chosen:
        writer.use(word)
    return writer.finish()


@dataclass
class Ran:
    """What a call gave: its results and gradients, or its error."""

    results: Any = None
    gradients: Sequence[Tensor] = ()
    error: Exception | None = None


class Trial:
    """A cell and its calls.

    Args:
        by_scan: Whether scan takes it, which knows no masks.
    """

    def __init__(self, case: int, by_scan: bool = False) -> None:
        rng = random.Random(case)
        self.case, self.by_scan, self.source = case, by_scan, written(rng)
        self.calls = [Call.drawn(rng, self.source)]
        if rng.random() < 0.5:
            self.calls.append(Call.drawn(rng, self.source))
            self.calls[1].changes = ["for p in cell.parameters(): p.data.mul_(0.9)"]
            self.calls[1].changes += self.source.changes
        if by_scan:
            for call in self.calls:
                call.masks = type(call.masks)()
        self.is_built = case % BUILT == 0
        self.draws_by_others = False
        """Whether the loop has drawn from torch's own generator, not by what Recurrent hands out.
        Those numbers are then others: its come from the generator of the call."""

    @property
    def text(self) -> str:
        how = "compiled" if self.is_built else "interpreted"
        how += ", by scan" if self.by_scan else ""
        return "\n".join([self.source.text, *(f"# {call}" for call in self.calls), f"# {how}"])

    # Runs

    def made(self) -> tuple[nn.Module, dict[str, Any]]:
        """The cell, and the variables of its module; each time another one."""
        module = ModuleType(f"step_{next(_numbers)}")
        space = vars(module)
        sys.modules[module.__name__] = module  # where torch.compile looks for variables
        torch.manual_seed(self.case)
        exec(compile(self.source.text, "step.py", "exec"), space)
        return space["Cell"]().double(), space

    def each(self, run: Callable[[nn.Module, Call], Callable[[], Any]]) -> list[Ran]:
        """All calls of a new cell, one after the other; none after an error."""
        cell, space = self.made()
        found: list[Ran] = []
        for call in self.calls:
            random.seed(self.case)
            for change in call.changes:
                exec(change, {"cell": cell, "space": space, "torch": torch})
            found.append(ran(cell, call, run))
            if found[-1].error is not None:
                break
        return found

    def by_loop(self, noise: float = 0.0) -> list[Ran]:
        """noise: changes all numbers by so much, relatively."""

        def run(cell: nn.Module, call: Call) -> Any:
            x, state = arguments = call.arguments()
            with torch.no_grad():
                for leaf in [*cell.parameters(), *pytree.tree_leaves(arguments)] if noise else ():
                    # Equal numbers stay equal, and zeros stay zeros.
                    leaf.data.mul_(1 + noise * torch.cos(1e4 * leaf + 1e15 * noise))
            options: dict[str, Any] = {"returns_sequence": call.returns_sequence, "seed": call.seed}

            def take() -> Any:
                before = torch.get_rng_state()
                made = loop(cell, x, state, call.masks, **options)
                self.draws_by_others |= not torch.equal(before, torch.get_rng_state())
                return made

            return arguments, take

        return self.each(run)

    def by_package(self, compile: str) -> tuple[list[Ran], list[str]]:
        """Also why each call took no program, or nothing where it took one."""
        modules: dict[int, fusedrnn.Recurrent] = {}

        def scanned(cell: nn.Module, call: Call) -> Any:
            x, state = arguments = call.arguments()
            generator = torch.Generator().manual_seed(call.seed)
            options: dict[str, Any] = {
                "chunk_size": call.chunk_size,
                "return_sequence": call.returns_sequence,
                "compile": compile,
                "generator": generator,
            }
            # Anew in each call, as in a module's forward.
            step = lambda h, x: cell(x, h)[::-1]  # noqa: E731
            return arguments, lambda: fusedrnn.scan(step, state, x, **options)[::-1]

        def run(cell: nn.Module, call: Call) -> Any:
            if self.by_scan:
                return scanned(cell, call)
            rnn = modules.setdefault(id(cell), fusedrnn.Recurrent(cell, compile=compile))
            rnn.chunk_size, rnn.return_sequence = call.chunk_size, call.returns_sequence
            x, state = arguments = call.arguments()
            masks = call.masks
            generator = torch.Generator().manual_seed(call.seed)
            return arguments, lambda: rnn(
                x, state, masks.lengths, masks.reset, masks.reset_to, generator=generator
            )

        with nullcontext() if self.is_built else interpreted(), reasons() as found:
            return self.each(run), found

    # The verdict

    def judged(self) -> tuple[str, str, list[tuple[str, str]]]:
        """Outcome, why it was taken in Python, and findings."""
        ours, found = self.by_package("auto")
        reason = next((one for one in found if one), "")
        is_compiled = bool(found) and not found[-1]
        if "python_random" in self.source.words and not is_compiled:
            return "fell back", reason, []
        if any(one.startswith("fusedrnn's compiler raises") for one in found):
            return "wrong", reason, [("compiler", reason)]
        theirs = self.by_loop()
        if self.draws_by_others and not is_compiled:
            return "fell back", reason, []
        for i, (mine, their) in enumerate(zip(ours, theirs, strict=False)):
            difference = differs(mine, their)
            if not difference:
                continue
            if their.error is not None and mine.error is None:
                return "accepted", reason, []  # autograd refuses what has no graph here
            return self._explained(i, mine, difference, reason, i < len(found) and not found[i])
        if any(mine.error is not None for mine in ours):
            return "raised", reason, []
        return ("right" if is_compiled else "fell back"), reason, []

    def _explained(
        self, i: int, mine: Ran, difference: str, reason: str, is_compiled: bool
    ) -> tuple[str, str, list[tuple[str, str]]]:
        """Call i differs from the loop."""
        if mine.error is None and self._is_unstable(i, mine):
            return "accepted", reason, []  # roundings decide
        generic, _ = self.by_package("never")
        other = generic[min(i, len(generic) - 1)]
        if mine.error is not None and other.error is not None:
            return "raised", reason, []
        if is_compiled or differs(mine, other):
            kind = "crash" if mine.error is not None else "wrong"
            return "wrong", reason, [(kind, f"call {i}: {difference}")]
        if self.source.words & OF_BATCHES and self.calls[i].masks.lengths:
            return "accepted", reason, []  # rows that have ended are in their sums, too
        return "fell back", reason, [("recipe", f"call {i}: {difference}; {reason}")]

    def _is_unstable(self, i: int, mine: Ran) -> bool:
        """Whether roundings change the results of the loop about as much."""
        exact = self.by_loop()[i]
        if exact.error is not None:
            return False
        off = distance(mine, exact)
        for k in range(1, 5):
            others = self.by_loop(k * 1e-15)
            if len(others) <= i or others[i].error is not None:
                return True
            if off <= 1e5 * distance(others[i], exact):
                return True
        return False


def ran(cell: nn.Module, call: Call, run: Callable[[nn.Module, Call], Any]) -> Ran:
    for p in cell.parameters():
        p.requires_grad_(call.wanted in ("all", "weights"))
    try:
        (x, state), function = run(cell, call)
        results = function()
        leaves = [x, state, [p for p in cell.parameters() if p.requires_grad]]
        return Ran(pytree.tree_map(copied, results), gradients(results, leaves, call.unused))
    except Exception as error:
        return Ran(error=error)


def copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def gradients(results: Any, leaves: Any, unused: frozenset[int]) -> Sequence[Tensor]:
    """Of random weights of all results but the unused ones."""
    wanted = [leaf for leaf in pytree.tree_leaves(leaves) if leaf.requires_grad]
    torch.manual_seed(5)
    pairs = [(leaf, torch.randn(leaf.shape).double()) for leaf in pytree.tree_leaves(results)]
    pairs = [
        (leaf, weight.to(leaf.dtype))
        for i, (leaf, weight) in enumerate(pairs)
        if leaf.requires_grad and i not in unused
    ]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        made, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(made, wanted, weights, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(wanted, found, strict=True)]


@contextmanager
def reasons() -> Iterator[list[str]]:
    """Why calls took no program; nothing for those that did."""
    found: list[str] = []
    run = CompiledCalls.run

    def noted(*given: Any) -> Any:
        try:
            made = run(*given)
        except NoProgram as error:
            found.append(str(error))
            raise
        found.append("")
        return made

    CompiledCalls.run = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CompiledCalls.run = run  # type: ignore[method-assign]


def differs(mine: Ran, other: Ran) -> str:
    """What differs; nothing if both are the same, or both raise."""
    if mine.error is not None or other.error is not None:
        if mine.error is not None and other.error is not None:
            return ""
        said = [repr(one.error)[:300] for one in (mine, other)]
        return f"{said[0]} in place of {said[1]}"
    a, b = (pytree.tree_structure(one.results) for one in (mine, other))
    if a != b:
        return f"structure {a} in place of {b}"
    for what in ("results", "gradients"):
        pairs = zip(
            *(pytree.tree_leaves(getattr(one, what)) for one in (mine, other)), strict=False
        )
        for n, (x, y) in enumerate(pairs):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"{what} {n}: {x.shape}, {x.dtype} in place of {y.shape}, {y.dtype}"
            if (off := off_by(x, y)) > TOLERANCE:
                return f"{what} {n}: off by {off:.1e}"
    return ""


def distance(mine: Ran, other: Ran) -> float:
    if pytree.tree_structure(mine.results) != pytree.tree_structure(other.results):
        return math.inf
    a, b = (pytree.tree_leaves((one.results, one.gradients)) for one in (mine, other))
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return math.inf
    return max((off_by(x, y) for x, y in zip(a, b, strict=True)), default=0.0)


def off_by(a: Tensor, b: Tensor) -> float:
    """The largest difference, by the largest number; the same infinities and NaNs are equal."""
    a, b = a.double(), b.double()
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    if not (a.isfinite() == b.isfinite()).all() or not same[~b.isfinite()].all():
        return math.inf
    finite = b[b.isfinite()].abs()
    scale = 1.0 + (float(finite.max()) if finite.numel() else 0.0)
    return float((a - b)[~same].abs().max()) / scale if not same.all() else 0.0


# Smaller cells


def shrunk(trial: Trial, kind: str, most: int = 60) -> Trial:
    """A trial of fewer statements and options that shows a finding of the same kind."""
    best, left = trial, most

    def shows(change: Callable[[Trial], None]) -> bool:
        nonlocal best, left
        other, left = copy.deepcopy(best), left - 1
        change(other)
        try:
            has_finding = left >= 0 and any(found == kind for found, _ in other.judged()[2])
        except Exception:
            return False
        best = other if has_finding else best
        return has_finding

    def drop(i: int, other: Trial) -> None:
        other.source.statements[i].text = ""

    def fill(i: int, other: Trial) -> None:
        other.source.statements[i].text = other.source.statements[i].without_work()

    shows(lambda other: other.calls.__delitem__(slice(1, None)))
    shows(_without_options)
    for i in reversed(range(len(best.source.statements))):
        shows(functools.partial(drop, i)) or shows(functools.partial(fill, i))
    for i in reversed(range(len(best.source.setup))):
        shows(lambda other, i=i: other.source.setup.__delitem__(i))  # type: ignore[misc]
    return best


def _without_options(trial: Trial) -> None:
    for call in trial.calls:
        call.masks, call.chunk_size, call.returns_sequence = type(call.masks)(), None, True
        call.wanted, call.unused = "all", frozenset()
