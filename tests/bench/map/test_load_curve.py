import numpy as np
import pytest

from helmrec.costs.calibrated import default_cost
from helmrec.sim.scenario import with_bus_speed
from helmrec_bench.map.cells import Cell
from helmrec_bench.map.load_curve import LoadCurve, load_curve, rising_trace, run_static


def curve(*p99_ms: float) -> LoadCurve:
    rate = np.arange(100.0, 100.0 * (len(p99_ms) + 1), 100.0)
    return LoadCurve(rate, np.array(p99_ms) / 2, np.array(p99_ms))


def test_capacity_lies_where_the_p99_crosses_the_slo() -> None:
    assert curve(20, 40, 160, 320).capacity(80) == pytest.approx(250)
    assert curve(20, 40, 60).capacity(80) == 300
    assert curve(100, 200).capacity(80) == 100


def test_a_p99_that_wavers_counts_as_crossing_in_the_middle() -> None:
    assert curve(20, 90, 60, 200).capacity(80) == pytest.approx(250)


def test_latency_is_read_off_between_windows() -> None:
    seen = curve(10, 20, 40, 80, 160)
    assert seen.p99_at(300) == pytest.approx(40)
    assert seen.p99_at(350) == pytest.approx(40 * 2**0.5)
    assert seen.mean_at(300) == pytest.approx(20)


def test_a_node_is_slower_at_the_end_of_a_rise_and_the_curve_says_at_which_rate() -> None:
    cell = Cell(rows_per_token=1, hot=0.05)
    trace = rising_trace(cell, "returning", 120, seed=3)
    seen = load_curve(run_static(cell, default_cost(), trace, 0.2), cell.warm_up_s, 120)
    assert seen.rate[0] < 0.35 * 120 < 0.95 * 120 < seen.rate[-1]
    in_last = np.count_nonzero(trace.time_s >= trace.duration_s - 4)
    assert in_last / 4 == pytest.approx(seen.rate[-1], rel=0.2)
    assert seen.mean_ms[-5:].mean() > seen.mean_ms[:5].mean()


def test_a_slower_bus_is_slower_in_everything_that_crosses_it_and_in_nothing_else() -> None:
    whole, half = default_cost(), with_bus_speed(default_cost(), 0.5)
    assert half.name == f"{whole.name}, bus x 0.5"
    changed = {name for name in whole.terms()._fields if getattr(half, name) != getattr(whole, name)}
    assert changed == {
        "alone_gb_per_s",
        "beside_gb_per_s",
        "sorted_alone_gb_per_s",
        "sorted_beside_gb_per_s",
        "reload_gb_per_s",
    }
    assert half.alone_gb_per_s == whole.alone_gb_per_s / 2
    assert with_bus_speed(whole, 1.0) is whole


def test_cells_have_the_same_bytes_of_rows_in_more_or_fewer_tables() -> None:
    for rows_per_token in (1, 6, 24):
        features = Cell(rows_per_token=rows_per_token).node(0.5).model.features
        assert sum(table.num_rows for table in features) == pytest.approx(260e6, rel=1e-3)
