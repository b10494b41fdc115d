"""Host time of a step and of intake, and requests per second, of this tree and of an earlier one by turns.

Each turn is a process of its own that imports one tree, so that both are measured in one run on one machine. A step is
one of eight requests; waits for the card are left out of its host time. Intake is what a front does with requests where
the engine has its own process, which receives them ready (`receive_ms`; earlier trees cannot).

    helmrec bench run host-time --before ../earlier     # on a card, against another checkout
    helmrec bench run host-time --only kuairand         # one shape
    helmrec bench run host-time --quick                 # anywhere, one small layer: does the measurement work
"""

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

# What an earlier tree has too: a turn runs this file with the modules of that tree.
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.steps import Step
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import PreparedTraffic, serving_engine
from helmrec_bench.measure.requests import Crowd

BATCH, HOT_SHARE = 8, 0.85
# As `serve/allocator.py` sets them in processes that serve; here for all trees.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}


class Visit(NamedTuple):
    """A request: tokens of its history that are resident, new events and candidates."""

    resident: int
    new: int
    candidates: int


class HostCase(NamedTuple):
    """A model shape, the crowd that saturates it, and single visits whose host time is measured."""

    profile: str
    crowd: Crowd
    visits: dict[str, Visit]
    max_batch_tokens: int
    num_requests: int  # of each saturated run


FULL = (
    HostCase(
        "dlrmv3",
        Crowd(200, 2_000, 11_399, 2_048),
        {"hits": Visit(6_668, 32, 2_048), "first visits": Visit(0, 1_024, 256)},
        70_016,
        960,
    ),
    HostCase(
        "kuairand",
        Crowd(400, 500, 2_500, 100),
        {"hits": Visit(2_968, 16, 100), "first visits": Visit(0, 1_024, 100)},
        33_600,
        4_000,
    ),
)
QUICK = (
    HostCase("kuairand", Crowd(4, 40, 60, 10), {"hits": Visit(40, 4, 10), "first visits": Visit(0, 40, 10)}, 2_048, 24),
)
_FIRST_USERS = count(1 << 30, 1 << 20)  # no two crowds of new users share one
RUNTIME_CALLS = (  # of the CUDA runtime, each a part of its own
    (torch.cuda.CUDAGraph, "replay", "launches of graphs"),
    (torch.Tensor, "copy_", "copies"),
    (torch.cuda.Event, "record", "events"),
    (torch.cuda.Event, "query", "events"),
    (torch.cuda.Event, "elapsed_time", "events"),
    (torch.cuda.Event, "synchronize", "waits for the card"),
    (torch.cuda.Stream, "wait_event", "streams"),
    (torch.cuda, "set_stream", "streams"),
    (torch.cuda, "current_stream", "streams"),
)


def make_model(name: str, *, is_quick: bool) -> ModelConfig:
    changes: dict[str, Any] = {"user_context": ()}
    if is_quick:
        changes |= {"num_layers": 1, "window": 256, "normaliser": 256, "dtype": "float32", "row_dtype": "float32"}
    return profile(name, 20_000 if is_quick else 1_000_000).model_copy(update=changes)


@contextmanager
def waits_s() -> Iterator[list[float]]:
    """Collect the times that the host waits for the card, so that the rest is the host's own."""
    waited: list[float] = []
    plain = torch.cuda.Event.synchronize

    def synchronize(event: torch.cuda.Event) -> None:
        started = time.perf_counter()
        plain(event)
        waited.append(time.perf_counter() - started)

    with patch.object(torch.cuda.Event, "synchronize", synchronize):
        yield waited


def sent(wire: Any, tag: bytes, request: Prepared) -> tuple[Any, ...]:
    """A request as it lies in the memory that a front shares with an engine's process."""
    packed = wire.pack_prepared(tag, [request], 0.0)
    if isinstance(packed, list):  # a tree whose engine copies the arrays
        return (memoryview(bytearray(b"".join(packed))),)
    return memoryview(bytearray(b"".join(packed.header))), np.frombuffer(bytearray(b"".join(packed.arrays)), np.int64)


def received(engine: Engine, prepared: list[Prepared]) -> tuple[list[Prepared], float]:
    """The requests as an engine's process gets them from a front, and the milliseconds that this takes it."""
    try:
        wire = importlib.import_module("helmrec.serve.prepared_wire")
    except ModuleNotFoundError:  # an earlier tree
        return prepared, 0.0
    frames = [sent(wire, engine.intake_recipe.tag, each) for each in prepared]
    started = time.perf_counter()
    got = [wire.unpack_prepared(*frame).prepared[0] for frame in frames]
    return got, (time.perf_counter() - started) * 1e3


class Visits:
    """New users, one batch after another, whose histories are resident as far as the visit says."""

    def __init__(self, engine: Engine, visit: Visit) -> None:
        self._engine, self._visit, self._user = engine, visit, next(_FIRST_USERS)
        self._rng = np.random.default_rng(self._user)

    def batch(self) -> list[RankRequest]:
        model, visit, requests = self._engine.model_config, self._visit, []
        num_items = model.features[0].num_rows
        for _ in range(BATCH):
            self._user += 1
            items = self._rng.integers(0, num_items, visit.resident + visit.new)
            if visit.resident:
                self._engine.rank([make_request(model, self._user, items[: visit.resident], items[:1])])
            requests.append(make_request(model, self._user, items, self._rng.integers(0, num_items, visit.candidates)))
        self._engine.check()
        return requests


def host_time(engine: Engine, visit: Visit, repeats: int) -> dict[str, Any]:
    """Milliseconds of eight requests: of intake, of receiving them ready, and of a step from queue to results."""
    probe, visits = EngineProbe(engine), Visits(engine, visit)
    steps, intakes, receipts = [], [], []
    for _ in range(repeats):
        timed = visits.batch()
        with waits_s() as waited:
            started = time.perf_counter()
            prepared = [probe.prepare(request) for request in timed]
            intakes.append((time.perf_counter() - started) * 1e3)
            prepared, receive_ms = received(engine, prepared)
            receipts.append(receive_ms)
            started = time.perf_counter()
            futures = [probe.submit(each) for each in prepared]
            while engine.step():
                pass
            ended = time.perf_counter()
        assert all(future.result(timeout=0).reused_tokens == visit.resident for future in futures)
        steps.append((ended - started - sum(waited)) * 1e3)
    times = {"step_ms": steps, "intake_ms": intakes, "receive_ms": receipts}
    medians = {name: round(statistics.median(each), 3) for name, each in times.items()}
    return {**medians, "us_by_part": by_part(engine, visit, repeats)}


def by_part(engine: Engine, visit: Visit, repeats: int) -> dict[str, float]:
    """Microseconds of a step by part, calls of the CUDA runtime apart. Timing them makes the step longer."""
    path = Path(__file__).parents[1] / "serving" / "host_parts.py"  # of this tree, in an earlier one too
    spec = importlib.util.spec_from_file_location("host_parts_of_this_tree", path)
    assert spec is not None and spec.loader is not None
    host_parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host_parts)
    probe, visits, times, found = EngineProbe(engine), Visits(engine, visit), host_parts.PartTimes(), []
    with host_parts.timed(times, RUNTIME_CALLS):
        for _ in range(repeats):
            prepared = [probe.prepare(request) for request in visits.batch()]
            times.by_part.clear()
            for each in prepared:
                probe.submit(each)
            while engine.step():
                pass
            found.append(times.by_part.copy())
    names = dict.fromkeys(name for each in found for name in each)
    return {name: round(statistics.median(each[name] for each in found) / 1e3, 1) for name in names}


def saturated(traffic: PreparedTraffic, num: int) -> dict[str, float]:
    """Requests per second when all are queued at once, and what the step log says of host and compute."""
    probe, engine = traffic.probe, traffic.probe.engine
    requests = traffic.take(num, HOT_SHARE)
    engine.take_steps()
    started = time.perf_counter()
    futures = [probe.submit(request) for request in requests]
    while not futures[-1].done():
        engine.step()
    took_s = time.perf_counter() - started
    log = engine.take_steps()
    return {
        "requests_per_s": round(num / took_s, 1),
        "log_host_ms": round(float(np.nanmedian(log[:, Step.HOST_MS])), 3),
        "log_compute_ms": round(float(np.nanmedian(log[:, Step.COMPUTE_MS])), 3),
    }


def measure(case: HostCase, traffic: PreparedTraffic, *, is_quick: bool) -> dict[str, Any]:
    """Host time of single batches of a shape, then requests per second when it is saturated."""
    engine, repeats = traffic.probe.engine, 4 if is_quick else 20
    found: dict[str, Any] = {name: host_time(engine, visit, repeats) for name, visit in case.visits.items()}
    saturated(traffic, case.num_requests)  # brings the hot users in
    runs = [saturated(traffic, case.num_requests) for _ in range(1 if is_quick else 3)]
    best = max(runs, key=lambda run: run["requests_per_s"])
    return {**found, "saturated": {**best, "runs": [run["requests_per_s"] for run in runs]}}


def turn(flags: Namespace) -> dict[str, Any]:
    """Measure the tree that this process has imported."""
    results: dict[str, Any] = {}
    device = "cpu" if flags.quick else "cuda"
    cases = {case.profile: case for case in (QUICK if flags.quick else FULL)}
    for name, case in cases.items():
        if flags.only not in (None, name):
            continue
        sizes = {"pool_bytes": "64MiB" if flags.quick else "24GiB", "alpha": 0.2, "kv_admission": "always"}
        tokens = {"max_batch_tokens": case.max_batch_tokens, "max_batch_requests": BATCH, "max_forks": 1}
        engine = serving_engine(make_model(name, is_quick=flags.quick), device=device, **sizes, **tokens)
        traffic = PreparedTraffic(EngineProbe(engine), case.crowd)
        results[name] = measure(case, traffic, is_quick=flags.quick)
        engine.close()
        del engine, traffic
        if device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(results), flush=True)
    return results


def run_turn(tree: Path, flags: Namespace, only: str | None) -> dict[str, Any]:
    """Measure a tree in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "turn.json"
        command = [sys.executable, "-P", __file__, "--turn", str(out), *(["--quick"] if flags.quick else [])]
        command += ["--only", only] if only else []
        places = [str(tree / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # and other packages' folders
        environment = {**os.environ, **KEEP_FREED_MEMORY, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        subprocess.run(command, check=True, env=environment)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def table(results: dict[str, list[Any]]) -> list[str]:
    """One line for each figure, with the medians of the turns of each tree."""
    lines = []
    for tree, turns in results.items():
        for shape in dict.fromkeys(name for each in turns for name in each):
            for what, figures in next(each for each in turns if shape in each)[shape].items():
                plain = [name for name, value in figures.items() if isinstance(value, float)]
                of_turns = {name: [each[shape][what][name] for each in turns if shape in each] for name in plain}
                shown = "  ".join(f"{name} {statistics.median(each):g}" for name, each in of_turns.items())
                lines.append(f"{tree:7}{shape:12}{what:16}{shown}")
    return lines


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, measured by turns with this one")
    parser.add_argument("--turns", type=int, default=1, help="turns of each tree")
    shapes = [case.profile for case in FULL]
    parser.add_argument("--only", choices=shapes, help="one shape")
    parser.add_argument("--quick", action="store_true", help="a small shape, on any machine")


def main(flags: Namespace) -> None:
    here = Path(__file__).resolve().parents[4]
    trees = {**({} if flags.before is None else {"before": flags.before}), "after": here}
    results: dict[str, list[Any]] = {name: [] for name in trees}
    for _ in range(flags.turns):
        for name, tree in trees.items():
            results[name].append(run_turn(tree.resolve(), flags, flags.only))
            write_measurement(flags.out, {"requests_a_step": BATCH, "hot_share": HOT_SHARE, **results})
    print(*table(results), sep="\n", flush=True)


if __name__ == "__main__":
    _parser = ArgumentParser()
    _parser.add_argument("--turn", type=Path)
    _parser.add_argument("--quick", action="store_true")
    _parser.add_argument("--only")
    _flags = _parser.parse_args()
    _flags.turn.write_text(json.dumps(turn(_flags)))
