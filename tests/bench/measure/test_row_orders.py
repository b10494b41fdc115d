"""The comparison of row orders: its traces, its replays, and a whole run on a tiny trace."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from helmrec.kernels.row_table import Admission
from helmrec.memory.device_rows import RowPolicy
from helmrec_bench.measure.simulated.row_orders import (
    OURS,
    THEIRS,
    Drift,
    RowTrace,
    compare,
    drifting,
    fbgemm_rule_hits,
    logged,
    replay,
)


def tiny(drift: Drift) -> RowTrace:
    return drifting(drift, num_rows=1_000, step_rows=100, num_steps=40, seed=3)


def test_a_shift_changes_which_rows_are_popular_and_a_seed_repeats_the_trace() -> None:
    trace = tiny(Drift("shift", shift_at=30))
    assert np.array_equal(trace.rows, tiny(Drift("shift", shift_at=30)).rows)
    popular = [np.bincount(part, minlength=1_000).argmax() for part in np.split(trace.rows, [3_000])]
    assert popular[0] != popular[1]
    assert trace.middle == 2_000


def test_a_step_misses_each_row_once_in_exact_lru() -> None:
    trace, slots = tiny(Drift("steady")), 200
    resident: OrderedDict[int, None] = OrderedDict()
    once = each = 0
    for step in range(40):
        rows = trace.rows[100 * step : 100 * (step + 1)].tolist()
        absent = [row for row in rows if row not in resident]
        if step >= 20:
            once, each = once + len(set(absent)), each + len(absent)
        for row in rows:
            resident[row] = None
            resident.move_to_end(row)
        while len(resident) > slots:
            resident.popitem(last=False)
    missing = replay(trace, slots, OURS["LRU, always"])
    assert each > once
    # Times of the last touch are those of steps, so that which of a step's rows stay is not exact.
    assert (missing.once, missing.each) == pytest.approx((once / 2_000, each / 2_000), abs=0.02)


def test_counts_that_never_age_lose_to_those_that_do_after_a_shift() -> None:
    trace = drifting(Drift("shift", shift_at=60), num_rows=2_000, step_rows=200, num_steps=80, seed=0)
    policy = RowPolicy(is_lru=False, admission=Admission.FREQUENCY, half_life=16)
    ours = 1 - replay(trace, 96, policy).once
    assert ours > fbgemm_rule_hits(trace, 96) + 0.02


def test_a_request_of_the_log_reads_the_history_of_its_user(tmp_path: Path) -> None:
    path = tmp_path / "ratings.dat"
    path.write_text("".join(f"{user}::{item}::9::{time}\n" for time, (user, item) in enumerate([(1, 7), (2, 8)] * 10)))
    trace = logged(path, "movietweetings", 16)
    assert trace.ends.tolist() == [0, *np.cumsum([sum(range(3, 7)) * 2, sum(range(7, 11)) * 2]).tolist()]
    assert trace.num_rows == 2


def test_a_comparison_has_every_policy(tmp_path: Path) -> None:
    pytest.importorskip("libcachesim", reason="no build of libCacheSim for this platform")
    found = compare(tiny(Drift("steady")), 0.2, tmp_path)
    assert len(found["hit_rate"]) == len(OURS) + 1 + len(THEIRS)
    assert all(0.2 < rate < 0.98 for rate in found["hit_rate"].values()), found
