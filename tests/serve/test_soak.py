"""A short version of the soak: everything changes while requests are served, and nothing goes wrong."""

from pathlib import Path

import pytest

from helmrec_bench.measure.serving.soak import run


@pytest.mark.slow
def test_twenty_seconds_of_everything_at_once_leave_no_error_and_no_wrong_score(tmp_path: Path) -> None:
    seen = run(tmp_path, 20.0, capacity_s=4.0)
    assert seen["errors"] == []
    assert seen["audits"] > 20
    assert (seen["audit_mismatches"], seen["background_failures"]) == (0, 0)
    assert set(seen["calls"]) == {"rank", "append", "rank with history", "delete", "rows"}
    assert seen["boundary_moves"] >= 4
    assert seen["checks_clean"]
    assert seen["anonymous_growth"] < 0.05, "a leak of any size shows in seconds at this rate"
