"""Writers that are killed by `kill -9`. The work is in `other_processes.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 24


def seen_by_another_process(folder: Path, num_rounds: int, seed: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.history.other_processes", str(folder), str(num_rounds), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def hold(killed: dict[str, int], num_rounds: int) -> None:
    assert killed["rounds"] == num_rounds
    assert killed["rounds_with_new"] >= num_rounds // 2, "children were killed before they did anything"
    assert killed["lost"] == 0, "acknowledged events did not survive"
    assert killed["wrong"] == 0, "events are missing, doubled or out of order"


def test_acknowledged_events_survive_kill_9_in_order_and_once(tmp_path: Path) -> None:
    hold(seen_by_another_process(tmp_path, NUM_ROUNDS, seed=1), NUM_ROUNDS)


@pytest.mark.slow
def test_acknowledged_events_survive_a_thousand_kills(tmp_path: Path) -> None:
    hold(seen_by_another_process(tmp_path, 1_000, seed=2), 1_000)
