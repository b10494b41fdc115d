"""Histories the server keeps: appended, ranked with, looked at, forgotten."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError, HistoryError
from helmrec.history.config import HistoryConfig
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import random_request, tiny_config, tiny_engine
from tests.history.limits import full_disk
from tests.serve.asgi import Caller, Reply, send
from tests.serve.cases import events_body, infer_json, rank_body, rank_requests, stored_body, tensors_of

EVENTS, USER = "/v1/events", "/v1/users/7"
FIELDS = ("items", "actions", "timestamps", "features")


def test_a_rank_without_a_history_uses_the_one_that_is_kept(keeper: Caller) -> None:
    sent = keeper.post("/v1/rank", rank_body()).json
    assert sent["history_version"] is None
    assert keeper.post(EVENTS, events_body(0)).json == {"first_event": 0, "version": 3, "is_repeat": False}
    kept = keeper.post("/v1/rank", stored_body()).json
    assert kept["scores"] == pytest.approx(np.array(sent["scores"]), abs=1e-5)
    assert (kept["history_version"], kept["reused_tokens"]) == (3, 4), "the same prefix, whoever brought the history"
    later = {"items": [8], "actions": [1], "timestamps": [40], "features": {"category": [3]}}
    assert keeper.post(EVENTS, events_body(3, **later)).json["version"] == 4
    grown = keeper.post("/v1/rank", stored_body()).json
    whole = {name: [*rank_body()[name], *later[name]] for name in ("items", "actions", "timestamps")}
    again = keeper.post("/v1/rank", rank_body(**whole, features={"category": [1, 1, 2, 3]})).json
    assert (grown["history_version"], grown["reused_tokens"]) == (4, 4)
    assert grown["scores"] == pytest.approx(np.array(again["scores"]), abs=1e-5)
    assert grown["scores"] != kept["scores"]


def test_a_history_is_read_back(keeper: Caller) -> None:
    sent = events_body(0)
    keeper.post(EVENTS, sent)
    whole = keeper.get(f"{USER}/events").json
    assert whole == {"user_id": 7, "version": 3, "first_event": 0, **{name: sent[name] for name in FIELDS}}
    last = keeper.get(f"{USER}/events?last=1").json
    assert (last["first_event"], last["version"], last["items"]) == (2, 3, sent["items"][-1:])
    assert keeper.get("/v1/users/12345/events").status == 404
    for wrong in ("0", "-1", "much", "100001"):
        assert keeper.get(f"{USER}/events?last={wrong}").json["field"] == "last"


def test_one_writer_needs_no_base_version(keeper: Caller) -> None:
    body = {name: value for name, value in events_body(0).items() if name != "base_version"}
    assert [keeper.post(EVENTS, body | {"timestamps": times}).json["version"] for times in ([1, 2, 3], [4, 5, 6])] == [
        3,
        6,
    ]
    assert keeper.get(f"{USER}/events").json["timestamps"] == [1, 2, 3, 4, 5, 6]


def test_a_long_history_gets_the_window_of_one_that_is_sent_whole(keeper: Caller, served: Engine) -> None:
    rng, config = np.random.default_rng(3), tiny_config()
    request = random_request(rng, config, user_id=9, num_events=150)
    body = {
        "user_id": 9,
        "base_version": 0,
        "items": request.items,
        "actions": request.actions,
        "timestamps": request.timestamps,
        "features": request.features,
    }
    assert keeper.post(EVENTS, plain(body)).json["version"] == 150
    ask = {"candidates": request.candidates, "candidate_features": request.candidate_features}
    kept = keeper.post("/v1/rank", plain({"user_id": 9, **ask, "context": request.context})).json
    (sent,) = tiny_engine().rank([request])
    assert (kept["window_start"], kept["history_version"]) == (sent.window_start, 150)
    np.testing.assert_allclose(kept["scores"], sent.scores, atol=1e-5)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


def test_a_user_without_events_is_ranked_as_a_new_one(keeper: Caller) -> None:
    unknown = keeper.post("/v1/rank", stored_body(user_id=1_000)).json
    empty = {"items": [], "actions": [], "timestamps": [], "features": {"category": []}}
    sent = keeper.post("/v1/rank", rank_body(user_id=1_001, **empty)).json
    assert unknown["history_version"] == 0
    assert unknown["scores"] == pytest.approx(np.array(sent["scores"]), abs=1e-5)


def test_a_stale_base_is_a_conflict_with_the_current_version(keeper: Caller) -> None:
    keeper.post(EVENTS, events_body(0))
    stale = keeper.post(EVENTS, events_body(2))
    assert (stale.status, stale.json["current_version"]) == (409, 3)
    assert stale.json["type"] == "urn:helmrec:error:StaleVersion"
    ahead = keeper.post(EVENTS, events_body(9))
    assert (ahead.status, ahead.json["current_version"]) == (409, 3)
    assert keeper.get(USER).json["version"] == 3


def test_events_sent_again_are_acknowledged_again_and_kept_once(keeper: Caller) -> None:
    first, again = (keeper.post(EVENTS, events_body(0)).json for _ in range(2))
    assert (first["is_repeat"], again["is_repeat"]) == (False, True)
    assert again["version"] == 3


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"items": [1, 2, 999]}, "items[2]"),
        ({"items": []}, "items"),
        ({"items": [1, 2]}, "features['category']"),
        ({"actions": [0, 1, 9]}, "actions[2]"),
        ({"timestamps": [30, 20, 10]}, "timestamps[1]"),
        ({"features": {}}, "features"),
        ({"user_id": 1 << 63}, "user_id"),
        ({"base_version": -1}, "base_version"),
        ({"base_version": None}, "base_version"),
        ({"shoes": 1}, "shoes"),
    ],
)
def test_wrong_events_are_named_and_not_kept(keeper: Caller, overrides: Any, field: str) -> None:
    reply = keeper.post(EVENTS, events_body(0) | overrides)
    assert (reply.status, reply.json["field"]) == (400, field)
    assert keeper.get(USER).status == 404


def test_time_does_not_run_backwards_between_appends(keeper: Caller) -> None:
    keeper.post(EVENTS, events_body(0))
    reply = keeper.post(EVENTS, events_body(3))
    assert (reply.status, reply.json["field"], reply.json["value"]) == (400, "timestamps[0]", 10)


def test_half_a_history_is_not_filled_up_with_the_kept_one(keeper: Caller) -> None:
    keeper.post(EVENTS, events_body(0))
    parts: list[dict[str, Any]] = [
        {"items": [1]},
        {"timestamps": []},
        {"features": {"category": [1]}},
        {"first_event": 3},
    ]
    for part in parts:
        reply = keeper.post("/v1/rank", stored_body(**part))
        assert (reply.status, reply.json["detail"][-11:]) == (400, "d, got None")


def test_the_state_of_a_user_has_version_and_seal(keeper: Caller) -> None:
    assert keeper.get(USER).status == 404
    keeper.post(EVENTS, events_body(0))
    seen = keeper.get(USER).json
    assert (seen["user_id"], seen["version"], seen["first_event"], seen["last_timestamp"]) == (7, 3, 0, 30)
    assert len(seen["seal"]) == 16
    later = events_body(3, timestamps=[30, 30, 31])
    keeper.post(EVENTS, later)
    assert keeper.get(USER).json["seal"] != seen["seal"]
    for wrong in ("99999999999999999999", "9223372036854775808", "9" * 5_000, "%22", "%227", "x" * 257, "%FF"):
        reply = keeper.get(f"/v1/users/{wrong}")
        assert (reply.status, reply.json["field"]) == (400, "user_id")


def test_a_forgotten_user_leaves_no_history_and_no_kv(keeper: Caller, served: Engine) -> None:
    keeper.post(EVENTS, events_body(0))
    before = [keeper.post("/v1/rank", stored_body()).json for _ in range(3)][-1]
    assert before["reused_tokens"] == 4
    others = served.stats().pool.resident_users
    assert keeper.delete(USER).json == {"user_id": 7, "had_events": True}
    assert served.stats().pool.resident_users == others - 1
    assert keeper.get(USER).status == 404
    assert keeper.delete(USER).json == {"user_id": 7, "had_events": False}
    assert keeper.post("/v1/rank", stored_body()).json["history_version"] == 0
    assert keeper.post("/v1/rank", rank_body()).json["reused_tokens"] <= 1, "the context token of the empty history"
    assert keeper.post(EVENTS, events_body(0)).json["version"] == 3, "a new life starts at version 0"


def test_a_rank_that_waits_while_its_user_is_forgotten_brings_nothing_back(
    keeper: Caller, served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.post(EVENTS, events_body(0))
    may_step, step = threading.Event(), served.step
    monkeypatch.setattr(served, "step", lambda: may_step.wait() and step())
    resident = served.stats().pool.resident_users

    async def race() -> list[Reply]:
        body = json.dumps(stored_body()).encode()
        waiting = [asyncio.create_task(send(keeper.app, "POST", "/v1/rank", body)) for _ in range(3)]
        await asyncio.sleep(0.05)
        forgotten = await send(keeper.app, "DELETE", USER)
        assert forgotten.status == 200
        may_step.set()
        return list(await asyncio.gather(*waiting))

    replies = keeper.run(race())
    assert [reply.status for reply in replies] == [409] * 3
    assert replies[0].json["type"] == "urn:helmrec:error:Forgotten"
    assert served.stats().pool.resident_users == resident


def test_a_user_is_forgotten_where_no_histories_are_kept_and_events_have_no_place(caller: Caller) -> None:
    for _ in range(3):
        last = caller.post("/v1/rank", rank_body()).json
    assert last["reused_tokens"] == 4
    assert caller.delete(USER).json == {"user_id": 7, "had_events": False}
    assert caller.post("/v1/rank", rank_body()).json["reused_tokens"] == 0
    assert caller.post(EVENTS, events_body(0)).status == 404
    assert caller.get(USER).status == 404
    assert "items: is required" in caller.post("/v1/rank", stored_body()).json["detail"]
    wrong = caller.post(USER, {})
    assert (wrong.status, set(wrong.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})


def test_tensors_without_events_use_the_kept_histories(keeper: Caller) -> None:
    requests = rank_requests(4)
    for request in requests[:3]:
        fields = ("user_id", "items", "actions", "timestamps", "features")
        body = plain({name: getattr(request, name) for name in fields})
        assert keeper.post(EVENTS, body | {"base_version": 0}).status == 200
    tensors = tensors_of(requests)
    sent = keeper.post("/v2/models/tiny/infer", infer_json(tensors)).json["outputs"][0]["data"]
    events = ("LENGTHS", "ITEMS", "ACTIONS", "TIMESTAMPS", "features.category")
    lean = {name: values for name, values in tensors.items() if name not in events}
    kept = keeper.post("/v2/models/tiny/infer", infer_json(lean)).json["outputs"][0]["data"]
    known = sum(len(request.candidates) for request in requests[:3]) * 2
    assert kept[:known] == pytest.approx(sent[:known], abs=1e-5)
    assert kept[known:] != sent[known:], "the fourth has no events yet"
    half = keeper.post("/v2/models/tiny/infer", infer_json({**lean, "ITEMS": [], "LENGTHS": [0] * 4}))
    assert (half.status, half.json["field"]) == (400, "inputs")


def test_metrics_count_appends_and_what_is_kept(keeper: Caller) -> None:
    for base in (0, 0, 1):
        keeper.post(EVENTS, events_body(base))
    text = keeper.get("/metrics").body.decode()
    for line in (
        'helmrec_history_appends_total{outcome="kept"} 1.0',
        'helmrec_history_appends_total{outcome="repeat"} 1.0',
        'helmrec_history_appends_total{outcome="stale"} 1.0',
        "helmrec_history_events_total 3.0",
        "helmrec_history_users 1.0",
    ):
        assert line in text


def test_a_full_store_refuses_without_naming_our_files(served: Engine, tmp_path: Path) -> None:
    config = HistoryConfig(sync="os", map_bytes=1 << 20, max_bytes=1 << 20)
    histories = StoredHistories.open(tmp_path / "small", tiny_config(), config)
    body = events_body(0, **{name: [1] * 20_000 for name in ("items", "actions", "timestamps")})
    body["features"] = {"category": [1] * 20_000}
    with Caller(make_app(InProcessPort(served), ServeConfig(), histories)) as keeper:
        for user_id in range(9):
            reply = keeper.post(EVENTS, body | {"user_id": user_id})
            if reply.status != 200:
                break
        assert (reply.status, reply.json["detail"]) == (507, "the history store has no room for more events")
        assert keeper.get("/v1/users/0").json["version"] == 20_000


def test_a_full_disk_has_its_own_error_and_events_are_stored_once_there_is_room(served: Engine, tmp_path: Path) -> None:
    histories = StoredHistories.open(tmp_path / "kept", tiny_config(), HistoryConfig())
    body = events_body(0, **{name: [1] * 9_000 for name in ("items", "actions", "timestamps")})
    body["features"] = {"category": [1] * 9_000}
    with Caller(make_app(InProcessPort(served), ServeConfig(), histories)) as keeper:
        with full_disk((tmp_path / "kept" / "data.mdb").stat().st_size + 4_096):
            reply = keeper.post(EVENTS, body)
        assert (reply.status, reply.json["type"]) == (507, "urn:helmrec:error:DiskFull")
        assert reply.json["detail"] == "the disk of the history store is full; nothing of this call was kept"
        assert keeper.get(USER).status == 404
        assert keeper.post(EVENTS, body).json["version"] == 9_000


def test_a_failing_store_is_our_failure_and_stays_in_the_log(
    keeper: Caller, histories: StoredHistories, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(user_id: int, num_events: int) -> None:
        raise HistoryError("/secret/path is damaged")

    monkeypatch.setattr(histories._store, "read_last", fail)
    reply = keeper.post("/v1/rank", stored_body())
    assert reply.status == 500
    assert b"secret" not in reply.body
    assert "/secret/path is damaged" in caplog.text


def test_events_outlive_the_server(tmp_path: Path) -> None:
    for base, times in ((0, [10, 20, 30]), (3, [30, 40, 50])):
        histories = StoredHistories.open(tmp_path / "kept", tiny_config(), HistoryConfig())
        port = InProcessPort(tiny_engine(clock=MonotonicClock()))
        with Caller(make_app(port, ServeConfig(), histories)) as keeper:
            assert keeper.post(EVENTS, events_body(base, timestamps=times)).json["version"] == base + 3


def test_a_store_must_hold_what_the_model_looks_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="history_max_events_per_user must be at least the model's window, 16, got 8"):
        StoredHistories.open(tmp_path, tiny_config(), HistoryConfig(max_events_per_user=8))
