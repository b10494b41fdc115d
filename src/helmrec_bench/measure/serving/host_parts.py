"""Host time of a step by part, without a card: an engine whose graphs, streams and copies do nothing.

The engine plans, lays out, stages and commits steps of eight requests as on a card. Of the CUDA runtime only the number
of calls is in it. Times are of the one busy thread of this process; compare trees that are measured by turns. Intake is
what a front does with a request where the engine has its own process, which then only receives it; trees that cannot
hand requests over ready do all of intake in the engine's process.

    helmrec bench run host-parts --before ../earlier
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

# What an earlier tree has too: a turn runs this file with the modules of that tree.
from helmrec.config import EngineConfig
from helmrec.engine import runner, setup
from helmrec.engine.capture import GraphMaker
from helmrec.engine.dense import Memory
from helmrec.engine.engine import Engine
from helmrec.engine.graphs import GraphedDense
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.timeline import DeviceTimeline
from helmrec.engine.warm_up import make_request
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement

# As `serve/allocator.py` sets them in processes that serve; here for all trees.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
BATCH, DEPTH, REPEATS, NUM_PAGES, NUM_ROWS = 8, 10, 12, 12_000, 20_000
CASES = {  # resident tokens, new events, candidates
    "dlrmv3 hits": ("dlrmv3", (6_668, 32, 2_048)),
    "dlrmv3 first visits": ("dlrmv3", (0, 1_024, 256)),
    "kuairand hits": ("kuairand", (3_968, 16, 100)),
    "kuairand first visits": ("kuairand", (0, 1_024, 100)),
}
PARTS = (  # module, class or None, function, part of the step; the first name that a tree has
    ("engine.engine", "Engine", "step", "rest"),
    ("engine.scheduler", "Scheduler", "submit", "submit"),
    ("engine.scheduler", "Scheduler", "next_batch", "plan"),
    ("engine.runner", "Runner", "launch", "launch"),
    ("engine.runner", None, "assemble", "layout and staging"),
    ("engine.graphs", "GraphedDense", "launch", "layout and staging"),
    ("engine.graphs", "GraphedDense", "_load", "layout and staging"),
    ("engine.row_graphs", "RowGraphs", "read", "layout and staging"),
    ("engine.runner", "Runner", "finish", "finish"),
    ("engine.scheduler", "Scheduler", "commit", "commit"),
    ("pauses", "GapMonitor", "starting", "gaps"),
    ("pauses", "GapMonitor", "ended", "gaps"),
    ("engine.pipeline", "Pipeline", "push", "pipeline"),
    ("engine.pipeline", "Ended", "hand_out", "hand out"),
    ("engine.engine", "Engine", "_work_in_background", "background"),
)
_CALLS: Counter[str] = Counter()


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_event(self, event: object) -> None:
        _CALLS["wait_event"] += 1


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        _CALLS["event"] += 1

    def record(self, stream: object = None) -> None:
        _CALLS["record"] += 1

    def synchronize(self) -> None:
        _CALLS["synchronize"] += 1

    def query(self) -> bool:
        _CALLS["query"] += 1
        return True

    def elapsed_time(self, other: object) -> float:
        _CALLS["elapsed_time"] += 1
        return 0.0


class _Graph:
    def replay(self) -> None:
        _CALLS["replay"] += 1


def _graphed(hstu: Any, arena: Any, geometry: Any, rows: Any, config: EngineConfig) -> GraphedDense:
    rows.cache.stream = rows.stream = _Stream()
    graph_limits = vars(setup).get("graph_limits") or vars(setup)["_limits"]  # its name in earlier trees
    limits = graph_limits(hstu.config, geometry, config)
    return GraphedDense(hstu, Memory(arena.k_pages, arena.v_pages), rows, limits)


@contextmanager
def idle_card() -> Iterator[None]:
    """Let graphs, streams, events and copies of the engines inside do nothing but be counted."""
    one, plain_copy = torch.zeros(1), torch.Tensor.copy_

    def counted(name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            _CALLS[name] += 1

        return call

    def copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _CALLS["copy"] += 1
        return plain_copy(one, one)

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in (("Stream", _Stream), ("Event", _Event))),
        *((torch.cuda, name, counted(name)) for name in ("current_stream", "set_stream")),
        *((torch.cuda, name, lambda *_: None) for name in ("graph_pool_handle", "synchronize")),
        (GraphMaker, "capture", lambda maker, work: _Graph()),
        (setup, "_make_dense", _graphed),
        (runner, "Timeline", DeviceTimeline),
        (torch.Tensor, "copy_", copy),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def make_engine(name: str) -> Engine:
    """A profile's tables and requests over tiny layers and rows, which no kernel reads."""
    shape = profile(name, NUM_ROWS)
    tiny = dict.fromkeys(("num_layers", "num_heads"), 1) | dict.fromkeys(("qk_dim", "v_dim"), 4)
    tiny |= dict.fromkeys(("dim", "hidden_dim", "row_dim"), 8)
    types = {"dtype": "float32", "row_dtype": "float32", "input_hidden_dim": None, "user_context": ()}
    config = type(shape)(**shape.model_dump() | tiny | types)
    tables = {table.name: torch.zeros((table.num_rows, 8)) for table in config.tables}
    model = LoadedModel(config, 1, random_dense(config, torch.Generator().manual_seed(0)), tables)
    settings: dict[str, Any] = {"device": "cpu", "row_index": "device", "page_tokens": 128, "overlap": True}
    settings |= {"max_batch_tokens": 70_016, "max_batch_requests": BATCH, "queue_limit": 1 << 20, "max_forks": 1}
    pool_bytes = NUM_PAGES * config.page_geometry(128, "model").page_bytes
    return Engine(model, EngineConfig(pool_bytes=pool_bytes, alpha=0.1, kv_admission="always", **settings))


class PartTimes:
    """Microseconds of functions, without those of other functions that are timed inside them."""

    def __init__(self) -> None:
        self.by_part: Counter[str] = Counter()
        self._inner: list[int] = []

    def wrap(self, plain: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            self._inner.append(0)
            try:
                return plain(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - start
                self.by_part[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


@contextmanager
def timed(times: PartTimes, others: Sequence[tuple[Any, str, str]] = ()) -> Iterator[None]:
    """Time the parts of a step, and other functions: owner, name, part."""
    with ExitStack() as stack:
        for module, owner, name, part in PARTS:
            where = importlib.import_module(f"helmrec.{module}")
            where = where if owner is None else getattr(where, owner)
            if name in where.__dict__:
                stack.enter_context(patch.object(where, name, times.wrap(where.__dict__[name], part)))
        for where, name, part in others:
            stack.enter_context(patch.object(where, name, times.wrap(getattr(where, name), part)))
        yield


class RunTimes(NamedTuple):
    """CPU milliseconds of eight requests."""

    intake_ms: float
    receive_ms: float  # by the engine's process, of requests that are handed over ready
    step_ms: float


def handed_over(engine: Engine, prepared: list[Prepared]) -> list[tuple[Callable[[Any], Prepared], Any]]:
    """Return the requests as an engine's process gets them, each with what unpacks it; as they are in earlier trees."""
    try:
        wire = importlib.import_module("helmrec.serve.prepared_wire")
    except ModuleNotFoundError:
        return [(lambda request: request, each) for each in prepared]
    tag = engine.intake_recipe.tag
    frames: list[tuple[Any, ...]] = []
    for each in prepared:
        packed = wire.pack_prepared(tag, [each], 0.0)
        if isinstance(packed, list):  # a tree whose engine copies the arrays
            frames.append((memoryview(bytearray(b"".join(packed))),))
        else:
            header, arrays = (bytearray(b"".join(parts)) for parts in packed)
            frames.append((memoryview(header), np.frombuffer(arrays, np.int64)))
    return [(lambda frame: wire.unpack_prepared(*frame).prepared[0], frame) for frame in frames]


class HostRuns:
    """Runs of steps of one case."""

    def __init__(self, name: str) -> None:
        shape, self._visit = CASES[name]
        self._engine = make_engine(shape)
        self._rng, self._user = np.random.default_rng(0), 0

    def close(self) -> None:
        self._engine.close()

    def run(self, times: PartTimes | None = None) -> RunTimes:
        """Return the CPU milliseconds of eight requests."""
        probe, requests = EngineProbe(self._engine), [self._visitor() for _ in range(BATCH * DEPTH)]
        while self._engine.step():
            pass
        start_s = time.thread_time()
        prepared = [probe.prepare(request) for request in requests]
        taken_in_s = time.thread_time()
        frames = handed_over(self._engine, prepared)
        start_receive_s = time.thread_time()
        prepared = [unpack(frame) for unpack, frame in frames]
        received_s = time.thread_time()
        _CALLS.clear()
        if times is not None:
            times.by_part.clear()
        futures = [probe.submit(each) for each in prepared]
        while self._engine.step():
            pass
        end_s = time.thread_time()
        assert all(future.result(timeout=0).reused_tokens == self._visit[0] for future in futures)
        took = (taken_in_s - start_s, received_s - start_receive_s, end_s - received_s)
        return RunTimes(*(each_s * 1e3 / DEPTH for each_s in took))

    def _visitor(self) -> RankRequest:
        resident, new, num_candidates = self._visit
        self._user += 1
        items = self._rng.integers(0, NUM_ROWS, resident + new)
        model = self._engine.model_config
        if resident:
            self._engine.rank([make_request(model, self._user, items[:resident], items[:1])])
        return make_request(model, self._user, items, self._rng.integers(0, NUM_ROWS, num_candidates))

    def parts(self) -> dict[str, float]:
        """Microseconds of a step by part."""
        times, found = PartTimes(), list[Counter[str]]()
        with timed(times):
            for _ in range(REPEATS):
                self.run(times)
                found.append(times.by_part.copy())
        names = dict.fromkeys(part for *_, part in PARTS)
        return {name: round(float(np.median([each[name] for each in found])) / DEPTH / 1e3, 1) for name in names}


def turn() -> dict[str, Any]:
    """Measure the tree that this process has imported."""
    results = {}
    with idle_card():
        for name in CASES:
            runs = HostRuns(name)
            times = np.array([runs.run() for _ in range(2 + REPEATS)])[2:]
            medians = dict(zip(RunTimes._fields, np.median(times, axis=0).round(3).tolist(), strict=True))
            calls = {call: num / DEPTH for call, num in _CALLS.items()}
            results[name] = {**medians, "us_by_part": runs.parts(), "calls": calls}
            runs.close()
    return results


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, measured by turns with this one")
    parser.add_argument("--turns", type=int, default=2, help="turns of each tree")


def main(flags: Namespace) -> None:
    trees = {**({"before": flags.before} if flags.before else {}), "after": Path(__file__).resolve().parents[4]}
    results: dict[str, list[Any]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "turn.json"
        for _ in range(flags.turns):
            for name, tree in trees.items():
                environment = {**os.environ, **KEEP_FREED_MEMORY, "OMP_NUM_THREADS": "1"}
                environment["PYTHONPATH"] = str(tree.resolve() / "src")
                subprocess.run([sys.executable, "-P", __file__, str(out)], check=True, env=environment)
                results[name].append(json.loads(out.read_text()))
                print(name, *results[name][-1].items(), sep="\n  ", flush=True)
    write_measurement(flags.out, {"requests_a_step": BATCH, **results})


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(turn()))
