"""The third tier of rows in the simulator: host memory in front of a disk."""

import pytest

from helmrec.control.static import Static, StaticSettings
from helmrec.costs.calibrated import default_cost
from helmrec.errors import ConfigError
from helmrec.sim.plan import PlanConfig, _node, _p99_ms, _share
from helmrec.sim.simulate import simulate


def p99_ms(host_rows_bytes: str | None, disk_rows_per_s: float | None) -> float:
    config = PlanConfig(
        rate=40,
        requests_per_run=400,
        host_rows_bytes=host_rows_bytes,
        disk_rows_per_s=disk_rows_per_s,
        num_items=400_000,
    )
    trace = _share(config, 1, 1)
    result = simulate(trace, _node(config, trace, 0.2), default_cost(), Static(StaticSettings(alpha=0.2)))
    return _p99_ms(result.arrived_s, result.outcomes, trace)


def test_a_disk_without_cost_changes_nothing() -> None:
    assert p99_ms("100MB", 1e12) == pytest.approx(p99_ms(None, None), rel=1e-3)


def test_a_slower_disk_and_less_memory_take_longer() -> None:
    fast, slow = p99_ms("100MB", 3e6), p99_ms("100MB", 1e6)
    assert fast < slow
    assert p99_ms("1GB", 1e6) < slow


def test_both_settings_are_needed() -> None:
    with pytest.raises(ConfigError, match="needed together"):
        p99_ms("100MB", None)
    with pytest.raises(ConfigError, match="index of"):
        p99_ms("1KB", 1e6)
