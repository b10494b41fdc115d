"""Users by string: served as users by number are, and never mixed with others, even where hashes are equal."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.config import RelayConfig
from helmrec.engine import intake
from helmrec.engine.engine import Engine
from helmrec.memory import kv_host_tier
from helmrec.memory.prefix_hash import HashKey, States, chain
from helmrec.types import IntArray, PrefillRequest, RankRequest, UserId
from tests.helpers import random_request, tiny_engine

USERS: list[UserId] = [7, "7", "ann", "annabel", "ann\0", "zoë", "u" * 256]


def request_of(engine: Engine, user: UserId, seed: int = 3) -> RankRequest:
    """The same events for every user, so that only the user tells histories apart."""
    return random_request(np.random.default_rng(seed), engine.model_config, user, num_events=12)


def keeping_engine() -> Engine:
    return tiny_engine(host_kv_bytes=1 << 20, kv_reload="always", kv_admission="always", pool_bytes=1 << 20)


def test_each_user_has_a_prefix_of_its_own() -> None:
    engine = keeping_engine()
    for user in USERS:
        assert engine.rank([request_of(engine, user)])[0].reused_tokens == 0
    for user in USERS:
        assert engine.rank([request_of(engine, user)])[0].reused_tokens == 13
    assert engine.stats().pool.resident_users == len(USERS)
    engine.check()


def test_strings_score_as_an_engine_without_caches_does() -> None:
    engine, rng = tiny_engine(host_kv_bytes=1 << 20, kv_reload="always"), np.random.default_rng(1)
    grown = dict.fromkeys(USERS, 1)
    for _ in range(60):
        user = USERS[int(rng.integers(len(USERS)))]
        whole = random_request(np.random.default_rng(USERS.index(user)), engine.model_config, user, num_events=40)
        grown[user] = min(40, grown[user] + int(rng.integers(4)))
        columns = {name: getattr(whole, name)[: grown[user]] for name in ("items", "actions", "timestamps")}
        features = {name: ids[: grown[user]] for name, ids in whole.features.items()}
        request = replace(whole, **columns, features=features)
        if rng.random() < 0.1:
            engine.forget(user)
        (cached,), (plain,) = engine.rank([request]), tiny_engine().rank([request])
        np.testing.assert_allclose(cached.scores, plain.scores, atol=1e-5)
    engine.check()


def test_forgetting_a_string_forgets_it_alone() -> None:
    engine = keeping_engine()
    for _ in range(2):
        engine.rank([request_of(engine, user) for user in USERS])
    engine.forget("ann")
    again = engine.rank([request_of(engine, user) for user in USERS])
    assert [result.reused_tokens for result in again] == [0 if user == "ann" else 13 for user in USERS]
    engine.check()


def _without_user(key: HashKey, seed: tuple[int, ...], num_context: int, columns: IntArray) -> States:
    """A chain whose seed does not depend on the user: all users with the same events have the same states."""
    return chain(key, (1,), num_context, columns)


def test_users_with_equal_hashes_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "chain", _without_user)
    monkeypatch.setattr(kv_host_tier, "hash", lambda _: 1, raising=False)
    engine = keeping_engine()
    a, b = engine.rank([request_of(engine, "ann")]), engine.rank([request_of(engine, 7)])
    assert (a[0].reused_tokens, b[0].reused_tokens) == (0, 0), "the prefix of one user must not serve another"
    engine.rank([request_of(engine, "ann"), request_of(engine, "bob")])
    engine.forget("ann")
    engine.check()
    found = engine.rank([request_of(engine, user) for user in ("ann", 7, "bob")])
    assert [result.reused_tokens for result in found] == [0, 13, 13]


def test_the_whole_string_enters_the_seed() -> None:
    engine = tiny_engine()
    long = "u" * 255
    one, other = (engine._intake.prepare(request_of(engine, f"{long}{end}")).history.states for end in "ab")
    assert not np.intersect1d(one, other).size


def test_seeds_of_numbers_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list[tuple[int, ...]]()

    def noted(key: HashKey, seed: tuple[int, ...], *rest: Any) -> States:
        seeds.append(seed)
        return chain(key, seed, *rest)

    monkeypatch.setattr(intake, "chain", noted)
    engine = tiny_engine()
    engine.rank([request_of(engine, 7)])
    assert seeds[-1][0] == 7


def test_a_history_of_a_string_is_computed_ahead() -> None:
    engine = tiny_engine(relay=RelayConfig(risk=0, chunk_tokens=4, max_compute=1.0, hold_ms=1_000), alpha=0.1)
    rank = request_of(engine, "ann")
    fields = {name: getattr(rank, name) for name in ("items", "actions", "timestamps", "features")}
    context = {table.name: rank.context[table.name] for table in engine.model_config.user_context}
    lease = engine.prefill(PrefillRequest(user_id="ann", **fields, context=context, num_candidates=3)).lease
    while engine.step():
        pass
    assert lease is not None
    assert lease.user_id == "ann"
    assert engine.rank([rank])[0].reused_tokens == 13
