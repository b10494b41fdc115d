"""Every way a caller can be wrong: a named error that names field and value, and an untouched engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec import (
    AlphaOutOfRange,
    ConfigError,
    Engine,
    EngineClosed,
    EngineConfig,
    PoolTooSmall,
    RankRequest,
    RequestError,
)
from helmrec.clock import ManualClock
from helmrec.model.weights import LoadedModel
from tests.helpers import random_request, tiny_engine, tiny_geometry, tiny_model


def good(engine: Engine, **overrides: Any) -> RankRequest:
    return random_request(np.random.default_rng(5), engine.model_config, **{"user_id": 7} | overrides)


@contextmanager
def untouched(engine: Engine) -> Iterator[None]:
    """What runs inside must not change the engine: its stats, its pool, the next request's scores and reuse."""
    twin = tiny_engine(tiny_model(), row_order=engine.config.row_order)
    for one in (engine, twin):
        one.rank([good(one)])
    before = engine.stats()
    yield
    assert engine.stats() == before
    engine.check()
    [result], [expected] = engine.rank([good(engine)]), twin.rank([good(twin)])
    assert np.array_equal(result.scores, expected.scores)
    assert (result.reused_tokens, result.row_hits) == (expected.reused_tokens, expected.row_hits)
    assert engine.stats() == twin.stats()


def refuses(engine: Engine, request: RankRequest, field: str, value: object, message: str = "") -> None:
    for call in (lambda: engine.rank([good(engine), request, good(engine)]), lambda: engine.submit(request)):
        with pytest.raises(RequestError) as caught:
            call()
        error = caught.value
        assert error.field == field
        assert error.value == value
        assert type(error.value) is type(value)
        assert field in str(error)
        assert f"got {value!r}" in str(error)
        assert message in str(error)


CATEGORY = "features['category']"
CANDIDATE_CATEGORY = "candidate_features['category']"
ONES = [1] * 5

# name: (overrides of a good request of 5 events and 3 candidates, field, value, part of the message)
BAD: dict[str, tuple[dict[str, Any], str, object, str]] = {
    "unknown item": ({"items": [1, 2, 300, 4, 5]}, "items[2]", 300, "run from 0 to 299"),
    "negative item": ({"items": [1, 2, 3, 4, -1]}, "items[4]", -1, "run from 0 to 299"),
    "unknown candidate": ({"candidates": [300, 1, 2]}, "candidates[0]", 300, "run from 0 to 299"),
    "negative candidate": ({"candidates": [0, -7, 2]}, "candidates[1]", -7, "run from 0 to 299"),
    "unknown feature": ({"features": {"category": [0, 20, 0, 0, 0]}}, CATEGORY + "[1]", 20, "run from 0 to 19"),
    "negative feature": ({"features": {"category": [-2, 0, 0, 0, 0]}}, CATEGORY + "[0]", -2, "run from 0 to 19"),
    "unknown candidate feature": (
        {"candidate_features": {"category": [0, 0, 99]}},
        CANDIDATE_CATEGORY + "[2]",
        99,
        "run from 0 to 19",
    ),
    "unknown action": ({"actions": [0, 1, 2, 3, 4]}, "actions[4]", 4, "run from 0 to 3"),
    "negative action": ({"actions": [0, 1, 2, -3, 3]}, "actions[3]", -3, "run from 0 to 3"),
    "unknown user context": ({"context": {"country": 5, "hour": 0}}, "context['country']", 5, "from 0 to 4"),
    "negative user context": ({"context": {"country": -1, "hour": 0}}, "context['country']", -1, "from 0 to 4"),
    "unknown request context": ({"context": {"country": 0, "hour": 24}}, "context['hour']", 24, "from 0 to 23"),
    "bool context": ({"context": {"country": True, "hour": 0}}, "context['country']", True, "integer"),
    "float context": ({"context": {"country": 1.0, "hour": 0}}, "context['country']", 1.0, "integer"),
    "list context": ({"context": {"country": [1], "hour": 0}}, "context['country']", [1], "integer"),
    "unknown feature table": ({"features": {"category": ONES, "colour": ONES}}, "features", "colour", "no such table"),
    "item as a feature": ({"features": {"category": ONES, "item": ONES}}, "features", "item", "no such table"),
    "unknown candidate table": (
        {"candidate_features": {"category": [1] * 3, "colour": [1] * 3}},
        "candidate_features",
        "colour",
        "no such table",
    ),
    "unknown context table": ({"context": {"country": 0, "hour": 0, "moon": 1}}, "context", "moon", "no such table"),
    "missing feature table": ({"features": {}}, "features", [], "'category' is needed"),
    "missing candidate table": ({"candidate_features": {}}, "candidate_features", [], "'category' is needed"),
    "missing context": ({"context": {"country": 0}}, "context", ["country"], "'hour' is needed"),
    "fewer actions": ({"actions": [0, 1]}, "actions", 2, "5 in all"),
    "more timestamps": ({"timestamps": [1] * 6}, "timestamps", 6, "5 in all"),
    "fewer features": ({"features": {"category": [1] * 4}}, CATEGORY, 4, "5 in all"),
    "more candidate features": ({"candidate_features": {"category": [1] * 4}}, CANDIDATE_CATEGORY, 4, "3 in all"),
    "no candidates": ({"candidates": []}, "candidates", 0, "between 1 and 8 candidates"),
    "too many candidates": ({"candidates": [1] * 9}, "candidates", 9, "between 1 and 8 candidates"),
    "timestamps backwards": ({"timestamps": [1, 2, 5, 4, 6]}, "timestamps[3]", 4, "runs backwards from 5"),
    "negative timestamp": ({"timestamps": [-1, 2, 3, 4, 6]}, "timestamps[0]", -1, ""),
    "negative user": ({"user_id": -1}, "user_id", -1, "integer from 0"),
    "huge user": ({"user_id": 2**63}, "user_id", 2**63, "integer from 0"),
    "float user": ({"user_id": 1.5}, "user_id", 1.5, "integer from 0"),
    "bool user": ({"user_id": True}, "user_id", True, "integer from 0"),
    "empty user": ({"user_id": ""}, "user_id", "", "string of 1 to 256 bytes"),
    "long user": ({"user_id": "ä" * 129}, "user_id", "ä" * 100, "not one of 258 bytes"),
    "user of no text": ({"user_id": "a\udc80"}, "user_id", "'a\\udc80'", "without lone surrogates"),
    "bytes user": ({"user_id": b"7"}, "user_id", b"7", "integer from 0"),
    "no user": ({"user_id": None}, "user_id", None, "integer from 0"),
    "negative first event": ({"first_event": -1}, "first_event", -1, "integer from 0"),
    "float first event": ({"first_event": 2.0}, "first_event", 2.0, "integer from 0"),
    "float items": ({"items": [1, 2, 3, 4, 5.5]}, "items[4]", 5.5, "not float"),
    "bool items": ({"items": [True] * 5}, "items[0]", True, "not bool"),
    "string items": ({"items": ["1"] * 5}, "items[0]", "1", "integers"),
    "float candidates": ({"candidates": np.array([1.0, 2, 3])}, "candidates", 1.0, "not float64"),
    "bool candidates": ({"candidates": np.array([True, False, True])}, "candidates", True, "not bool"),
    "string candidates": ({"candidates": ["a", "b", "c"]}, "candidates[0]", "a", "integers"),
    "huge candidates": ({"candidates": np.array([2**64 - 1], np.uint64)}, "candidates", 2**64 - 1, "64 bits"),
    "2-d items": ({"items": np.ones((5, 1), np.int64)}, "items", (5, 1), "flat list"),
    "2-d candidates": ({"candidates": [[1, 2, 3]]}, "candidates[0]", [1, 2, 3], "integers"),
    "2-d empty": ({"candidates": np.empty((0, 3), np.int64)}, "candidates", (0, 3), "flat list"),
    "scalar candidates": ({"candidates": 3}, "candidates", 3, "flat list"),
    "2-d actions": ({"actions": [[0]] * 5}, "actions[0]", [0], "integers"),
    "2-d timestamps": ({"timestamps": [[0]] * 5}, "timestamps[0]", [0], "integers"),
    "2-d feature": ({"features": {"category": [[0]] * 5}}, CATEGORY + "[0]", [0], "integers"),
    "zero deadline": ({"deadline_ms": 0}, "deadline_ms", 0, "positive"),
    "negative deadline": ({"deadline_ms": -2.5}, "deadline_ms", -2.5, "positive"),
    "request before last event": (
        {"timestamps": [1, 2, 3, 4, 60], "request_time": 59},
        "request_time",
        59,
        "before the last event at 60",
    ),
    "negative request time": ({"request_time": -1}, "request_time", -1, "integer from 0"),
    "float request time": ({"request_time": 1e9}, "request_time", 1e9, "integer from 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_named_and_leaves_the_engine_untouched(engine: Engine, name: str) -> None:
    overrides, field, value, message = BAD[name]
    with untouched(engine):
        refuses(engine, good(engine, **overrides), field, value, message)


UNNAMED: dict[str, tuple[dict[str, Any], str]] = {
    "items beyond 64 bits": ({"items": [2**70, 1, 1, 1, 1]}, "items"),
    "no item": ({"items": [None, 1, 1, 1, 1]}, "items"),
    "ragged items": ({"items": [[1], [1, 2], 3, 4, 5]}, "items"),
    "string deadline": ({"deadline_ms": "5"}, "deadline_ms"),
    "no features": ({"features": None}, "features"),
    "number as a table name": ({"features": {1: ONES, "colour": ONES}}, "features"),
    "event index beyond 64 bits": ({"first_event": 2**63 - 1, "num_events": 8}, "first_event"),
    "one bool among items": ({"items": [1, True, 1, 1, 1]}, "items"),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_input_of_a_foreign_type_is_named_too(engine: Engine, name: str) -> None:
    overrides, field = UNNAMED[name]
    with pytest.raises(RequestError, match=field):
        engine.rank([good(engine, **overrides)])


def test_the_value_named_is_the_wrong_one(engine: Engine) -> None:
    with pytest.raises(RequestError, match="got 'a'"):
        engine.rank([good(engine, items=[1, 2, "a", 4, 5])])


def test_a_nan_deadline_is_refused(engine: Engine) -> None:
    with untouched(engine), pytest.raises(RequestError, match="deadline_ms: a positive number is needed, got nan"):
        engine.rank([good(engine, deadline_ms=float("nan"))])


def test_more_events_than_configured_are_refused(model: LoadedModel) -> None:
    engine = tiny_engine(model, max_history=20)
    before = engine.stats()
    engine_message = r"items: at most 20 events may be sent, got 21"
    with pytest.raises(RequestError, match=engine_message):
        engine.rank([good(engine, num_events=21)])
    assert engine.stats() == before
    assert engine.rank([good(engine, num_events=20)])[0].truncated_events == 4


def test_a_cold_user_is_no_error(engine: Engine) -> None:
    [result] = engine.rank([good(engine, num_events=0)])
    assert result.scores.shape == (3, 2)
    assert np.isfinite(result.scores).all()


def test_a_history_longer_than_the_window_is_no_error_and_is_told(engine: Engine) -> None:
    [result] = engine.rank([good(engine, num_events=21)])
    assert (result.window_start, result.truncated_events) == (8, 8)


def test_numpy_integers_of_any_width_are_ids(engine: Engine) -> None:
    [wide] = engine.rank([good(engine, items=[1, 2, 3, 4, 5], user_id=np.int32(4))])
    [narrow] = engine.rank([good(engine, items=np.array([1, 2, 3, 4, 5], np.uint8), user_id=np.uint64(4))])
    np.testing.assert_allclose(wide.scores, narrow.scores, atol=1e-5)
    assert narrow.reused_tokens == 6


ROW = np.zeros((1, 16), np.float32)
BAD_UPDATES: dict[str, tuple[tuple[Any, Any, Any], str, object]] = {
    "unknown table": (("colour", [0], ROW), "table", "colour"),
    "unknown id": (("item", [300], ROW), "ids[0]", 300),
    "negative id": (("item", [-1], ROW), "ids[0]", -1),
    "float id": (("item", [1.0], ROW), "ids[0]", 1.0),
    "bool id": (("item", [True], ROW), "ids[0]", True),
    "2-d ids": (("item", [[1]], ROW), "ids[0]", [1]),
    "wrong width": (("item", [1], np.zeros((1, 15))), "values", (1, 15)),
    "wrong number": (("item", [1, 2], ROW), "values", (1, 16)),
    "flat values": (("item", [1], np.zeros(16)), "values", (16,)),
    "repeated ids": (("item", [3, 3], np.zeros((2, 16))), "ids", 3),
    "nan": (("item", [1], np.full((1, 16), np.nan)), "values[0, 0]", float("nan")),
    "infinity": (("hour", [1], np.full((1, 16), np.inf)), "values[0, 0]", float("inf")),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_a_bad_row_update_is_named_and_changes_nothing(engine: Engine, name: str) -> None:
    arguments, field, value = BAD_UPDATES[name]
    with untouched(engine):
        with pytest.raises(RequestError) as caught:
            engine.update_rows(*arguments)
        assert (caught.value.field, repr(caught.value.value)) == (field, repr(value))
        assert field in str(caught.value)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("values", [[["a"] * 16], [[1.0], [1.0, 2.0]]], ids=["strings", "ragged"])
def test_row_values_that_are_no_numbers_are_named(engine: Engine, values: object) -> None:
    with pytest.raises(RequestError, match="values"):
        engine.update_rows("item", [1], values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "largest", "too_large"),
    [("float16", 65_519.0, 65_520.0), ("bfloat16", 3.39e38, 3.4e38), ("float32", 3.4e38, 1e39)],
)
def test_row_values_too_large_for_the_tables_dtype_are_refused(dtype: str, largest: float, too_large: float) -> None:
    engine = tiny_engine(tiny_model(row_dtype=dtype))
    with pytest.raises(RequestError, match=rf"values\[0, 3\]: numbers finite in {dtype} are needed"):
        engine.update_rows("item", [1], np.where(np.arange(16) == 3, -too_large, 0.0)[None])
    engine.update_rows("item", [1], np.full((1, 16), largest))


@pytest.mark.parametrize("values", [np.array([1, 2, 3], object), np.array([None, "x", 3], object)])
@pytest.mark.parametrize("field", ["items", "actions", "timestamps", "candidates"])
def test_ids_in_an_array_of_objects_are_named(engine: Engine, field: str, values: Any) -> None:
    with untouched(engine), pytest.raises(RequestError, match=rf"^{field}: .*not object, got {values[0]!r}$"):
        engine.rank([replace(good(engine), **{field: values})])


def test_a_deadline_that_is_a_truth_value_is_named(engine: Engine) -> None:
    with untouched(engine), pytest.raises(RequestError, match="deadline_ms: a positive number is needed, got True"):
        engine.rank([replace(good(engine), deadline_ms=True)])


@pytest.mark.parametrize("alpha", [-0.01, 1.01, float("nan")])
def test_alpha_out_of_range_is_named_and_changes_nothing(engine: Engine, alpha: float) -> None:
    with untouched(engine), pytest.raises(AlphaOutOfRange, match=f"alpha must be between 0 and 1, got {alpha}"):
        engine.move_alpha(alpha)


def test_alpha_that_leaves_no_room_for_a_request_is_named_and_changes_nothing(engine: Engine) -> None:
    with untouched(engine), pytest.raises(AlphaOutOfRange, match=r"alpha must be at most 0\.8333, got 0\.9"):
        engine.move_alpha(0.9)


def test_a_pool_too_small_for_one_request_is_named(model: LoadedModel) -> None:
    page = tiny_geometry(model.config).page_bytes
    for pool_bytes in (1, page, 6 * page - 1):
        with pytest.raises(PoolTooSmall, match=rf"pool_bytes must be at least {8 * page} .*got {pool_bytes}$"):
            tiny_engine(model, pool_bytes=pool_bytes, alpha=0.4)
    tiny_engine(model, pool_bytes=8 * page, alpha=0.4).check()
    tiny_engine(model, pool_bytes=6 * page, alpha=0.1).check()


def test_a_bad_engine_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="page_tokens must be at least 1, got 0"):
        EngineConfig(pool_bytes=1 << 20, page_tokens=0)


def test_a_device_that_is_not_there_is_named(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device: .*got 'cuda'"):
        tiny_engine(model, device="cuda")


CALLS: dict[str, Callable[[Engine], object]] = {
    "rank": lambda engine: engine.rank([good(engine)]),
    "submit": lambda engine: engine.submit(good(engine)),
    "step": lambda engine: engine.step(),
    "move_alpha": lambda engine: engine.move_alpha(0.5),
    "update_rows": lambda engine: engine.update_rows("item", [1], ROW),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_engine_says_so(model: LoadedModel, name: str) -> None:
    engine = tiny_engine(model, ManualClock())
    engine.close()
    before = engine.stats()
    with pytest.raises(EngineClosed, match="closed"):
        CALLS[name](engine)
    assert engine.stats() == before
