"""Figures that a process told come back, also if it fails or hangs afterwards."""

import sys

from helmrec_bench.measure.cards.apart import run_apart

TELL = "from helmrec_bench.measure.cards.apart import tell; print('other output'); tell(ms=1.5);"


def test_figures_come_back() -> None:
    assert run_apart([sys.executable, "-c", TELL], 60) == [{"ms": 1.5}]


def test_a_failure_comes_after_what_was_told() -> None:
    assert run_apart([sys.executable, "-c", f"{TELL} raise SystemExit(3)"], 60) == [
        {"ms": 1.5},
        {"failure": "status 3"},
    ]


def test_a_process_that_hangs_is_stopped() -> None:
    command = [sys.executable, "-c", f"{TELL} import time; time.sleep(600)"]
    assert run_apart(command, 8) == [{"ms": 1.5}, {"failure": "stopped after 8 s"}]
