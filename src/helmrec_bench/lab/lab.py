"""Where experiments are run: reads scenarios, runs what is not kept yet, shows how far it is."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from helmrec.costs.calibrated import default_cost
from helmrec.sim.scenario import Scenario, load_scenario
from helmrec_bench.lab.place import Place
from helmrec_bench.lab.provenance import code_digest
from helmrec_bench.lab.runs import Outcome, Run, Settings, Setup, Task, perform, tasks_of
from helmrec_bench.lab.store import Store, Unit, digest_of, spread_shown
from helmrec_bench.lab.tiers import Tier, resized


class Lab:
    """One evaluation at one tier. Pieces made by the same code on the same scenario and costs are not made again."""

    def __init__(self, tier: Tier, place: Place | None = None, processes: int = 1, *, is_quiet: bool = False) -> None:
        self.tier = tier
        self.place = place or Place()
        self._processes, self._is_quiet = processes, is_quiet
        self._seen: dict[str, str] = {}  # digests of the scenarios that were read, by name

    @cached_property
    def store(self) -> Store:
        return Store(self.place.build / "kept.jsonl", f"{code_digest()} {digest_of(default_cost())}")

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.tier.seeds

    @property
    def scenarios_read(self) -> dict[str, str]:
        """With digests of their content."""
        return dict(sorted(self._seen.items()))

    def scenario(self, name: str, pressed: float = 1.0) -> Scenario:
        """As the reader wrote it, cut to this tier. `pressed`: share of its time that it is given besides."""
        scenario = load_scenario(self.place.scenarios / f"{name}.toml")
        self._seen[name] = hashlib.sha256(scenario.model_dump_json().encode()).hexdigest()[:12]
        return resized(scenario, self.tier.time * pressed, self.tier.size)

    def setup(self, name: str, seed: int, load: float = 1.0, traffic: Settings = (), pressed: float = 1.0) -> Setup:
        return Setup(self.scenario(name, pressed), seed, load, self.tier.window_s, traffic)

    def run(self, runs: Sequence[Run], what: str) -> dict[Run, Outcome]:
        """What came of each; those of one setup are run together, so that its miss curves are made once."""
        missing = [run for run in runs if run.name not in self.store.found]
        tasks = tasks_of(missing, self.place.build / "curves")

        def keep(task: Task, results: dict[str, Any]) -> None:
            for name, result in results.items():
                self.store.put(name, result)

        self._work(tasks, perform, keep, what)
        return {run: Outcome.from_json(self.store.found[run.name]) for run in runs}

    def compute(self, units: Sequence[Unit], work: Callable[[Any], Any], what: str) -> list[Any]:
        """Results of other pieces of work, in order."""
        missing = [unit for unit in units if unit.name not in self.store.found]
        self._work(missing, work, lambda unit, result: self.store.put(unit.name, result), what)
        return [self.store.found[unit.name] for unit in units]

    def _work(
        self, tasks: Sequence[Any], work: Callable[[Any], Any], keep: Callable[[Any, Any], None], what: str
    ) -> None:
        for task, result in spread_shown(tasks, work, self._processes, what, is_quiet=self._is_quiet):
            keep(task, result)
