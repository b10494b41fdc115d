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

import numba
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from helmrec.config import EngineConfig, Frozen
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.miss_curves_kv import History, KVShadows, KVState, serve_history
from helmrec.memory.miss_curves_rows import MAX_COLUMNS, RowShadows, RowState, read_rows

Rows = NDArray[np.int64]
Curve = NDArray[np.float64]  # (alphas,)

GRID = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
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
    kv_admission: Literal["always", "second-visit"] = Field("second-visit", description="as the engine's")
    row_admission: Literal["always", "second-touch"] = Field("second-touch", description="as the engine's")

    @field_validator("alphas")
    @classmethod
    def _ascend(cls, alphas: tuple[float, ...]) -> tuple[float, ...]:
        if not 1 <= len(alphas) <= MAX_COLUMNS or any(b <= a for a, b in pairwise(alphas)):
            raise ValueError(f"must be 1 to {MAX_COLUMNS} ascending values")
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


class _Request(NamedTuple):
    """One request as compiled code takes it."""

    user: int
    num_tokens: int
    unchanged: int
    first_token: int
    is_kept: bool
    num_history_rows: int
    num_candidate_rows: int
    history_rows: Rows
    candidate_rows: Rows


class JointMissCurves:
    """Shadows of both caches at every alpha of a grid, and what they have seen lately."""

    def __init__(self, config: MissCurveConfig) -> None:
        self.config = config
        emb_pages = [config.emb_pages(alpha) for alpha in config.alphas]
        rate = config.sampling_rate
        self._kv = KVShadows([config.num_pages - pages for pages in emb_pages], config.batch_pages, config.max_users)
        self._rows = RowShadows(
            capacities=[round(pages * config.rows_per_page * rate) for pages in emb_pages],
            filter_slots=None if config.row_admission == "always" else config.num_pages * config.rows_per_page,
            rate=rate,
        )
        half_life = config.half_life_requests
        self._decay = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._alphas = _read_only(np.array(config.alphas))
        self._first_kept = 1 if config.kv_admission == "always" else 2  # visit from which a prefix displaces others
        self.reset()

    def reset(self) -> None:
        """Count anew from here; what the shadows hold stays."""
        self._num_requests = self._num_tokens = 0.0
        self._sums = np.zeros((4, len(self.config.alphas)))  # reused tokens, users hit, rows read, sampled rows missed

    def needed_from(self, user_id: int) -> int:
        """Tokens of this user resident at every alpha: rows of those need not be sampled at all."""
        return min(self._kv.resident(user_id), default=0)

    def observe(self, request: Observed) -> None:
        """Let every alpha serve this request."""
        num_tokens, unchanged = request.num_tokens, request.unchanged_tokens
        user, visits = self._kv.arrive(request.user_id) if num_tokens else (0, 0)
        self._rows.reserve(request.history_rows.size + request.candidate_rows.size)
        compiled = (
            user,
            num_tokens,
            num_tokens if unchanged is None else min(unchanged, num_tokens),
            request.first_token,
            visits >= self._first_kept,
            request.num_history_rows,
            request.num_candidate_rows,
            request.history_rows,
            request.candidate_rows,
        )
        state = (*self._kv.state, *self._rows.state)
        assert _observe(state, compiled, self._sums, self._decay, self.config.page_tokens), "needed rows were left out"
        self._num_requests = self._num_requests * self._decay + 1
        self._num_tokens = self._num_tokens * self._decay + num_tokens

    def curves(self) -> JointCurves:
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
        )

    def check(self) -> None:
        self._kv.check(self.config.page_tokens)
        self._rows.check()


def _read_only(curve: Curve) -> Curve:
    curve.flags.writeable = False
    return curve


@numba.njit(cache=True)
def _observe(
    state: tuple[Any, ...], request_values: tuple[Any, ...], sums: NDArray[np.float64], decay: float, page_tokens: int
) -> bool:
    """Serve the request at every alpha and add it up; False, too late, if rows are missing that some alpha reads.

    State and request come as plain tuples: named ones cost three times as much to hand over.
    """
    kv, rows, request = KVState(*state[:5]), RowState(*state[5:]), _Request(*request_values)
    num_tokens, num_history = request.num_tokens, request.history_rows.size
    num_columns = sums.shape[1]
    reused = np.zeros(num_columns, np.int64)
    if num_tokens:
        history = History(request.user, num_tokens, request.unchanged, page_tokens, request.is_kept)
        reused = serve_history(kv, history)
    # Where a history is resident in part, its sampled rows are cut in proportion: exact if all rows are sampled.
    given = max(1, num_tokens - request.first_token)
    first_read = np.empty(num_columns, np.int64)
    for column in range(num_columns):
        share = max(0, reused[column] - request.first_token) / given
        first_read[column] = int(share * num_history + 0.5)
    misses = read_rows(rows, np.concatenate((request.history_rows, request.candidate_rows)), first_read)
    for column in range(num_columns):
        computed_share = 1 - reused[column] / max(1, num_tokens)
        read = request.num_candidate_rows + request.num_history_rows * computed_share
        sums[0, column] = sums[0, column] * decay + reused[column]
        sums[1, column] = sums[1, column] * decay + (reused[column] > 0)
        sums[2, column] = sums[2, column] * decay + read
        sums[3, column] = sums[3, column] * decay + misses[column]
    return reused.min() >= request.first_token
