"""Whatever goes wrong with a node: its books stay right, every request has one answer, and the same faults give the
same bytes. What a lost node does to others is in `test_cluster.py`.
"""

import numpy as np
import pytest

from helmrec.sim.node.config import prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import Faults, Outcomes, Status, make_outcomes, no_faults
from helmrec.sim.simulate import finish
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from tests.sim.test_simulate import COST, dlrmv3

SLOW = np.array([[4.0, 9.0, 0.005]])
STALL = np.array([[4.0, 5.5]])
STORM = {"update_s": np.arange(4.0, 9.0, 0.1), "update_share": np.full(50, 0.002), "update_salt": np.arange(50)}
FAULTS: dict[str, Faults] = {
    "slow bus": no_faults()._replace(slow_bus=SLOW),
    "stalled node": no_faults()._replace(stall=STALL),
    "storm of row updates": no_faults()._replace(**STORM),
    "all at once": no_faults()._replace(slow_bus=SLOW, stall=STALL, **STORM),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(family("steady", Shape(duration_s=12, rate=150)), 1)


def served(trace: Trace, faults: Faults | None) -> Outcomes:
    """By a node whose boundary moves meanwhile, its invariants checked ten times a second."""
    config = dlrmv3(deadline_ms=400.0, queue_limit=64, host_kv_bytes="2GB")
    outcomes = make_outcomes(trace.num_requests)
    node = Node(config, COST, prepare_requests(trace, config), outcomes, faults)
    node.send(np.arange(trace.num_requests), trace.time_s)
    for tick in range(1, 121):
        node.run_until(tick / 10)
        if tick % 20 == 0:
            node.aim(0.2 + 0.1 * (tick // 20 % 2))
        node.check()
    finish(node, 0.1)
    node.check()
    return outcomes


@pytest.mark.parametrize("name", FAULTS)
def test_invariants_hold_and_no_request_vanishes(trace: Trace, name: str) -> None:
    calm, found = served(trace, None), served(trace, FAULTS[name])
    fates = np.bincount(found.status, minlength=len(Status))
    assert fates.sum() == trace.num_requests
    assert fates[Status.WAITING] == 0
    np.testing.assert_array_equal(np.isnan(found.latency_ms), found.status != Status.SERVED)
    early, late = trace.time_s < 3.0, (trace.time_s > 4.0) & (trace.time_s < 9.0)
    np.testing.assert_array_equal(found.latency_ms[early], calm.latency_ms[early])
    is_worse = found.latency_ms[late] > calm.latency_ms[late]
    assert np.count_nonzero(is_worse | (found.status[late] != Status.SERVED)) > 0.1 * late.sum(), "nothing went wrong"
    assert fates[Status.SERVED] > 0.5 * trace.num_requests, "it never came back"


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_faults_give_the_same_bytes(trace: Trace, name: str) -> None:
    first, second = (served(trace, FAULTS[name]) for _ in range(2))
    for field, column in first._asdict().items():
        assert column.tobytes() == getattr(second, field).tobytes(), field
