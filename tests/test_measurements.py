"""No claim without a measurement: files that README and docs name exist, and tables of figures name theirs.

A table of figures is one with measured units in two cells or more. Its file is named in its own section or in the text
of a section around it, as a path, a link or a bare file name. The record of a training is such a file, too.
"""

import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helmrec_bench.registry import REGISTERED

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"
TRAININGS = ROOT / "src" / "helmrec" / "control" / "policies"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"measurements/([\w.-]+\.(?:json|png))|`(?:policies/)?([\w.-]+\.json)`")
FIGURE = re.compile(r"\d[\d,.]*\s?(?:ms|µs|us|%|x|GB/s|MiB/s|req/s|requests/s)(?:\b|$|\s|\|)")
HEADING = re.compile(r"^(#{1,6}) ")


class Section(NamedTuple):
    """The lines under a heading, and those of the headings around it."""

    title: str
    lines: tuple[str, ...]
    around: tuple[str, ...]


def sections(text: str) -> Iterator[Section]:
    """Own lines only: those of deeper headings are theirs. Code is left out."""
    stack: list[tuple[int, str, list[str]]] = [(0, "", [])]
    done: list[Section] = []
    is_code = False

    def close(down_to: int) -> None:
        while stack and stack[-1][0] >= down_to:
            _, title, lines = stack.pop()
            around = tuple(line for _, _, outer in stack for line in outer)
            done.append(Section(title, tuple(lines), around))

    for line in text.splitlines():
        is_code ^= line.startswith("```")
        found = None if is_code else HEADING.match(line)
        if found:
            close(len(found[1]))
            stack.append((len(found[1]), line.lstrip("# "), []))
        elif not is_code:
            stack[-1][2].append(line)
    close(0)
    yield from done


def figures_in(section: Section) -> list[str]:
    """Cells of tables that hold measured figures."""
    cells = [cell for line in section.lines if line.startswith("|") for cell in line.strip("|").split("|")]
    return [cell.strip() for cell in cells if FIGURE.search(cell)]


def files_named(lines: tuple[str, ...]) -> set[str]:
    return {path or bare for line in lines for path, bare in NAMED.findall(line)}


def is_kept(name: str) -> bool:
    return any((folder / name).exists() for folder in (MEASUREMENTS, TRAININGS))


def provenance_of(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    calibrated = found.get("measured")  # calibrations were made one by one
    made: dict[str, Any] = calibrated[0]["made"] if isinstance(calibrated, list) else found
    return made


def command_of(path: Path) -> str:
    return str(provenance_of(path)["command"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measurement_files_that_are_named_exist(page: Path) -> None:
    paths = {path for path, _ in NAMED.findall(page.read_text()) if path}
    assert not {name for name in paths if not (MEASUREMENTS / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_of_figures_names_its_measurement(page: Path) -> None:
    bare = [
        section.title
        for section in sections(page.read_text())
        if len(figures_in(section)) >= 2
        if not any(is_kept(name) for name in files_named(section.lines + section.around))
    ]
    assert not bare, "name the file of docs/measurements these figures are from"


@pytest.mark.parametrize("path", sorted(MEASUREMENTS.glob("*.json")), ids=lambda path: path.name)
def test_every_measurement_says_where_it_comes_from(path: Path) -> None:
    assert {"command", "commit"} <= provenance_of(path).keys()


@pytest.mark.parametrize("path", sorted(MEASUREMENTS.glob("*.json")), ids=lambda path: path.name)
def test_every_measurement_can_be_made_again_with_its_command(path: Path) -> None:
    program, *arguments = shlex.split(command_of(path))
    if program == "python":
        assert arguments[0] == "-m"
        assert find_spec(arguments[1]) is not None
    else:
        assert program == "helmrec"
        assert arguments[0] in {"bench", "calibrate"}
    if arguments[:2] == ["bench", "run"]:
        measurement = REGISTERED[arguments[2]]
        assert path.name in measurement.writes or arguments[2].startswith("controller-")
        measurement.parse(arguments[3:])


def test_files_that_an_experiment_writes_are_those_of_one_experiment() -> None:
    written = [name for one in REGISTERED.values() for name in one.writes]
    assert len(written) == len(set(written))


def test_the_rule_sees_a_table_without_a_file() -> None:
    text = "# A\n`map.json`\n## B\n| x | y |\n|---|---|\n| 3 ms | 4% |\n# C\n| 3 ms | 4% |\n```\n| 5 ms | 6 ms |\n```\n"
    found = {section.title: section for section in sections(text)}
    assert len(figures_in(found["B"])) == len(figures_in(found["C"])) == 2
    assert files_named(found["B"].lines + found["B"].around) == {"map.json"}
    assert not files_named(found["C"].lines + found["C"].around)
