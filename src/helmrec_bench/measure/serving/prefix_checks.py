"""Two habits of other systems, as configurations of our engine on small traces: what goes wrong, and what it costs.

helmrec bench run prefix-checks                # a CPU is enough; writes docs/measurements/peers-kv-cpu.json

`unverified`: prefixes are found by user id and length alone, as in NVIDIA recsys-examples. Histories here are also
edited (an event deleted, replaced, or arriving late) and rows updated; every score is compared with one computed
without caches. `fixed split`: KV and rows have shares fixed at start, every prefix and row is admitted, LRU on both
sides, pages of 32 tokens, nothing saved on eviction. What it costs is counted: tokens computed and rows missed, of
eight rows a token.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from helmrec.clock import ManualClock
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Intake, Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.memory.history import chain
from helmrec.model.config import ITEM, EncoderConfig, ModelConfig, TableConfig
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import IntArray, RankRequest
from helmrec_bench.baselines.service_cost import ServiceCost
from helmrec_bench.lab.provenance import write_measurement

NUM_ITEMS, NUM_EXTRA = 50_000, 7  # of the second trace: rows of all eight tables take twice the pool
TOLERANCE = 1e-4  # of a score; float32 rounding stays below a hundredth of it here
# What an H200 was measured to take, per 6,700 tokens of a prefix and per row of 1 KiB over its bus.
PRICES = ServiceCost(token_ms=0.8 / 6_700, missed_row_ms=1_024 / 30e6)


def small_model(seed: int, num_items: int, num_extra: int = 0) -> LoadedModel:
    """One whose KV of a token takes eight rows' room, as DLRMv3's takes ten; with more tables than items', if asked."""
    names = (ITEM, *(f"feature_{i}" for i in range(num_extra)))
    config = ModelConfig(
        name="small",
        num_layers=2,
        num_heads=1,
        qk_dim=16,
        v_dim=16,
        dim=16,
        hidden_dim=16,
        normaliser=256,
        window=512,
        max_candidates=64,
        num_actions=4,
        row_dim=8,
        features=tuple(TableConfig(name=name, num_rows=num_items) for name in names),
        encoders=(EncoderConfig(name="all", tables=names, pooling="sum"),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,)),
    )
    generator = torch.Generator().manual_seed(seed)
    tables = {name: torch.randn((num_items, config.row_dim), generator=generator) for name in names}
    return LoadedModel(config, seed + 1, random_dense(config, generator), tables)


# Prefixes found without verification.


class UserAndLength(Intake):
    """Histories that look the same to a cache whenever the user is the same."""

    def prepare(self, request: RankRequest) -> Prepared:
        prepared = super().prepare(request)
        history = prepared.history
        states = chain(self._key, (history.user_id,), 0, np.zeros((1, history.num_tokens), np.int64))
        return replace(prepared, history=replace(history, states=states))


@dataclass(slots=True)
class Events:
    """One user's history, as it is at the moment."""

    items: list[int]
    actions: list[int]
    times: list[int]

    def append(self, rng: np.random.Generator, num: int, num_items: int) -> None:
        for _ in range(num):
            self.items.append(int(rng.integers(num_items)))
            self.actions.append(int(rng.integers(4)))
            self.times.append((self.times[-1] if self.times else 0) + int(rng.integers(1, 5_000)))

    def edit(self, rng: np.random.Generator, num_items: int) -> None:
        """Delete an event, as its user may ask; replace one; or let one arrive late."""
        at = int(rng.integers(1, len(self.items)))
        match int(rng.integers(3)):
            case 0:
                del self.items[at], self.actions[at], self.times[at]
            case 1:
                self.items[at] = int(rng.integers(num_items))
            case _:
                self.items.insert(at, int(rng.integers(num_items)))
                self.actions.insert(at, int(rng.integers(4)))
                self.times.insert(at, self.times[at - 1])


@dataclass(frozen=True, slots=True)
class EditedVisit:
    """A request, how its history came about, and the rows that change before it."""

    request: RankRequest
    is_edited: bool  # since the user's last visit
    updated: IntArray


def edited_visits(seed: int, num_visits: int, num_items: int, update_every: int) -> Iterator[EditedVisit]:
    rng, users = np.random.default_rng(seed), [Events([], [], []) for _ in range(30)]
    for user in users:
        user.append(rng, int(rng.integers(20, 80)), num_items)
    seen = set[int]()
    for i in range(num_visits):
        number = int(rng.integers(len(users)))
        user, is_edited = users[number], number in seen and rng.random() < 0.15
        user.edit(rng, num_items) if is_edited else user.append(rng, int(rng.integers(1, 5)), num_items)
        seen.add(number)
        updated = rng.integers(0, num_items, 5 if update_every and i % update_every == 0 else 0)
        candidates = rng.integers(0, num_items, 20)
        request = RankRequest(number, list(user.items), list(user.actions), list(user.times), candidates)
        yield EditedVisit(request, bool(is_edited), np.unique(updated))


def count_wrong(visits: Sequence[EditedVisit], *, is_verified: bool) -> dict[str, Any]:
    """Serve all visits; compare every score with one computed without caches at that moment."""
    num_items = 2_000
    model = small_model(0, num_items)
    freshness: dict[str, Any] = {} if is_verified else {"kv_freshness": 1e9}
    engine = Engine(model, EngineConfig(pool_bytes="4MiB", kv_admission="always", **freshness), ManualClock())
    probe = EngineProbe(engine)
    found_by = UserAndLength(model.config, model.version, engine.config.max_history)
    errors, other_tops, reused = [], 0, 0
    for visit in visits:
        if visit.updated.size:
            values = np.random.default_rng(visit.updated).normal(size=(visit.updated.size, 8))
            engine.update_rows(ITEM, visit.updated, values)
        asked = probe.submit(probe.prepare(visit.request) if is_verified else found_by.prepare(visit.request))
        while not asked.done():
            engine.step()
        result, right = asked.result(), probe.score_without_caches(probe.prepare(visit.request))
        errors.append(float(np.abs(result.scores - right).max()))
        other_tops += int(np.argmax(result.scores[:, 0]) != np.argmax(right[:, 0]))
        reused += result.reused_tokens
    wrong = np.array(errors) > TOLERANCE
    return {
        "requests": len(visits),
        "edited_before": sum(visit.is_edited for visit in visits),
        "wrong_scores": int(wrong.sum()),
        "other_first_place": other_tops,
        "largest_error": float(np.max(errors)),
        "reused_tokens": reused,
    }


# A split fixed at start.


def two_phases(seed: int, per_phase: int) -> list[RankRequest]:
    """Users with long histories who return, then users who come once and read what is popular."""
    rng = np.random.default_rng(seed)
    below = np.cumsum(1 / np.arange(1, NUM_ITEMS + 1) ** 0.9)
    names = rng.permutation(NUM_ITEMS)

    def popular(num: int) -> IntArray:
        return names[np.searchsorted(below, rng.random(num) * below[-1])]

    def request(user: int, items: IntArray) -> RankRequest:
        candidates, zeros = popular(64), np.zeros_like(items)
        rows, others = features_of(items), features_of(candidates)
        return RankRequest(user, items, zeros, np.arange(items.size), candidates, rows, others)

    histories, lengths = [popular(480) for _ in range(80)], np.full(80, 380)
    requests = []
    for _ in range(per_phase):
        user = int(rng.integers(80))
        lengths[user] = min(480, lengths[user] + 2)
        requests.append(request(user, histories[user][: lengths[user]]))
    return requests + [request(1_000 + i, popular(200)) for i in range(per_phase)]


def features_of(items: IntArray) -> dict[str, IntArray]:
    """A row in every table, another in each."""
    return {f"feature_{i}": (items * (2 * i + 7_919)) % NUM_ITEMS for i in range(NUM_EXTRA)}


def serve(requests: Sequence[RankRequest], **settings: Any) -> list[dict[str, Any]]:
    """Tokens computed and rows missed per request in the second half of each phase, and what they cost."""
    clock, model = ManualClock(), small_model(0, NUM_ITEMS, NUM_EXTRA)
    config: dict[str, Any] = {"pool_bytes": 6 << 20, "page_tokens": 32}
    engine = Engine(model, EngineConfig(**config | settings), clock)
    half = len(requests) // 4
    counted = [{"tokens": 0, "rows": 0} for _ in range(4)]
    for i, request in enumerate(requests):
        clock.advance(0.04)
        result = engine.rank([request])[0]
        counted[i // half]["tokens"] += result.computed_tokens - len(request.candidates)
        counted[i // half]["rows"] += result.row_misses
    return [
        {
            "computed_tokens": round(each["tokens"] / half, 1),
            "missed_rows": round(each["rows"] / half, 1),
            "ms_at_h200_prices": round(
                (each["tokens"] * PRICES.token_ms + each["rows"] * PRICES.missed_row_ms) / half, 5
            ),
        }
        for each in (counted[1], counted[3])
    ]


def splits(per_phase: int) -> list[dict[str, Any]]:
    requests = two_phases(0, per_phase)
    theirs: dict[str, Any] = {"kv_admission": "always", "row_admission": "always"}
    ways: dict[str, Callable[[], list[dict[str, Any]]]] = {
        f"fixed split, alpha {alpha}, everything admitted": partial(serve, requests, alpha=alpha, **theirs)
        for alpha in (0.2, 0.5, 0.8)
    }
    ways["ours, alpha fixed at 0.5"] = partial(serve, requests, alpha=0.5)
    rows = []
    for name, run in ways.items():
        returning, passing = run()
        rows.append({"configuration": name, "returning": returning, "passing": passing})
        print(rows[-1], flush=True)
    return rows


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--visits", type=int, default=400)
    parser.add_argument("--per-phase", type=int, default=600)


def main(flags: Namespace) -> None:
    unverified = []
    for name, update_every in (("histories edited", 0), ("histories edited, rows updated", 20)):
        visits = list(edited_visits(0, flags.visits, 2_000, update_every))
        for is_verified in (False, True):
            way = "verified (ours)" if is_verified else "user id and length"
            unverified.append({"trace": name, "prefix_found_by": way, **count_wrong(visits, is_verified=is_verified)})
            print(unverified[-1], flush=True)
    results = {"tolerance": TOLERANCE, "prices": PRICES.model_dump(), "verification": unverified}
    write_measurement(flags.out, results | {"splits": splits(flags.per_phase)})
