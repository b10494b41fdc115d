"""What two shortcuts of the map cost: rows that are left out, and loads that are passed through instead of held."""

from dataclasses import dataclass

from helmrec.control.static import Static, StaticSettings
from helmrec.sim.cost import CostModel
from helmrec.sim.simulate import simulate
from helmrec.traffic.generate import generate
from helmrec_bench.judging.judge import largest_of
from helmrec_bench.map.cells import SLO_MS, Cell
from helmrec_bench.map.load_curve import run_static

_ALPHA, _HELD_S = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A steady run with one of so many lanes simulated."""

    num_lanes: int
    mean_ms: float
    p99_ms: float
    row_hit_rate: float


def sampled(cell: Cell, measured: CostModel, rate: float, num_lanes: int) -> Sampled:
    calm = cell.phase("returning", _HELD_S, rate)
    workload = cell.workload(cell.phase("returning", cell.warm_up_s - 1, rate), (calm,))
    trace = generate(workload.model_copy(update={"num_lanes": num_lanes}), 0)
    policy = Static(StaticSettings(alpha=_ALPHA))
    result = simulate(trace, cell.node(_ALPHA, num_lanes), cell.cost(measured), policy)
    found = result.summary(cell.warm_up_s)
    return Sampled(num_lanes, found.mean_ms, found.p99_ms, result.pool.row_hit_rate)


def held_capacity(cell: Cell, measured: CostModel, around: float) -> float:
    """The largest load within the SLO, each load held for a minute; looked for a fifth below and above `around`."""

    def is_met(rate: float) -> bool:
        calm = cell.phase("returning", _HELD_S, rate)
        warm_up = cell.phase("returning", cell.warm_up_s - 1, rate)
        found = run_static(cell, measured, generate(cell.workload(warm_up, (calm,)), 1), _ALPHA).summary(cell.warm_up_s)
        return found.num_refused == 0 and found.p99_ms <= SLO_MS

    rates = [around * (0.8 + 0.02 * step) for step in range(21)]
    return largest_of(rates, is_met) or rates[0]
