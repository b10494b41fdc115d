"""The planner: more load needs more nodes, and what it says is what a simulated cluster does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.cli.plan import milliseconds
from helmrec.costs.calibrated import default_cost
from helmrec.errors import ConfigError
from helmrec.sim.plan import Plan, PlanConfig, Point, _fewest, _share, make_plan, settings_of_trace
from helmrec.traffic.imported import ImportConfig, trace_of_log
from helmrec.traffic.importers import Log


def planned(on_run: Callable[[str], None] = lambda _: None, **changes: Any) -> Plan:
    crowd: dict[str, Any] = {"history": 2_000, "hot_users": 300, "requests_per_run": 300}
    settings: dict[str, Any] = {"rate": 1_500.0, "slo_ms": 20.0, "pool_bytes": "8GB", **crowd}
    return make_plan(PlanConfig(**settings | changes), default_cost(), on_run)


def test_a_plan_meets_its_slo_and_more_load_needs_more_nodes() -> None:
    some, many = planned(), planned(rate=6_000.0)
    assert some.num_nodes is not None
    assert many.num_nodes is not None
    assert some.num_nodes < many.num_nodes
    for plan in (some, many):
        assert plan.p99_ms <= 20.0 * 1.25, "a small cluster behind the router confirms the single node"
        assert 0 < plan.kv_hit < 1


def test_the_same_seed_gives_the_same_plan() -> None:
    assert planned() == planned()


def test_a_plan_without_enough_nodes_has_no_number_of_nodes() -> None:
    found = planned(rate=50_000.0, max_nodes=2)
    assert found.num_nodes is None
    assert found.unloaded_p99_ms is not None
    assert found.unloaded_p99_ms <= 20, "more nodes would do"


def test_a_limit_below_the_time_of_one_request_is_out_of_reach_at_any_size() -> None:
    runs: list[str] = []
    found = planned(runs.append, slo_ms=0.5, max_nodes=200)
    assert not [run for run in runs if "200 nodes" in run], "no size is tried in vain"
    assert found.num_nodes is None
    assert found.unloaded_p99_ms is not None
    assert found.unloaded_p99_ms > 0.5


def test_a_pool_without_room_for_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool_bytes must have room for one request at alpha"):
        planned(pool_bytes="1MB")


@pytest.mark.parametrize("needed", range(1, 40))
def test_the_fewest_nodes_are_found_whatever_their_number(needed: int) -> None:
    config = PlanConfig(rate=1.0, max_nodes=32)
    asked: list[int] = []

    def point(num: int) -> Point:
        asked.append(num)
        return Point(num, 0.5, 10.0 if num >= needed else np.inf)

    found = _fewest(config, point)
    assert (None if found is None else found.num_nodes) == (needed if needed <= 32 else None)
    assert len(asked) <= 12


@pytest.mark.parametrize(("text", "wanted"), [("80ms", 80.0), ("0.08s", 80.0), (" 20 MS", 20.0), ("15", 15.0)])
def test_times_are_read_as_people_write_them(text: str, wanted: float) -> None:
    assert milliseconds(text) == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["", "fast", "-1ms", "0", "inf", "nan", "1sx", "5m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        milliseconds(text)


def test_the_command_prints_a_table_with_a_line_for_each_pool() -> None:
    flags = ["--rate", "300", "--slo", "20ms", "--history", "2000", "--hot-users", "100", "--requests", "200"]
    done = CliRunner().invoke(app, ["plan", *flags, "--pool", "4GB", "--pool", "8GB"], env={"COLUMNS": "140"})
    assert done.exit_code == 0, done.output
    assert "4 GB" in done.output
    assert "8 GB" in done.output
    assert CliRunner().invoke(app, ["plan", "--rate", "800", "--slo", "soon"]).exit_code == 2


def test_a_trace_determines_items_candidates_history_and_returning_users() -> None:
    log = Log(
        user=np.array([0, 0, 1, 0, 2, 1]),
        item=np.array([0, 1, 2, 0, 3, 0]),
        action=np.zeros(6, np.uint8),
        timestamp_s=np.arange(6),
        num_actions=1,
    )
    trace = trace_of_log(log, ImportConfig(history_share=0.0, num_candidates=3))
    found = settings_of_trace(trace)
    assert found == {"history": 1.0, "hot_users": 2, "hot_share": 5 / 6, "num_items": 4, "num_candidates": 3}
    shared = _share(PlanConfig(rate=50.0, requests_per_run=200, **found), num_nodes=1, num_simulated=1)
    assert (shared.catalogue.num_items, shared.num_candidates.max()) == (4, 3)
