"""Prepared requests come out of the wire as they went in, and only for the engine they were prepared for."""

import time
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from helmrec.engine.intake import Intake, Prepared
from helmrec.memory.prefix_hash import HashKey, History
from helmrec.model.config import ModelConfig
from helmrec.serve.prepared_wire import pack_prepared, pack_recipe, unpack_prepared, unpack_recipe
from helmrec.types import RankRequest
from tests.helpers import OPTIONS, QUERY_FRAMES, random_request, tiny_config, tiny_engine
from tests.serve.cases import as_request, rank_body, rank_requests

FORMS: dict[str, dict[str, Any]] = {"plain": {}, "no context": {"user_context": (), "request_context": ()}}
FORMS |= OPTIONS | QUERY_FRAMES


def joined(parts: Any) -> memoryview:
    return memoryview(bytearray(b"".join(bytes(part) for part in parts)))


def requests_of(config: ModelConfig) -> list[RankRequest]:
    rng = np.random.default_rng(0)
    return [random_request(rng, config, user, 1 + user % 12, 1 + user % 5) for user in range(14)]


def crossed(intake: Intake, requests: list[RankRequest]) -> list[Prepared]:
    packed = pack_prepared(intake.tag, intake.prepare_all(requests), time.monotonic())
    payload = joined([*packed.header, *packed.arrays])
    received = unpack_prepared(payload)
    payload[:] = bytes(len(payload))  # the ring is written again
    assert received.tag == intake.tag
    return received.prepared


def lent(intake: Intake, requests: list[RankRequest]) -> list[Prepared]:
    """The same with arrays that stay where they are."""
    header, arrays = map(joined, pack_prepared(intake.tag, intake.prepare_all(requests), time.monotonic()))
    received = unpack_prepared(header, np.frombuffer(arrays, np.int64))
    header[:] = bytes(len(header))
    return received.prepared


def assert_same(one: object, other: object, kind: type) -> None:
    for field in fields(kind):
        if field.name == "places":  # addresses in this process
            continue
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, History):
            assert_same(a, b, History)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("form", FORMS)
def test_every_field_crosses(form: str) -> None:
    config = tiny_config(**FORMS[form])
    intake = Intake(config, 1, 100)
    requests = [*requests_of(config), replace(requests_of(config)[3], first_event=40, deadline_ms=12.5, user_id="u")]
    for cross in (crossed, lent):
        for sent, got in zip(intake.prepare_all(requests), cross(intake, requests), strict=True):
            assert_same(sent, got, Prepared)


def test_a_kept_prefix_does_not_keep_the_other_arrays_of_its_request() -> None:
    for cross in (crossed, lent):
        (got,) = cross(Intake(tiny_config(), 1, 100), rank_requests(1))
        assert got.history.states.base is None


def test_an_engine_gives_the_same_scores_to_what_was_prepared_elsewhere() -> None:
    requests, engine = rank_requests(8), tiny_engine()
    elsewhere = Intake.of(unpack_recipe(joined(pack_recipe(engine.intake_recipe))))
    assert engine.is_prepared_by(elsewhere.tag)
    for cross in (crossed, lent, crossed):  # after the first time from their prefixes
        futures = engine.submit_prepared(cross(elsewhere, requests))
        while engine.step():
            pass
        got = [future.result(timeout=0) for future in futures]
        for one, other in zip(got, tiny_engine().rank(requests), strict=True):
            np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)
    assert any(each.reused_tokens for each in got)
    engine.check()


def test_a_tag_is_that_of_one_model_version_length_and_key() -> None:
    key = HashKey.random()
    first = Intake(tiny_config(), 1, 100, key)
    assert Intake.of(first.recipe).tag == first.tag
    others = [
        Intake(tiny_config(), 2, 100, key),
        Intake(tiny_config(), 1, 101, key),
        Intake(tiny_config(window=8), 1, 100, key),
        Intake(tiny_config(), 1, 100),
    ]
    assert len({first.tag, *(each.tag for each in others)}) == 5


def test_the_key_is_not_shown() -> None:
    intake = Intake(tiny_config(), 1, 100)
    assert repr(intake.recipe.secret)[2:-1] not in repr(intake.recipe)


def test_sizes_that_do_not_fit_the_payload_are_refused() -> None:
    intake = Intake(tiny_config(), 1, 100)
    packed = pack_prepared(intake.tag, intake.prepare_all([as_request(rank_body())]), 0.0)
    header, arrays = joined(packed.header), joined(packed.arrays)
    for wrong in (arrays[:-8], joined([arrays, b"12345678"])):
        with pytest.raises(ValueError, match="numbers"):
            unpack_prepared(joined([header, wrong]))
        with pytest.raises(ValueError, match="numbers"):
            unpack_prepared(header, np.frombuffer(wrong, np.int64))


def test_the_way_counts_towards_the_deadline() -> None:
    intake = Intake(tiny_config(), 1, 100)
    sent = pack_prepared(intake.tag, intake.prepare_all([as_request(rank_body())]), time.monotonic() - 0.04)
    assert 40 <= unpack_prepared(joined([*sent.header, *sent.arrays])).spent_ms < 10_000
