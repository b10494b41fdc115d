"""How much of an experiment is run: whether it works (smoke), what it says (quick), with which certainty (full).

A smaller tier has fewer seeds, shorter traffic and, for smoke alone, a smaller node. Scenarios stay what the reader
wrote: they are read, then resized here.
"""

from dataclasses import dataclass

from pydantic import ByteSize

from helmrec.sim.scenario import Scenario
from helmrec.traffic.workload import Phase, Workload
from helmrec_bench.judging.contest import each_phase


@dataclass(frozen=True, slots=True)
class Tier:
    """What is cut down, and by how much."""

    name: str
    num_seeds: int
    time: float  # share of a scenario's duration, warm-up included
    size: float  # share of pool, hot users and items; rates stay
    window_s: float  # over which splits are compared
    alphas: tuple[float, ...]  # of sweeps
    loads: tuple[float, ...]  # multiples of a scenario's arrivals among which the largest is looked for
    pressed: float  # share of their time that scenarios of hours are given
    is_judged: bool  # whether its figures may bear a verdict

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.num_seeds))


_ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_LOADS = tuple(round(0.65 + 0.05 * step, 2) for step in range(15))  # four bisections
_FINE_LOADS = tuple(round(0.6 + 0.025 * step, 3) for step in range(37))

TIERS = {
    tier.name: tier
    for tier in (
        Tier("smoke", 1, 0.05, 0.05, 1.0, (0.2, 0.5, 0.8), (0.5, 1.0), 0.01, is_judged=False),
        Tier("quick", 1, 1.0, 1.0, 10.0, _ALPHAS, _LOADS, 1 / 36, is_judged=True),
        Tier("full", 5, 1.0, 1.0, 10.0, (0.03, *_ALPHAS), _FINE_LOADS, 1.0, is_judged=True),
    )
}


def spelled_out(scenario: Scenario) -> Scenario:
    """With its traffic as a workload, which can be changed phase by phase."""
    if scenario.family is None:
        return scenario
    return scenario.model_copy(update={"workload": scenario.family.workload(), "family": None})


def resized(scenario: Scenario, time: float, size: float) -> Scenario:
    """The same regimes on a smaller node, gone through faster. Batches and requests keep their sizes."""
    scenario = spelled_out(scenario)
    if scenario.workload is None or (time == 1 and size == 1):
        return scenario
    workload = each_phase(scenario.workload, lambda phase: _resized(phase, time, size))
    traffic = {
        "epoch_s": workload.epoch_s * time,
        "num_items": max(workload.lanes, round(workload.num_items * size)),
        "item_shift": workload.item_shift * size,
    }
    engine = scenario.engine
    pool = {
        "pool_bytes": ByteSize(engine.sized_pool_bytes * size),
        "host_kv_bytes": ByteSize(engine.host_kv_bytes * size),
    }
    return scenario.model_copy(
        update={
            "workload": workload.model_copy(update=traffic),
            "engine": engine.model_copy(update=pool),
            "warm_up_s": scenario.warm_up_s * time,
            "tick_s": max(0.25, scenario.tick_s * min(1.0, 10 * time)),
        }
    )


def _resized(phase: Phase, time: float, size: float) -> Phase:
    first, last = phase.hot_first
    return phase.model_copy(
        update={
            "duration_s": phase.duration_s * time,
            "hot_users": max(8, round(phase.hot_users * size)),
            "hot_first": (round(first * size), round(last * size)),
        }
    )


def with_traffic(workload: Workload, **settings: object) -> Workload:
    """Every phase with these settings: one number stands for a ramp that goes nowhere."""
    if not settings:
        return workload
    return each_phase(workload, lambda phase: Phase(**phase.model_dump() | settings))


def for_nodes(workload: Workload, num_nodes: int, load: float) -> Workload:
    """Traffic of a cluster: so many times the users and the requests of one node, over the same items."""
    return each_phase(workload, lambda phase: _for_nodes(phase, num_nodes, load))


def _for_nodes(phase: Phase, num_nodes: int, load: float) -> Phase:
    (low, high), (first, last) = phase.rate, phase.hot_first
    return phase.model_copy(
        update={
            "rate": (low * num_nodes * load, high * num_nodes * load),
            "hot_users": phase.hot_users * num_nodes,
            "hot_first": (first * num_nodes, last * num_nodes),
        }
    )
