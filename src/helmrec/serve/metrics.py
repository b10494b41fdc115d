"""Metrics for Prometheus: requests as the front counted them, and the engine's counters at the time of the scrape."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from helmrec.engine.engine import EngineStats
from helmrec.history.values import HistoryStats
from helmrec.pauses import BUCKETS_MS
from helmrec.types import RankResult

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.08, 0.128, 0.256, 0.512, 1.0, 2.0, 5.0)
_GAUGES = {  # name -> path in EngineStats, help
    "queue_length": ("queue_length", "Requests that wait."),
    "audit_max_error": ("audit_max_error", "Largest score difference an audit saw."),
    "relay_leases": ("relay.leases", "Prefixes held for their ranks."),
    "relay_compute_share": ("relay.compute_share", "Recent share of time for prefill."),
    "tracked_objects": ("collector.tracked_objects", "Objects a full garbage collection would visit."),
    "pool_alpha": ("pool.alpha", "embedding share of the pool's pages"),
    "pool_alpha_target": ("pool.alpha_target", "target embedding share of the pool's pages"),
    "pool_num_pages": ("pool.num_pages", "pages of the pool"),
    "pool_free_pages": ("pool.free_pages", "pages without an owner"),
    "pool_emb_pages": ("pool.emb_pages", "pages that hold embedding rows"),
    "pool_kv_pages": ("pool.kv_pages", "pages that hold KV prefixes"),
    "pool_draining_pages": ("pool.draining_pages", "pages that wait for running steps"),
    "pool_resident_rows": ("pool.resident_rows", "embedding rows in the pool"),
    "pool_resident_users": ("pool.resident_users", "users with a prefix in the pool"),
    "pool_host_pages": ("pool.host_pages", "KV pages in the host tier"),
}
_COUNTERS = {
    "steps": ("steps", "steps run"),
    "served": ("served", "requests ranked"),
    "non_finite": ("non_finite", "requests whose scores were not finite"),
    "refused": ("refused", "requests refused because of a full queue or a deadline"),
    "audits": ("audits", "requests scored again without caches"),
    "audit_mismatches": ("audit_mismatches", "audits whose scores differed: alert on any"),
    "background_failures": ("background_failures", "failures of background work"),
    "controller_failures": (
        "controller_failures",
        "failures of the policy, each of which freezes alpha until a mode is set",
    ),
    "relay_leases_used": ("relay.used", "Leases whose rank came in time."),
    "relay_leases_expired": ("relay.expired", "Leases whose rank did not come in time."),
    "relay_leases_lost": ("relay.lost", "Leases whose prefix was evicted."),
    "relay_busy_seconds": ("relay.busy_s", "Time spent on prefill."),
    "gap_suspended_seconds": (
        "pauses.suspended_s",
        "Time inside gaps in which the operating system did not run the process.",
    ),
    "full_collections": ("collector.full", "Full garbage collections while serving."),
    "postponed_collections": ("collector.postponed", "Full collections postponed because they would take long."),
    "pool_row_hits": ("pool.row_hits", "embedding rows read from the pool"),
    "pool_row_misses": ("pool.row_misses", "embedding rows read from the host"),
    "pool_row_evictions": ("pool.row_evictions", "rows evicted from their slot"),
    "pool_row_refills": ("pool.row_refills", "rows prefetched into empty slots"),
    "pool_reused_tokens": ("pool.reused_tokens", "history tokens whose KV was resident"),
    "pool_total_tokens": ("pool.total_tokens", "history tokens of all requests"),
    "pool_kv_evicted_pages": ("pool.kv_evicted_pages", "pages evicted from prefixes"),
    "pool_kv_refused_prefixes": ("pool.kv_refused_prefixes", "prefixes refused by admission"),
    "pool_stale_cuts": ("pool.stale_cuts", "prefixes cut because rows had changed"),
    "pool_stale_tokens": ("pool.stale_tokens", "cached history tokens computed again because rows had changed"),
    "pool_host_reloaded_pages": ("pool.host_reloaded_pages", "KV pages reloaded from the host tier"),
}
_ROW_GAUGES = {  # of a server that follows row deltas: name -> field of RowStreamStats, help
    "row_delta_position": ("position", "Sequence number of the last row delta that is visible as a whole."),
    "row_delta_newest": ("newest", "Highest sequence number that the source of row deltas had."),
    "row_delta_lag": ("lag_deltas", "Row deltas that the source has and the engine has not."),
    "row_delta_lag_seconds": ("lag_s", "Age of the oldest row delta that is not visible: alert on more than seconds."),
}
_ROW_COUNTERS = {
    "row_deltas": ("deltas", "Row deltas applied."),
    "row_delta_rows": ("rows", "Rows written by row deltas."),
    "row_delta_duplicates": ("duplicates", "Row deltas that came again and were ignored."),
    "row_delta_stops": ("stops", "Times that a fault stopped the application of row deltas."),
}
_TIER_GAUGES = {  # of an engine with rows on disk: name -> field of RowTierStats, help
    "row_memory_capacity": ("capacity_rows", "Embedding rows that host memory holds."),
    "row_memory_resident": ("resident_rows", "Embedding rows in host memory."),
    "row_memory_pinned": ("pinned_rows", "Embedding rows in host memory that waiting and running requests need."),
    "row_disk_rows_per_second": ("disk_rows_per_s", "Rows that the disk reads in a second, lately."),
    "row_log_bytes": ("log_bytes", "Size of the log of row updates."),
}
_TIER_COUNTERS = {
    "row_memory_hits": ("memory_hits", "Rows of requests that were in host memory."),
    "row_memory_misses": ("memory_misses", "Rows of requests that were read from disk."),
    "row_memory_evictions": ("memory_evictions", "Rows evicted from host memory."),
    "row_disk_bytes": ("disk_bytes", "Bytes read from disk for requests, in whole blocks."),
    "row_disk_errors": ("disk_errors", "Requests that failed because rows could not be read: alert on any."),
    "row_disk_waits": ("disk_waits", "Requests that waited for the disk."),
    "row_disk_wait_seconds": ("disk_wait_s", "Time that requests waited for the disk."),
}
_BY_LABEL = {  # name -> path of a dictionary in EngineStats, label of its keys, help
    "unknown_ids": ("unknown_ids", "table", "Ids without a row, read as the row for unknown ids."),
    "relay_signals": ("relay.verdicts", "reason", "Signals by outcome."),
    "pool_bytes": ("pool.bytes_by_cause", "cause", "Bytes moved, by cause."),
}


class Metrics:
    """All metrics of one server."""

    def __init__(self, slo_ms: float) -> None:
        self._registry = CollectorRegistry()
        Gauge("helmrec_slo_seconds", "Latency objective of a ranking call.", registry=self._registry).set(slo_ms / 1e3)
        self._by_labels: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._requests = Counter(
            "helmrec_http_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._errors = Counter("helmrec_http_errors", "Errors by cause.", ["cause"], registry=self._registry)
        self._seconds = self._histogram("helmrec_http_request_seconds", "Time from first byte to answer.", ["route"])
        self._queue = self._histogram("helmrec_queue_seconds", "Time ranked requests waited for their step.")
        self._compute = self._histogram("helmrec_compute_seconds", "Time ranked requests took to compute.")
        self._appends = Counter(
            "helmrec_history_appends", "Appends to stored histories.", ["outcome"], registry=self._registry
        )
        self._events = Counter("helmrec_history_events", "Events appended and stored.", registry=self._registry)
        self._look_failures = Counter(
            "helmrec_look_failures", "Unexpected failures to read the engine's state.", registry=self._registry
        )
        self._body_bytes = Gauge("helmrec_http_body_bytes", "Bytes of bodies in memory.", registry=self._registry)

    def _histogram(self, name: str, help_: str, labels: Iterable[str] = ()) -> Histogram:
        return Histogram(name, help_, labels, buckets=_SECONDS, registry=self._registry)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        found = self._by_labels.get((route, status))
        if found is None:  # looking a metric up by its labels costs more than counting
            found = self._by_labels[route, status] = (self._requests.labels(route, status), self._seconds.labels(route))
        counter, histogram = found
        counter.inc()
        histogram.observe(seconds)

    def count_error(self, cause: str) -> None:
        self._errors.labels(cause).inc()

    def count_result(self, result: RankResult) -> None:
        self._queue.observe(result.timing.queue_ms / 1e3)
        self._compute.observe(result.timing.compute_ms / 1e3)

    def count_append(self, outcome: str, num_events: int) -> None:
        """`outcome`: kept, repeat or stale."""
        self._appends.labels(outcome).inc()
        if outcome == "kept":
            self._events.inc(num_events)

    def count_look_failure(self) -> None:
        self._look_failures.inc()

    def render(self, view: "ServerView") -> bytes:
        self._body_bytes.set(view.body_bytes)
        self._engine.view = view
        return generate_latest(self._registry)


@dataclass(frozen=True, slots=True)
class ServerView:
    """State of engine and history store at the time of a scrape."""

    stats: EngineStats | None  # None: the engine is not running
    history: HistoryStats | None  # None: no histories are stored, or the store does not answer
    is_ready: bool
    num_restarts: int
    replicas: Mapping[str, EngineStats] | None = None  # of a cluster, by name
    body_bytes: int = 0  # of requests that are being read or answered
    store: "StoreHealth | None" = None  # None: no histories are stored


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """Whether stored histories can be used, and the number of failed calls."""

    is_ready: bool
    num_failures: int


class _EngineCollector(Collector):
    """Collects the metrics of one `ServerView`."""

    def __init__(self) -> None:
        self.view: ServerView | None = None

    def collect(self) -> Iterator[Metric]:
        if self.view is None:
            return
        stats, history = self.view.stats, self.view.history
        yield GaugeMetricFamily("helmrec_engine_ready", "Whether requests may be sent.", float(self.view.is_ready))
        yield CounterMetricFamily("helmrec_engine_restarts", "Restarts of the engine.", self.view.num_restarts)
        if (store := self.view.store) is not None:
            yield GaugeMetricFamily("helmrec_history_ready", "Whether the history store answers.", store.is_ready)
            yield CounterMetricFamily(
                "helmrec_history_failures", "Calls the history store did not answer.", store.num_failures
            )
        if history is not None:
            yield GaugeMetricFamily("helmrec_history_users", "Users with stored events.", history.num_users)
            yield GaugeMetricFamily("helmrec_history_file_bytes", "Size of the history store.", history.used_bytes)
        if self.view.replicas is not None:
            num_replicas = 0 if stats is None else len(self.view.replicas)
            yield GaugeMetricFamily("helmrec_replicas", "Replicas that answer.", num_replicas)
        if stats is None:
            return
        yield from _of_engine(stats) if self.view.replicas is None else _of_replicas(self.view.replicas)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (path, help_) in table.items():
            yield kind(f"helmrec_{name}", help_, attrgetter(path)(stats))
    if (rows := stats.row_stream) is not None:
        for kind, table in ((GaugeMetricFamily, _ROW_GAUGES), (CounterMetricFamily, _ROW_COUNTERS)):
            for name, (path, help_) in table.items():
                yield kind(f"helmrec_{name}", help_, getattr(rows, path))
        is_stopped = float(rows.stop is not None)
        yield GaugeMetricFamily("helmrec_row_delta_stopped", "Whether a fault stops the row deltas.", is_stopped)
    yield from _of_files(stats)
    held_bytes = stats.relay.held_pages * stats.pool.page_bytes
    yield GaugeMetricFamily("helmrec_relay_leased_bytes", "Pool bytes reserved for them.", held_bytes)
    for name, (path, label, help_) in _BY_LABEL.items():
        counter = CounterMetricFamily(f"helmrec_{name}", help_, labels=[label])
        for value, num in attrgetter(path)(stats).items():
            counter.add_metric([value], num)
        yield counter
    yield _gaps(stats)


def _of_files(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of rows on disk and of the check of the model's files."""
    if (tier := stats.row_tier) is not None:
        for kind, table in ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)):
            for name, (path, help_) in table.items():
                yield kind(f"helmrec_{name}", help_, getattr(tier, path))
    if (check := stats.file_check) is not None:
        yield GaugeMetricFamily("helmrec_model_checked_bytes", "Bytes of the model's files checked.", check.done_bytes)
        yield GaugeMetricFamily("helmrec_model_corrupt", "Whether a file of the model is corrupt.", check.is_corrupt)


def _of_replicas(replicas: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of every replica, with its name as a label."""
    found: dict[str, Metric] = {}
    for replica, stats in replicas.items():
        for metric in _of_engine(stats):
            same = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                same.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    yield from found.values()


def _gaps(stats: EngineStats) -> Metric:
    """Return the histogram of gaps, in which requests waited and no step ran."""
    gaps = HistogramMetricFamily(
        "helmrec_gap_seconds", "Gaps in which requests waited and no step ran, by cause.", labels=["cause"]
    )
    bounds = [*(f"{bound / 1e3:g}" for bound in BUCKETS_MS), "+Inf"]
    for cause, gap in stats.pauses.gaps.items():
        counts = itertools.accumulate(gap.counts)
        gaps.add_metric([cause], list(zip(bounds, map(float, counts), strict=True)), gap.total_s)
    return gaps
