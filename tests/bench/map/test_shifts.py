from functools import partial

import numpy as np
import pytest

from helmrec.costs.calibrated import default_cost
from helmrec_bench.map.cells import Cell
from helmrec_bench.map.shifts import Planned, Shift, run_shift, switch_prices
from tests.control.bowl import Bowl


def test_a_plan_is_followed_in_time_for_each_window() -> None:
    plan = Planned(np.array((0.2, 0.6, 0.6, 0.3)), window_s=5, start_s=10)
    window = partial(Bowl(0.3, 0.3, rate=30).window, rng=np.random.default_rng(0))
    asked = [plan.decide(window(0.2, float(second))) for second in range(40)]
    goes = {second + 1: move.alpha for second, move in enumerate(asked) if move is not None}
    assert goes[15] == 0.6
    assert min(goes) == 15, "until then it is where the plan begins"
    assert goes[25] == 0.3
    assert goes[40] == 0.3


def test_windows_divide_a_regime() -> None:
    for length_s in (3.0, 20.0, 60.0):
        shift = Shift(length_s, (1, 1), 0.9)
        assert shift.length_s % shift.window_s == pytest.approx(0)
        assert shift.num_rounds >= 2


def test_no_oracle_is_worse_than_the_best_constant_and_the_tracker_may_be() -> None:
    cell = Cell(rows_per_token=1, hot=0.05)
    found = run_shift(cell, default_cost(), Shift(20, (60, 60), 0.9), np.array((0.1, 0.5, 0.9)))
    best_mean_ms, best_p99_ms = (
        min(getattr(one, name) for one in found.statics.values()) for name in ("mean_ms", "p99_ms")
    )
    assert found.oracle.mean_ms <= best_mean_ms
    assert found.oracle.p99_ms <= min(best_p99_ms, found.tracker.p99_ms)
    assert set(found.statics) == {0.1, 0.5, 0.9}
    assert found.quasi_static.mean_ms <= best_mean_ms + 1e-9


def test_moves_are_priced_by_what_must_be_computed_and_read_again() -> None:
    prices = switch_prices(Cell(rows_per_token=24).node(0.5), default_cost(), 0.9)
    assert prices.pool_bytes == 80e9
    assert prices.refill_ms_per_byte == pytest.approx(1 / (default_cost().sorted_beside_gb_per_s * 1e6))
    assert prices.rewarm_ms_per_byte * 10_240 * 6_700 > 0.5, "a prefix takes about a millisecond"
