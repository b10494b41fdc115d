"""Finished pieces of a long run, one line each, so that a run that was stopped goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from rich.progress import Progress

from helmrec.sim.cost import CostModel


class Unit(Protocol):
    @property
    def name(self) -> str:
        """Says all that its result depends on but costs and code."""


def digest_of(cost: CostModel) -> str:
    """Tells calibrations apart by their figures."""
    told = cost.model_dump_json(exclude={"sources", "fit", "made"})
    return hashlib.sha256(told.encode()).hexdigest()[:12]


class Store:
    """Results by name, of one digest: pieces of another calibration or other scenarios are left alone."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        path.parent.mkdir(exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [json.loads(line) for line in lines]
        self.found: dict[str, Any] = {one["name"]: one["result"] for one in kept if one["digest"] == digest}

    def put(self, name: str, result: Any) -> None:
        self.found[name] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"digest": self._digest, "name": name, "result": result}) + "\n")


def finish(units: Sequence[Unit], work: Callable[[Any], Any], store: Store, processes: int, what: str) -> None:
    """Run what is missing, in this process or in several, and keep each result as soon as it is there."""
    missing = [unit for unit in units if unit.name not in store.found]
    with Progress() as bar:
        task = bar.add_task(what, total=len(units), completed=len(units) - len(missing))
        for unit, result in _spread(missing, work, processes):
            store.put(unit.name, result)
            bar.update(task, advance=1, description=f"{what}: {unit.name}")


def _spread(units: Iterable[Unit], work: Callable[[Any], Any], processes: int) -> Iterator[tuple[Unit, Any]]:
    if processes == 1:
        yield from ((unit, work(unit)) for unit in units)
        return
    with ProcessPoolExecutor(processes) as pool:
        started = {pool.submit(work, unit): unit for unit in units}
        for future in as_completed(started):
            yield started[future], future.result()
