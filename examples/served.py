"""The trained model, served: in this process with all caches on and off, and over HTTP with histories on the server.

Quality is the place of each held-out item among all items: HR@10 and NDCG@10.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.histories import HELD_OUT, History
from helmrec import Client, Engine, EngineConfig, RankRequest, RankResult
from helmrec.types import IntArray, UserId
from helmrec_bench.measure.server import ServerProcess

CUT = 10  # of HR@10 and NDCG@10


@dataclass(frozen=True, slots=True)
class Judged:
    """How one way of serving ranked."""

    ranks: IntArray  # (requests,) place of the held-out item among all, from 0
    scores: NDArray[np.float32]  # (requests,) of the held-out item
    seconds: float
    reused_tokens: int = 0
    row_hit_rate: float = 0.0

    def describe(self) -> dict[str, Any]:
        hit = self.ranks < CUT
        return {
            "hr_at_10": round(float(hit.mean()), 4),
            "ndcg_at_10": round(float((hit / np.log2(self.ranks + 2)).mean()), 4),
            "reused_tokens": self.reused_tokens,
            "row_hit_rate": round(self.row_hit_rate, 4),
            "ms_per_request": round(1e3 * self.seconds / len(self.ranks), 3),
        }


def place_of(target: int, scores: NDArray[np.number]) -> int:
    """From 0; in the middle of those with the same score."""
    return int((scores > scores[target]).sum() + ((scores == scores[target]).sum() - 1) // 2)


def requests_of(users: Sequence[History], num_items: int) -> list[tuple[RankRequest, int]]:
    """What is asked before each held-out event, and the event's item; in the order of time."""
    everything = np.arange(num_items)
    asked = []
    for history in users:
        for end in range(history.items.size - HELD_OUT, history.items.size):
            request = RankRequest(
                user_id=history.user,
                items=history.items[:end],
                actions=history.actions[:end],
                timestamps=history.times[:end],
                candidates=everything,
                request_time=int(history.times[end]),
            )
            asked.append((request, int(history.items[end])))
    return sorted(asked, key=lambda each: each[0].request_time or 0)


def serve(folder: Path, asked: Sequence[tuple[RankRequest, int]], *, with_caches: bool) -> Judged:
    """All requests, one by one. Without caches no row is kept on the device and nothing of a user."""
    config = EngineConfig(pool_bytes="32MiB", alpha=0.1 if with_caches else 0.0, kv_admission="always")
    ranks, own_scores, reused = [], [], 0
    with Engine.from_model(folder, config) as engine:
        started = time.perf_counter()
        for request, target in asked:
            result = engine.rank([request])[0]
            scores = result.scores[:, 0]
            ranks.append(place_of(target, scores))
            own_scores.append(scores[target])
            reused += result.reused_tokens
            if not with_caches:
                engine.forget(request.user_id)
        seconds, pool = time.perf_counter() - started, engine.stats().pool
    lookups = pool.row_hits + pool.row_misses
    return Judged(np.array(ranks), np.array(own_scores), seconds, reused, pool.row_hits / lookups)


def serve_over_http(folder: Path, asked: Sequence[tuple[RankRequest, int]], histories: Path) -> Judged:
    """Append what each user did since the last request, and rank with the stored history. Prints one user's visits."""
    settings = {"pool_bytes": "32MiB", "history_path": histories}
    server = ServerProcess.of_model(folder, settings)
    ranks, own_scores, versions, reused = [], [], dict[UserId, int](), 0
    try:
        with Client(server.url) as client:
            started, before = time.perf_counter(), server.stats().pool
            watched = next((r.user_id for r, _ in asked if len(r.items) >= 10), asked[0][0].user_id)
            for request, target in asked:
                result, num_new = visit(client, request, versions)
                if request.user_id == watched:
                    print(f"user {watched}: {num_new} events appended; {told(result)}", flush=True)
                scores = result.scores[:, 0]
                ranks.append(place_of(target, scores))
                own_scores.append(scores[target])
                reused += result.reused_tokens
            seconds, pool = time.perf_counter() - started, server.stats().pool
    finally:
        server.end()
    hits, misses = pool.row_hits - before.row_hits, pool.row_misses - before.row_misses
    return Judged(np.array(ranks), np.array(own_scores), seconds, reused, hits / (hits + misses))


def visit(client: Client, request: RankRequest, versions: dict[UserId, int]) -> tuple[RankResult, int]:
    """Send the events that the server does not have, then rank; also how many events were new."""
    user, base, end = request.user_id, versions.get(request.user_id, 0), len(request.items)
    new = slice(base, end)
    client.append(user, base, request.items[new], request.actions[new], request.timestamps[new])
    versions[user] = end
    return client.rank_stored(user, request.candidates, request_time=request.request_time), end - base


def told(result: RankResult) -> str:
    return f"{result.reused_tokens} tokens reused, {result.computed_tokens} computed"
