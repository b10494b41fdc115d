"""Finished pieces of a long run, one line each, so that a run that was stopped goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.progress import Progress

import helmrec
from helmrec.cli.console import err
from helmrec.costs.calibrated import CostModel


class Unit(Protocol):
    @property
    def name(self) -> str:
        """Says all that its result depends on but costs and code."""


_Task = TypeVar("_Task")
_Unit = TypeVar("_Unit", bound=Unit)


def digest_of(cost: CostModel) -> str:
    """Tells calibrations apart by their figures."""
    details = cost.model_dump_json(exclude={"sources", "fit", "made"})
    return hashlib.sha256(details.encode()).hexdigest()[:12]


def digest_of_code(*packages: str, also: Sequence[str] = ()) -> str:
    """Tells versions of these packages of helmrec, and of other source files, apart by their text."""
    source = Path(helmrec.__file__).parent
    files = sorted(path for package in packages for path in (source / package).rglob("*.py"))
    files += [Path(name) for name in also]
    assert files, f"no source in {packages}"
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


class Store:
    """Results by name, of one digest: pieces of another calibration or other scenarios are left alone."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [one for line in lines if (one := _read(line)) is not None]
        self.found: dict[str, Any] = {one["name"]: one["result"] for one in kept if one["digest"] == digest}

    def put(self, name: str, result: Any) -> None:
        self.found[name] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"digest": self._digest, "name": name, "result": result}) + "\n")


def _read(line: str) -> dict[str, Any] | None:
    """None for the half of a line that a killed run left."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def finish(units: Sequence[Unit], work: Callable[[Any], Any], store: Store, processes: int, what: str) -> None:
    """Run what is missing, in this process or in several, and keep each result as soon as it is there."""
    missing = [unit for unit in units if unit.name not in store.found]
    for unit, result in spread_shown(missing, work, processes, what):
        store.put(unit.name, result)


def spread_shown(
    units: Sequence[_Unit], work: Callable[[_Unit], Any], processes: int, what: str, *, is_quiet: bool = False
) -> Iterator[tuple[_Unit, Any]]:
    """As `spread`, with a bar that shows how far it is."""
    with Progress(console=err, transient=True, disable=is_quiet) as bar:
        task = bar.add_task(what, total=len(units))
        for unit, result in spread(units, work, min(processes, max(1, len(units)))):
            yield unit, result
            bar.update(task, advance=1, description=f"{what}: {unit.name}")


def spread(tasks: Iterable[_Task], work: Callable[[_Task], Any], processes: int) -> Iterator[tuple[_Task, Any]]:
    """Results as they come, with the task each is of."""
    if processes == 1:
        yield from ((task, work(task)) for task in tasks)
        return
    with ProcessPoolExecutor(processes) as pool:
        started = {pool.submit(work, task): task for task in tasks}
        for future in as_completed(started):
            yield started[future], future.result()
