"""Killed under load and started again: every acknowledged event is there, no score is stale, and rows are warm."""

from pathlib import Path

import pytest

from helmrec_bench.measure.serving.restart import RestartCase, run

SMALL = RestartCase(
    num_rows=3_000, pool="8MiB", num_clients=3, users_per_client=4, before_s=2.0, after_s=1.25, pace_s=0.01
)


@pytest.mark.slow
def test_a_killed_server_comes_back_with_every_acknowledged_event_and_warm_rows(tmp_path: Path) -> None:
    seen = run(tmp_path, SMALL, has_snapshot=True)
    assert (seen["events_lost"], seen["histories_wrong"]) == (0, 0)
    assert seen["events_acknowledged"] >= 60 * 12
    assert seen["ranked_before_the_kill"] > 0
    assert (seen["audits"] > 0, seen["audit_mismatches"]) == (True, 0)
    assert seen["row_hit_rate_first_second_after"] >= 0.9 * seen["row_hit_rate_before"]


@pytest.mark.slow
def test_without_a_snapshot_rows_are_cold_and_nothing_is_lost_either(tmp_path: Path) -> None:
    seen = run(tmp_path, SMALL, has_snapshot=False)
    assert (seen["events_lost"], seen["histories_wrong"], seen["audit_mismatches"]) == (0, 0, 0)
