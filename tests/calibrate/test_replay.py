import numpy as np
import pytest

from helmrec.calibrate.replay import replay
from helmrec.config import EngineConfig
from helmrec.model.profiles import profile
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import make_outcomes
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from tests.calibrate.test_fit import TRUE
from tests.sim.test_simulate import COST

STEP, ROW_BYTES = 4, 1_024


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_end_when_those_of_a_simulated_node_do(overlap: bool) -> None:
    """All requests are there at once, by users who come once, so that steps hold four each, in order."""
    trace = generate(family("steady", Shape(duration_s=2, rate=60, hot_share=0.0)), 0)
    num = trace.num_requests // STEP * STEP
    engine = EngineConfig(
        pool_bytes="4GB", alpha=0.2, max_batch_requests=STEP, refill_bytes_per_step=0, overlap=overlap
    )
    config = NodeConfig(model=profile("dlrmv3", 1_000_000), engine=engine, row_sample=1 / 256)
    cost = COST.model_copy(update=TRUE._asdict())
    node = Node(config, cost, prepare_requests(trace, config), make_outcomes(trace.num_requests))
    node.send(np.arange(num), np.zeros(num))
    node.run_until(1e3)
    found = node.outcomes
    by_step = [np.arange(begin, begin + STEP) for begin in range(0, num, STEP)]
    works = np.array([_work(found, step) for step in by_step])
    ends = replay(cost.terms(), works, np.array([0, len(works)]), overlap)
    measured = [found.latency_ms[step[0]] - cost.intake_ms for step in by_step]
    assert ends == pytest.approx(np.array(measured), rel=1e-6)


def _work(found: object, step: np.ndarray) -> list[float]:
    total, reused, computed, missed = (
        getattr(found, name)[step].astype(np.float64)
        for name in ("history_tokens", "reused_tokens", "computed_tokens", "missed_rows")
    )
    new = total - reused
    pairs = new * (reused + new / 2) + (computed - new) * total
    rows = (computed - 1) * 6 + 1  # the user's own token has one row
    num_rows, num_missed = rows.sum(), missed.sum()
    hit = num_rows - num_missed
    return [STEP, computed.sum(), pairs.sum(), num_rows, hit * ROW_BYTES, num_missed * ROW_BYTES, num_missed, 0.0]
