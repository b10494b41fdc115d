"""Readers and the trace they lead to, on fixtures: invented lines in the published formats."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from helmrec.errors import ConfigError, TraceError
from helmrec.traffic.imported import ImportConfig, trace_of_log
from helmrec.traffic.importers import Log, read_log
from helmrec.traffic.popularity import block_mass
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace import index_histories
from tests.traffic.cases import model_of_many_tables

FIXTURES = Path(__file__).parent / "fixtures"


def lines(log: Log) -> list[tuple[int, int, int, int]]:
    columns = (log.user, log.item, log.action, log.timestamp_s)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("kind", "name", "first", "last", "num_lines", "num_actions"),
    [
        ("taobao", "taobao.csv", (0, 0, 0, 1511544070), (1, 3, 0, 1511614348), 8, 4),
        ("amazon", "amazon-2018.jsonl", (0, 0, 4, 1445040000), (1, 1, 0, 1456272000), 4, 5),
        ("amazon", "amazon-2023.jsonl", (0, 0, 4, 1588687728), (0, 1, 3, 1589665266), 3, 5),
        ("movielens", "movielens.csv", (0, 0, 9, 1147880044), (0, 2, 7, 1147880999), 5, 10),
        ("movielens", "movielens-1m.dat", (0, 0, 9, 978300760), (1, 1, 1, 978299000), 4, 10),
        ("movielens", "movielens-100k.data", (0, 0, 5, 881250949), (0, 1, 9, 891717800), 3, 10),
        ("movietweetings", "movietweetings.dat", (0, 0, 9, 1381945744), (2, 0, 8, 1382500000), 5, 11),
        ("kuairand", "kuairand.csv", (0, 0, 0, 1649484027), (1, 2, 1, 1649573449), 4, 4),
    ],
)
def test_published_formats_are_read(  # one line of the table per format
    kind: str, name: str, first: tuple[int, ...], last: tuple[int, ...], num_lines: int, num_actions: int
) -> None:
    log = read_log(kind, FIXTURES / name)
    found = lines(log)
    assert len(found) == num_lines
    assert (found[0], found[-1]) == (first, last)
    assert log.num_actions == num_actions


def test_behaviours_and_signals_become_actions() -> None:
    assert read_log("taobao", FIXTURES / "taobao.csv").action.tolist() == [0, 0, 3, 2, 1, 0, 3, 0]
    assert read_log("kuairand", FIXTURES / "kuairand.csv").action.tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize(
    ("kind", "name"), [("taobao", "taobao.csv"), ("amazon", "amazon-2018.jsonl"), ("movielens", "movielens.csv")]
)
def test_compressed_files_are_read_too(tmp_path: Path, kind: str, name: str) -> None:
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((FIXTURES / name).read_bytes()))
    assert lines(read_log(kind, packed)) == lines(read_log(kind, FIXTURES / name))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("taobao", "1,2,3,pv,12\n1,2,3,look,13\n", "behaviour must be one of .* got 'look'"),
        ("taobao", "1,2,3,pv\n", "columns"),
        ("taobao", "1,2,3,pv,soon\n", "soon"),
        ("taobao", "1,2,3,pv,-5\n", "timestamps must be at least 0, got -5"),
        ("taobao", "", "cannot be read"),
        ("amazon", '{"reviewerID": "a", "asin": "b", "overall": 9.0, "unixReviewTime": 5}\n', "ratings run .* got 9"),
        ("amazon", '{"reviewerID": "a", "asin": "b", "overall": 5.0}\n', "unixReviewTime is missing in 1 lines"),
        ("amazon", "not json\n", "cannot be read as amazon"),
        ("movielens", "userId,movieId,rating,timestamp\n1,2,7.5,3\n", "ratings run from 1 to 10"),
        ("movietweetings", "1::2::3\n", "cannot be read as movietweetings"),
        ("movietweetings", "1::2::ten::4\n", "ten"),
        ("kuairand", "user_id,video_id,time_ms\n1,2,3\n", "column 'is_click' is missing"),
    ],
)
def test_a_bad_file_is_refused_by_name_with_what_is_wrong(tmp_path: Path, kind: str, text: str, message: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_log(kind, tmp_path / "log")
    assert str(tmp_path / "log") in str(caught.value)


def test_unknown_kinds_and_missing_files_raise_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kind must be one of taobao.* got 'ebay'"):
        read_log("ebay", tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        read_log("taobao", tmp_path / "nowhere")


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"helmrec\[parquet\]"):
        read_log("taobao", FIXTURES / "taobao.csv")


def log_of(*events: tuple[int, int, int]) -> Log:
    """Events as (user, item, second)."""
    user, item, timestamp_s = (np.array(column, np.int64) for column in zip(*events, strict=True))
    return Log(user, item, np.zeros(user.size, np.uint8), timestamp_s, num_actions=1)


def random_log(num_events: int = 3_000) -> Log:
    rng = np.random.default_rng(0)
    item = (rng.pareto(1.0, num_events) * 20).astype(np.int64) % 500
    _, item = np.unique(item, return_inverse=True)
    _, user = np.unique(rng.integers(0, 60, num_events), return_inverse=True)
    action = rng.integers(0, 3, num_events).astype(np.uint8)
    return Log(user, item, action, rng.integers(0, 100_000, num_events), num_actions=3)


@pytest.mark.parametrize(("gap_s", "share"), [(0, 0.0), (0, 0.3), (500, 0.3)])
def test_requests_and_histories_equal_their_plain_twin(gap_s: float, share: float) -> None:
    log = random_log()
    trace = trace_of_log(log, ImportConfig(visit_gap_s=gap_s, history_share=share))
    trace.check()
    start_s = trace.catalogue.start_time_s
    by_user: dict[int, list[tuple[int, int]]] = {}
    expected: list[tuple[int, list[int]]] = []
    for at in np.argsort(log.timestamp_s, kind="stable"):
        past = by_user.setdefault(int(log.user[at]), [])
        now = int(log.timestamp_s[at])
        if now >= start_s and (not gap_s or not past or now - past[-1][0] > gap_s):
            expected.append((now, [item for _, item in past]))
        past.append((now, int(log.item[at])))
    model = model_of_many_tables().model_copy(update={"window": 10_000, "max_candidates": 100})
    found = [(start_s + int(t), list(r.items)) for t, r in zip(trace.time_s, rank_requests(trace, model), strict=True)]
    counts = np.bincount(log.item)
    ranked = np.argsort(-counts, kind="stable")
    renamed = sorted((now, ranked[np.array(items, int)].tolist()) for now, items in found)
    assert renamed == sorted(expected)


def test_a_user_first_brings_along_what_it_did_before_the_requests_start() -> None:
    log = log_of((0, 5, 10), (1, 5, 20), (0, 6, 30), (0, 7, 40), (1, 7, 50), (2, 5, 60))
    trace = trace_of_log(log, ImportConfig(history_share=0.5))
    assert trace.catalogue.start_time_s == 40
    assert trace.time_s.tolist() == [0, 10, 20]
    assert trace.user.tolist() == [0, 1, 2]
    assert trace.num_new.tolist() == [2, 1, 0]
    assert trace.timestamp_s.tolist() == [10, 30, 20]


def test_items_are_numbered_by_popularity_and_candidates_follow_it() -> None:
    log = random_log()
    trace = trace_of_log(log, ImportConfig())
    counts = np.sort(np.bincount(log.item))[::-1]
    mass = block_mass(trace.catalogue.laws[0], trace.catalogue)
    assert trace.catalogue.num_lanes == 1
    assert mass[:4] == pytest.approx(counts[:4] / counts.sum(), rel=0.2)
    assert np.cumsum(mass)[49] == pytest.approx(counts[:50].sum() / counts.sum(), abs=0.02)


def test_real_time_can_be_pressed_into_less() -> None:
    slow, fast = (trace_of_log(random_log(), ImportConfig(duration_s=d)) for d in (None, 60))
    assert fast.duration_s == pytest.approx(60)
    assert np.allclose(fast.time_s * slow.duration_s / 60, slow.time_s)
    assert np.array_equal(index_histories(fast).length, index_histories(slow).length)


def test_a_log_without_visits_after_its_history_is_refused() -> None:
    log = log_of((0, 1, 10), (0, 2, 20), (0, 3, 30))
    with pytest.raises(TraceError, match="no visit begins after"):
        trace_of_log(log, ImportConfig(history_share=0.9, visit_gap_s=100))
