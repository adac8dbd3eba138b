"""The map of the tests names every test file."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_map_names_every_test_file():
    mapped = re.findall(r"\| \[(\S+/test_\w+\.py)\]", (TESTS / "README.md").read_text())
    files = [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")]
    assert sorted(mapped) == sorted(files)
