"""The compiled node decides what the engine's own classes decide, request by request, whatever the settings."""

import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.costs.calibrated import CostModel, default_cost
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import Faults, N, Status, make_outcomes, no_faults
from helmrec.steps import Step
from helmrec.traffic.trace import Trace
from tests.helpers import tiny_geometry
from tests.sim.node.plain_node import PlainNode
from tests.traffic.cases import model_of_many_tables, small_trace

MODEL = model_of_many_tables()
PAGE_BYTES = tiny_geometry(MODEL).page_bytes
# So slow that requests queue and steps are shared: a token takes 0.7 ms. A page from the host takes twice as long as
# its four, so that some reloads are worth it and some are not.
SLOW = default_cost().model_copy(
    update={"compute_token_us": 700.0, "reload_gb_per_s": 0.0002, "sorted_from_rows": 60, "background_ms": 3.0}
)

CASES: dict[str, dict[str, Any]] = {
    "as the engine comes": {},
    "steps in turn": {"overlap": False},
    "everything is admitted": {"kv_admission": "always", "row_admission": "always"},
    "expected benefit": {"kv_admission": "benefit", "max_forks": 1},
    "host tier": {"host_kv_bytes": 60 * PAGE_BYTES, "kv_reload": "always", "save_bytes_per_step": 9 * PAGE_BYTES},
    "host tier if worth it": {"host_kv_bytes": 300 * PAGE_BYTES, "kv_admission": "always"},
    "deadlines": {"deadline_ms": 280.0},
    "a short queue": {"deadline_ms": 520.0, "queue_limit": 5},
    "small batches": {"max_batch_tokens": 150, "max_batch_requests": 3},
    "a pool that hardly suffices": {"pool_bytes": 40 * PAGE_BYTES, "alpha": 0.2},
}


def node_config(**engine: Any) -> NodeConfig:
    settings: dict[str, Any] = {
        "pool_bytes": 130 * PAGE_BYTES,
        "alpha": 0.4,
        "page_tokens": 4,
        "max_batch_tokens": 400,
        "max_batch_requests": 6,
        "move_bytes_per_step": 2 * PAGE_BYTES,
        "refill_bytes_per_step": 8 * PAGE_BYTES,
    }
    return NodeConfig(model=MODEL, engine=EngineConfig(**settings | engine), row_sample=1.0)


def both(
    trace: Trace, config: NodeConfig, cost: CostModel, faults: Faults, aims: tuple[tuple[float, float], ...]
) -> tuple[Node, PlainNode]:
    outcomes = make_outcomes(trace.num_requests)
    node = Node(config, cost, prepare_requests(trace, config), outcomes, faults)
    node.send(np.arange(trace.num_requests), trace.time_s)
    plain = PlainNode(trace, config, cost, faults)
    for time_s, alpha in (*aims, (trace.duration_s + 1_000, 0.3)):
        node.run_until(time_s)
        node.check()
        plain.run_until(time_s)
        plain.pool.check()
        node.aim(alpha)
        plain.pool.aim(alpha)
    return node, plain


def assert_same(node: Node, plain: PlainNode) -> None:
    for name, column in node.outcomes._asdict().items():
        expected = getattr(plain.outcomes, name)
        if name.endswith("_ms"):
            np.testing.assert_allclose(column, expected, rtol=1e-9, atol=1e-9, err_msg=name)
        else:
            np.testing.assert_array_equal(column, expected, err_msg=name)
    logged = np.array([[one[column] for column in Step] for one in plain.log])
    np.testing.assert_allclose(node.take_steps(), logged, rtol=1e-9, atol=1e-9, err_msg="steps")
    assert (logged[:, Step.COMPUTE_MS] > 0).all()
    found, expected = node.stats(), plain.pool.stats()
    for field in found.__slots__:
        # Hits of rows no lane shows are not among the plain node's; the simulator does not count stale tokens.
        if field not in ("bytes_by_cause", "row_hits", "stale_tokens"):
            assert getattr(found, field) == getattr(expected, field), field
    for cause, num_bytes in expected.bytes_by_cause.items():
        if cause != "boundary-compact":
            assert found.bytes_by_cause[cause] == num_bytes, cause


MOVES = ((6.0, 0.7), (11.0, 0.1), (14.0, 0.5), (14.5, 0.2), (25.0, 0.6), (30.0, 0.3))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_node_decides_as_the_engines_classes_do(name: str, seed: int) -> None:
    config = node_config(**CASES[name])
    aims = tuple((time_s, min(alpha, config.alpha_max)) for time_s, alpha in MOVES)
    node, plain = both(small_trace(seed), config, SLOW, no_faults(), aims)
    assert_same(node, plain)
    assert node.num_unanswered == 0
    assert node.state.counts[N.ENDED] < 0.8 * node.state.counts[N.SERVED], "steps must have been shared"
    refusals = {
        "deadlines": {Status.HOPELESS, Status.EXPIRED},
        "a short queue": {Status.HOPELESS, Status.QUEUE_FULL},
    }
    if name in refusals:
        assert set(node.outcomes.status) >= {Status.SERVED} | refusals[name]
    stats = node.stats()
    assert stats.kv_evicted_pages > 0, "both caches must have been short"
    assert stats.row_evictions > 0, "both caches must have been short"


def _wrong(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function with every result changed."""
    return lambda *args, **kwargs: change(function(*args, **kwargs))


PLANTED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "admission": ("as the engine comes", "helmrec.memory.kv_cache.is_admitted", lambda admitted: not admitted),
    "worth of the coldest": ("expected benefit", "helmrec.memory.kv_cache.idle_s", lambda seconds: 0.3 * seconds),
    "probation": ("as the engine comes", "helmrec.memory.kv_cache.has_room", lambda room: False),
    "order of eviction": ("as the engine comes", "helmrec.memory.kv_cache.is_evicted_last", lambda last: True),
    "reserve": ("as the engine comes", "helmrec.memory.pool.reserved_pages", lambda pages: pages + 1),
    "pace of the boundary": ("as the engine comes", "helmrec.memory.pool.moves_between_steps", lambda moves: 1 + moves),
    "reload or compute": ("host tier if worth it", "helmrec.costs.reload.is_cheaper", lambda cheaper: True),
    "delay of a reload": ("host tier if worth it", "helmrec.costs.reload.with_delay", lambda seconds: seconds + 0.01),
    "loads of a step": ("host tier if worth it", "helmrec.costs.reload.can_overlap", lambda overlaps: True),
    "batching": ("small batches", "helmrec.engine.scheduler.may_fit", lambda fits: False),
    "refusal": ("deadlines", "helmrec.engine.scheduler.expected_ms", lambda ms: 1.02 * ms),
    "expiry": ("deadlines", "helmrec.engine.scheduler.needed_s", lambda seconds: 0.0),
    "times of steps": (
        "deadlines",
        "helmrec.engine.scheduler.with_step",
        lambda times: times._replace(request_ms=0.98 * times.request_ms),
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_difference_of_each_kind_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the engine's side is changed: the compiled side has the rule compiled in."""
    name, target, change = PLANTED[planted]
    module, _, attribute = target.rpartition(".")
    owner = pkgutil.resolve_name(module)
    found = []
    for seed in range(2):
        config = node_config(**CASES[name])
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, _wrong(getattr(owner, attribute), change))
            node, plain = both(small_trace(seed), config, SLOW, no_faults(), MOVES)
        try:
            assert_same(node, plain)
        except AssertionError:
            found.append(seed)
    assert found, "the nodes agreed although one of them decides otherwise"


@pytest.mark.parametrize("host_pages", [0, 200])
def test_row_updates_cut_prefixes_where_the_engine_cuts_them(host_pages: int) -> None:
    faults = no_faults()._replace(
        update_s=np.linspace(1.0, 30.0, 40),
        update_share=np.tile([0.01, 0.2, 0.002, 0.05], 10),
        update_salt=np.arange(40),
    )
    tier = {"host_kv_bytes": host_pages * PAGE_BYTES, "kv_reload": "always", "save_bytes_per_step": 20 * PAGE_BYTES}
    node, plain = both(small_trace(2), node_config(**tier), SLOW, faults, MOVES)
    assert_same(node, plain)
    assert node.stats().stale_cuts > 10
    assert (node.stats().host_reloaded_pages > 0) == (host_pages > 0)
