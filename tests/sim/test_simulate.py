import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.control.policy import Move, WindowStats
from helmrec.control.static import Static, StaticSettings
from helmrec.costs.calibrated import BusLoad, ComputeWork, compute_ms, default_cost, rows_ms
from helmrec.errors import AlphaOutOfRange, ConfigError, PoolTooSmall
from helmrec.model.profiles import profile
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import Faults, Status, make_outcomes, no_faults
from helmrec.sim.simulate import Options, SimResult, simulate
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from tests.sim.node.test_conformance import PAGE_BYTES, SLOW, node_config
from tests.traffic.cases import small_trace

COST = default_cost()


class Jump:
    """Goes to another split at once, if it can."""

    def __init__(self, alpha: float, at_s: float) -> None:
        self.alpha, self.at_s = alpha, at_s
        self.seen: list[WindowStats] = []

    def decide(self, stats: WindowStats) -> Move | None:
        self.seen.append(stats)
        return Move(self.alpha, "jump") if stats.traffic.end_s == self.at_s else None

    def reset(self) -> None: ...


def static(alpha: float) -> Static:
    return Static(StaticSettings(alpha=alpha))


def dlrmv3(row_sample: float = 5 / 256, **engine: object) -> NodeConfig:
    settings = {"pool_bytes": "8GB", "alpha": 0.2, "max_batch_requests": 8, **engine}
    return NodeConfig(model=profile("dlrmv3", 1_000_000), engine=EngineConfig(**settings), row_sample=row_sample)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(family("steady", Shape(duration_s=20, rate=100)), 0)


@pytest.fixture(scope="module")
def result(trace: Trace) -> SimResult:
    return simulate(trace, dlrmv3(), COST, static(0.2))


def test_every_request_is_answered_and_stands_in_one_window(trace: Trace, result: SimResult) -> None:
    assert (result.outcomes.status == Status.SERVED).all()
    assert result.calibration == "h200"
    in_windows = sum(window.stats.traffic.num_requests for window in result.windows)
    assert trace.num_requests - 50 <= in_windows <= trace.num_requests  # the last ones are answered after the end
    assert {window.stats.alpha for window in result.windows} == {result.pool.alpha}


def test_windows_add_up_to_what_the_pool_counted(result: SimResult) -> None:
    missed = sum(window.bytes_by_cause["row-miss"] for window in result.windows)
    assert 0.9 * result.pool.bytes_by_cause["row-miss"] <= missed <= result.pool.bytes_by_cause["row-miss"]
    assert result.pool.row_misses * 1_024 == pytest.approx(result.pool.bytes_by_cause["row-miss"], rel=1e-6)
    served = result.summary()
    assert served.num_requests == result.arrived_s.size
    assert served.p50_ms <= served.mean_ms <= served.p99_ms
    assert served.token_reuse_rate == pytest.approx(result.pool.token_reuse_rate)
    assert result.pool.token_reuse_rate > 0.05


def test_it_is_known_from_when_on_both_caches_were_short(trace: Trace, result: SimResult) -> None:
    tight = simulate(trace, dlrmv3(pool_bytes="4GB"), COST, static(0.1))
    assert tight.evicting_from_s is not None
    assert 1 < tight.evicting_from_s < trace.duration_s
    assert result.pool.kv_evicted_pages > 0
    assert result.pool.row_evictions == 0
    assert result.evicting_from_s is None


def test_the_same_trace_gives_the_same_bytes(trace: Trace, result: SimResult) -> None:
    again = simulate(trace, dlrmv3(), COST, static(0.2))
    for name, column in result.outcomes._asdict().items():
        assert column.tobytes() == getattr(again.outcomes, name).tobytes(), name


def test_a_fiftieth_of_the_rows_tells_the_hit_rates_of_all() -> None:
    rates, trace = [], generate(family("steady", Shape(duration_s=8, rate=100)), 1)
    for row_sample in (5 / 256, 1.0):
        found = simulate(trace, dlrmv3(row_sample), COST, static(0.2))
        rates.append((found.pool.row_hit_rate, found.pool.token_reuse_rate, found.summary().p50_ms))
    assert rates[0][0] == pytest.approx(rates[1][0], abs=0.005)
    assert rates[0][1] == pytest.approx(rates[1][1], abs=0.005)
    assert rates[0][2] == pytest.approx(rates[1][2], rel=0.05)


def test_moves_are_applied_in_bounded_steps_until_the_boundary_is_there() -> None:
    policy = Jump(0.7, at_s=10.0)
    simulate(small_trace(), node_config(move_bytes_per_step=PAGE_BYTES), SLOW, policy)
    alphas = [stats.alpha for stats in policy.seen]
    assert alphas[9] == pytest.approx(0.4)
    assert alphas[10] < 0.7, "a page a step"
    assert alphas[-1] == pytest.approx(0.7)
    assert sorted(alphas) == alphas


def test_a_lone_request_pays_for_both_stages_and_a_busy_node_for_the_longer_one() -> None:
    """Requests of users who come once; the host's time is left out, it is a third stage."""
    cost = COST.model_copy(
        update={"host_floor_ms": 0.0, "host_request_ms": 0.0, "host_token_us": 0.0, "host_row_ns": 0.0}
    )
    config = dlrmv3(max_batch_requests=1, row_sample=1 / 256)
    shape = Shape(duration_s=10, rate=100, hot_share=0.0, history_sigma=0.0)
    trace = generate(family("steady", shape), 0)
    chosen = np.arange(200)
    latencies = {}
    for gap_s in (1.0, 0.0):
        node = Node(config, cost, prepare_requests(trace, config), make_outcomes(trace.num_requests))
        node.send(chosen, np.linspace(0.0, 199 * gap_s, 200))
        node.run_until(1_000.0)
        latencies[gap_s] = (node.outcomes.latency_ms[chosen], node.outcomes)
    terms, (lone_ms, outcomes) = cost.terms(), latencies[1.0]
    tokens, missed = int(outcomes.computed_tokens[0]), float(outcomes.missed_rows[0])
    new = tokens - 2_048
    compute = compute_ms(terms, ComputeWork(tokens, new * new / 2 + 2_048 * new, tokens * 6.0))
    read = rows_ms(terms, BusLoad((tokens * 6 - 11 - missed) * 1_024, missed * 1_024, missed), 0.0, 1.0)
    assert lone_ms[0] == pytest.approx(terms.intake_ms + read + compute, rel=1e-3)
    steps_ms = np.diff(np.sort(latencies[0.0][0]))[20:-20]
    assert np.median(steps_ms) == pytest.approx(compute, rel=0.12)  # rows are read meanwhile, and slow it a little
    assert np.median(steps_ms) >= compute - 1e-9


def test_refill_costs_the_bus_what_demand_leaves(trace: Trace) -> None:
    """A boundary that comes back finds empty slots; what is read ahead is counted apart from demand."""
    policy = Jump(0.02, at_s=8.0)
    config = dlrmv3(pool_bytes="4GB", refill_bytes_per_step="64MiB", move_bytes_per_step="1GiB")
    back = type("Back", (Jump,), {"decide": lambda self, stats: _there_and_back(stats)})(0.0, 0.0)
    found = simulate(trace, config, COST, back)
    assert found.pool.bytes_by_cause["row-refill"] > 0
    assert simulate(trace, config, COST, policy).pool.bytes_by_cause["row-refill"] == 0


def _there_and_back(stats: WindowStats) -> Move | None:
    targets = {8.0: 0.02, 12.0: 0.3}
    alpha = targets.get(stats.traffic.end_s)
    return None if alpha is None else Move(alpha, "as planned")


def test_miss_curves_predict_the_hit_rates_of_the_split_that_is_held(trace: Trace) -> None:
    policy = Jump(0.2, at_s=-1.0)
    found = simulate(trace, dlrmv3(), COST, policy, options=Options(has_curves=True))
    curves = policy.seen[-1].curves
    assert policy.seen[0].curves is not None
    assert curves is not None
    at = int(np.flatnonzero(np.isclose(curves.alphas, 0.2))[0])
    assert curves.kv_token_hit_rate[at] == pytest.approx(found.pool.token_reuse_rate, abs=0.05)
    assert curves.emb_hit_rate[at] == pytest.approx(found.pool.row_hit_rate, abs=0.05)


def test_a_slow_bus_and_a_stall_show_and_lose_nobody(trace: Trace, result: SimResult) -> None:
    faults: dict[str, Faults] = {
        "slow": no_faults()._replace(slow_bus=np.array([[5.0, 10.0, 0.005]])),
        "stall": no_faults()._replace(stall=np.array([[5.0, 6.5]])),
    }
    for name, fault in faults.items():
        found = simulate(trace, dlrmv3(), COST, static(0.2), options=Options(faults=fault))
        assert (found.outcomes.status == Status.SERVED).all(), name
        assert found.summary(5.0, 6.0).p99_ms > 3 * result.summary(5.0, 6.0).p99_ms, name
        assert found.summary(0.0, 4.0) == result.summary(0.0, 4.0), name
        assert found.summary(18.0).p50_ms < 2 * result.summary(18.0).p50_ms, name


def test_a_storm_of_row_updates_costs_reuse(trace: Trace, result: SimResult) -> None:
    storm = no_faults()._replace(
        update_s=np.arange(5.0, 10.0, 0.5), update_share=np.full(10, 0.001), update_salt=np.arange(10)
    )
    found = simulate(trace, dlrmv3(), COST, static(0.2), options=Options(faults=storm))
    assert (found.outcomes.status == Status.SERVED).all()
    assert found.pool.stale_cuts > 0
    assert found.summary(5.0, 10.0).token_reuse_rate < result.summary(5.0, 10.0).token_reuse_rate


def test_what_cannot_be_simulated_is_refused(trace: Trace) -> None:
    for engine, error in (
        ({"row_order": "frequency"}, ConfigError),
        ({"kv_freshness": 2.0}, ConfigError),
        ({"pool_bytes": "10MB"}, PoolTooSmall),
        ({"alpha": 0.999}, AlphaOutOfRange),
    ):
        with pytest.raises(error):
            simulate(trace, dlrmv3(**engine), COST, static(0.2))
