"""Settings of a simulated node and requests of a trace: checked here, then converted for compiled code."""

import numpy as np
from pydantic import Field

from helmrec.config import EngineConfig, Frozen
from helmrec.costs.calibrated import CostModel
from helmrec.errors import AlphaOutOfRange, ConfigError, PoolTooSmall
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.kv_admission import ADMISSIONS
from helmrec.memory.prefix_book import KVRules
from helmrec.memory.row_frames import RowFrames
from helmrec.model.config import ModelConfig
from helmrec.sim.node.host import MAX_POSITIONS
from helmrec.sim.node.relay import relay_rules
from helmrec.sim.node.state import ALWAYS_RELOAD, MEASURED_RELOAD, NEVER_RELOAD, Requests, Setup
from helmrec.traffic.rows import row_reads, row_space
from helmrec.traffic.trace import Trace, index_histories

_PAGE_TOKENS = 128  # the engine's default on a GPU
_RELOAD = {"never": NEVER_RELOAD, "always": ALWAYS_RELOAD, "measured": MEASURED_RELOAD}


class NodeConfig(Frozen):
    """One node: the engine's settings and a model's shape. Settings that the simulator does not support are errors."""

    model: ModelConfig
    engine: EngineConfig
    row_sample: float = Field(1 / 256, gt=0, le=1, description="share of the rows that is simulated; 1 simulates all")
    slo_ms: float = Field(80.0, gt=0, description="latency limit that counts as met or missed")
    disk_rows_per_s: float | None = Field(
        None, gt=0, description="with host_rows_bytes, rows that the disk reads in a second: its rate of random reads"
    )

    @property
    def geometry(self) -> PageGeometry:
        engine, page_tokens = self.engine, self.engine.page_tokens or _PAGE_TOKENS
        return self.model.page_geometry(
            page_tokens, engine.fixed_kv_dtype, engine.fixed_row_dtype, engine.host_row_dtype
        )

    @property
    def num_pages(self) -> int:
        return self.engine.sized_pool_bytes // self.geometry.page_bytes

    @property
    def request_pages(self) -> int:
        """Pages of the longest request."""
        return self.geometry.pages_for(self.model.max_prefix_tokens)

    @property
    def alpha_max(self) -> float:
        """The largest EMB share at which KV can hold one request; below 0 if the whole pool cannot."""
        return 1 - self.request_pages / max(1, self.num_pages)

    @property
    def memory_rows(self) -> int:
        """Rows that host memory holds, where others are on disk."""
        return RowFrames.frames_for(int(self.engine.host_rows_bytes or 0), self.model.num_rows, self.model.row_stride)

    def pages_at(self, alpha: float) -> int:
        """EMB pages of a split, rounded as in the pool."""
        pages = int(np.floor(alpha * self.num_pages + 0.5))
        if not 0 <= alpha <= 1 or self.num_pages - pages < self.request_pages:
            raise AlphaOutOfRange(f"alpha must be between 0 and {self.alpha_max:.4f}, got {alpha!r}")
        return pages


def make_setup(config: NodeConfig, cost: CostModel, rate: float) -> Setup:
    """Settings for compiled code. `rate`: the share of rows that is simulated, from the row space."""
    _check(config)
    engine, geometry = config.engine, config.geometry
    page_bytes = geometry.page_bytes
    return Setup(
        rules=KVRules(geometry.page_tokens, engine.max_forks, ADMISSIONS[engine.kv_admission]),
        terms=cost.terms(),
        num_context=len(config.model.user_context),
        num_request_context=len(config.model.request_context),
        rows_per_event=len(config.model.features),
        page_bytes=page_bytes,
        row_bytes=config.model.row_stride,  # smaller rows take no less time on the bus
        rows_per_page=geometry.rows_per_page,
        rate=rate,
        max_batch_tokens=engine.max_batch_tokens,
        max_batch_requests=engine.max_batch_requests,
        queue_limit=engine.queue_limit,
        deadline_ms=np.inf if engine.deadline_ms is None else engine.deadline_ms,
        refill_bytes=int(engine.refill_bytes_per_step) if engine.host_rows_bytes is None else 0,
        save_pages=max(1, engine.save_bytes_per_step // page_bytes),
        move_pages=max(1, engine.move_bytes_per_step // page_bytes),
        num_pages=config.num_pages,
        request_pages=config.request_pages,
        batch_pages=geometry.pages_for(engine.max_batch_tokens),
        reload=_RELOAD[engine.kv_reload],
        overlaps=engine.overlap is not False,
        relay=relay_rules(engine),
        disk_rows_per_s=np.inf if config.disk_rows_per_s is None else config.disk_rows_per_s,
    )


def _check(config: NodeConfig) -> None:
    engine = config.engine
    if config.num_pages < config.request_pages + 1:
        needed = (config.request_pages + 1) * config.geometry.page_bytes
        raise PoolTooSmall(f"pool_bytes must be at least {needed}, got {engine.sized_pool_bytes}")
    if engine.row_order != "lru":
        raise ConfigError(f"row_order must be 'lru' in the simulator, got {engine.row_order!r}")
    assert engine.row_admission != "frequency", "it needs another order"
    if engine.kv_freshness != "exact":
        raise ConfigError(f"kv_freshness must be 'exact' in the simulator, got {engine.kv_freshness!r}")
    if (engine.host_rows_bytes is None) != (config.disk_rows_per_s is None):
        raise ConfigError("host_rows_bytes and disk_rows_per_s are needed together in the simulator")
    if engine.host_rows_bytes is not None and config.memory_rows < 1:
        raise ConfigError(f"host_rows_bytes must hold the index of {config.model.num_rows} rows and some rows")
    if config.request_pages >= MAX_POSITIONS:
        raise ConfigError(f"a request must take fewer than {MAX_POSITIONS} pages, got {config.request_pages}")


def prepare_requests(trace: Trace, config: NodeConfig) -> Requests:
    """The requests of a trace as seen by nodes of this configuration, which may share the result."""
    space = row_space(trace, config.model, config.row_sample)
    length, window = index_histories(trace).length, config.model.window
    step = max(1, window // 4)
    place = -(-np.maximum(0, length - window) // step)  # as in `window_anchor`, for a client that sends the last events
    if place.max(initial=0) >= MAX_POSITIONS:
        raise ConfigError(f"a history must span fewer than {MAX_POSITIONS} windows, got {place.max()}")
    return Requests(
        reads=row_reads(trace, space),
        window=place,
        anchor=place * step,
        num_tokens=len(config.model.user_context) + length - place * step,
        item=trace.item,
    )
