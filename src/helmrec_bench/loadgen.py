"""MLPerf LoadGen's Server scenario against an engine: LoadGen says in this process when requests come, and judges.

Who asks comes from elsewhere: LoadGen draws samples in any order, but histories grow in one, so its n-th query is the
n-th request it is given. What the engine refuses or fails makes a run invalid, whatever LoadGen says of the rest.
"""

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from helmrec.config import EngineConfig, Frozen
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError
from helmrec.memory.stats import PoolStats
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace import Trace
from helmrec.types import RankResult

Offer = Callable[[], "Future[RankResult]"]
_IDLE_WAIT_S = 0.001
_PREFIX = ":::MLLOG "
_DETAIL = "mlperf_log_detail.txt"
_CONSTRAINTS = {
    "result_perf_constraints_met": "too many over the latency bound",
    "result_min_duration_met": "too short",
    "result_min_queries_met": "too few queries",
    "early_stopping_met": "too few queries for the confidence LoadGen asks for",
}


class LoadGenConfig(Frozen):
    """The Server scenario: Poisson arrivals, and a bound on a percentile of latency."""

    target_qps: float = Field(gt=0, description="queries a second, Poisson")
    latency_ms: float = Field(80.0, gt=0, description="bound of the percentile")
    percentile: float = Field(0.99, gt=0, lt=1, description="share of queries that must keep the bound")
    seconds: float = Field(60.0, gt=0, description="how long to go on at least; a submission needs 600")
    min_queries: int = Field(1, ge=1, description="queries to make at least")
    seed: int = Field(0, ge=0, description="of the arrivals")


@dataclass(frozen=True, slots=True)
class LoadGenVerdict:
    """What LoadGen found."""

    is_valid: bool
    problems: tuple[str, ...]  # why not
    target_qps: float
    completed_per_s: float
    num_queries: int
    num_late: int  # over the bound
    num_failed: int  # refused or failed
    mean_ms: float
    percentiles_ms: dict[str, float]  # by "50", "90", "95", "97", "99", "99.9"
    max_ms: float


class ServerScenario:
    """One run. `offer` submits the next request; an engine of this process is stepped by a thread of its own."""

    def __init__(self, engine: Engine | None, offer: Offer, config: LoadGenConfig) -> None:
        """engine: None if it steps in another process."""
        self._engine = engine
        self._offer = offer
        self._config = config
        self._has_work = threading.Event()
        self._is_over = False
        self._num_failed = 0
        self._loadgen = loadgen_module()

    def run(self, logs: Path | None = None) -> LoadGenVerdict:
        """Returns when every query is answered; LoadGen's own files stay in `logs`, if that is given."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if logs is None else logs
            folder.mkdir(parents=True, exist_ok=True)
            with nullcontext() if self._engine is None else self._stepped(self._engine):
                self._start(folder)
            return _verdict(self._config, folder / _DETAIL, self._num_failed)

    @contextmanager
    def _stepped(self, engine: Engine) -> Iterator[None]:
        stepper = threading.Thread(target=self._step_until_over, args=(engine,), name="helmrec-steps")
        stepper.start()
        try:
            yield
        finally:
            self._is_over = True
            self._has_work.set()
            stepper.join()

    def _start(self, folder: Path) -> None:
        loadgen, output = self._loadgen, self._loadgen.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = str(folder), False
        log = loadgen.LogSettings()
        log.log_output, log.enable_trace = output, False
        under_test = loadgen.ConstructSUT(self._issue, lambda: None)
        samples = loadgen.ConstructQSL(1, 1, lambda _: None, lambda _: None)
        try:
            loadgen.StartTestWithLogSettings(under_test, samples, self._settings(), log, "")
        finally:
            loadgen.DestroyQSL(samples)
            loadgen.DestroySUT(under_test)

    def _settings(self) -> Any:
        config, settings = self._config, self._loadgen.TestSettings()
        settings.scenario = self._loadgen.TestScenario.Server
        settings.mode = self._loadgen.TestMode.PerformanceOnly
        settings.server_target_qps = config.target_qps
        settings.server_target_latency_ns = int(config.latency_ms * 1e6)
        settings.server_target_latency_percentile = config.percentile
        settings.min_duration_ms = int(config.seconds * 1e3)
        settings.min_query_count = config.min_queries
        settings.schedule_rng_seed = config.seed
        return settings

    def _issue(self, queries: list[Any]) -> None:
        """Called by LoadGen, which knows no failure: whatever happens, a query is completed."""
        for query in queries:
            try:
                future = self._offer()
            except Exception:
                self._num_failed += 1
                self._complete(query.id)
                continue
            future.add_done_callback(partial(self._conclude, query.id))
        self._has_work.set()

    def _conclude(self, number: int, done: "Future[RankResult]") -> None:
        self._num_failed += done.exception() is not None
        self._complete(number)

    def _complete(self, number: int) -> None:
        self._loadgen.QuerySamplesComplete([self._loadgen.QuerySampleResponse(number, 0, 0)])

    def _step_until_over(self, engine: Engine) -> None:
        while not self._is_over:
            self._has_work.clear()  # before the step: what is submitted during it must end the wait
            if not engine.step():
                self._has_work.wait(_IDLE_WAIT_S)


def judge_trace(
    model: Path, engine_config: EngineConfig, trace: Trace, config: LoadGenConfig, logs: Path | None = None
) -> tuple[LoadGenVerdict, PoolStats]:
    """Let LoadGen judge a model folder; the n-th query is the n-th request of the trace. Also the pool at the end."""
    with Engine.from_model(model, engine_config) as engine:
        engine.rank([next(rank_requests(trace, engine.model_config))])  # compiles what runs compiled
        requests = rank_requests(trace, engine.model_config)
        verdict = ServerScenario(engine, lambda: engine.submit(next(requests)), config).run(logs)
        return verdict, engine.stats().pool


def largest_valid(
    judge: Callable[[float], LoadGenVerdict], low: float, high: float, steps: int
) -> list[LoadGenVerdict]:
    """Runs that narrow down the largest valid rate between `low` and `high`, by geometric bisection, in order.

    `low` is not judged unless all others are invalid.
    """
    seen: list[LoadGenVerdict] = []
    floor = low
    for _ in range(steps):
        seen.append(judge((low * high) ** 0.5))
        if seen[-1].is_valid:
            low = seen[-1].target_qps
        else:
            high = seen[-1].target_qps
    if not any(verdict.is_valid for verdict in seen):
        seen.append(judge(floor))
    return seen


def _verdict(config: LoadGenConfig, detail: Path, num_failed: int) -> LoadGenVerdict:
    lines = (line.removeprefix(_PREFIX) for line in detail.read_text().splitlines() if line.startswith(_PREFIX))
    details = {entry["key"]: entry["value"] for entry in map(json.loads, lines)}
    problems = [problem for key, problem in _CONSTRAINTS.items() if not details[key]]
    if num_failed:
        problems.append(f"{num_failed} refused or failed")
    shares = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")
    return LoadGenVerdict(
        is_valid=details["result_validity"] == "VALID" and not num_failed,
        problems=tuple(problems),
        target_qps=config.target_qps,
        completed_per_s=details["result_completed_samples_per_sec"],
        num_queries=details["result_query_count"],
        num_late=details["result_overlatency_query_count"],
        num_failed=num_failed,
        mean_ms=details["result_mean_latency_ns"] / 1e6,
        percentiles_ms={f"{float(p):g}": details[f"result_{p}_percentile_latency_ns"] / 1e6 for p in shares},
        max_ms=details["result_max_latency_ns"] / 1e6,
    )


def loadgen_module() -> Any:
    """LoadGen's module; ConfigError if it is not installed."""
    try:
        import mlperf_loadgen  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("MLPerf LoadGen is not installed: pip install 'helmrec[bench]'") from None
    return mlperf_loadgen
