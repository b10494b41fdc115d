"""Two engines that share one copy of the tables: memory, rows per second, updates, and kill -9 of every process.

    helmrec bench run shared-tables                                                     # this machine's CPU
    helmrec bench run shared-tables --device cuda --gib 32 --folder /data/large-model   # one card

On a card both engines run on the first one, as two cards would. The model is written to the folder, unless it is there:
that of `disk-rows` serves as well. Where rows per second are measured, each user comes once, so that each request reads
all of its rows.
"""

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.cluster.engines import EnginesPort, make_engines
from helmrec.config import EngineConfig
from helmrec.model.shared_tables import SharedTables
from helmrec.serve.port import Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.row_keeper import RowKeeper
from helmrec.serve.settings import ServeConfig
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.large_model import GIB, Note, large_config, note_since, write_large_model
from helmrec_bench.measure.requests import Crowd, Visitors

NUM_REQUESTS, AT_ONCE, NUM_COMPARED = 64, 16, 8
CROWDS = {"cpu": Crowd.around(NUM_REQUESTS, 200, 64), "cuda": Crowd.around(NUM_REQUESTS, 2_000, 512)}
POOLS = {"cpu": "64MiB", "cuda": "4GiB"}
UPDATED = 1_000  # rows
TOLERANCE = 3e-2  # of scores in bfloat16, absolute and relative: engines put requests into steps in other ways

MAP_AND_REGISTER = """
import sys, time
from pathlib import Path
from helmrec.model.folder import read_manifest
from helmrec.model.shared_tables import SharedTables
from helmrec.model.table_memory import TableFiles
import torch
if sys.argv[4] == "cuda":
    torch.cuda.init(); torch.zeros(1, device="cuda")
began_s = time.perf_counter()
tables = SharedTables(read_manifest(Path(sys.argv[1])).model, TableFiles(int(sys.argv[2]), int(sys.argv[3])))
if sys.argv[4] == "cuda":
    tables.master.lock()
print(time.perf_counter() - began_s)
"""


def pss_bytes(pid: int) -> int:
    """The proportional share of the tables in the memory of a process."""
    found, is_wanted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            is_wanted = "helmrec-tables" in line or "/tables/" in line
        elif is_wanted and line.startswith("Pss:"):
            found += 1_024 * int(line.split()[1])
    return found


def are_close(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))


class SharedStand:
    """Two engines and their keeper, and requests for them."""

    def __init__(self, folder: Path, device: str, pool: str, note: Note) -> None:
        batches = {"max_batch_requests": 8, "max_batch_tokens": 70_016} if device == "cuda" else {}  # as `disk-rows`
        engine = EngineConfig(device=device, pool_bytes=pool, alpha=0.1, verify="never", **batches)
        same_card = patch("helmrec.cluster.engines.cards_of", lambda engine, num: ["0"] * num)
        with same_card if device == "cuda" else nullcontext():
            serve = ServeConfig(engines=2, policy="none", log_level="warning")
            self.port: EnginesPort = make_engines(folder, engine, serve)
        self.note = note
        visitors = Visitors(self.port.model, CROWDS[device])
        self.requests: list[RankRequest] = [visitors.next(1.0) for _ in range(NUM_REQUESTS)]
        self._new_users = itertools.count(1 << 41)
        self.wrong = self.failed = self.answered = 0
        self.largest_difference = 0.0  # from the nearest state of the rows

    @property
    def keeper(self) -> RowKeeper:
        return self.port.keepers[0]

    @property
    def engines(self) -> list[ProcessPort]:
        return list(self.port.engines)

    def pids(self) -> list[int]:
        return [each.pid for each in (self.keeper, *self.engines) if each.pid is not None]

    async def until(self, is_so: Callable[[], bool]) -> float:
        """Seconds until something is so; ends the measurement if a process cannot start."""
        began_s = time.monotonic()
        while not is_so():
            for each in (self.keeper, *self.engines):
                if each.health is Health.FAILED:
                    raise SystemExit(f"the {each.kind} has failed: {each.reason}")
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    def are_ready(self) -> bool:
        """Whether all processes serve, and the router knows it."""
        are_up = all(each.health is Health.READY for each in (self.keeper, *self.engines))
        return are_up and self.port.num_routed == len(self.engines)

    async def rows_per_s(self, engines: Sequence[ProcessPort], seconds: float) -> float:
        """Rows read by engines that are kept busy."""
        before = [(await each.stats()).pool for each in engines]
        began_s = time.monotonic()
        end_s = began_s + seconds

        async def ask(engine: ProcessPort, first: int) -> None:
            at = first
            while time.monotonic() < end_s:
                await engine.submit([replace(self.requests[at % NUM_REQUESTS], user_id=next(self._new_users))])
                at += AT_ONCE

        await asyncio.gather(*(ask(each, first) for each in engines for first in range(AT_ONCE)))
        took_s = time.monotonic() - began_s
        after = [(await each.stats()).pool for each in engines]
        pairs = zip(after, before, strict=True)
        return sum(new.row_hits + new.row_misses - old.row_hits - old.row_misses for new, old in pairs) / took_s

    async def scores(self, engine: ProcessPort) -> list[Any]:
        return [result.scores for result in await engine.submit(self.requests[:NUM_COMPARED])]

    def updated_ids(self) -> NDArray[np.int64]:
        """Items of the requests that are compared, and others."""
        every = [np.asarray(request.candidates) for request in self.requests[:NUM_COMPARED]]
        ids = np.unique(np.concatenate(every))[:UPDATED]
        return np.concatenate([ids, np.setdiff1d(np.arange(2 * UPDATED), ids)[: UPDATED - ids.size]])

    def new_rows(self, state: int) -> NDArray[np.float32]:
        """Values of the updated rows in a state."""
        rng = np.random.default_rng(state)
        return rng.standard_normal((UPDATED, self.port.model.row_dim), np.float32)

    def num_exact(self, state: int) -> int:
        """Updated rows whose values in the shared memory, which both engines read, are those of this state."""
        model = self.port.model
        rows = self.updated_ids() + model.offsets[model.features[0].name]
        found = SharedTables(model, self.keeper.files).master.gather(rows)
        return int((found == torch.from_numpy(self.new_rows(state)).to(found.dtype)).all(1).sum())

    async def update(self, state: int) -> float:
        """Seconds that an update of rows takes which both engines then see."""
        began_s = time.monotonic()
        table = self.port.model.features[0].name
        await self.port.update_rows(table, self.updated_ids().tolist(), self.new_rows(state))
        return time.monotonic() - began_s

    def count(self, scores: NDArray[Any], states: Sequence[NDArray[Any]]) -> None:
        """Count an answer, which must be one of a state of the rows."""
        self.answered += 1
        self.wrong += not any(are_close(scores, state) for state in states)
        nearest = min(float(np.abs(scores - state).max()) for state in states)
        self.largest_difference = max(self.largest_difference, nearest)

    async def under_load(self, work: Callable[[], Awaitable[float]], states: list[list[Any]]) -> float:
        """Do something while requests are answered; count failures, and answers of no state of the rows."""
        is_over = asyncio.Event()

        async def ask(at: int) -> None:
            while not is_over.is_set():
                try:
                    (result,) = await asyncio.wait_for(self.port.submit([self.requests[at]]), 60)
                    self.count(result.scores, [state[at] for state in states])
                except Exception as error:  # every failure counts, whatever it is
                    self.note(f"failed: {error!r}")
                    self.failed += 1
                    await asyncio.sleep(0.05)

        asking = [asyncio.create_task(ask(at)) for at in range(NUM_COMPARED)]
        found = await work()
        is_over.set()
        await asyncio.gather(*asking)
        return found

    async def kill(self, process: ProcessPort | RowKeeper) -> float:
        """Seconds until another process has taken its place. Rows are updated meanwhile."""
        assert process.pid is not None
        began_s = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        waiting = asyncio.create_task(self.until(lambda: process.health is not Health.READY))
        await self.update(1)
        await waiting
        await self.until(self.are_ready)
        return time.monotonic() - began_s


async def measure(stand: SharedStand, flags: Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure all parts; `keep` takes each as soon as it is there."""
    stand.port.start()
    size = stand.port.model.num_rows * stand.port.model.row_stride
    loaded_s = await stand.until(lambda: stand.keeper.health is Health.READY)
    ready_s = loaded_s + await stand.until(stand.are_ready)
    keep({"table_bytes": size, "keeper_ready_s": loaded_s, "all_ready_s": ready_s})
    rates: list[dict[str, Any]] = []
    for _ in range(flags.repeats):
        alone = [await stand.rows_per_s([each], flags.seconds) for each in stand.engines]
        rates.append({"alone": alone, "together": await stand.rows_per_s(stand.engines, flags.seconds)})
    keep({"rows_per_s": rates, "together_over_alone": [one["together"] / max(one["alone"]) for one in rates]})
    shares = [await asyncio.to_thread(pss_bytes, pid) for pid in stand.pids()]
    keep({"pss_over_size": sum(shares) / size})
    mapped_s = await asyncio.to_thread(_map_and_register, Path(flags.folder), stand.keeper, flags.device)
    keep({"another_process_maps_and_registers_s": mapped_s})
    states, updates = list[list[Any]](), list[dict[str, Any]]()
    for state in (0, 1):
        took_s = await stand.update(state)
        one, other = [await stand.scores(each) for each in stand.engines]
        agree = sum(map(are_close, one, other))
        states.append(one)
        updates.append({"rows": UPDATED, "took_s": took_s, "exact": stand.num_exact(state), "scores_agree": agree})
    changed = sum(not are_close(old, new) for old, new in zip(*states, strict=True))
    held = await stand.keeper.stats()
    keep({"updates": updates, "scores_changed": changed, "longest_held_s": held.longest_held_s})
    killed_s: dict[str, float] = {}
    for name, process in (("keeper", stand.keeper), ("engine 0", stand.engines[0]), ("engine 1", stand.engines[1])):
        killed_s[name] = await stand.under_load(partial(stand.kill, process), states)
        counts = {"answered": stand.answered, "failed_requests": stand.failed, "wrong_scores": stand.wrong}
        keep({"ready_after_kill_s": dict(killed_s), **counts, "largest_difference": stand.largest_difference})
    await stand.port.close()


def _map_and_register(folder: Path, keeper: RowKeeper, device: str) -> float:
    """Seconds in which one more process has the tables mapped and, on a card, registered."""
    files = keeper.files
    command = [sys.executable, "-c", MAP_AND_REGISTER, str(folder), *map(str, files), device]
    ran = subprocess.run(command, pass_fds=files, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"another process could not map the tables: {ran.stderr}")
    return float(ran.stdout)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gib", type=float, default=0.0625, help="of tables")
    parser.add_argument("--pool", help="of each engine")
    parser.add_argument("--folder", type=Path, help="of the model; it is written if it is not there")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each rate")
    parser.add_argument("--repeats", type=int, default=3)


def default_out(flags: Namespace) -> str:
    return "shared-tables-h200.json" if flags.device == "cuda" else "shared-tables-cpu.json"


def main(flags: Namespace) -> None:
    note, found = partial(note_since, time.monotonic()), dict[str, Any]()

    def keep(part: dict[str, Any]) -> None:
        note(str(part))
        found.update(part)
        write_measurement(flags.out, {"device": flags.device, "pool": pool, **found})

    pool = flags.pool or POOLS[flags.device]
    with tempfile.TemporaryDirectory() as name:
        flags.folder = flags.folder or Path(name) / "model"
        write_large_model(flags.folder, large_config(flags.device, int(flags.gib * GIB)), note)
        stand = SharedStand(flags.folder, flags.device, pool, note)
        note("requests are made; processes start")
        asyncio.run(measure(stand, flags, keep))
    note("the end")
