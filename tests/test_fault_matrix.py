"""Every cell of docs/faults.md names tests that exist, and every test it lists belongs to a cell."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "faults.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)


def test_the_tests_it_names_exist() -> None:
    assert len(NAMED) > 20
    missing = [name for file, name in NAMED if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing


def test_every_cell_is_held_by_a_test() -> None:
    cells = {int(number) for number in re.findall(r"\[(\d+)\]\(#", TEXT)}
    listed = {int(number) for number in re.findall(r"^(\d+)\. `tests/", TEXT, re.MULTILINE)}
    assert cells == listed == set(range(1, max(cells) + 1))
