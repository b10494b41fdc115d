"""Everything a card must show, in one run: `make gpu`.

Checks every kernel and the engine on the card, then times the engine's own dense path: requests go through the
engine, which lays them out, pads them to a graph and fills its pages; the graphs it replayed are then timed.
"""

import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from helmrec.config import ComputeDtype, EngineConfig, FixedKVDtype
from helmrec.engine.engine import Engine
from helmrec.engine.graphs import GraphedDense
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import IntArray, RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.report.files import markdown_table

WARM_UPS, REPEATS = 5, 30
NUM_ROWS = 20_000


class Sequence(NamedTuple):
    resident: int
    new: int
    candidates: int


@dataclass(frozen=True)
class KernelRow:
    """One line of the table. Times of Meta's Triton stack are the ones published with our measurements of it."""

    name: str
    profile: str
    sequences: list[Sequence]
    meta_ms: float | None = None
    window: int = 1 << 20  # tokens before it that a token sees

    def floating_point_operations(self, config: ModelConfig) -> float:
        """Multiply-adds of the layers' products and attention, twice; what masks hide and padding are not counted."""
        width, qk_width = config.num_heads * config.v_dim, config.num_heads * config.qk_dim
        tokens = sum(s.new + s.candidates for s in self.sequences)
        pairs = tokens  # each sees itself
        for s in self.sequences:
            pairs += int(np.minimum(np.arange(s.resident, s.resident + s.new), self.window).sum())
            pairs += s.candidates * min(s.resident + s.new, self.window)
        products = 2 * tokens * config.dim * (2 * width + 2 * qk_width + 3 * width)
        return config.num_layers * (products + 2 * (width + qk_width) * pairs)


LONG, WINDOWS = [Sequence(0, 16_384, 2_048)] * 3, (128, 1_024, 4_096, 65_536)
MIX = (200, 400, 800, 1_500, 3_000, 6_000, 10_000, 14_000)
ROWS = [
    KernelRow("nvidia-bench 8 x 4096+256", "nvidia-bench", [Sequence(0, 4_096, 256)] * 8, 14.70),
    KernelRow("dlrmv3 8 x 6700+2048", "dlrmv3", [Sequence(0, 6_700, 2_048)] * 8, 11.68),
    KernelRow("dlrmv3 8 x 4096+256", "dlrmv3", [Sequence(0, 4_096, 256)] * 8, 7.68),
    KernelRow("dlrmv3 8 x 1024+256", "dlrmv3", [Sequence(0, 1_024, 256)] * 8, 4.23),
    KernelRow("dlrmv3 1 x 6700+2048", "dlrmv3", [Sequence(0, 6_700, 2_048)], 5.1),
    KernelRow("nvidia-bench 8 x 3968 of 4096 cached, 256", "nvidia-bench", [Sequence(3_968, 128, 256)] * 8),
    KernelRow("dlrmv3 8 x 6668 of 6700 cached, 2048", "dlrmv3", [Sequence(6_668, 32, 2_048)] * 8),
    KernelRow("dlrmv3 mix of 200 to 14000, 256", "dlrmv3", [Sequence(0, n, 256) for n in MIX]),
    KernelRow("dlrmv3 as many tokens, equal lengths", "dlrmv3", [Sequence(0, sum(MIX) // 8, 256)] * 8),
    KernelRow("dlrmv3 3 x 16384+2048", "dlrmv3-16k", LONG),
    *(KernelRow(f"dlrmv3 3 x 16384+2048, window {w}", f"dlrmv3-16k/{w}", LONG, window=w) for w in WINDOWS),
]


def make_engine(name: str, kv_dtype: FixedKVDtype = "model", compute_dtype: ComputeDtype = "model") -> Engine:
    """A profile's dense shape without context tables (the published timings have none), over small random tables.

    After "-16k", the longest history is that long; after a stroke, a token sees so many before it.
    """
    shape, _, window = name.partition("/")
    changed = {"window": 16_384, "max_attn_len": int(window) if window else None} if "-16k" in name else {}
    config = profile(shape.removesuffix("-16k"), NUM_ROWS).model_copy(update={"user_context": (), **changed})
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, config.row_dtype)
    tables = {t.name: torch.randn((t.num_rows, config.row_dim), generator=generator).to(dtype) for t in config.tables}
    model = LoadedModel(config, 1, random_dense(config, generator), tables)
    settings: dict[str, Any] = {"pool_bytes": "16GiB", "alpha": 0.1, "device": "cuda", "kv_admission": "always"}
    settings |= {"kv_dtype": kv_dtype, "compute_dtype": compute_dtype}
    settings |= {"max_batch_tokens": 70_016, "max_batch_requests": 8, "max_forks": 1}
    return Engine(model, EngineConfig(**settings))


class KernelUsers:
    """Users with histories of their own, for each row of the table."""

    def __init__(self, config: ModelConfig) -> None:
        self._config, self._rng, self._user = config, np.random.default_rng(0), 0

    def visits(self, sequences: list[Sequence]) -> tuple[list[RankRequest], list[RankRequest]]:
        """Requests that leave the resident tokens behind, and the requests to be timed."""
        before, timed = [], []
        for sequence in sequences:
            self._user += 1
            items = self._draw(sequence.resident + sequence.new)
            if sequence.resident:
                before.append(make_request(self._config, self._user, items[: sequence.resident], self._draw(1)))
            timed.append(make_request(self._config, self._user, items, self._draw(sequence.candidates)))
        return before, timed

    def _draw(self, num: int) -> IntArray:
        return self._rng.integers(0, NUM_ROWS, num)


def times_ms(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
    times = []
    for _ in range(WARM_UPS + REPEATS):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[WARM_UPS:])


def gemm_ceiling() -> float:
    """TFLOP/s of a large bf16 product, the yardstick of this run."""
    a, b = (torch.randn((8_192, 8_192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8_192**3 / statistics.median(times_ms(lambda: a @ b)) / 1e9


def fp8_gemm_ceiling() -> float:
    """TFLOP/s of a large product of eight-bit floats with one scale per row and column."""
    a, b = (torch.randn((8_192, 8_192), device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    ones = torch.ones((8_192, 1), device="cuda")

    def multiply() -> object:
        return torch._scaled_mm(a, b.T, ones, ones.T, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * 8_192**3 / statistics.median(times_ms(multiply)) / 1e9


def measure(engine: Engine, users: KernelUsers, row: KernelRow, ceiling: float) -> dict[str, Any]:
    """Serve the row's requests, then time the graphs that served them, over the inputs they served."""
    before, timed = users.visits(row.sequences)
    if before:
        engine.rank(before)
    results = engine.rank(timed)
    assert [r.reused_tokens for r in results] == [s.resident for s in row.sequences], row.name
    assert all(np.isfinite(r.scores).all() for r in results), row.name
    dense = EngineProbe(engine).dense
    assert isinstance(dense, GraphedDense)
    embed, layers, head = dense.last_step.embed, dense.last_step.layers, dense.last_head.scores[0]
    layer_times = times_ms(layers.replay, embed.replay)
    median = statistics.median(layer_times)
    rate = row.floating_point_operations(engine.model_config) / median / 1e9
    live = sum(s.new + s.candidates for s in row.sequences)
    return {
        "work": row.name,
        "layers_ms": round(median, 4),
        "p10_ms": round(layer_times[len(layer_times) // 10], 4),
        "p90_ms": round(layer_times[-1 - len(layer_times) // 10], 4),
        "meta_ms": row.meta_ms,
        "tflops": round(rate, 1),
        "share_of_ceiling": round(rate / ceiling, 3),
        "embed_ms": round(statistics.median(times_ms(embed.replay)), 4),
        "head_ms": round(statistics.median(times_ms(head.replay)), 4),
        "padding": round(1 - live / dense.last_step.size, 4),
    }


@contextmanager
def waits_s() -> Iterator[list[float]]:
    """Times that the host waits for the card, so that the rest is the host's own."""
    waited, plain = [0.0], torch.cuda.Event.synchronize

    def synchronize(event: torch.cuda.Event) -> None:
        started = time.perf_counter()
        plain(event)
        waited.append(time.perf_counter() - started)

    with patch.object(torch.cuda.Event, "synchronize", synchronize):
        yield waited


def host_time(engine: Engine, users: KernelUsers, sequences: list[Sequence]) -> dict[str, Any]:
    """Host milliseconds of a step, everything Python does from request to result, the wait for the card left out."""
    host, parts, probe = [], [], EngineProbe(engine)
    for _ in range(30):
        before, timed = users.visits(sequences)
        if before:
            engine.rank(before)
        with waits_s() as waited:
            started = time.perf_counter()
            prepared = [probe.prepare(request) for request in timed]
            intake = time.perf_counter()
            for each in prepared:
                probe.submit(each)
            while engine.step():
                pass
            ended = time.perf_counter()
        host.append((ended - started - sum(waited)) * 1e3)
        parts.append((intake - started) * 1e3)
    return {
        "sequences": f"{len(sequences)} x {sequences[0]}",
        "step_ms_median": round(statistics.median(a - b for a, b in zip(host, parts, strict=True)), 3),
        "intake_ms_median": round(statistics.median(parts), 3),
        "sum_ms_p90": round(sorted(host)[int(0.9 * len(host))], 3),
    }


def run_checks(*names: str) -> None:
    """Run tests/gpu/test_NAME_on_gpu.py; raises if one fails."""
    subprocess.run(_check_command(names), check=True)


def failed_checks(*names: str, limit_s: float | None = None) -> list[str]:
    """Run the tests as `run_checks` does, and return a line for each one that failed."""
    command = _check_command(names)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as stopped:
        print(stopped.stdout, flush=True)
        return [f"the checks were stopped after {limit_s} s"]
    print(done.stdout, flush=True)
    if done.returncode == 0:
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines or [f"the checks ended with status {done.returncode}"]


def _check_command(names: tuple[str, ...]) -> list[str]:
    tests = [f"tests/gpu/test_{name}_on_gpu.py" for name in names]
    shown = ["-q", "-rfEP", "--tb=short", "--durations=5"]
    return [sys.executable, "-m", "pytest", *shown, "--noconftest", "-p", "no:cacheprovider", *tests]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true", help="time only")
    every = list(dict.fromkeys(row.profile for row in ROWS))
    parser.add_argument("--profiles", nargs="*", default=every, help="leave out others' rows; all: %(default)s")


def main(flags: Namespace) -> None:
    if not flags.skip_checks:
        run_checks("kernels", "engine")
    ceiling = gemm_ceiling()
    results: dict[str, dict[str, Any]] = {}
    host: list[dict[str, Any]] = []
    reports: dict[str, dict[str, Any]] = {}
    for name in flags.profiles:
        started = time.perf_counter()
        engine = make_engine(name)
        ready_s, report = round(time.perf_counter() - started, 1), str(engine.report()).splitlines()
        print(name, *report, f"ready after {ready_s} s", sep="\n", flush=True)
        reports[name] = {"ready_s": ready_s, "report": report}
        users = KernelUsers(engine.model_config)
        results |= {row.name: measure(engine, users, row, ceiling) for row in ROWS if row.profile == name}
        if "-16k" not in name:  # a window changes nothing for the host
            hit, cold = Sequence(3_968, 128, 256), Sequence(0, 1_024, 256)
            host += [{"profile": name, **host_time(engine, users, [s] * 8)} for s in (hit, cold)]
        engine.check()
        engine.close()
        del engine
        torch.cuda.empty_cache()
        ordered = [results[row.name] for row in ROWS if row.name in results]
        found = {"gemm_tflops": round(ceiling, 1), "rows": ordered, "host": host, "engines": reports}
        write_measurement(flags.out, found)  # again after each profile: a run that is stopped leaves what it has
    print(*host, sep="\n")
    print(f"bf16 8192^3 product: {ceiling:.0f} TFLOP/s")
    print(markdown_table(list(ordered[0]), [[str(value) for value in row.values()] for row in ordered]))
