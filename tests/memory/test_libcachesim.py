"""Our exact LRU caches against a cache simulator that others wrote: the same hits, access by access."""

import numpy as np
import pytest
from numpy.typing import NDArray

from helmrec.memory.embedding_cache import ABSENT, EmbeddingCache
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.miss_curves import GRID, CurveRequest, JointMissCurves, MissCurveConfig
from helmrec.memory.prefix_hash import HashKey, History, chain
from helmrec.memory.row_admission import AdmitEveryRow
from helmrec.memory.row_order import LruOrder
from tests.memory.miss_curves.replay import Setting, Traffic

lcs = pytest.importorskip("libcachesim", reason="no build of libCacheSim for this platform")

Hits = NDArray[np.bool_]
NO_ROWS = np.empty(0, np.int64)
ROWS_PER_PAGE = 16
NUM_PAGES = 100
TRAFFIC = Traffic(num_users=150, num_items=5_000, num_requests=2_000, median_events=30, num_candidates=8)

KEY = HashKey(bytes(32))


def their_hits(keys: NDArray[np.int64], capacity: int) -> Hits:
    cache = lcs.LRU(cache_size=capacity, hashpower=16)
    hits = np.array([cache.get(lcs.Request(obj_id=key, obj_size=1)) for key in keys.tolist()])
    assert 0.02 < hits.mean() < 0.98, "all hits or none shows nothing"
    return hits


@pytest.fixture(scope="module")
def rows() -> NDArray[np.int64]:
    """Every row of the first requests, in the order they are asked for."""
    asked = [rows for visit in TRAFFIC.visits() for rows in (visit.rows, visit.candidates)]
    return np.concatenate(asked)[:12_000]


@pytest.fixture(scope="module")
def users() -> NDArray[np.int64]:
    return np.array([visit.user_id for visit in TRAFFIC.visits()])


@pytest.mark.parametrize("num_pages", [2, 20])
def test_the_embedding_cache_hits_where_their_lru_hits(rows: NDArray[np.int64], num_pages: int) -> None:
    slots = num_pages * ROWS_PER_PAGE
    cache = EmbeddingCache(TRAFFIC.num_rows, num_pages, ROWS_PER_PAGE, LruOrder(slots), AdmitEveryRow())
    cache.add_pages(range(num_pages))
    ours = np.empty(rows.size, np.bool_)
    for i in range(rows.size):
        asked = rows[i : i + 1]
        ours[i] = cache.lookup(asked)[0] != ABSENT
        if not ours[i]:
            cache.publish(cache.admit(asked, np.zeros(1, np.int64)))
    assert cache.evictions > 1_000
    assert np.array_equal(ours, their_hits(rows, slots))
    assert cache.hits == ours.sum()


def make_curves(page_tokens: int = 8) -> JointMissCurves:
    return JointMissCurves(
        MissCurveConfig(
            num_pages=NUM_PAGES,
            page_tokens=page_tokens,
            rows_per_page=ROWS_PER_PAGE,
            sampling_rate=1.0,
            half_life_requests=None,
            kv_admission="always",
            row_admission="always",
        )
    )


def test_the_row_shadow_hits_where_their_lru_hits_at_every_alpha(rows: NDArray[np.int64]) -> None:
    curves = make_curves()
    ours = np.empty((rows.size, len(GRID)), np.bool_)
    for i in range(rows.size):
        curves.reset()
        curves.observe(CurveRequest(0, 0, NO_ROWS, NO_ROWS[None], NO_ROWS, rows[i : i + 1][None]))
        ours[i] = curves.curves().emb_hit_rate == 1
    theirs = [their_hits(rows, round(alpha * NUM_PAGES) * ROWS_PER_PAGE) for alpha in GRID]
    assert np.array_equal(ours, np.stack(theirs, axis=1))


def test_user_shadows_hit_where_their_lru_hits_at_every_alpha(users: NDArray[np.int64]) -> None:
    """Histories of one page each, since their cache drops whole objects where ours drops tails."""
    curves = make_curves()
    ours = np.empty((users.size, len(GRID)), np.bool_)
    for i, user in enumerate(users.tolist()):
        curves.reset()
        curves.observe(CurveRequest(user, 5, NO_ROWS, np.zeros((1, 5), np.int64), NO_ROWS, NO_ROWS[None]))
        ours[i] = curves.curves().kv_user_hit_rate == 1
    theirs = [their_hits(users, NUM_PAGES - round(alpha * NUM_PAGES) - 1) for alpha in GRID]  # one page is reserve
    assert np.array_equal(ours, np.stack(theirs, axis=1))


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_the_kv_cache_hits_where_their_lru_hits(users: NDArray[np.int64], alpha: float) -> None:
    setting = Setting(NUM_PAGES, "always", "always", batch_tokens=1, geometry=PageGeometry(8, 1, 1, 32, 32, 2, 16, 2))
    pool = setting.pool(alpha, Traffic(num_items=10, median_events=1))
    ours = np.empty(users.size, np.bool_)
    columns = np.zeros((1, 5), np.int64)
    for i, user in enumerate(users.tolist()):
        history = History(user, NO_ROWS, columns, chain(KEY, (user,), 0, columns))
        plan = pool.kv.plan(history, now=0.0)
        assert plan is not None
        ours[i] = plan.num_resident > 0
        pool.kv.commit(plan, now=0.0)
        pool.kv.restore_reserve()
    assert pool.kv.evicted_pages > 100
    assert np.array_equal(ours, their_hits(users, NUM_PAGES - round(alpha * NUM_PAGES) - 1))
