"""A separate process that starts children and kills them.

`python -m tests.history.other_processes FOLDER NUM_ROUNDS SEED` prints what it saw as JSON. Children are forks: this
process imports everything once and has no threads when it forks.
"""

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from tests.history.helpers import SCHEMA, events_of, same

SYNCS: tuple[Literal["commit", "interval", "os"], ...] = ("commit", "interval", "os")
THREADS = 3
USERS_PER_THREAD = 4
MAX_EVENTS = 40


def child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork; returns the child's id and the end of a pipe it writes to."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            work(write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


def append_for_ever(store: EmbeddedHistory, pipe: int, users: range, seed: int) -> None:
    """Tell every acknowledgement through the pipe, a line each: short writes to a pipe are whole or not at all."""
    chance = random.Random(seed)
    versions = {user: store.read_last(user, 0).version for user in users}
    for user in itertools.cycle(users):
        num = chance.randint(1, MAX_EVENTS)
        done = store.append(user, versions[user], events_of(user, versions[user], num))
        versions[user] = done.version
        os.write(pipe, f"{user} {done.version}\n".encode())


def be_killed(path: Path, config: HistoryConfig, seed: int, pipe: int) -> None:
    store = EmbeddedHistory(path, SCHEMA, config)
    os.write(pipe, b"open\n")
    for thread in range(THREADS):
        users = range(thread * USERS_PER_THREAD, (thread + 1) * USERS_PER_THREAD)
        threading.Thread(target=append_for_ever, args=(store, pipe, users, seed + thread)).start()
    threading.Event().wait()


def kill_one(path: Path, config: HistoryConfig, seed: int, wait_s: float) -> dict[int, int]:
    """Versions acknowledged by a child before it was killed; for even seeds it had acknowledged something."""
    pid, pipe = child(lambda write_end: be_killed(path, config, seed, write_end))
    with os.fdopen(pipe) as lines:
        assert lines.readline() == "open\n", "the child could not open the store"
        told = [] if seed % 2 else [lines.readline()]
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
        told += lines.readlines()
    os.waitpid(pid, 0)
    assert all(line.endswith("\n") for line in told)
    return {int(user): int(version) for user, version in (line.split() for line in told)}


def judge(store: EmbeddedHistory, acknowledged: dict[int, int]) -> tuple[int, int]:
    """Events that were acknowledged and are lost, and users whose events are not exactly theirs, in order, once."""
    lost = wrong = 0
    for user, version in acknowledged.items():
        found = store.read_last(user, 10**9)
        lost += max(0, version - found.version)
        is_theirs = found.first_event == 0 and same(found, events_of(user, 0, found.version))
        wrong += not is_theirs or found.version > version + MAX_EVENTS  # at most one append was under way
    store.check()
    return lost, wrong


def warm_up(path: Path) -> None:
    """Have everything compiled before children inherit it."""
    with EmbeddedHistory(path, SCHEMA) as store:
        store.append(0, 0, events_of(0, 0, 3))
        store.append(0, 3, events_of(0, 3, 3))
        judge(store, {0: 6})


def kill_many(path: Path, num_rounds: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    acknowledged: dict[int, int] = {}
    seen = {"rounds": 0, "acknowledged": 0, "lost": 0, "wrong": 0, "rounds_with_new": 0}
    for number in range(num_rounds):
        config = HistoryConfig(sync=SYNCS[number % 3], sync_interval_s=0.005, map_bytes=1 << 20)
        new = kill_one(path, config, 1_001 * number, chance.uniform(0, 0.04))
        acknowledged |= new
        with EmbeddedHistory(path, SCHEMA, config) as store:
            lost, wrong = judge(store, acknowledged)
            acknowledged = {int(user): store.read_last(user, 0).version for user in store.user_ids()}
        seen["rounds"] += 1
        seen["rounds_with_new"] += bool(new)
        seen["lost"] += lost
        seen["wrong"] += wrong
    seen["acknowledged"] = sum(acknowledged.values())
    return seen


def main(folder: str, num_rounds: str, seed: str) -> None:
    warm_up(Path(folder) / "warm")
    killed = kill_many(Path(folder) / "killed", int(num_rounds), int(seed))
    sys.stdout.write(json.dumps(killed))


if __name__ == "__main__":
    main(*sys.argv[1:])
