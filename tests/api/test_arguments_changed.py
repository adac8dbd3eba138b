"""A caller writes to an argument before backward: gradients stay those of the call, or an error.

Lengths, flags, indices and seeds are copied, so that callers may write to theirs, as
``lengths.sub_(1)`` does to gather the last output of each row. A write to another tensor is an
error where backward needs that tensor.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from compiler.interpreted import interpreted
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

import fusedrnn

pytestmark = pytest.mark.filterwarnings("ignore:fusedrnn")
T, B, INPUT, H, Z = 6, 4, 3, 5, 2


def numbers(*shape):
    return lambda: torch.randn(*shape, dtype=torch.float64, requires_grad=True)


MAKE = {  # of each argument; states and noise are those of two cells
    "input": numbers(T, B, INPUT),
    "tokens": lambda: torch.randint(7, (T, B)),
    "data": numbers(15, INPUT),
    "batch_sizes": lambda: torch.tensor([4, 4, 3, 2, 1, 1]),
    "sorted_indices": lambda: torch.tensor([2, 0, 3, 1]),
    "unsorted_indices": lambda: torch.tensor([1, 3, 0, 2]),
    "lengths": lambda: torch.tensor([6, 4, 3, 2]),
    "reset": lambda: torch.rand(T, B) < 0.4,
    "h": numbers(2, B, H),
    "c": numbers(2, B, H),
    "h_to": numbers(2, B, H),
    "c_to": numbers(2, 1, H),
    "h_to_of_steps": numbers(2, T, B, H),
    "c_to_of_steps": numbers(2, T, B, H),
    "eps": numbers(2, T, B, Z),
    "seed": lambda: torch.tensor([5]),
    "weight": numbers(H, H),
    "columns": lambda: torch.tensor([1, 0, 3, 2, 4]),
}
CHANGES = {
    "batch_sizes": lambda sizes: sizes + torch.tensor([0, -1, 0, 0, 1, 0]),
    "sorted_indices": lambda indices: indices.roll(1),
    "unsorted_indices": lambda indices: indices.roll(1),
    "lengths": lambda lengths: lengths - 1,
    "reset": lambda flags: ~flags,
    "seed": lambda seed: seed + 1,
    "tokens": lambda tokens: (tokens + 1) % 7,
    "columns": lambda columns: columns.roll(1),
}
COPIED = {*CHANGES} - {"tokens", "columns"}
PADDED = ("input", "lengths", "reset")
PACKED = ("data", "batch_sizes", "sorted_indices", "unsorted_indices", "reset")
TO_STATES = ("_to", "_to_of_steps")


class Entry(NamedTuple):
    make: Callable[[], tuple[Any, list[Tensor]]]
    """-> what is called, and its weights."""
    call: Callable[[Any, dict[str, Tensor]], Any]
    """Of that and the arguments, by name -> results."""
    names: tuple[str, ...]
    """Of the arguments."""


ENTRIES: dict[str, Entry] = {}


def state_of(a, part, suffix=""):
    """h, or (h, c). ``part``: an index, or a slice for a module of several layers."""
    own = [a[name + suffix][part] for name in "hc" if name + suffix in a]
    return own[0] if len(own) == 1 else tuple(own)


def states_of(a, parts, suffix=""):
    states = tuple(state_of(a, part, suffix) for part in parts)
    return states[0] if len(parts) == 1 else states


def call_sequence(rnn, a, parts):
    """``parts``: of states, one for each cell that a Recurrent has."""
    named = {name: a[name] for name in ("lengths", "reset", "seed") if name in a}
    if "eps" in a:
        named["eps"] = a["eps"][parts[0]]
    for suffix in TO_STATES:
        if f"h{suffix}" in a:
            named["reset_to"] = states_of(a, parts, suffix)
    given = [a[name] for name in ("input", "tokens") if name in a]
    x = given[0] if given else PackedSequence(*[a[name] for name in PACKED[:4]])
    return rnn(x, states_of(a, parts), **named)


def add_sequences(name, make, parts, states, others=(), suffixes=()):
    """``states``: "h" or "hc"; ``suffixes``: of what states become at resets besides zero."""
    call = functools.partial(call_sequence, parts=parts)
    for form, given in (("", PADDED), (" packed", PACKED)):
        for suffix in ("", *suffixes):
            to = [state + suffix for state in states if suffix]
            ENTRIES[name + form + suffix] = Entry(make, call, (*given, *states, *to, *others))


# Layers, functional forms and cells

for kind, states, others, options in [
    ("GRU", "h", (), {}),
    ("LSTM", "hc", (), {}),
    ("StochasticGRU", "h", ("eps",), {"latent_size": Z}),
    ("GRU", "h", (), {"recompute": False}),
    ("LSTM", "hc", (), {"return_sequence": False}),
    ("GRU", "h", (), {"return_sequence": False, "num_layers": 2}),
    ("GRU", "h", (), {"bidirectional": True}),
]:

    def make(kind=kind, options=options):
        module = getattr(fusedrnn, kind)(INPUT, H, **options).double()
        return module, list(module.parameters())

    is_of_two = "num_layers" in options or "bidirectional" in options
    name = " ".join([kind, *(f"{option}={value}" for option, value in options.items())])
    suffixes = TO_STATES if not options or others else ()
    add_sequences(name, make, (slice(1 + is_of_two),), states, others, suffixes)


def make_stochastic_gru():
    weights = list(fusedrnn.StochasticGRU(INPUT, H, Z).double().parameters())
    return lambda x, h, **named: fusedrnn.stochastic_gru(x, weights, h, **named), weights


add_sequences("stochastic_gru", make_stochastic_gru, (slice(1),), "h", ("seed",))


def call_cell(cell, a):
    named = {"eps": a["eps"][0, 0]} if "eps" in a else {}
    return cell(a["input"][0], state_of(a, 0), **named)


for kind, names, sizes in [
    ("GRUCell", ("h",), (INPUT, H)),
    ("LSTMCell", ("h", "c"), (INPUT, H)),
    ("StochasticGRUCell", ("h", "eps"), (INPUT, H, Z)),
]:

    def make(kind=kind, sizes=sizes):
        cell = getattr(fusedrnn, kind)(*sizes).double()
        return cell, list(cell.parameters())

    ENTRIES[kind] = Entry(make, call_cell, ("input", *names))


# Cells that users write


class OfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cell = nn.Embedding(7, INPUT), nn.GRUCell(INPUT, H)

    def forward(self, x, h):
        return self.cell(self.table(x), h)


WAYS = {
    "compiled": {"compile": "require"},
    "compiled recompute=False": {"compile": "require", "recompute": False},
    "replay": {"compile": "never", "chunk_size": 2},
    "graph": {"compile": "never", "recompute": False},
}


@functools.cache
def recurrent(kind, way, returns_sequence=True):
    cells = {
        "LSTMCell": lambda: nn.LSTMCell(INPUT, H),
        "two layers": lambda: [nn.GRUCell(INPUT, H), nn.GRUCell(H, H)],
        "both directions": lambda: [nn.GRUCell(INPUT, H), nn.GRUCell(INPUT, H)],
        "tokens": OfTokens,
    }
    options = {"bidirectional": kind == "both directions", "return_sequence": returns_sequence}
    rnn = fusedrnn.Recurrent(cells[kind](), **options, **WAYS[way]).double()
    return rnn, list(rnn.parameters())


for way in WAYS:
    for returns_sequence in (True,) if "recompute" in WAYS[way] else (True, False):
        last = "" if returns_sequence else " return_sequence=False"
        for kind in ("LSTMCell", "two layers", "both directions"):
            is_lstm = kind == "LSTMCell"
            parts, states = ((0,), "hc") if is_lstm else ((0, 1), "h")
            suffixes = TO_STATES if is_lstm and returns_sequence else ()
            make = functools.partial(recurrent, kind, way, returns_sequence)
            add_sequences(f"{way} {kind}{last}", make, parts, states, (), suffixes)
    call = functools.partial(call_sequence, parts=(0,))
    make = functools.partial(recurrent, "tokens", way)
    ENTRIES[f"{way} tokens"] = Entry(make, call, ("tokens", "lengths", "h"))


def step(h, x, params):
    x, reset = x
    h = h.masked_fill(reset[:, None], 0)
    h = torch.tanh(x.sum(-1, keepdim=True) + h[:, params["columns"]] @ params["weight"])
    return h, 2 * h


def call_scan(scan, a):
    params = {name: a[name] for name in ("weight", "columns")}
    return scan(step, a["h"][0], (a["input"], a["reset"]), params)


for way in ("replay", "graph"):
    for reverse in (False, True):
        scan = functools.partial(fusedrnn.scan, reverse=reverse, **WAYS[way])
        names = ("input", "reset", "h", "weight", "columns")
        make = functools.partial(lambda scan: (scan, []), scan)
        ENTRIES[f"scan {way}{' reverse' if reverse else ''}"] = Entry(make, call_scan, names)


# Tests


@pytest.fixture(scope="module", autouse=True)
def _programs_are_interpreted():
    """Nothing is compiled, and what calls keep for backward is as in use."""
    with interpreted():
        yield


def flat(results):
    if isinstance(results, PackedSequence):
        return [results.data]
    return [results] if isinstance(results, Tensor) else [t for r in results for t in flat(r)]


def gradients(entry, write=lambda a: None, order=1):
    """Of all arguments and weights. ``write`` comes before the last of ``order`` derivatives."""
    torch.manual_seed(1)
    called, weights = entry.make()
    torch.manual_seed(2)
    a = {name: MAKE[name]() for name in entry.names}
    leaves = [tensor for tensor in (*a.values(), *weights) if tensor.requires_grad]
    found = flat(entry.call(called, a))
    for left in reversed(range(order)):
        if not left:
            write(a)
        loss = sum((t.flatten().square() * torch.arange(t.numel())).sum() for t in found)
        found = torch.autograd.grad(loss, leaves, create_graph=left > 0, materialize_grads=True)
    return found


@functools.cache
def expected(entry, order=1, is_dual=False):
    with forward_ad.dual_level() if is_dual else nullcontext():
        return gradients(ENTRIES[entry], order=order)


def write_in_place(a, name):
    with torch.no_grad():
        a[name].copy_(CHANGES.get(name, lambda tensor: -2 * tensor)(a[name]))


def check(entry, name, order=1, is_dual=False):
    wanted = expected(entry, order, is_dual)
    try:
        with forward_ad.dual_level() if is_dual else nullcontext():
            found = gradients(ENTRIES[entry], lambda a: write_in_place(a, name), order)
    except RuntimeError as error:
        assert "modified" in str(error) and (name not in COPIED or entry.startswith("scan"))
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


ALL = [(entry, name) for entry, (_, _, names) in ENTRIES.items() for name in names]


@pytest.mark.parametrize(("entry", "name"), ALL)
def test_a_write_in_place(entry, name):
    check(entry, name)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if "scan" not in entry])
def test_a_write_to_memory_that_torch_does_not_see(entry):
    """As where a simulator writes its flags into one array, which torch.from_numpy has shared."""

    def write(a):
        for name in COPIED & {*a}:
            a[name].numpy()[...] = CHANGES[name](a[name]).numpy()

    torch.testing.assert_close(gradients(ENTRIES[entry], write), expected(entry), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize("entry", ["GRU", "compiled LSTMCell", "replay LSTMCell"])
def test_lengths_that_are_no_tensor(entry, kind):
    make, call, names = ENTRIES[entry]

    def call_with_others(called, a):
        lengths = a["lengths"].tolist() if kind == "list" else a["lengths"].numpy()
        results = call(called, a | {"lengths": lengths})
        lengths[:] = [1] * B
        return results

    found = gradients(Entry(make, call_with_others, names))
    torch.testing.assert_close(found, expected(entry), rtol=0, atol=0)


SOME = ["GRU", "StochasticGRU latent_size=2 packed_to", "LSTM return_sequence=False"]
SOME += ["compiled LSTMCell_to", "compiled two layers packed", "replay tokens", "scan replay"]


@pytest.mark.parametrize(("order", "is_dual"), [(2, False), (1, True)])
@pytest.mark.parametrize(("entry", "name"), [(e, name) for e, name in ALL if e in SOME])
def test_a_write_before_other_derivatives(entry, name, order, is_dual):
    """Second ones, and those of a call within a level of forward mode."""
    check(entry, name, order, is_dual)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "is_within"), [("eager", False), ("eager", True), ("inductor", True)]
)
def test_a_write_after_or_in_a_graph(backend, is_within):
    """Inductor makes copies again in backward, so it must get none that hides the write."""
    rnn, x, lengths = fusedrnn.GRU(INPUT, H), torch.randn(T, B, INPUT), torch.tensor([6, 4, 3, 2])

    def gather(lengths):
        output, _ = rnn(x, lengths=lengths)
        if is_within:
            lengths.sub_(1)
        return output[lengths if is_within else lengths - 1, torch.arange(B)]

    (wanted,) = torch.autograd.grad(gather(lengths.clone()).sum(), [rnn.weight_hh_l0])
    try:
        result = torch.compile(gather, backend=backend)(lengths)
        lengths.sub_(0 if is_within else 1)
        (found,) = torch.autograd.grad(result.sum(), [rnn.weight_hh_l0])
    except Exception as error:  # the compiler's own, or autograd's
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(found, wanted)
