"""Simulated scenarios for trials of policies: drawn or frozen, of one seed, with the miss curves recorded on them.

What takes long to make (loads of drawn scenarios, miss curves) is kept in build/, under a digest of the code it depends
on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from helmrec.control.rebalancer import LOOK_EVERY
from helmrec.control.static import UNTUNED_ALPHA
from helmrec.costs import calibrated, reload
from helmrec.memory.miss_curves import JointCurves
from helmrec.sim.curves import record_curves
from helmrec.sim.scenario import load_scenario
from helmrec.traffic.trace import Trace
from helmrec_bench import drawn as drawn_module
from helmrec_bench import scenarios
from helmrec_bench.drawn import Drawn, Range, draw
from helmrec_bench.judging.first_times import OPENING_S, first_burst
from helmrec_bench.lab.curve_file import load_curves, save_curves
from helmrec_bench.lab.store import digest_of_code

BUILD, SCENARIOS = Path("build"), Path(scenarios.__file__).parent
FROZEN = tuple(sorted(path.stem for path in SCENARIOS.glob("*.toml")))
_NODE_COSTS = (calibrated.__file__, reload.__file__)  # what a simulated node takes of `costs`
SIMULATOR = digest_of_code("sim", "traffic", "memory", also=[*_NODE_COSTS, drawn_module.__file__])  # when a run begins
CONTROLLER = digest_of_code("control", "costs")


class Case(NamedTuple):
    """A scenario and a seed: its miss curves, and constants on the coarse grid."""

    which: Range | Literal["frozen"]
    number: int
    seed: int
    load: float | None = None  # None: the one that was drawn
    scored_from_s: float = OPENING_S

    @property
    def name(self) -> str:
        changed = "" if self.load is None else f" load {self.load:g}"
        changed += "" if self.scored_from_s == OPENING_S else f" from {self.scored_from_s:g} s"
        return f"constants {self.which} {self.number} seed {self.seed}{changed} {SIMULATOR}"

    def curves(self) -> list[JointCurves | None]:
        """At every look; kept in a file once they are recorded."""
        path = self._path("curves", f"{self.seed}.npz")
        if not path.exists():
            drawn, trace = scene(self)
            recorded = record_curves(trace, drawn.node_at(UNTUNED_ALPHA), drawn.cost, LOOK_EVERY)
            with _replacing(path) as new:
                save_curves(new, recorded)
        return load_curves(path)

    def drawn(self) -> Drawn:
        """The scenario; kept in a file, since its loads are found by simulation."""
        assert self.which != "frozen"
        path, adapter = self._path("drawn", "drawn.json"), TypeAdapter(Drawn)
        if not path.exists():
            with _replacing(path) as new:
                new.write_bytes(adapter.dump_json(draw(self.which, self.number, self.load)))
        return adapter.validate_json(path.read_bytes())

    def _path(self, folder: str, ending: str) -> Path:
        load = "" if self.load is None else f"-{self.load:g}"
        return BUILD / folder / f"{self.which}-{self.number}{load}-{SIMULATOR}-{ending}"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when all is written: other processes write it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    yield new
    new.rename(path)


class Finer(NamedTuple):
    """Constants beside those that were best over all seeds."""

    case: Case
    alphas: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{' '.join(f'{alpha:g}' for alpha in self.alphas)} of {self.case.name}"


class Trial(NamedTuple):
    """A policy on a case."""

    case: Case
    policy: str
    start: float

    @property
    def name(self) -> str:
        return f"{self.policy} from {self.start:g}, {CONTROLLER}, on {self.case.name}"


@cache
def scene(case: Case) -> tuple[Drawn, Trace]:
    if case.which != "frozen":
        drawn = case.drawn()
        return replace(drawn, scored_from_s=case.scored_from_s), drawn.make_trace(case.seed)
    scenario = load_scenario(SCENARIOS / f"{FROZEN[case.number]}.toml")
    trace = scenario.make_trace(case.seed)
    assert scenario.workload is not None
    return Drawn(
        name=scenario.name,
        kind=scenario.name,
        load=float("nan"),
        workload=scenario.workload,
        config=scenario.node_config(trace),
        cost=scenario.cost(),
        bursts_s=first_burst(scenario),
        scored_from_s=case.scored_from_s,
    ), trace
