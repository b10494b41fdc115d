"""Seconds as people see them: differences of two looks, and the pool as a row of cells."""

from dataclasses import replace
from typing import Any

import pytest

from helmrec.engine.engine import EngineStats
from helmrec.memory.ledger import Owner
from helmrec.serve.control import Steering
from helmrec.serve.port import EngineView
from helmrec.serve.samples import PageMap, Samples
from tests.helpers import tiny_engine

STATS = tiny_engine().stats()


def look(steps: int = 0, busy_s: float = 0.0, **pool: Any) -> EngineView:
    stats: EngineStats = replace(STATS, steps=steps, busy_s=busy_s, pool=replace(STATS.pool, **pool))
    return EngineView(stats, b"", None)


def test_a_sample_is_the_difference_of_two_looks() -> None:
    samples = Samples(slo_ms=50)
    before = {"row-miss": 100, "row-refill": 7, "kv-save": 1, "boundary-grow": 1_000}
    after = {"row-miss": 400, "kv-reload": 30, "row-refill": 9, "kv-save": 2, "boundary-grow": 5_000}
    samples.add(10.0, look(1, 2.0, row_hits=10, row_misses=10, total_tokens=100, bytes_by_cause=before))
    for ms in (10, 20, 60):
        samples.count(200, ms / 1e3)
    for status in (429, 503, 500, 400):
        samples.count(status, 0.001)
    samples.add(
        12.0,
        look(2, 3.0, row_hits=40, row_misses=20, total_tokens=300, reused_tokens=50, bytes_by_cause=after, alpha=0.25),
    )
    (sample,) = samples.after(0)
    assert (sample.number, sample.span_s, sample.busy, sample.alpha) == (1, 2.0, 0.5, 0.25)
    assert (sample.answered, sample.refused, sample.failed) == (3, 2, 1), "a bad request is its client's own affair"
    assert sample.p50_ms == pytest.approx(20)
    assert sample.slo_share == pytest.approx(2 / 6)
    assert (sample.row_hit_rate, sample.token_reuse_rate) == (0.75, 0.25)
    assert (sample.on_path_bytes, sample.off_path_bytes, sample.inside_bytes) == (330, 3, 4_000)
    recent = samples.recent()
    assert (recent.rate, recent.refused_rate) == (1.5, 1.0)
    assert recent.slo_share == pytest.approx(2 / 6)


def test_errors_are_counted_by_cause_and_pages_by_what_fills_them() -> None:
    samples, control = Samples(slo_ms=50), Steering("static:0.4", 50).view(None, "adaptive", 0.0)
    samples.add(0.0, look())
    for cause in ("QueueFull", "RequestError", "QueueFull"):
        samples.count_error(cause)
    predicted = replace(control, measured_ms=3.0, predicted_ms=2.0)
    samples.add(1.0, replace(look(1, resident_rows=30, row_capacity=120), control=predicted))
    samples.count_error("QueueFull")
    samples.add(2.0, look(1, row_capacity=0))
    first, second = samples.after(0)
    assert (first.errors, second.errors) == ({"QueueFull": 2, "RequestError": 1}, {"QueueFull": 1})
    assert samples.recent().errors == samples.errors == {"QueueFull": 3, "RequestError": 1}
    assert (first.fill, second.fill) == (0.25, None)
    assert (first.measured_ms, first.predicted_ms) == (3.0, 2.0)
    assert (second.measured_ms, second.predicted_ms) == (None, None)


def test_a_second_without_requests_has_no_times_and_no_rates() -> None:
    samples = Samples(slo_ms=50)
    for now_s in (0.0, 1.0):
        samples.add(now_s, look())
    (sample,) = samples.after(0)
    assert (sample.p99_ms, sample.slo_share, sample.row_hit_rate, sample.token_reuse_rate) == (None, None, None, None)
    assert samples.recent().p99_ms is None


def test_only_what_is_new_is_given_and_the_oldest_leave() -> None:
    samples = Samples(slo_ms=50)
    for second in range(3_700):
        samples.add(float(second), look(second))
    assert [sample.number for sample in samples.after(3_697)] == [3_698, 3_699]
    assert samples.after(4_000) == []
    assert len(samples.after(0)) == 3_600
    assert [sample.number for sample in samples.after(0, most=2)] == [3_698, 3_699]
    assert samples.after(0, most=0) == []


def test_an_engine_that_was_restarted_begins_anew() -> None:
    samples = Samples(slo_ms=50)
    for now_s, steps in ((0.0, 5), (1.0, 9), (2.0, 0), (3.0, 4)):
        samples.add(now_s, look(steps))
    assert [sample.time_s for sample in samples.after(0)] == [1.0, 3.0]


def test_a_stretch_that_never_ends_takes_no_more_memory_and_its_counts_stay_exact() -> None:
    samples = Samples(slo_ms=50)
    samples.add(0.0, look())
    for i in range(100_000):
        samples.count(200, 0.01 if i % 4 else 0.06)
    assert len(samples._now.latencies_ms) == 1 << 14
    samples.add(10.0, look(1))
    (sample,) = samples.after(0)
    assert (sample.answered, sample.slo_share) == (100_000, 0.75)
    assert sample.p50_ms == pytest.approx(10)
    assert samples.recent().rate == 10_000


def test_late_answers_leave_the_recent_ones() -> None:
    samples = Samples(slo_ms=50)
    samples.add(0.0, look())
    samples.count(200, 9.0)
    for second in range(1, 13):
        samples.add(float(second), look())
        samples.count(200, 0.01)
    assert samples.recent().p99_ms == pytest.approx(10)


def test_a_small_pool_is_shown_page_by_page_and_a_large_one_by_majority() -> None:
    small = bytes([Owner.FREE, Owner.EMB, Owner.KV, Owner.DRAINING])
    assert PageMap.of(small) == PageMap("0123", 1)
    large = PageMap.of(bytes([Owner.EMB] * 5_000 + [Owner.KV] * 4_000 + [Owner.FREE]))
    assert large.pages_per_cell == 5
    assert large.cells == "1" * 1_000 + "2" * 800 + "0"
