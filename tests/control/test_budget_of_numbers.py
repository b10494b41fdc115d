"""The controller stays small: a limit on hand-set numbers, and one on lines."""

import ast
from pathlib import Path
from typing import NamedTuple

import helmrec.control
import helmrec.costs.learned

PACKAGE = sorted(Path(helmrec.control.__file__).parent.glob("*.py"))
SOURCES = [*PACKAGE, Path(helmrec.costs.learned.__file__)]  # numbers of the costs that it learns count too
FREE = {-1, 0, 1, 2}  # say nothing about a device or its traffic
MOST_NUMBERS, MOST_LINES = 25, 1_300


class Number(NamedTuple):
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def numbers_in(source: str, file: str) -> list[Number]:
    """Numeric literals but -1, 0, 1 and 2; a minus before a literal is part of it."""
    nodes = list(ast.walk(ast.parse(source)))
    minus = {id(node.operand) for node in nodes if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)}
    found = dict[tuple[int, int], Number]()
    for node in nodes:
        if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
            continue
        if isinstance(node.value, int | float | complex):
            value = -node.value if id(node) in minus else node.value
            if value not in FREE:
                found[node.lineno, node.col_offset] = Number(file, node.lineno, str(value))
    return [found[place] for place in sorted(found)]


def test_few_numbers_are_set_by_hand() -> None:
    found = [number for path in SOURCES for number in numbers_in(path.read_text(), path.name)]
    assert len(found) <= MOST_NUMBERS, f"{len(found)} numbers:\n" + "\n".join(map(str, found))


def test_the_controller_is_short_enough_to_be_read() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in PACKAGE}
    assert sum(lines.values()) <= MOST_LINES, lines


def test_numbers_are_counted_as_they_are_written() -> None:
    source = 'x = [-1, 0, 1.0, 2, True, "3", None, f"{y:.3f}"]\ny = 3 * -4 + 1e-9 - 0.5\n'
    assert [one.text for one in numbers_in(source, "x.py")] == ["3", "-4", "1e-09", "0.5"]
