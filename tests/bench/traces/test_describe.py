from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from helmrec.traffic.families import Shape, family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace import Trace
from helmrec_bench.traces.describe import describe, return_times
from tests.traffic.cases import model_of_many_tables, small_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return small_trace()


def test_reuse_equals_its_plain_twin(trace: Trace) -> None:
    model = model_of_many_tables().model_copy(update={"window": 10_000})
    full, kept = Counter[int](), Counter[int]()
    for r, request in enumerate(rank_requests(trace, model)):
        new = len(request.items) - int(trace.num_new[r])
        full.update([*request.items, *request.candidates])
        kept.update([*request.items[new:], *request.candidates])
    found = describe(trace)
    assert found.sample_rate == 1
    for reuse, counts in ((found.full, full), (found.kept, kept)):
        times = np.array(list(counts.values()))
        assert reuse.mean == pytest.approx(times.mean())
        assert reuse.once_rows == pytest.approx((times == 1).mean())
        assert reuse.once_reads == pytest.approx((times == 1).sum() / times.sum())
        assert reuse.hot_reads == pytest.approx(times[times > 64].sum() / times.sum())


def test_return_times_equal_their_plain_twin(trace: Trace) -> None:
    last: dict[int, float] = {}
    gaps = []
    for user, now in zip(trace.user.tolist(), trace.time_s.tolist(), strict=True):
        if user in last:
            gaps.append(now - last[user])
        last[user] = now
    assert np.sort(return_times(trace)) == pytest.approx(sorted(gaps))
    found = describe(trace)
    assert found.median_return_s == pytest.approx(np.median(gaps))
    assert found.p75_return_s == pytest.approx(np.quantile(gaps, 0.75))


def test_phases_are_described_separately(trace: Trace) -> None:
    calm, busy = describe(trace).phases
    assert (calm.name, busy.name) == ("calm", "busy")
    assert calm.num_requests + busy.num_requests == trace.num_requests
    assert calm.rate == pytest.approx(15, rel=0.2)
    assert busy.rate == pytest.approx(27.5, rel=0.2)
    assert busy.median_history < calm.median_history


def test_a_trace_too_small_to_say_says_none(trace: Trace) -> None:
    one = replace(
        trace,
        **{
            name: getattr(trace, name)[:1]
            for name in ("time_s", "user", "num_new", "num_candidates", "candidate_seed", "phase", "epoch", "backlog")
        },
        **{name: getattr(trace, name)[:0] for name in ("item", "action", "timestamp_s")},
    )
    found = describe(one)
    assert found.median_return_s is None
    assert found.item_slope is None


def test_the_default_shape_has_the_published_slope_and_top_share() -> None:
    found = describe(generate(family("steady", Shape(num_candidates=1, history=50, min_history=1)), 0))
    assert found.item_slope == pytest.approx(-1.2, abs=0.05)
    assert found.top_items_share == pytest.approx(0.68, abs=0.04)


@pytest.mark.slow
def test_the_meta_preset_reads_rows_as_often_as_the_published_trace() -> None:
    found = describe(generate(family("steady", preset("meta-2021")), 0)).full
    assert found.mean == pytest.approx(6.9, rel=0.1)
    assert found.once_rows == pytest.approx(0.47, abs=0.03)
    assert found.once_reads == pytest.approx(0.069, abs=0.005)
    assert found.hot_reads == pytest.approx(0.42, abs=0.02)
