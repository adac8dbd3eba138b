"""Numbers in the README and in the docs are those that the benchmark printed."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_results_of_the_benchmark():
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- results")[1].split("<!-- end of results")[0].splitlines()[1:]
    printed = (ROOT / "bench" / "results" / "cpu.md").read_text().splitlines()
    assert len(shown) > 20
    assert [line for line in shown if line not in printed] == []


def test_performance_shows_the_results_of_calls():
    text = (ROOT / "docs" / "performance.md").read_text()
    shown = text.split("<!-- calls")[1].split("<!-- end of calls")[0].split("\n", 1)[1]
    printed = json.loads((ROOT / "bench" / "results" / "calls.json").read_text())
    assert f"`{printed['environment']['command']}` on " in shown
    assert "\n".join(printed["tables"]).strip() in shown


def test_readme_example_runs():
    readme = (ROOT / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    names = {}
    exec(example, names)
    assert names["output"].shape == (128, 16, 256)
