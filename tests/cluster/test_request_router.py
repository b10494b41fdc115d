"""A routing decision that fails sends the request anywhere; it leaves nobody waiting."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from helmrec.cluster.dispatch import Dispatch
from helmrec.cluster.hint import Hint
from helmrec.costs.calibrated import default_cost
from helmrec.costs.routing import RouterCost

pytest.importorskip("ray.serve", reason="helmrec[cluster] is not installed")
from helmrec.cluster.request_router import HelmRequestRouter


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={})


def test_a_decision_that_fails_leaves_the_choice_to_ray_and_the_others_are_still_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = HelmRequestRouter.__new__(HelmRequestRouter)  # without a cluster behind it
    cost = RouterCost.from_calibration(default_cost().terms(), 2, 64)
    router.initialize_state("least-loaded", cost._asdict(), {}, {})
    replicas = [replica("a"), replica("b")]
    router._dispatch.meet({"a": None, "b": None})
    hint = Hint(1, 4, 2, 2, 0, np.empty(0, np.uint64).tobytes(), np.empty(0, np.int64).tobytes())
    pending: Any = SimpleNamespace(
        args=[msgspec.msgpack.encode(hint)],
        routing_context=SimpleNamespace(should_backoff=False),
        metadata=SimpleNamespace(internal_request_id="request"),
    )

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake of the policy")

    for method in ("choose", "sent", "finished", "lose"):
        monkeypatch.setattr(Dispatch, method, fail)
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert [each.replica_id.unique_id for rank in ranks for each in rank] == ["a", "b"]
    router.on_request_routed(pending, replicas[0].replica_id, None)
    router.on_request_completed(replicas[0].replica_id, "request")
    assert router._failures.count() == 3
    assert "a mistake of the policy" in caplog.text
    monkeypatch.undo()
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert len(ranks[0]) == 1, "one is chosen again"
