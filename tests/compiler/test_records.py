"""First uses whose step another process has compiled before: what is found, and what is not.

Longer than 350 lines, because whole, damaged and other records are made and looked at alike.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import interpreted as runner
from compiler.interpreted import interpreted
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn
from bench.any_cell_steps import Size, start_of
from docs.examples.published_cells import CASES, Case
from fusedrnn._compiler import (
    build,
    library_cache,
    operation_graph,
    pipeline,
    records,
    step_to_compile,
    trial,
    unused_results,
    verify,
)
from fusedrnn._recurrent import compiled_calls
from fusedrnn._recurrent.shared_steps import SharedSteps
from fusedrnn._runtime import find_program

T, B, H = 4, 3, 8


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Says what is traced and derived, as often as it is."""
    found: list[str] = []

    def noted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*given: Any) -> Any:
            found.append(name)
            return function(*given)

        monkeypatch.setattr(module, name, call)

    noted(pipeline, "trace")
    noted(pipeline, "derive")
    noted(unused_results, "derive")
    yield found


class Scaled(nn.Module):
    """A GRU with what a test changes about it."""

    def __init__(self, scale: float = 2.0, shift: float = 0.0) -> None:
        super().__init__()
        self.gru, self.scale = nn.GRUCell(H, H), scale
        self.shift = shift
        self.gain = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        x = x + torch.tensor([self.shift], dtype=x.dtype) * torch.exp(self.gain)
        return self.gru(x * torch.arange(1, H + 1, dtype=x.dtype), h) * self.scale


def forget() -> None:
    """What this process knows of steps, as if it was another one."""
    find_program._known.clear()
    compiled_calls.steps_of_process = SharedSteps()
    torch._dynamo.reset()  # or else numbers that once were others are inputs


def numbers(module: nn.Module, batch: int = B, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Results and gradients of a cell as a program, always for the same weights and inputs.

    As of a first use in a process.
    """
    forget()
    torch.manual_seed(0)
    module = module.to(dtype)
    for p in module.parameters():
        nn.init.uniform_(p, -0.4, 0.4)
    x = torch.randn(T, batch, H, dtype=dtype, requires_grad=True)
    y, last = fusedrnn.Recurrent(module, compile="require")(x, torch.zeros(batch, H, dtype=dtype))
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [y, last, *torch.autograd.grad(y.sin().sum() + last.sum(), leaves)]


def steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.step"))


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FirstUse = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def first_uses(tmp_path_factory: pytest.TempPathFactory) -> FirstUse:
    """Puts the library and the record of a first use of Scaled into a folder; gives its numbers."""
    known: dict[torch.dtype, tuple[Path, list[Tensor]]] = {}

    def put(folder: Path, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        if dtype not in known:
            made = tmp_path_factory.mktemp("first") / "cache"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FUSEDRNN_CACHE", str(made))
                known[dtype] = made, numbers(Scaled(), dtype=dtype)
        made, found = known[dtype]
        shutil.copytree(made, folder)
        return found

    return put


COMPILED = [case for case in CASES if case.name != "AttentionDecoder"]
"""Which reads a tensor that is another one in each call."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[] if i == 2 else [pytest.mark.nightly if i % 3 else pytest.mark.slow],
        )
        for i, case in enumerate(COMPILED)
    ],
)
def test_records_have_the_same_programs(case: Case, folder: Path, traces: list[str]) -> None:
    """Of all published cells: bit for bit, and nothing is traced or derived."""
    torch.manual_seed(0)
    module, inputs = case.cell(H, B), case.inputs(T, B, H)

    def results() -> list[Tensor]:
        forget()
        torch.manual_seed(1)
        made, last = fusedrnn.Recurrent(module, compile="require")(
            inputs, start_of(module, Size(T, B, H), "cpu")
        )
        leaves = [leaf for leaf in pytree.tree_leaves((made, last)) if leaf.requires_grad]
        weights = list(module.parameters())
        gradients = torch.autograd.grad(leaves, weights, [y.cos() for y in leaves])
        return [*leaves, *gradients]

    with interpreted():
        first = results()
        assert "trace" in traces and "derive" in traces
        program = runner._programs[-1]
        assert program.key
        program.library = build.Library(0, Path(), "", True, 0.0, 0)
        records.keep(program, program.derived().plan.lowered.traced.module)
        traces.clear()
        second = results()
    assert not traces
    again = runner._programs[-1].generated
    assert again.call_weights is not program.generated.call_weights
    assert again._replace(call_weights=None) == program.generated._replace(call_weights=None)
    assert same(second, first)


def test_a_first_use_stores_a_record(folder: Path, traces: list[str]) -> None:
    first = numbers(Scaled())
    (record,) = steps(folder)
    assert record.stat().st_mode & 0o777 == 0o644
    traces.clear()
    second = numbers(Scaled())
    assert not traces and steps(folder) == [record]
    assert same(second, first)


def _frozen() -> nn.Module:
    module = Scaled()
    module.gru.bias_hh.requires_grad_(False)
    return module


class Doubled(Scaled):
    """Does the same by other operations."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        made = super().forward(x, h)
        return made + made - made


OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a number": (lambda: Scaled(3.0), {}),
    "a constant tensor": (lambda: Scaled(shift=1.0), {}),
    "a frozen weight": (_frozen, {}),
    "operations": (Doubled, {}),
    "dtype": (Scaled, {"dtype": torch.float32}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if i % 2 else []) for i, n in enumerate(OTHERS)],
)
def test_other_steps_have_other_records(
    name: str, folder: Path, traces: list[str], first_uses: FirstUse
) -> None:
    make, options = OTHERS[name]
    first_uses(folder)
    traces.clear()
    numbers(make(), **options)
    assert "trace" in traces
    assert len(steps(folder)) == 2


def test_a_record_is_found_by_what_a_step_does(
    folder: Path, traces: list[str], first_uses: FirstUse
) -> None:
    """Whatever its code, and the batch."""

    class Another(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRUCell(H, H)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            assert h.dim() == 2
            places = torch.arange(1, H + 1, dtype=x.dtype)
            shifted = x + torch.tensor([0.0], dtype=x.dtype)
            return self.gru(shifted * places, h) * sum([1.0, 1.0])

    first_uses(folder)
    traces.clear()
    numbers(Scaled(), batch=5)
    numbers(Scaled(), batch=70)
    assert not traces
    numbers(Another())
    assert len(steps(folder)) == 1 + bool(traces)


def test_a_default_dtype(folder: Path, traces: list[str]) -> None:
    """The same graph makes other tensors."""

    class Cell(Scaled):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return super().forward(x * torch.tensor(0.1), h)

    first = numbers(Cell())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        traces.clear()
        assert not torch.equal(numbers(Cell())[0], first[0])
        assert "trace" in traces
    finally:
        torch.set_default_dtype(before)


def test_a_record_is_of_one_kind_of_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first_uses: FirstUse
) -> None:
    """Libraries for GPUs are of another text."""
    first_uses(folder)
    texts: list[str] = []

    def taken(text: str, *, device: str, capability: str | None) -> None:
        texts.append(text)
        raise build.CannotBuild("it has been taken")

    for module in (pipeline, step_to_compile, unused_results):
        monkeypatch.setattr(module, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(pipeline, "build", taken)
    with pytest.raises(RuntimeError, match="it has been taken"):
        numbers(Scaled())
    assert texts and all("fusedrnn_stage_launch" in text for text in texts)


def test_another_version_of_the_compiler(
    folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch, first_uses: FirstUse
) -> None:
    first_uses(folder)
    traces.clear()
    monkeypatch.setattr(records, "_package", lambda: "another one")
    numbers(Scaled())
    assert "trace" in traces


def in_text(stored: dict[str, Any], old: str, new: str) -> None:
    text = stored["generated"]["text"]
    assert old in text
    stored["generated"]["text"] = text.replace(old, new)


def of_unknown_operations(stored: dict[str, Any]) -> None:
    nodes = stored["generated"]["call_weights"]["module"]["nodes"]
    node = next(node for node in nodes if node["op"] == "call_function")
    node["target"] = "os.system.default"


def of_another_constant(stored: dict[str, Any]) -> None:
    tensors = stored["generated"]["call_weights"]["module"]["tensors"]
    assert tensors
    for tensor in tensors.values():
        tensor["shape"], tensor["numbers"] = [3], [1.0, 2.0]


def of_other_operations(graphs: dict[str, Any]) -> None:
    for forward, _ in graphs["derived"]:
        for node in forward["nodes"]:
            if node["target"] == "aten.tanh.default":
                node["target"] = "aten.sin.default"


def of_each_derivative(graphs: dict[str, Any], change: str) -> None:
    for pair in graphs["derived"]:
        (results,) = pair[1]["nodes"][-1]["args"]["tuple"]
        getattr(results["tuple" if "tuple" in results else "list"], change)()


DAMAGED_FILES = """
file.write_bytes(file.read_bytes()[:-40])
library_cache.write(file, b"{")
file.chmod(0o666)
"""
DAMAGED_RECORDS = """
stored.pop("generated")
stored.pop("unread")
stored.pop("library")
stored.pop("graphs")
stored["generated"].pop("form")
stored["generated"].pop("output_sequences")
stored["generated"].pop("call_weights")
stored["generated"].pop("text")
stored["generated"].pop("has_choices")
stored.update(generated=None)
stored["generated"]["form"].pop()
stored["generated"]["form"].append(0)
stored["generated"].update(output_sequences=[7])
stored["generated"].update(text="no C++")
stored["generated"]["call_weights"].update(count=1)
stored["generated"]["call_weights"].update(inputs=[5])
stored["generated"]["call_weights"].update(constants=[])
stored["generated"]["call_weights"]["recipes"].pop()
stored["generated"]["call_weights"]["recipes"][1].pop()
stored["generated"]["call_weights"]["recipes"][1].reverse()
stored["generated"]["call_weights"]["recipes"][2].pop()
stored["generated"]["call_weights"]["recipes"][2][0][0][0][0] = 99
of_unknown_operations(stored)
of_another_constant(stored)
in_text(stored, "math::tanh(", "math::sigmoid(")
in_text(stored, "din[0] = ", "din[0] = 1.5f * ")
"""
DAMAGED_GRAPHS = """
graphs.pop("derived")
graphs["derived"].clear()
graphs["derived"].extend(graphs["derived"])
graphs["module"]["nodes"].pop(3)
graphs.update(module=None)
of_other_operations(graphs)
of_each_derivative(graphs, "reverse")
of_each_derivative(graphs, "pop")
"""
"""Nobody reads them but who needs the interpreter, as trials in 16 bits do."""


def _damage(record: Path, line: str) -> None:
    """By one of these lines."""
    if line in DAMAGED_FILES:
        return exec(line, globals(), {"file": record})
    stored = json.loads(library_cache.read(record) or b"")
    graphs = json.loads(stored["graphs"])
    exec(line, globals(), {"stored": stored, "graphs": graphs})
    if "graphs" in stored:
        stored["graphs"] = json.dumps(graphs)
    library_cache.write(record, json.dumps(stored).encode())


def damages() -> Iterator[Any]:
    """Lines and dtypes; the quick tests have every fifth of them."""
    of_text = DAMAGED_RECORDS.split("\n")[-3:-1]
    rows = [(line, torch.float64) for line in (DAMAGED_FILES + DAMAGED_RECORDS).split("\n")]
    rows += [(line, torch.bfloat16) for line in DAMAGED_GRAPHS.split("\n")]
    rows += [(line, dtype) for line in of_text for dtype in DTYPES[1:]]
    for i, (line, dtype) in enumerate(row for row in rows if row[0]):
        marks = [pytest.mark.slow] if i % 5 else []
        yield pytest.param(line, dtype, id=f"{line}, {dtype}", marks=marks)


@pytest.mark.ci_has_every(4)
@pytest.mark.parametrize(("line", "dtype"), list(damages()))
def test_damaged_records_are_made_anew(
    line: str, dtype: torch.dtype, folder: Path, traces: list[str], first_uses: FirstUse
) -> None:
    """Those of another step, too."""
    first = first_uses(folder, dtype)
    (record,) = steps(folder)
    _damage(record, line)
    traces.clear()
    assert same(numbers(Scaled(), dtype=dtype), first)
    assert "trace" in traces
    traces.clear()
    numbers(Scaled(), dtype=dtype)
    assert not traces  # it is whole again


@pytest.mark.parametrize(
    "dtype",
    [DTYPES[0], DTYPES[2], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1::2])],
)
def test_each_process_compares_the_library_to_the_step(
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch, first_uses: FirstUse
) -> None:
    """By way of the interpreter in 16 bits. Neither operations nor code show all."""
    first_uses(folder, dtype)
    found: list[str] = []
    for owner, name in ((verify, "_compare_library"), (trial.Trial, "by_interpreter")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *g, n=name, c=call: found.append(n) or c(*g))
    numbers(Scaled(), dtype=dtype)
    assert found[-1] == "_compare_library"
    assert ("by_interpreter" in found) == (dtype.itemsize == 2)


def test_roundings_that_change_a_choice(
    folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch, first_uses: FirstUse
) -> None:
    """A library that is off at once is compared as it is at a first use without a record."""
    first_uses(folder, torch.float32)
    traces.clear()
    monkeypatch.setitem(verify._CLOSE, torch.float32, 0.0)
    numbers(Scaled(), dtype=torch.float32)
    assert not traces


class Norms(nn.Module):
    """A second output that nothing with a gradient reads, and whose derivative may be infinite."""

    def __init__(self, is_bounded: bool) -> None:
        super().__init__()
        self.linear, self.other, self.is_bounded = nn.Linear(H, H), nn.Linear(H, H), is_bounded

    def forward(self, x: Tensor, h: Tensor) -> tuple[object, object]:
        new = torch.tanh(self.linear(x) + h)
        other = self.other(h)
        return (new, other if self.is_bounded else other.abs().sqrt()), new


def _of_one_output(is_bounded: bool) -> list[Tensor | None]:
    forget()
    torch.manual_seed(0)
    module = Norms(is_bounded)
    x = torch.randn(T, B, H, requires_grad=True)
    (y, _), _ = fusedrnn.Recurrent(module, compile="require")(x, torch.zeros(B, H))
    y.sin().sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        *(
            pytest.param(line, marks=pytest.mark.slow)
            for line in (
                'stored.pop("generated")',
                'stored.update(library="of another compiler")',
                'stored["generated"]["form"].pop()',
                'stored["generated"].update(output_sequences=[1, 0])',
            )
        ),
    ],
)
@pytest.mark.parametrize("is_bounded", [True, False])
def test_programs_without_unused_results(
    is_bounded: bool, damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have records of their own, which say, too, what has no gradient."""
    found: list[bool] = []
    make = unused_results.lowered_without

    def noted(*given: Any) -> Any:
        made = make(*given)
        found.append(made[0] is not None)
        return made

    monkeypatch.setattr(unused_results, "lowered_without", noted)
    first = _of_one_output(is_bounded)
    assert found == [not is_bounded]
    assert [value is None for value in first] == [*[False] * 4, True, True]
    for record in steps(folder):
        stored = json.loads(library_cache.read(record) or b"")
        whole = json.loads(stored["graphs"])["module"] is not None
        if damage and not whole and stored["generated"]:
            _damage(record, damage)
    found.clear()
    assert same(_of_one_output(is_bounded), first)
    assert bool(found) == (bool(damage) and not is_bounded)
    found.clear()
    assert same(_of_one_output(is_bounded), first)
    assert not found  # it is whole again


def test_folders_that_cannot_be_used(folder: Path, traces: list[str]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users can write"):
        numbers(Scaled())
    assert not steps(folder)


def test_graphs_with_other_code_are_not_stored() -> None:
    for function in (lambda x: x + 1, lambda x: x.sin()):
        with pytest.raises(operation_graph.CannotStore):
            operation_graph.to_json(torch.fx.symbolic_trace(function))


PROGRAM = """
import sys
import torch
loaded = set(sys.modules)
import fusedrnn
layers = fusedrnn.GRU(4, 4)

def imported(*names):
    return any(name in sys.modules and name not in loaded for name in names)

class Cell(torch.nn.GRUCell):
    parts = {"gates", "candidate"}  # in another order in each process
    def forward(self, x, h):
        return super().forward(x, h) if "gates" in self.parts and "a" in {"a", "b", "c"} else x

print(imported("fusedrnn._recurrent", "fusedrnn._front", "fusedrnn._compiler"), end=" ")
rnn = fusedrnn.Recurrent(Cell(4, 4), compile="require")
print(imported("torch._dynamo"), end=" ")
y, _ = rnn(torch.randn(3, 2, 4))
y.sum().backward()
print(imported("torch._inductor.graph"), "cached" in rnn.explain(torch.randn(3, 2, 4)).program)
"""


@pytest.mark.slow
def test_what_is_imported(folder: Path) -> None:
    """Nothing of users' cells before one is made, and torch.compile's tracer at the first call."""
    for seed, compiler, said in (
        ("1", None, "False False False False"),
        ("2", "/nowhere/c++", "False False False True"),
    ):
        env = os.environ | {"PYTHONHASHSEED": seed} | ({"CXX": compiler} if compiler else {})
        output = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=env)
        assert output.strip() == said


class Fitted(Scaled):
    """Does something else where it has so many rows."""

    def __init__(self, is_fitted: bool, rows: int) -> None:
        super().__init__()
        self.is_fitted, self.rows = is_fitted, rows

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if len(x) == self.rows and self.is_fitted:
            x = 3 * x
        return super().forward(x, h)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_step_that_differs_in_one_batch(rows: int, folder: Path, traces: list[str]) -> None:
    """A record is that of all batches for which torch.compile has one graph."""
    numbers(Fitted(False, rows), batch=4)
    traces.clear()
    forget()
    rnns = [
        fusedrnn.Recurrent(Fitted(True, rows).double(), compile=compile)
        for compile in ("auto", "never")
    ]
    rnns[1].load_state_dict(rnns[0].state_dict())
    for number, batch in enumerate((4, rows, 4, 7)):
        x = torch.randn(T, batch, H, dtype=torch.float64)
        made = [rnn(x, torch.zeros(batch, H, dtype=torch.float64))[0] for rnn in rnns]
        torch.testing.assert_close(made[0], made[1], rtol=1e-12, atol=1e-12)
        assert number or not traces


_operators = torch.library.Library("fusedrnn_test_records", "DEF")
_operators.define("scaled(Tensor x) -> Tensor")
_operators.impl("scaled", lambda x: 2 * x, "CompositeImplicitAutograd")


class ByName(Scaled):
    """Calls an operator, whose name in the graph does not say what it does."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return super().forward(torch.ops.fusedrnn_test_records.scaled(x), h)


def test_operators_of_users_have_no_records(folder: Path, traces: list[str]) -> None:
    """Those of a later process may be other ones of the same name."""
    for _ in range(2):
        traces.clear()
        numbers(ByName())
        assert traces and not steps(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_hold_no_weights(folder: Path, dtype: torch.dtype) -> None:
    """Neither those that are made, nor those of records, which in 16 bits are made again."""
    for _ in range(2):
        forget()
        rnn = fusedrnn.Recurrent(Scaled().to(dtype), compile="require")
        rnn(torch.zeros(T, B, H, dtype=dtype), torch.zeros(B, H, dtype=dtype))
        (program,) = find_program._known.values()
        traced = program.derived().plan.lowered.traced
        assert all(traced.values[node].is_meta for node in traced.constants)
