"""Histories made to collide under a hash without a key: each is scored as what it is.

The hash below mixes every field with constants that anybody can read, so one timestamp can be chosen to make two
histories look alike. Whoever forges one so must gain nothing.
"""

import numpy as np
import pytest

from helmrec.engine.engine import Engine
from helmrec.engine.intake import Intake
from helmrec.types import RankRequest
from tests.helpers import tiny_config, tiny_engine, tiny_geometry, tiny_model

WORD = (1 << 64) - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0x87C37B91114253D5, 0x4CF5AD432745937F
FIRST_CATEGORY = 300  # its row; items come before
Event = tuple[int, int, int, int]  # item, category, action, timestamp


def mix(value: int, salt: int) -> int:
    mixed = value + salt * STEP & WORD
    mixed = (mixed ^ mixed >> 32) * FIRST & WORD
    mixed = (mixed ^ mixed >> 29) * SECOND & WORD
    return mixed ^ mixed >> 32


def unmix(mixed: int, salt: int) -> int:
    mixed = (mixed ^ mixed >> 32) * pow(SECOND, -1, 1 << 64) & WORD
    mixed = (mixed ^ mixed >> 29 ^ mixed >> 58) * pow(FIRST, -1, 1 << 64) & WORD
    return (mixed ^ mixed >> 32) - salt * STEP & WORD


def word(event: Event) -> int:
    item, category, action, timestamp = event
    return mix(item, 0) + mix(FIRST_CATEGORY + category, 1) + mix(action, 2) + mix(timestamp, 3) & WORD


def forge(wanted: int, after: int) -> Event:
    """An event of that word, not before `after`."""
    for item in range(300):
        rest = mix(item, 0) + mix(FIRST_CATEGORY + 3, 1) + mix(2, 2)
        timestamp = unmix(wanted - rest & WORD, 3)
        if after <= timestamp < 2**63 - 2:
            return item, 3, 2, timestamp
    raise AssertionError("half of all timestamps would do")


def request_of(events: list[Event], user: int = 1) -> RankRequest:
    items, categories, actions, timestamps = map(list, zip(*events, strict=True))
    return RankRequest(
        user_id=user,
        items=items,
        actions=actions,
        timestamps=timestamps,
        candidates=[5, 6],
        features={"category": categories},
        candidate_features={"category": [5, 6]},
        context={"country": 1, "hour": 2},
    )


def assert_scored_as_without_caches(engine: Engine, request: RankRequest) -> None:
    (found,), (fresh,) = engine.rank([request]), tiny_engine(tiny_model()).rank([request])
    np.testing.assert_allclose(found.scores, fresh.scores, atol=1e-5)


def test_a_chosen_timestamp_does_not_make_one_history_pass_for_another() -> None:
    engine = tiny_engine(tiny_model(), kv_admission="always")
    true: list[Event] = [(1, 1, 1, 1_000), (2, 2, 1, 1_001)]
    forged = [true[0], forge(word(true[1]), after=1_000)]
    assert word(forged[1]) == word(true[1])
    engine.rank([request_of(true)])
    assert_scored_as_without_caches(engine, request_of(forged))


def test_a_chosen_timestamp_does_not_load_a_page_of_another_user() -> None:
    model = tiny_model()
    host_bytes = 40 * tiny_geometry(model.config).page_bytes
    engine = tiny_engine(model, kv_admission="always", host_kv_bytes=host_bytes, kv_reload="always")
    victim: list[Event] = [(i, i, 1, 1_000 + i) for i in range(4)]
    engine.rank([request_of(victim)])
    engine._pool.kv.evict(99)  # its first page, the user's own token and three events, is on the host now
    before = int(engine._intake.prepare(request_of(victim)).history.states[2])
    own: list[Event] = [(50, 3, 2, 5), (51, 3, 2, 6)]
    state = int(engine._intake.prepare(request_of(own, user=2)).history.states[-1])
    forged = forge(before ^ word(victim[2]) ^ state, after=6)
    request = request_of([*own, forged, (7, 7, 1, forged[3] + 1)], user=2)
    assert_scored_as_without_caches(engine, request)
    assert engine.stats().pool.host_reloaded_pages == 0


def test_states_cannot_be_told_from_outside() -> None:
    request = request_of([(1, 1, 1, 1_000), (2, 2, 1, 1_001)])
    one, other = (Intake(tiny_config(), 1, 100).prepare(request).history.states for _ in range(2))
    assert not np.isin(one, other).any(), "every engine has a key of its own"


@pytest.mark.parametrize("value", [0, 1, 12_345, 2**63 - 1])
def test_the_forger_knows_the_trade(value: int) -> None:
    assert unmix(mix(value, 3), 3) == value
