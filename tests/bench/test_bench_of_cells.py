"""The benchmark of cells that users write, without its measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import any_cell, any_cell_first, readme, report
from bench.any_cell_steps import BUILT_IN, BUILT_IN_LAYERS, LOOP, OURS, PROGRAM, Size, Step
from docs.examples.published_cells import CASES

SIZE = Size(6, 3, 8)
ABOUT = {"cpu": "none", "threads": 1, "torch": "2", "date": "2000-01-01"}


def names_of(*, quick: bool = False, cell: str | None = None) -> list[str]:
    run = report.Run(quick, Path(), report.NoProgress(), argparse.Namespace(cell=cell), {})
    return [case.name for case in any_cell._cases(run)]


def test_which_cells_are_measured() -> None:
    """All but for a short run, those of the documents first; or the one that is asked for."""
    names = [case.name for case in CASES]
    assert names_of()[: len(any_cell.FIRST)] == [*any_cell.FIRST]
    assert sorted(names_of()) == sorted(names)
    assert sorted(names_of(quick=True)) == sorted(any_cell.QUICK_CELLS)
    assert names_of(quick=True, cell="sLSTM") == names_of(cell="sLSTM") == ["sLSTM"]


@pytest.mark.parametrize("name", BUILT_IN_LAYERS)
def test_the_built_in_layer_has_the_weights_of_the_cell(name: str) -> None:
    """So a cell without noise and its layer give the same numbers; both can be trained."""
    case = next(case for case in CASES if case.name == name)
    loop, layer = (Step(contender, case, SIZE, "cpu") for contender in (LOOP, BUILT_IN))
    weights = {f"{key}_l0": value for key, value in loop.cell.state_dict().items()}
    torch.testing.assert_close(dict(layer.cell.state_dict()), weights, rtol=0, atol=0)
    if name != "ForumCell":
        torch.testing.assert_close(loop.forward(), layer.forward())
    layer.train()


def rows_of(**each_ms: list[float]) -> dict[str, Any]:
    one = {"peak_bytes": 100, "output_bytes": 1 << 19}
    return {name: one | {"each_ms": each} for name, each in each_ms.items()}


def test_a_program_is_compared_to_the_built_in_layer() -> None:
    """There is a target for the one cell; other cells have no such layer, or no target."""
    forum = rows_of(**{LOOP: [4.0, 4.0], PROGRAM: [2.0, 2.0], BUILT_IN: [1.0, 1.0]})
    forum[BUILT_IN]["peak_bytes"] = 80
    other = rows_of(**{LOOP: [4.0, 4.0], PROGRAM: [2.0, 2.0]})
    found = any_cell._report(
        SIZE, (LOOP, PROGRAM, BUILT_IN), {"ForumCell": forum, "GRUCell": forum, "sLSTM": other}
    )
    to_built_in = {t.what: t.value for t in found.targets if t.what.endswith(BUILT_IN)}
    assert to_built_in == {
        f"ForumCell, peak, {PROGRAM} / {BUILT_IN}": 1.25,
        f"ForumCell, time, {PROGRAM} / {BUILT_IN}": 2,
    }
    (table,) = found.tables
    assert [row[-2:] for row in table.rows] == [["0.80", "0.25"]] * 2 + [["-", "-"]]


def test_the_document_shows_the_contenders_that_there_are(tmp_path: Path) -> None:
    """The compiled program first; a contender that some cells lack has no numbers there."""
    forum = rows_of(**{LOOP: [4.0], OURS: [8.0], PROGRAM: [2.0], BUILT_IN: [1.0]})
    other = rows_of(**{LOOP: [4.0], OURS: [8.0], PROGRAM: [2.0]})
    found = any_cell._report(SIZE, [*forum], {"ForumCell": forum, "sLSTM": other})
    written = json.dumps({**found.numbers, "environment": ABOUT})
    (tmp_path / "any_cell.json").write_text(written)
    assert readme.any_cell_table(tmp_path).split("\n")[:4] == [
        f"| peak memory, time | outputs | plain loop | {PROGRAM} | {BUILT_IN} | {OURS} |",
        "|:--|--:|--:|--:|--:|--:|",
        "| ForumCell | 0.5 MiB | 0.0 MiB, 4 ms | 1.00, 0.50 | 1.00, 0.25 | 1.00, 2.00 |",
        "| sLSTM | 0.5 MiB | 0.0 MiB, 4 ms | 1.00, 0.50 | – | 1.00, 2.00 |",
    ]


def test_the_first_use_is_built_once_and_found_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has its process; why a process has no seconds is a failure, or that of the cell."""
    found = any_cell_first.first_uses(next(c for c in CASES if c.name == "IndRNN"), SIZE)
    built, cached = (found[name] for name in (any_cell_first.BUILT, any_cell_first.CACHED))
    assert built["process"] != cached["process"]
    assert built["seconds"] > 0 < cached["seconds"]
    assert built["libraries"] > 0 == cached["libraries"]
    assert sorted(cached["each_s"])[any_cell_first.CACHED_TIMES // 2] == cached["seconds"]
    monkeypatch.setenv("FUSEDRNN_COMPILE", "0")
    unable = any_cell_first.first_uses(CASES[0], SIZE)
    assert "FUSEDRNN_COMPILE=0" in unable[any_cell_first.BUILT]["unable"]
    failed = {any_cell_first.BUILT: {"seconds": 12.0}, any_cell_first.CACHED: {"error": "broken"}}
    rows = {LOOP: {"unable": "no"}}
    all_of_it = {"IndRNN": found, "RNNCell": unable, "sLSTM": failed}
    result = any_cell._report(SIZE, (LOOP,), {"sLSTM": rows}, first=all_of_it)
    assert result.failures == ["The first use of sLSTM, from the cache: broken"]
    assert [t.passed for t in result.targets][2:] == [False]
    assert [row[1:] for row in result.tables[-1].rows][1:] == [["-", "-"], ["12.00", "-"]]
