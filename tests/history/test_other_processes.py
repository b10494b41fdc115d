"""kill -9 and a second process, for real. The work is in `other_processes.py`, which runs once for all tests here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 24


def seen_by_another_process(folder: Path, num_rounds: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.history.other_processes", str(folder), str(num_rounds), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen_by_another_process(tmp_path_factory.mktemp("history"), NUM_ROUNDS, seed=1)


def hold(killed: dict[str, int], num_rounds: int) -> None:
    assert killed["rounds"] == num_rounds
    assert killed["rounds_with_new"] >= num_rounds // 2, "children were killed before they did anything"
    assert killed["lost"] == 0, "acknowledged events did not survive"
    assert killed["wrong"] == 0, "events are missing, doubled or out of order"


def test_acknowledged_events_survive_kill_9_in_order_and_once(seen: dict[str, Any]) -> None:
    hold(seen["killed"], NUM_ROUNDS)


def test_another_process_reads_what_was_acknowledged_and_follows_growth(seen: dict[str, Any]) -> None:
    assert seen["read"]["answers"] == ["open", "same", "same", "same", "same"]
    assert seen["read"]["map_bytes"] > 1 << 20


@pytest.mark.slow
def test_acknowledged_events_survive_a_thousand_kills(tmp_path: Path) -> None:
    hold(seen_by_another_process(tmp_path, 1_000, seed=2)["killed"], 1_000)
