"""What the garbage collector has to look through grows with resident users alone, and by little."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from tests.helpers import random_request, tiny_engine, tiny_geometry, tiny_model

PER_USER = 5  # a prefix, its pages, its epochs, the list of the user's prefixes, and one to spare


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def roomy_engine(num_pages: int, num_host_pages: int = 0) -> Engine:
    page_bytes = tiny_geometry(tiny_model().config).page_bytes
    return tiny_engine(
        clock=MonotonicClock(),
        kv_admission="always",
        alpha=0.1,
        pool_bytes=num_pages * page_bytes,
        host_kv_bytes=num_host_pages * page_bytes,
    )


def rank_users(engine: Engine, users: range, num_events: int = 12) -> None:
    rng = np.random.default_rng(users.start)
    for user in users:
        engine.rank([random_request(rng, engine.model_config, user, num_events)])


def tracked() -> int:
    gc.collect()  # tuples of numbers are tracked until they are first looked at
    return len(gc.get_objects())


def test_a_resident_user_is_a_handful_of_objects() -> None:
    with roomy_engine(4_000) as engine:
        rank_users(engine, range(50))
        before, num_before = tracked(), engine.stats().pool.resident_users
        rank_users(engine, range(1_000, 1_400))
        num = engine.stats().pool.resident_users - num_before
        assert num == 400
        assert tracked() - before <= PER_USER * num + 100


def test_requests_leave_nothing_behind(no_collector: None) -> None:
    with roomy_engine(200) as engine:
        rank_users(engine, range(50))
        gc.collect()
        rank_users(engine, range(100))
        few = gc.collect()
        rank_users(engine, range(400))
        assert gc.collect() <= few + 20, "a request makes a cycle"


def test_host_pages_are_no_objects() -> None:
    with roomy_engine(40, num_host_pages=2_000) as engine:
        rank_users(engine, range(50))
        before, num_before = tracked(), engine.stats().pool.host_pages
        rank_users(engine, range(1_000, 1_400))
        num = engine.stats().pool.host_pages - num_before
        assert num > 800
        assert tracked() - before < num / 4
