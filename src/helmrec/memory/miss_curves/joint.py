"""What the hit rates of both caches would be at other splits of the pool, from the requests that come anyway.

The two caches are not independent: a KV hit spares that user's history rows, so the row stream itself depends on
alpha. For each alpha of a grid, `KVShadows` says which tokens of a request would be computed, and only their rows
(and the candidates') reach that alpha's shadow of sampled rows. Shared by engine and simulator; knows neither.

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
from helmrec.memory.miss_curves.kv import KVShadows
from helmrec.memory.miss_curves.rows import Asked, RowShadows
from helmrec.memory.miss_curves.step import NUM_SUMS, Pending, Visit, observe, sample
from helmrec.memory.sampling import sampling_threshold

Rows = NDArray[np.int64]
Curve = NDArray[np.float64]  # (alphas,)

GRID = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_MAX_ALPHAS = 62
MOST_WAITING = 512  # requests whose rows wait to be read
_SAMPLED_SLOTS = 1 << 14  # of the whole pool: a cost of microseconds, an error below a hundredth


class MissCurveConfig(Frozen):
    """The pool whose splits are compared, and how closely."""

    num_pages: int = Field(ge=1, description="pages of the pool")
    page_tokens: int = Field(ge=1, description="tokens of KV in a page")
    rows_per_page: int = Field(ge=1, description="embedding rows in a page")
    batch_pages: int = Field(1, ge=1, description="KV pages kept free for the next step")
    alphas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(GRID, description="splits compared, ascending")
    sampling_rate: float = Field(0.01, gt=0, le=1, description="share of rows that stand for all")
    half_life_requests: float | None = Field(
        4_096, gt=0, description="requests after which one counts half; None counts all since `reset` alike"
    )
    max_users: int = Field(1 << 16, ge=1, description="users remembered, longest unseen forgotten first")
    waiting_rows: int = Field(
        256, ge=1, description="sampled rows that wait to be read at every split: many at once are read faster"
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
        """The pool of an engine, at a rate that costs little; admission by benefit is taken for second visit."""
        num_pages = config.pool_bytes // geometry.page_bytes
        return cls(
            num_pages=num_pages,
            page_tokens=geometry.page_tokens,
            rows_per_page=geometry.rows_per_page,
            batch_pages=geometry.pages_for(batch_tokens),
            sampling_rate=min(1.0, _SAMPLED_SLOTS / (num_pages * geometry.rows_per_page)),
            kv_admission="always" if config.kv_admission == "always" else "second-visit",
            row_admission=config.row_admission,
        )

    def emb_pages(self, alpha: float) -> int:
        """Pages embedding rows have at this split, as the pool rounds it."""
        return int(np.floor(alpha * self.num_pages + 0.5))


class Observed(NamedTuple):
    """One request, as far as both caches care. Rows are sampled ones (`sampling.sampled`), repeats included.

    A named tuple because one is made per request, at a third of a frozen dataclass's cost.
    """

    user_id: int
    num_tokens: int  # cacheable tokens of the history
    num_history_rows: int  # rows of all of them, sampled or not
    num_candidate_rows: int
    candidate_rows: Rows
    history_rows: Rows  # in token order, of tokens from `first_token` on
    first_token: int = 0  # at most what `needed_from` says
    unchanged_tokens: int | None = None  # leading tokens as they were at the last visit; None: it only grew


class Whole(NamedTuple):
    """One request with all its rows; those of the sample are found here."""

    user_id: int
    num_tokens: int  # cacheable tokens of the history: context, then events
    context_rows: Rows
    event_rows: Rows  # (features, events)
    request_rows: Rows
    candidate_rows: Rows  # (features, candidates)
    unchanged_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class JointCurves:
    """One value per alpha of the grid; read-only."""

    alphas: Curve
    num_requests: float  # weight behind the figures; old requests count less
    kv_token_hit_rate: Curve  # history tokens whose KV would be resident
    kv_user_hit_rate: Curve  # requests that would find any of their history resident
    emb_hit_rate: Curve  # of the rows that would be read
    rows_per_request: Curve  # rows that would be read,
    missed_rows_per_request: Curve  # and how many of them over the bus
    computed_tokens_per_request: Curve  # history tokens; candidates come on top at every alpha
    faded: float = 0.0  # logarithm of the weight that the very first request has by now


class JointMissCurves:
    """Shadows of both caches at every alpha of a grid, and what they have seen lately.

    KV is served at once, since it says which rows are read; rows wait until there are many.
    """

    def __init__(self, config: MissCurveConfig) -> None:
        self.config = config
        emb_pages = [config.emb_pages(alpha) for alpha in config.alphas]
        rate = config.sampling_rate
        self.kv = KVShadows([config.num_pages - pages for pages in emb_pages], config.batch_pages, config.max_users)
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
        self._first_kept = 1 if config.kv_admission == "always" else 2  # visit from which a prefix displaces others
        self._pending = Pending.empty(config.waiting_rows, MOST_WAITING, len(config.alphas))
        self._sums = np.zeros((NUM_SUMS, len(config.alphas)))
        self.reset()

    def reset(self) -> None:
        """Count anew from here; what the shadows hold stays."""
        self.read_pending()
        self._num_requests = self._num_tokens = self._faded = 0.0
        self._sums[:] = 0

    def needed_from(self, user_id: int) -> int:
        """Tokens of this user resident at every alpha: rows of those need not be sampled at all."""
        return min(self.kv.resident(user_id), default=0)

    def observe(self, request: Observed) -> None:
        """Let every alpha serve this request."""
        visit = self.arrive(request.user_id, request.num_tokens, request.unchanged_tokens)
        self.make_room(request.history_rows.size + request.candidate_rows.size)
        counts = (request.num_history_rows, request.num_candidate_rows, request.first_token)
        rows = (request.history_rows, request.candidate_rows)
        assert observe(self.state, visit, counts, rows, self.decay), "needed rows were left out"

    def sample(self, request: Whole) -> None:
        """The same for a request with all its rows; those of tokens resident at every alpha are not looked at."""
        visit = self.arrive(request.user_id, request.num_tokens, request.unchanged_tokens)
        rows = (request.context_rows, request.event_rows, request.request_rows, request.candidate_rows)
        self.make_room(rows[0].size + rows[1].size + rows[2].size + rows[3].size)
        sample(self.state, visit, rows, self._threshold, self.decay)

    def curves(self) -> JointCurves:
        self.read_pending()
        reused, users, read, sampled_missed = self._sums
        missed = sampled_missed / self.config.sampling_rate
        requests, tokens = max(self._num_requests, 1e-12), max(self._num_tokens, 1e-12)
        # Misses are scaled up from the sample, reads are known: what the sample lacks of hot rows counts as hits.
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

    def check(self) -> None:
        self.read_pending()
        self.kv.check(self.config.page_tokens)
        self._rows.check()

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays, for compiled code that serves requests of its own making (`miss_curves.step`)."""
        return (*self.kv.state, *self._pending, self._sums)

    def arrive(self, user_id: int, num_tokens: int, unchanged: int | None) -> Visit:
        """Note a visit; it is to be served before a user is forgotten for the next (`KVShadows.forgets_for`)."""
        user, visits = self.kv.arrive(user_id) if num_tokens else (0, 0)
        self._num_requests = self._num_requests * self.decay + 1
        self._num_tokens = self._num_tokens * self.decay + num_tokens
        self._faded += self._log_decay
        return (
            user,
            num_tokens,
            num_tokens if unchanged is None else min(unchanged, num_tokens),
            self.config.page_tokens,
            visits >= self._first_kept,
        )

    def make_room(self, num_rows: int, num_requests: int = 1) -> None:
        """For so many more requests. What waits is read if there is not enough, or if it is time."""
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
        """Read at every alpha what waits."""
        pending, num_steps = self._pending, int(self._pending.num_steps[0])
        asked = Asked(
            pending.rows[: pending.ends[num_steps]], pending.ends[: num_steps + 1], pending.first_read[:num_steps]
        )
        if num_steps:
            self._rows.read(asked, self._sums[3], self.decay)
            pending.num_steps[0] = 0


def _read_only(curve: Curve) -> Curve:
    curve.flags.writeable = False
    return curve
