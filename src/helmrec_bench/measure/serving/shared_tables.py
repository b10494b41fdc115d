"""Two engines that share one copy of the tables: memory, rows per second, updates, and kill -9 of every process.

    helmrec bench run shared-tables                                               # this machine's CPU, small tables
    helmrec bench run shared-tables --device cuda --profile wide --gib 32 --folder /tmp/shared-tables   # one card

On a card both engines run on the first one, as two cards would. The model is written to the folder once; a later run
finds it there.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.cluster.engines import EnginesPort, make_engines
from helmrec.config import EngineConfig
from helmrec.model.config import ModelConfig, TableConfig
from helmrec.model.folder import read_manifest
from helmrec.model.profiles import profile
from helmrec.model.shared_tables import SharedTables
from helmrec.model.weights import random_dense, stream_model
from helmrec.serve.port import Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.row_keeper import RowKeeper
from helmrec.serve.settings import ServeConfig
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.requests import Crowd, Visitors

NUM_REQUESTS, AT_ONCE = 64, 16
UPDATED = 1_000  # rows
PART_BYTES = 64 << 20  # of random rows, which repeat
TOLERANCE = 2e-2  # of scores in bfloat16: engines put requests into steps in other ways

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


def write_model(folder: Path, name: str, num_bytes: int) -> None:
    """Write a model whose first table fills so many bytes, unless it is there."""
    if (folder / "config.json").exists():
        return
    base = profile(name)
    first, *others = base.features
    item = TableConfig(name=first.name, num_rows=max(first.num_rows, num_bytes // base.row_stride))
    config = ModelConfig(**base.model_dump() | {"features": (item, *others)})
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(PART_BYTES // 4, generator=generator).to(getattr(torch, config.row_dtype))
    part = values.view(torch.uint8).numpy().tobytes()

    def rows(table: TableConfig) -> Iterator[bytes]:
        left = table.num_rows * config.row_bytes
        while left:
            some = part[: min(left, len(part))]
            left -= len(some)
            yield some

    stream_model(folder, config, random_dense(config, generator), {table.name: rows(table) for table in config.tables})


def pss_bytes(pid: int) -> int:
    """The proportional share of the tables in the memory of a process."""
    found, is_wanted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            is_wanted = "helmrec-tables" in line or "/tables/" in line
        elif is_wanted and line.startswith("Pss:"):
            found += 1_024 * int(line.split()[1])
    return found


class SharedStand:
    """Two engines and their keeper, and requests for them."""

    def __init__(self, folder: Path, device: str, pool: str) -> None:
        engine = EngineConfig(device=device, pool_bytes=pool, alpha=0.1)
        self.port: EnginesPort = make_engines(folder, engine, ServeConfig(engines=2, policy="none", log_level="error"))
        visitors = Visitors(self.port.model, Crowd.around(NUM_REQUESTS, 200, 64))
        self.requests: list[RankRequest] = [visitors.next(1.0) for _ in range(NUM_REQUESTS)]
        self.wrong = self.failed = 0

    @property
    def keeper(self) -> RowKeeper:
        return self.port.keepers[0]

    @property
    def engines(self) -> list[ProcessPort]:
        return list(self.port.engines)

    def pids(self) -> list[int]:
        return [each.pid for each in (self.keeper, *self.engines) if each.pid is not None]

    async def until(self, is_so: Callable[[], bool]) -> float:
        """Seconds until something is so."""
        began_s = time.monotonic()
        while not is_so():
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
                await engine.submit([self.requests[at % NUM_REQUESTS]])
                at += AT_ONCE

        await asyncio.gather(*(ask(each, first) for each in engines for first in range(AT_ONCE)))
        took_s = time.monotonic() - began_s
        after = [(await each.stats()).pool for each in engines]
        pairs = zip(after, before, strict=True)
        return sum(new.row_hits + new.row_misses - old.row_hits - old.row_misses for new, old in pairs) / took_s

    async def scores(self, engine: ProcessPort) -> list[Any]:
        return [result.scores for result in await engine.submit(self.requests[:8])]

    def updated_ids(self) -> NDArray[np.int64]:
        """Items of the requests that are compared, and others."""
        ids = np.unique(np.concatenate([np.asarray(request.items) for request in self.requests[:8]]))[:UPDATED]
        return np.concatenate([ids, np.setdiff1d(np.arange(2 * UPDATED), ids)[: UPDATED - ids.size]])

    def num_exact(self, value: float) -> int:
        """Updated rows whose bytes in the shared memory, which both engines read, are those of the new value."""
        model = self.port.model
        rows = self.updated_ids() + model.offsets[model.features[0].name]
        found = SharedTables(model, self.keeper.files).master.gather(rows)
        return int((found == torch.tensor(value).to(found.dtype)).all(1).sum())

    async def update(self, value: float) -> float:
        """Seconds that an update of rows takes which both engines then see."""
        every = self.updated_ids()
        began_s = time.monotonic()
        values = np.full((every.size, self.port.model.row_dim), value, np.float32)
        await self.port.update_rows(self.port.model.features[0].name, every.tolist(), values)
        return time.monotonic() - began_s

    async def under_load(self, work: Callable[[], Awaitable[float]], states: list[list[Any]]) -> float:
        """Do something while requests are answered; count failures, and answers of no state of the rows."""
        is_over = asyncio.Event()

        async def ask(at: int) -> None:
            while not is_over.is_set():
                try:
                    (result,) = await asyncio.wait_for(self.port.submit([self.requests[at]]), 60)
                    self.wrong += not any(np.allclose(result.scores, one[at], atol=TOLERANCE) for one in states)
                except Exception as error:  # every failure counts, whatever it is
                    print(f"failed: {error!r}", flush=True)
                    self.failed += 1
                    await asyncio.sleep(0.05)

        asking = [asyncio.create_task(ask(at)) for at in range(8)]
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
        await self.update(0.25)
        await waiting
        await self.until(self.are_ready)
        return time.monotonic() - began_s


async def measure(folder: Path, flags: Namespace) -> dict[str, Any]:
    stand = SharedStand(folder, flags.device, flags.pool)
    size = stand.port.model.num_rows * stand.port.model.row_stride
    stand.port.start()
    loaded_s = await stand.until(lambda: stand.keeper.health is Health.READY)
    ready_s = loaded_s + await stand.until(stand.are_ready)
    rates: list[dict[str, Any]] = []
    for _ in range(flags.repeats):
        alone = [await stand.rows_per_s([each], flags.seconds) for each in stand.engines]
        rates.append({"alone": alone, "together": await stand.rows_per_s(stand.engines, flags.seconds)})
    mapped_s = await asyncio.to_thread(_map_and_register, folder, stand.keeper, flags.device)
    states, updates_s, num_exact = list[list[Any]](), list[float](), list[int]()
    for value in (0.5, 0.25):
        updates_s.append(await stand.update(value))
        found = [await stand.scores(each) for each in stand.engines]
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, atol=TOLERANCE)
        states.append(found[0])
        num_exact.append(stand.num_exact(value))
    changed = [not np.allclose(old, new, atol=TOLERANCE) for old, new in zip(*states, strict=True)]
    shares = [pss_bytes(pid) for pid in stand.pids()]
    killed_s: dict[str, float] = {}
    for name, process in (("keeper", stand.keeper), ("engine 0", stand.engines[0]), ("engine 1", stand.engines[1])):
        killed_s[name] = await stand.under_load(partial(stand.kill, process), states)
    held = await stand.keeper.stats()
    await stand.port.close()
    return {
        "table_bytes": size,
        "pss_over_size": sum(shares) / size,
        "keeper_ready_s": loaded_s,
        "all_ready_s": ready_s,
        "another_process_maps_and_registers_s": mapped_s,
        "rows_per_s": rates,
        "together_over_alone": [one["together"] / max(one["alone"]) for one in rates],
        "update_s": {
            "rows": UPDATED,
            "took_s": updates_s,
            "exact": num_exact,
            "scores_changed": sum(changed),
            "longest_held_s": held.longest_held_s,
        },
        "ready_after_kill_s": killed_s,
        "failed_requests": stand.failed,
        "wrong_scores": stand.wrong,
    }


def _map_and_register(folder: Path, keeper: RowKeeper, device: str) -> float:
    """Seconds in which one more process has the tables mapped and, on a card, registered."""
    files = keeper.files
    command = [sys.executable, "-c", MAP_AND_REGISTER, str(folder), *map(str, files), device]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {})
    ran = subprocess.run(command, pass_fds=files, capture_output=True, text=True, check=True, env=environment)
    return float(ran.stdout)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--profile", default="demo")
    parser.add_argument("--gib", type=float, default=0.0625, help="of tables")
    parser.add_argument("--pool", default="64MiB", help="of each engine")
    parser.add_argument("--folder", type=Path, help="of the model; it is written if it is not there")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--repeats", type=int, default=3)


def default_out(flags: Namespace) -> str:
    return "shared-tables-h200.json" if flags.device == "cuda" else "shared-tables-cpu.json"


def main(flags: Namespace) -> None:
    if flags.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"  # both engines on the first card
    with tempfile.TemporaryDirectory() as name:
        folder = flags.folder or Path(name) / "model"
        began_s = time.monotonic()
        write_model(folder, flags.profile, int(flags.gib * (1 << 30)))
        print(f"model of version {read_manifest(folder).version} after {time.monotonic() - began_s:.0f} s", flush=True)
        found = asyncio.run(measure(folder, flags))
    for part, value in found.items():
        print(f"{part}: {value}", flush=True)
    write_measurement(flags.out, {"device": flags.device, "profile": flags.profile, **found})
