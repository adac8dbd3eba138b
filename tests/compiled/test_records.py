"""First uses whose step another process has compiled before: what is found, and what is not.

Longer than 350 lines, because whole, damaged and other records are made and looked at alike.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreted as runner
import pytest
import torch
from interpreted import interpreted
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn
from bench.any_cell_steps import Size, start_of
from docs.examples.published_cells import CASES, Case
from fusedrnn._compile import cache, cell, first_use, graphs, records, verify

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

    noted(first_use, "trace")
    noted(cell, "derive")
    yield found


class Scaled(nn.Module):
    """A GRU with what a test changes about it."""

    def __init__(self, scale: float = 2.0, shift: float = 0.0) -> None:
        super().__init__()
        self.gru, self.scale = nn.GRUCell(H, H), scale
        self.shift = shift

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.gru(x + torch.tensor([self.shift], dtype=x.dtype), h) * self.scale


def numbers(module: nn.Module, batch: int = B, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Results and gradients of a cell as a program, always for the same weights and inputs."""
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


COMPILED = [case for case in CASES if case.name != "AttentionDecoder"]
"""Which reads a tensor that is another one in each call."""


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_records_have_the_same_programs(case: Case, folder: Path, traces: list[str]) -> None:
    """Of all published cells: bit for bit, and nothing is traced or derived."""
    torch.manual_seed(0)
    module, inputs = case.cell(H, B), case.inputs(T, B, H)

    def results() -> list[Tensor]:
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
        traced = program.plan.lowered.traced.module
        records.keep(program.key, records.Record(traced, program.derived, program.log))
        traces.clear()
        second = results()
    assert not traces
    assert runner._programs[-1].text == program.text
    for ours, theirs in zip(second, first, strict=True):
        assert torch.equal(ours, theirs)


def test_a_first_use_stores_a_record(folder: Path, traces: list[str]) -> None:
    first = numbers(Scaled())
    (record,) = steps(folder)
    assert record.stat().st_mode & 0o777 == 0o644
    traces.clear()
    second = numbers(Scaled())
    assert not traces and steps(folder) == [record]
    assert all(map(torch.equal, first, second))


def _frozen() -> nn.Module:
    module = Scaled()
    module.gru.bias_hh.requires_grad_(False)
    return module


def _doubled() -> nn.Module:
    """A class of the same name whose code is another one, though it does the same operations."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.scale, self.shift = nn.GRUCell(H, H), 2.0, 0.0

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            assert h.dim() == 2
            return self.gru(x + torch.tensor([self.shift], dtype=x.dtype), h) * self.scale

    return Scaled()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Scaled(3.0), {}),
        (lambda: Scaled(shift=1.0), {}),
        (_frozen, {}),
        (_doubled, {}),
        (Scaled, {"batch": 5}),
        (Scaled, {"dtype": torch.float32}),
    ],
    ids=["a number", "a constant tensor", "a frozen weight", "code", "batch", "dtype"],
)
def test_other_steps_have_other_records(
    make: Any, options: dict[str, Any], folder: Path, traces: list[str]
) -> None:
    numbers(Scaled())
    traces.clear()
    numbers(make(), **options)
    assert "trace" in traces
    assert len(steps(folder)) == 2


def test_functions_that_differ_in_their_arguments_alone() -> None:
    one, several = (eval(f"lambda {given}: len(a)").__code__ for given in ("a", "*a"))
    assert one.co_code == several.co_code
    assert records._of_code(one) != records._of_code(several)


def test_another_version_of_the_compiler(
    folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(Scaled())
    traces.clear()
    monkeypatch.setattr(records, "_package", lambda: "another one")
    numbers(Scaled())
    assert "trace" in traces


def _changed(change: Any) -> Any:
    def damage(record: Path) -> None:
        stored = json.loads(cache.read(record) or b"")
        change(stored)
        cache.write(record, json.dumps(stored).encode())

    return damage


def _of_other_operations(stored: dict[str, Any]) -> None:
    for forward, _ in stored["derived"]:
        for node in forward["nodes"]:
            if node["target"] == "aten.tanh.default":
                node["target"] = "aten.sin.default"


def _of_unknown_operations(stored: dict[str, Any]) -> None:
    stored["module"]["nodes"][-2]["target"] = "os.system.default"


def _without_derivatives(stored: dict[str, Any]) -> None:
    for pair in stored["derived"]:
        (results,) = pair[1]["nodes"][-1]["args"]["tuple"]
        results["tuple" if "tuple" in results else "list"].reverse()


def _with_fewer_derivatives(stored: dict[str, Any]) -> None:
    for pair in stored["derived"]:
        (results,) = pair[1]["nodes"][-1]["args"]["tuple"]
        results["tuple" if "tuple" in results else "list"].pop()


def _of_another_constant(stored: dict[str, Any]) -> None:
    for tensor in stored["module"]["tensors"].values():
        tensor["shape"] = [100_000]


def test_objects_that_only_their_type_tells_apart_have_no_records(
    folder: Path, traces: list[str]
) -> None:
    """A step may decide by them where only the trial of one row looks."""

    class Held(Scaled):
        def __init__(self, held: object) -> None:
            super().__init__()
            self.held = held

    numbers(Held(iter([])))
    assert not steps(folder)
    pair = collections.namedtuple("Pair", "a b")(1.0, 2.0)
    for i, held in enumerate((range(2), range(3), Path("a"), pair, torch.ops.aten.relu.default)):
        numbers(Held(held))
        assert len(steps(folder)) == i + 1


def test_the_walk_does_not_enter_this_package(folder: Path, traces: list[str]) -> None:
    """Where programs are kept, which the first call changes."""

    class Held(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.held = fusedrnn.Recurrent(nn.GRUCell(H, H))._memories

    numbers(Held())
    assert traces.count("trace") == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.write_bytes(record.read_bytes()[:-40]),
        lambda record: cache.write(record, b"{"),
        _changed(lambda stored: stored.pop("derived")),
        _changed(lambda stored: stored["derived"].clear()),
        _changed(lambda stored: stored["derived"].extend(stored["derived"])),
        _changed(lambda stored: stored["module"]["nodes"].pop(3)),
        _changed(_of_other_operations),
        _changed(_of_unknown_operations),
        _changed(_without_derivatives),
        _changed(_with_fewer_derivatives),
        _changed(_of_another_constant),
        lambda record: record.chmod(0o666),
    ],
)
def test_damaged_records_are_made_anew(damage: Any, folder: Path, traces: list[str]) -> None:
    first = numbers(Scaled())
    (record,) = steps(folder)
    damage(record)
    traces.clear()
    second = numbers(Scaled())
    assert "trace" in traces
    assert all(map(torch.equal, first, second))
    traces.clear()
    numbers(Scaled())
    assert not traces  # it is whole again


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_process_compares_the_library_to_the_step(
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of the interpreter in 16 bits. Neither operations nor code show all."""
    numbers(Scaled(), dtype=dtype)
    found: list[str] = []
    for owner, name in ((verify, "_compare_library"), (verify.Trial, "by_interpreter")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *g, n=name, c=call: found.append(n) or c(*g))
    numbers(Scaled(), dtype=dtype)
    assert found[-1] == "_compare_library"
    assert ("by_interpreter" in found) == (dtype.itemsize == 2)


@pytest.mark.parametrize("damage", [_of_other_operations, _without_derivatives])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_record_of_another_step_in_each_dtype(
    damage: Any, dtype: torch.dtype, folder: Path, traces: list[str]
) -> None:
    first = numbers(Scaled(), dtype=dtype)
    (record,) = steps(folder)
    _changed(damage)(record)
    traces.clear()
    second = numbers(Scaled(), dtype=dtype)
    assert "trace" in traces
    assert all(map(torch.equal, first, second))


def test_roundings_that_change_a_choice(
    folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is off at once is compared as it is at a first use without a record."""
    numbers(Scaled(), dtype=torch.float32)
    traces.clear()
    monkeypatch.setitem(verify._CLOSE, torch.float32, 0.0)
    numbers(Scaled(), dtype=torch.float32)
    assert not traces


def test_steps_that_are_not_the_same_each_time(folder: Path) -> None:
    class Counting(Scaled):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            with open(folder.parent / "count", "a+") as file:
                file.write("x")
                return self.gru(x, h) * float(file.tell())

    with pytest.raises(RuntimeError, match="does not do the same each time"):
        numbers(Counting())


def test_folders_that_cannot_be_used(folder: Path, traces: list[str]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users can write"):
        numbers(Scaled())
    assert not steps(folder)


def test_graphs_with_other_code_are_not_stored() -> None:
    for function in (lambda x: x + 1, lambda x: x.sin()):
        with pytest.raises(graphs.CannotStore):
            graphs.to_json(torch.fx.symbolic_trace(function))


PROGRAM = """
import sys, torch, fusedrnn
class Cell(torch.nn.GRUCell):
    parts = {"gates", "candidate"}  # in another order in each process
    def forward(self, x, h):
        return super().forward(x, h) if "gates" in self.parts and "a" in {"a", "b", "c"} else x
rnn = fusedrnn.Recurrent(Cell(4, 4), compile="require")
y, _ = rnn(torch.randn(3, 2, 4))
y.sum().backward()
print("torch._dynamo" in sys.modules)
"""


def test_torch_s_compiler_is_not_imported(folder: Path) -> None:
    """It takes most of a second, and nothing needs it where there is a record."""
    for seed, said in (("1", "True"), ("2", "False")):
        env = os.environ | {"PYTHONHASHSEED": seed}
        output = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=env)
        assert output.strip() == said
