"""The hit rates that both caches would have at other splits of the pool, estimated from the requests served.

The two caches are not independent: a KV hit spares the rows of that user's history, so the row stream depends on
alpha. For each alpha of a grid, `KVShadows` determines which tokens of a request would be computed, and only their rows
and those of the candidates reach the shadow of sampled rows at that alpha. Engine and simulator share this module.

Not modelled: the host tier, forks (a changed history replaces the one before), batches (each request is a step of its
own) and a row order other than LRU.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from helmrec.config import EngineConfig, Frozen
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.kv_admission import ADMISSIONS
from helmrec.memory.miss_curves.kv import KVShadows
from helmrec.memory.miss_curves.rows import RowShadows, RowSteps
from helmrec.memory.miss_curves.step import NUM_SUMS, Pending, Visit, observe
from helmrec.memory.prefix_book import KVRules
from helmrec.memory.sampling import sampling_threshold
from helmrec.types import UserId

Rows = NDArray[np.int64]
Curve = NDArray[np.float64]  # (alphas,)

GRID = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_MAX_ALPHAS = 62
MOST_WAITING = 512  # requests whose rows wait to be read
_MIN_REQUESTS = 32  # before estimates are worth using
_SAMPLED_SLOTS = 1 << 14  # of the whole pool: costs microseconds per request, with an error below 0.01


class MissCurveConfig(Frozen):
    """The pool whose splits are compared, and the precision of the comparison."""

    num_pages: int = Field(ge=1, description="pages of the pool")
    page_tokens: int = Field(ge=1, description="tokens of KV in a page")
    rows_per_page: int = Field(ge=1, description="embedding rows in a page")
    batch_pages: int = Field(1, ge=1, description="KV pages kept free for the next step")
    alphas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(GRID, description="splits to compare, ascending")
    sampling_rate: float = Field(0.01, gt=0, le=1, description="share of rows that is simulated")
    half_life_requests: float | None = Field(
        4_096, gt=0, description="requests after which a request counts half; None: all since `reset` count alike"
    )
    max_users: int = Field(1 << 16, ge=1, description="users remembered; the least recent is forgotten first")
    waiting_rows: int = Field(
        256,
        ge=1,
        description="sampled rows to collect before they are read at every split",
    )
    kv_admission: Literal["always", "second-visit"] = Field("second-visit", description="as the engine's")
    row_admission: Literal["always", "second-touch"] = Field("second-touch", description="as the engine's")

    @field_validator("alphas")
    @classmethod
    def _ascend(cls, alphas: tuple[float, ...]) -> tuple[float, ...]:
        if not 1 <= len(alphas) <= _MAX_ALPHAS or any(b <= a for a, b in pairwise(alphas)):
            raise ValueError(f"must be 1 to {_MAX_ALPHAS} ascending values")
        return alphas

    @classmethod
    def of_engine(cls, config: EngineConfig, geometry: PageGeometry, batch_tokens: int) -> "MissCurveConfig":
        """The pool of an engine, at a low sampling rate.

        Admission by benefit is simulated as second-visit, and that of rows by frequency as second-touch.
        """
        num_pages = config.sized_pool_bytes // geometry.page_bytes
        return cls(
            num_pages=num_pages,
            page_tokens=geometry.page_tokens,
            rows_per_page=geometry.rows_per_page,
            batch_pages=geometry.pages_for(batch_tokens),
            sampling_rate=sampling_rate_of(num_pages * geometry.rows_per_page),
            kv_admission="always" if config.kv_admission == "always" else "second-visit",
            row_admission="always" if config.row_admission == "always" else "second-touch",
        )

    def emb_pages(self, alpha: float) -> int:
        """Pages for embedding rows at this split, rounded as in the pool."""
        return int(np.floor(alpha * self.num_pages + 0.5))


def sampling_rate_of(num_slots: int) -> float:
    """Share of rows that an engine samples, from the slots that its whole pool has for them."""
    return min(1.0, _SAMPLED_SLOTS / num_slots)


class CurveRequest(NamedTuple):
    """One served request, with all its rows. A named tuple costs a third of a frozen dataclass to make."""

    user_id: UserId
    num_tokens: int  # cacheable tokens of the history: context, then events
    context_rows: Rows
    event_rows: Rows  # (features, events)
    request_rows: Rows
    candidate_rows: Rows  # (features, candidates)
    unchanged_tokens: int | None = None  # leading tokens equal to those of the last visit; None if it only grew


@dataclass(frozen=True, slots=True, eq=False)
class JointCurves:
    """The estimates, one value per alpha of the grid; read-only."""

    alphas: Curve
    num_requests: float  # total weight of the requests; older ones weigh less
    kv_token_hit_rate: Curve  # share of history tokens whose KV would be resident
    kv_user_hit_rate: Curve  # share of requests with any resident token
    emb_hit_rate: Curve  # share of the rows read
    rows_per_request: Curve  # rows that would be read
    missed_rows_per_request: Curve  # of these, rows that would be read over the bus
    computed_tokens_per_request: Curve  # history tokens; candidates are added at every alpha
    faded: float = 0.0  # logarithm of the current weight of the first request


class JointMissCurves:
    """Simulated copies (shadows) of both caches at every alpha of a grid, and their recent hits.

    KV is served at once, since it determines which rows are read; rows are collected and read many at a time.
    """

    def __init__(self, config: MissCurveConfig) -> None:
        self.config = config
        emb_pages = [config.emb_pages(alpha) for alpha in config.alphas]
        rate = config.sampling_rate
        rules = KVRules(config.page_tokens, max_forks=1, admission=ADMISSIONS[config.kv_admission])
        kv_pages = [config.num_pages - pages for pages in emb_pages]
        self.kv = KVShadows(kv_pages, config.batch_pages, config.max_users, rules)
        self._rows = RowShadows(
            capacities=[round(pages * config.rows_per_page * rate) for pages in emb_pages],
            filter_slots=None if config.row_admission == "always" else config.num_pages * config.rows_per_page,
            rate=rate,
        )
        half_life = config.half_life_requests
        self.decay = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._log_decay = float(np.log(self.decay))
        self._threshold = sampling_threshold(rate)
        self._alphas = _read_only(np.array(config.alphas))
        self._pending = Pending.empty(config.waiting_rows, MOST_WAITING, len(config.alphas))
        self._sums = np.zeros((NUM_SUMS, len(config.alphas)))
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero; the contents of the shadows stay."""
        self.read_pending()
        self._num_requests = self._num_tokens = self._faded = 0.0
        self._sums[:] = 0

    def observe(self, request: CurveRequest) -> None:
        """Serve a request at every alpha. Rows of tokens that are resident at every alpha are not read."""
        visit = self.arrive(request.user_id, request.num_tokens, request.unchanged_tokens)
        rows = (request.context_rows, request.event_rows, request.request_rows, request.candidate_rows)
        self.make_room(sum(each.size for each in rows))
        observe(self.state, visit, rows, self._threshold, self.decay)

    def curves(self) -> JointCurves:
        """The estimates from all requests observed since `reset`."""
        self.read_pending()
        reused, users, read, sampled_missed = self._sums
        missed = sampled_missed / self.config.sampling_rate
        requests, tokens = max(self._num_requests, 1e-12), max(self._num_tokens, 1e-12)
        # Misses are scaled up from the sample, reads are exact: hot rows missing from the sample count as hits.
        hit_rate = np.clip(1 - missed / np.maximum(read, 1e-12), 0, 1)
        return JointCurves(
            alphas=self._alphas,
            num_requests=self._num_requests,
            kv_token_hit_rate=_read_only(reused / tokens),
            kv_user_hit_rate=_read_only(users / requests),
            emb_hit_rate=_read_only(hit_rate),
            rows_per_request=_read_only(read / requests),
            missed_rows_per_request=_read_only(missed / requests),
            computed_tokens_per_request=_read_only((self._num_tokens - reused) / requests),
            faded=self._faded,
        )

    def curves_if_enough(self) -> JointCurves | None:
        """The estimates; None while too few requests were observed."""
        curves = self.curves()
        return curves if curves.num_requests >= _MIN_REQUESTS else None

    def check(self) -> None:
        """Assert the invariants of all shadows."""
        self.read_pending()
        self.kv.check()
        self._rows.check()

    @property
    def state(self) -> tuple[Any, ...]:
        """All arrays, for compiled code (`miss_curves.step`)."""
        return (*self.kv.state, *self._pending, self._sums)

    def arrive(self, user_id: UserId, num_tokens: int, unchanged: int | None) -> Visit:
        """Count a visit. Serve it before the next visit that makes a user be forgotten (`KVShadows.forgets_for`)."""
        user, visits = self.kv.arrive(user_id) if num_tokens else (0, 0)
        self._num_requests = self._num_requests * self.decay + 1
        self._num_tokens = self._num_tokens * self.decay + num_tokens
        self._faded += self._log_decay
        return user, num_tokens, num_tokens if unchanged is None else min(unchanged, num_tokens), visits

    def make_room(self, num_rows: int, num_requests: int = 1) -> None:
        """Make room for more rows and requests; read the waiting rows if there is no room or enough of them wait."""
        pending, num_steps = self._pending, self._pending.num_steps[0]
        num_waiting = pending.ends[num_steps]
        if num_waiting >= self.config.waiting_rows or num_steps + num_requests >= pending.ends.size:
            self.read_pending()
            num_waiting = 0
        if num_waiting + num_rows > pending.rows.size:
            grown = np.empty(num_waiting + 2 * num_rows, np.int64)
            grown[:num_waiting] = pending.rows[:num_waiting]
            self._pending = pending._replace(rows=grown)

    def read_pending(self) -> None:
        """Read the waiting rows at every alpha."""
        pending, num_steps = self._pending, int(self._pending.num_steps[0])
        steps = RowSteps(
            pending.rows[: pending.ends[num_steps]], pending.ends[: num_steps + 1], pending.first_read[:num_steps]
        )
        if num_steps:
            self._rows.read(steps, self._sums[3], self.decay)
            pending.num_steps[0] = 0


def _read_only(curve: Curve) -> Curve:
    curve.flags.writeable = False
    return curve
