"""Bytes that routers and replicas exchange."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helmrec.cluster.hint import Describer, unpack_hint
from helmrec.cluster.merge import merge_stats
from helmrec.cluster.report import RecentUsers, unpack_report
from helmrec.collector import CollectorStats
from helmrec.pauses import GapHistogram, PauseStats
from helmrec.serve.wire import pack_prefill, pack_requests
from tests.cluster.cases import ahead_of, make_replica, stamp_now, write_model
from tests.helpers import random_request, tiny_config, tiny_engine
from tests.serve.cases import rank_requests


def test_a_hint_samples_the_rows_of_the_tokens_it_names() -> None:
    model = tiny_config()
    request = random_request(np.random.default_rng(0), model, 7, 12, 4)
    hint = Describer(model).hint(request)
    told = unpack_hint(msgspec.msgpack.encode(hint))
    assert told == hint
    route = hint.route_request()
    assert (route.user, route.num_tokens, route.num_candidates, route.rows_per_token) == (7, 13, 4, 2)
    assert route.sample.hashes.size == 12 * 2 + 4 * 2, "a small request is sampled whole"
    assert set(route.sample.position.tolist()) == set(range(1, 14)), (
        "the user's context is token 0 and no row of it is sampled"
    )


def test_what_cannot_be_described_still_has_a_hint() -> None:
    request = random_request(np.random.default_rng(0), tiny_config(), 7, 12, 4)
    wrongs: list[dict[str, Any]] = [{"features": {}}, {"items": ["a"] * 12}, {"user_id": 2**70}, {"user_id": "x"}]
    for wrong in wrongs:
        values = {name: getattr(request, name) for name in request.__slots__} | wrong
        hint = Describer(tiny_config()).hint(type(request)(**values))
        assert unpack_hint(msgspec.msgpack.encode(hint)) == hint


def test_anything_else_is_no_hint_and_no_report() -> None:
    for value in (None, 5, b"", b"nonsense", "text"):
        assert unpack_hint(value) is None
        assert unpack_report(value) is None


def test_only_users_whose_prefix_is_kept_are_reported_newest_first() -> None:
    served = RecentUsers(kept_from_visit=2, max_users=3)
    for user in (1, 2, 1, 3, 2, 4):
        served.note(user, 10 * user)
    assert len(served) == 3
    assert served.latest(5) == [(2, 20)]
    served.note(3, 31)
    assert served.latest(1) == [(3, 31)]
    served.forget(3)
    assert served.latest(5) == [(2, 20)]


def test_a_user_whose_history_is_held_ahead_of_its_rank_is_reported_at_once() -> None:
    served = RecentUsers(kept_from_visit=2)
    served.note(1, 10)
    served.hold(2, 20)
    assert served.latest(5) == [(2, 20)]
    served.note(2, 25)
    assert served.latest(5) == [(2, 25)]


@pytest.mark.parametrize(("risk", "reported"), [(0.0, [3]), (1e9, [])])
def test_a_replica_reports_whom_it_holds_a_history_for(tmp_path: Path, risk: float, reported: list[int]) -> None:
    relay = {"risk": risk, "max_held": 1.0, "max_compute": 1.0}
    replica = make_replica(write_model(tmp_path / "tiny"), "a", relay=relay)

    async def run() -> bytes:
        await replica.prefill(b"", stamp_now(), b"".join(pack_prefill(ahead_of(rank_requests(4)[3]))))
        report = await replica.report()
        await replica.close()
        return report

    report = unpack_report(asyncio.run(run()))
    assert report is not None
    assert [user for user, _ in report.users] == reported


def test_a_replica_reports_its_rows_its_users_and_its_split(tmp_path: Path) -> None:
    replica = make_replica(write_model(tmp_path / "tiny"), "a")

    async def run() -> bytes:
        for request in rank_requests(6) * 2:
            payload = b"".join(pack_requests([request], 0.0))
            await replica.rank(b"", stamp_now(), payload)
        report = await replica.report()
        await replica.close()
        return report

    report = unpack_report(asyncio.run(run()))
    assert report is not None
    assert sorted(user for user, _ in report.users) == list(range(6))
    assert report.alpha == 0.4
    assert report.pool_tokens == 30 * 4
    sketch = report.node_report(0, 0.0).sketch
    assert sketch is not None
    assert 0 < sketch.fill < 1
    assert sketch.num_bytes == 1_024 // 8 + 16


def test_many_engines_add_up_to_one() -> None:
    engines = [tiny_engine(), tiny_engine(alpha=0.2)]
    for engine in engines:
        engine.rank(rank_requests(5))
    merged = merge_stats([engine.stats() for engine in engines])
    assert merged.served == 10
    assert merged.pool.num_pages == 60
    assert merged.pool.alpha == pytest.approx(0.3)
    assert merged.pool.page_bytes == engines[0].stats().pool.page_bytes
    assert merge_stats([engines[0].stats()]) == engines[0].stats()


def test_gaps_and_collections_of_many_engines_add_up_and_the_longest_keeps_its_cause() -> None:
    stats = tiny_engine().stats()
    gaps = [
        PauseStats({"save": GapHistogram((1, 2), 0.5, 30.0)}, 0.1, 5.0, 20.0, "save"),
        PauseStats(
            {"save": GapHistogram((0, 1), 0.2, 40.0), "rows": GapHistogram((3, 0), 0.1, 2.0)}, 0.2, 4.0, 35.0, "rows"
        ),
    ]
    merged = merge_stats([replace(stats, pauses=each) for each in gaps]).pauses
    collected = [CollectorStats(5, 1, 2.0, 9.0, 70, 0), CollectorStats(6, 1, 3.0, 8.0, 80, 1)]
    assert merge_stats([replace(stats, collector=each) for each in collected]).collector == CollectorStats(
        11, 2, 3.0, 9.0, 150, 1
    )
    assert merged.gaps == {"save": GapHistogram((1, 3), 0.7, 40.0), "rows": GapHistogram((3, 0), 0.1, 2.0)}
    assert (merged.longest_suspended_ms, merged.recent_ms, merged.recent_cause) == (5.0, 35.0, "rows")
