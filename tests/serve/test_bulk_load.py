"""Bulk load: from a file into a server, in batches, repeatable."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.clock import MonotonicClock
from helmrec.errors import ConfigError, HistoryUnavailable, QueueFull, ServerError
from helmrec.history.config import HistoryConfig
from helmrec.serve import bulk_load
from helmrec.serve.app import make_app
from helmrec.serve.bulk_load import BulkLoad, Line, read_lines
from helmrec.serve.client import Client
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.schema import AppendOutcome, EventsBody
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_config, tiny_engine
from tests.serve.asgi import Caller, on_loopback, wait_for
from tests.serve.cases import events_body

BULK = "/v1/events/bulk"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    histories = StoredHistories.open(tmp_path / "store", tiny_config(), HistoryConfig())
    server = make_app(InProcessPort(tiny_engine(clock=MonotonicClock())), ServeConfig(), histories)
    with on_loopback(server) as port, Client(f"http://127.0.0.1:{port}") as client:
        wait_for(client.is_ready)
        yield f"http://127.0.0.1:{port}"


def line(user_id: int, first: int = 0, num: int = 3, **changes: Any) -> dict[str, Any]:
    times = range(first, first + num)
    columns = {"items": [t % 5 for t in times], "actions": [t % 2 for t in times], "timestamps": list(times)}
    return {"user_id": user_id, **columns, "features": {"category": [t % 3 for t in times]}, **changes}


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return path


def load(path: Path, url: str) -> bulk_load.BulkReport:
    with Client(url) as client:
        return BulkLoad(client).run(read_lines(path))


def test_appends_of_one_call_are_done_in_order_each_with_its_own_outcome(keeper: Caller) -> None:
    bad = events_body(0, user_id=8, items=[1, 2, 10**6])
    appends = [events_body(0), bad, events_body(3, timestamps=[50, 60, 70]), events_body(5, user_id=9), events_body(0)]
    outcomes = keeper.post(BULK, {"appends": appends}).json["outcomes"]
    assert [each.get("version") for each in outcomes] == [3, None, 6, None, 6]
    assert "items[2]: values run from 0 to" in outcomes[1]["error"]
    assert outcomes[3]["type"] == "urn:helmrec:error:StaleVersion"
    assert outcomes[4]["is_repeat"]
    assert keeper.get("/v1/users/7").json["version"] == 6
    assert keeper.get("/v1/users/8").status == 404


def test_after_an_error_later_appends_of_the_same_user_are_not_tried(keeper: Caller) -> None:
    appends = [events_body(0, items=[1, 2, 10**6]), events_body(0), events_body(0, user_id=8)]
    outcomes = keeper.post(BULK, {"appends": appends}).json["outcomes"]
    assert ["error" in each for each in outcomes] == [True, True, False]
    assert outcomes[0] == outcomes[1]
    assert keeper.get("/v1/users/7").status == 404


@pytest.mark.parametrize("appends", [[], [{"user_id": 1}], [events_body(0)] * 1_001])
def test_a_malformed_bulk_call_is_refused_as_a_whole(keeper: Caller, appends: list[Any]) -> None:
    reply = keeper.post(BULK, {"appends": appends})
    assert (reply.status, keeper.get("/v1/users/7").status) == (400, 404)


def test_a_file_is_loaded_and_loading_it_again_changes_nothing(tmp_path: Path, url: str) -> None:
    lines = [line(user) for user in range(700)] + [line(user, 3, 2) for user in range(0, 700, 2)]
    path = written(tmp_path / "h.jsonl", lines)
    first, again = load(path, url), load(path, url)
    assert (first.num_lines, first.num_stored, first.num_repeats, first.bad) == (1_050, 1_050, 0, [])
    assert (len(first.users), first.num_events) == (700, 700 * 3 + 350 * 2)
    assert (again.num_stored, again.num_repeats, again.bad) == (1_050, 1_050, [])
    with Client(url) as client:
        versions = [state and state.version for state in map(client.user, (0, 1, 698, 699))]
    assert versions == [5, 3, 5, 3]


def test_a_load_that_was_interrupted_is_completed_by_running_it_again(tmp_path: Path, url: str) -> None:
    lines = [line(user) for user in range(20)]
    load(written(tmp_path / "part.jsonl", lines[:7]), url)
    report = load(written(tmp_path / "h.jsonl", lines), url)
    assert (report.num_stored, report.num_repeats) == (20, 7)


def test_parquet_and_json_lines_are_the_same_histories(tmp_path: Path, url: str) -> None:
    lines = [line(user, num=user + 1) for user in range(5)]
    flat = [{**{n: v for n, v in each.items() if n != "features"}, "features.category": each["features"]["category"]}
            for each in lines]  # fmt: skip
    for name, rows in (("nested", lines), ("flat", flat)):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    expected = list(read_lines(written(tmp_path / "h.jsonl", lines)))
    assert list(read_lines(tmp_path / "nested.parquet")) == expected
    assert list(read_lines(tmp_path / "flat.parquet")) == expected
    assert load(tmp_path / "flat.parquet", url).num_repeats == 0
    assert load(tmp_path / "h.jsonl", url).num_repeats == 5


def test_bad_lines_are_named_by_number_and_the_others_loaded(tmp_path: Path, url: str) -> None:
    no_list, too_large = line(3, items=7), line(4, items=[0, 1, 10**6])
    lines = [line(1), "{not json\n", "\n", no_list, too_large, line(5, shoes=1), line(2)]
    path = written(tmp_path / "h.jsonl", lines)
    report = load(path, url)
    assert (report.num_stored, [number for number, _ in report.bad]) == (2, [2, 4, 6, 5])
    reasons = dict(report.bad)
    for number, part in ((2, "not JSON"), (4, "items: array is needed"), (5, "items[2]"), (6, "shoes")):
        assert part in reasons[number]
    shown = CliRunner().invoke(app, ["histories", "load", str(path), "--url", url], env={"COLUMNS": "200"})
    assert shown.exit_code == 2
    assert f"{path}, line 5: items[2]" in shown.output
    assert "lines stored │ 2" in " ".join(shown.output.split())


def test_a_column_of_another_type_is_a_bad_line(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"user_id": [1], "items": [["x"]]}), tmp_path / "h.parquet")
    (found,) = read_lines(tmp_path / "h.parquet")
    assert (found.body, "items" in (found.error or "")) == (None, True)


def test_files_that_cannot_be_read_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        list(read_lines(tmp_path / "h.parquet"))
    with pytest.raises(ConfigError, match="no such file: nowhere"):
        read_lines(Path("nowhere.jsonl"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"helmrec\[parquet\]', or write JSON lines"):
        list(read_lines(tmp_path / "h.parquet"))


def test_a_server_without_a_store_or_without_an_answer_ends_the_load(tmp_path: Path) -> None:
    path = written(tmp_path / "h.jsonl", [line(1)])
    shown = CliRunner().invoke(app, ["histories", "load", str(path), "--url", "http://127.0.0.1:9"])
    assert (shown.exit_code, "no answer" in shown.output) == (2, True)


class _BusyClient(Client):
    """Answers as told: an error that is raised, or types of errors by call."""

    def __init__(self, *answers: Exception | str | None) -> None:
        super().__init__("http://127.0.0.1:9")
        self.answers, self.sent = list(answers), list[list[int]]()

    def append_many(self, appends: Any) -> list[AppendOutcome]:
        self.sent.append([each.user_id for each in appends])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return [AppendOutcome(version=3)] * len(appends)
        return [AppendOutcome(version=3), *[AppendOutcome(error="busy", type=answer)] * (len(appends) - 1)]


def body(user_id: int) -> EventsBody:
    return EventsBody(user_id=user_id, items=[1], actions=[0], timestamps=[5])


@pytest.mark.parametrize("error", [QueueFull("full"), HistoryUnavailable("gone"), "urn:helmrec:error:QueueFull"])
def test_a_busy_store_is_tried_again_with_growing_pauses(error: Exception | str) -> None:
    pauses = list[float]()
    client = _BusyClient(error, error, None)
    report = BulkLoad(client, pauses.append).run([Line(n, body(n)) for n in (1, 2, 3)])
    assert (report.num_stored, report.bad) == (3, [])
    assert pauses == sorted(pauses)
    assert len(set(pauses)) == len(pauses) == 2
    assert client.sent[-1] == ([1, 2, 3] if isinstance(error, Exception) else [3])


def test_a_store_that_stays_busy_ends_the_load_and_names_the_line() -> None:
    client = _BusyClient(*[QueueFull("full")] * 100)
    with pytest.raises(ServerError, match="stayed busy, from line 4 on"):
        BulkLoad(client, lambda _: None).run([Line(4, body(1))])


@pytest.mark.parametrize(("limit", "value"), [("_BATCH_APPENDS", 2), ("_BATCH_EVENTS", 2), ("_BATCH_FIELDS", 13)])
def test_batches_stay_within_their_limits(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(bulk_load, limit, value)
    client = _BusyClient(None, None, None)
    BulkLoad(client).run([Line(n, body(n)) for n in range(5)])
    assert client.sent == [[0, 1], [2, 3], [4]]
