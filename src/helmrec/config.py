"""Frozen configuration, complete and checked when it is created.

It knows bounds and units, not models, tensors or the source of settings.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from helmrec.errors import ConfigError
from helmrec.redaction import redact

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


_SIZE = "(size)"  # a tag in the places of errors, not shown
AutoBytes = Annotated[
    Annotated[ByteSize, Field(gt=0), Tag(_SIZE)] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else _SIZE),
]


RoundedKV = Literal["fp8_e4m3", "int8"]
FixedKVDtype = Literal["model", RoundedKV]
KVDtype = Literal[FixedKVDtype, "auto"]
ComputeDtype = Literal["model", "fp8_e4m3"]
FixedRowDtype = FixedKVDtype
RowDtype = KVDtype
Freshness = Literal["exact"] | Annotated[float, Field(gt=0)]


class Frozen(BaseModel):
    """Base of every configuration value: immutable, no unknown keys, errors that name field and value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**{name: self._hide(name, value) for name, value in settings.items()})
        except ValidationError as error:
            raise ConfigError(redact("; ".join(_explain(e) for e in error.errors()))) from None

    @classmethod
    def secret_names(cls) -> frozenset[str]:
        """Names of the fields that hold secrets."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return frozenset(name for name, kind in kinds.items() if SecretStr in (kind, *get_args(kind)))

    @classmethod
    def _hide(cls, name: str, value: Any) -> Any:
        """Wrap a secret before it is validated, so that an error message does not show it."""
        if name not in cls.secret_names() or isinstance(value, SecretStr | None):
            return value
        if not isinstance(value, str):
            raise ConfigError(f"{name}: text is needed, got a value of type {type(value).__name__}")
        return SecretStr(value)


def _explain(error: ErrorDetails) -> str:
    field = ".".join(str(part) for part in error["loc"] if part != _SIZE) or "configuration"
    kind, value = error["type"], error.get("input")
    if kind in _BOUNDS:
        words, limit = _BOUNDS[kind]
        return f"{field} must be {words} {error['ctx'][limit]}, got {value!r}"
    if isinstance(inner := error.get("ctx", {}).get("error"), ConfigError):  # the message of a nested value is complete
        return f"{field}.{inner}" if error["loc"] else str(inner)
    if kind == "extra_forbidden":
        return f"{field} is not a known setting, got {value!r}"
    if kind == "missing":
        return f"{field} is required"
    return f"{field}: {error['msg'].removeprefix('Value error, ')}, got {value!r}"


class RelayConfig(Frozen):
    """Bounds of computing prefixes ahead of their ranks."""

    budget_ms: float = Field(50.0, gt=0, description="latency budget of a rank, if the signal names none")
    risk: float = Field(
        0.3,
        ge=0,
        description="a rank is at risk if it is expected to take more than this share of its budget; 0: always at risk",
    )
    hold_ms: float = Field(
        500.0, gt=0, description="how long a prefix is held for its rank, if the signal names no time"
    )
    max_hold_ms: float | None = Field(
        None, gt=0, description="longest hold that a signal is granted; default 20 times hold_ms"
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens computed ahead in one step; default 8192, or max_batch_tokens if that is less",
    )
    max_held: float = Field(0.25, gt=0, le=1, description="share of the KV pages that leases may hold")
    max_compute: float = Field(0.5, gt=0, le=1, description="largest share of time spent on computing ahead")
    max_leases: int = Field(1_024, ge=1, description="most leases at once; a user has at most one")

    @property
    def longest_hold_ms(self) -> float:
        return 20 * self.hold_ms if self.max_hold_ms is None else self.max_hold_ms

    @model_validator(mode="after")
    def _holds_within_its_bound(self) -> Self:
        if self.longest_hold_ms < self.hold_ms:
            raise ConfigError(f"max_hold_ms must be at least hold_ms ({self.hold_ms:g}), got {self.max_hold_ms:g}")
        return self


class EngineConfig(Frozen):
    """Settings of one engine. Sizes take units: pool_bytes="24GiB"."""

    pool_bytes: AutoBytes = Field(
        "auto",
        description="memory shared by both caches; auto: on cuda what model, graphs and 5% of the card leave; "
        "on cpu 256MiB",
    )
    card_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of a card's memory that this engine may take, if others run on the same card",
    )
    alpha: float = Field(0.4, ge=0, le=1, description="embedding share of the pool's pages at start")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device of the pool and the model; auto: cuda if there is a card, else cpu"
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto", description="auto: triton on cuda, torch on cpu; torch runs anywhere and is the reference"
    )
    cuda_graphs: bool = Field(True, description="replay steps as CUDA graphs, captured before the engine is ready")
    page_tokens: int | None = Field(
        None, ge=1, description="history tokens a page holds; default 32 on cpu, 128 on cuda"
    )

    overlap: bool | None = Field(
        None, description="start a step before the previous one has ended; default: where steps run as CUDA graphs"
    )

    max_batch_tokens: int = Field(65_536, ge=1, description="tokens computed in one step, over all requests")
    max_batch_requests: int = Field(32, ge=1, description="requests in one step")
    max_history: int = Field(100_000, ge=1, description="most events a request may send")
    queue_limit: int = Field(1_024, ge=1, description="requests that may wait")
    deadline_ms: float | None = Field(None, gt=0, description="deadline of requests that have none")

    row_index: Literal["auto", "host", "device"] = Field(
        "auto",
        description="place of the index of resident rows; auto: the device where triton kernels run, else the host",
    )
    row_order: Literal["lru", "frequency"] = Field("lru", description="eviction order of embedding rows")
    row_admission: Literal["always", "second-touch", "frequency"] = Field(
        "second-touch",
        description="when a missed row is admitted, since half of all rows are read only once; frequency: when it was "
        "read more often lately than the row it replaces, which needs row_order frequency and the index on the device",
    )
    kv_dtype: KVDtype = Field(
        "model",
        description="model: K/V have the model's dtype; fp8_e4m3 or int8: eight bits, and a scale per token and head; "
        "auto: eight bits where `helmrec model check --precision` has found that this model's scores allow it",
    )
    compute_dtype: ComputeDtype = Field(
        "model",
        description="model: products of the layers take the model's dtype; fp8_e4m3: eight-bit floats with a scale per "
        "token and per output, and q.k too where K/V are kept as fp8_e4m3; a Hopper card computes both faster",
    )
    row_dtype: RowDtype = Field(
        "model",
        description="of embedding rows in the pool. model: as in the model's files; fp8_e4m3 or int8: eight bits, and "
        "a scale per row; auto: eight bits where `helmrec model check --precision` has found that scores allow it, or "
        "where host_row_dtype has rounded the rows already",
    )
    host_row_dtype: FixedRowDtype = Field(
        "model",
        description="of embedding rows in host memory, in the same words; rows are rounded when tables are loaded. If "
        "this and row_dtype are both of eight bits, they are the same",
    )
    kv_admission: Literal["always", "second-visit", "benefit"] = Field(
        "second-visit",
        description="when a prefix is admitted; prefixes of one-time users must not evict those of returning users",
    )
    kv_freshness: Freshness | dict[str, Freshness] = Field(
        "exact",
        description="'exact', or seconds by which reused KV may lag behind row updates; or either by table, with "
        "tables that are not named exact",
    )
    max_forks: int = Field(2, ge=1, description="different histories kept per user")
    host_kv_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0), description="host memory that keeps evicted KV pages; 0 is off"
    )
    host_rows_bytes: Annotated[ByteSize, Field(gt=0)] | None = Field(
        None,
        description="host memory that embedding rows and their index may take, in equal parts for several engines; "
        "other rows stay in the model's files and are read from disk ahead of the steps that need them; unset: all "
        "rows are in host memory",
    )
    disk_reads: Literal["direct", "cached"] = Field(
        "direct", description="with host_rows_bytes, read rows past the page cache (O_DIRECT), or through it"
    )
    disk_threads: int = Field(32, ge=1, le=1_024, description="with host_rows_bytes, rows read from disk at once")
    row_log: str | None = Field(
        None,
        min_length=1,
        description="with host_rows_bytes, file that row updates are written to and replayed from at start; unset: "
        "beside the model's folder, with its name and .rows.log",
    )
    verify: Literal["start", "background", "never"] = Field(
        "background",
        description="when the checksums of model files over 256 MiB are checked: before the first request, beside "
        "serving, or never; smaller files are always checked at start. A corrupt file ends serving",
    )
    kv_reload: Literal["measured", "always", "never"] = Field(
        "measured", description="reload a page from the host if that is faster than computing it, always, or never"
    )
    save_bytes_per_step: Annotated[ByteSize, Field(gt=0)] = Field(
        ByteSize(16 << 20), description="KV bytes that may be copied to the host between two steps"
    )
    refill_bytes_per_step: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(16 << 20), description="row bytes read ahead into empty slots between two steps, less what demand read"
    )
    move_bytes_per_step: Annotated[ByteSize, Field(gt=0)] = Field(
        ByteSize(16 << 20),
        description="pool bytes that may change owner between two steps; a tenth of the pool a second if that is more",
    )
    relay: RelayConfig = Field(RelayConfig(), description="bounds of computing prefixes ahead of their ranks")
    miss_curves: bool = Field(
        False, description="estimate the hits at other splits of the pool while serving, for controllers"
    )
    log_gaps_ms: float = Field(
        50.0, gt=0, description="log every gap longer than this, a time in which requests wait and no step runs"
    )
    audit_every: int = Field(0, ge=0, description="score one request in this many again without caches; 0 is off")
    audit_tolerance: float | None = Field(
        None, gt=0, description="largest score difference an audit accepts; by default what the model's dtype allows"
    )

    @property
    def sized_pool_bytes(self) -> int:
        """`pool_bytes`, where it must be a size: in a simulation, and once an engine has chosen it."""
        if self.pool_bytes == "auto":
            raise ConfigError("pool_bytes must be a size here, got 'auto'")
        return int(self.pool_bytes)

    @property
    def fixed_kv_dtype(self) -> FixedKVDtype:
        """`kv_dtype`, where it must be known: in a simulation, and once an engine has chosen it."""
        if self.kv_dtype == "auto":
            raise ConfigError("kv_dtype must be 'model', 'fp8_e4m3' or 'int8' here, got 'auto'")
        return self.kv_dtype

    @property
    def fixed_row_dtype(self) -> FixedRowDtype:
        """`row_dtype`, where it must be known: in a simulation, and once an engine has chosen it."""
        if self.row_dtype == "auto":
            raise ConfigError("row_dtype must be 'model', 'fp8_e4m3' or 'int8' here, got 'auto'")
        return self.row_dtype

    @property
    def row_rounding(self) -> FixedRowDtype:
        """To what the rows that scores are computed from are rounded, in the pool or in host memory."""
        return self.fixed_row_dtype if self.host_row_dtype == "model" else self.host_row_dtype

    @property
    def chunk_tokens(self) -> int:
        """Tokens computed ahead in one step."""
        return self.relay.chunk_tokens or min(8_192, self.max_batch_tokens)

    @model_validator(mode="after")
    def _frequencies_are_compared_with_frequencies(self) -> Self:
        if self.row_admission == "frequency" and self.row_order != "frequency":
            raise ConfigError(f"row_admission 'frequency' needs row_order 'frequency', got {self.row_order!r}")
        if self.row_admission == "frequency" and self.row_index == "host":
            raise ConfigError("row_admission 'frequency' needs the index on the device, got row_index 'host'")
        return self

    @model_validator(mode="after")
    def _rows_are_rounded_once(self) -> Self:
        here, host = self.row_dtype, self.host_row_dtype
        if host != "model" and here not in {"model", "auto", host}:
            raise ConfigError(f"row_dtype must be 'model' or {host!r} with host_row_dtype {host!r}, got {here!r}")
        if host != "model" and self.host_rows_bytes is not None:
            raise ConfigError(f"host_row_dtype must be 'model' with host_rows_bytes, got {host!r}")
        return self

    @model_validator(mode="after")
    def _chunks_fit_a_step(self) -> Self:
        chunk, limit = self.chunk_tokens, self.max_batch_tokens
        if chunk > limit:
            raise ConfigError(f"relay.chunk_tokens must be at most max_batch_tokens ({limit}), got {chunk}")
        return self
