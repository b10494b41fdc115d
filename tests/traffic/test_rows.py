from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from helmrec.errors import TraceError
from helmrec.model.config import ITEM, TableConfig
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.rows import RowSpace, candidate_rows, context_rows, history_rows, row_reads, row_space
from helmrec.traffic.trace import Trace
from helmrec.types import Ids, IntArray, RankRequest
from tests.helpers import tiny_config
from tests.traffic.cases import model_of_many_tables, small_trace

MODEL = model_of_many_tables()
NUM_LANES = 16


@pytest.fixture(scope="module")
def trace() -> Trace:
    return small_trace()


def rows_of(items: Ids, features: dict[str, Ids], lanes: set[int]) -> list[int]:
    """Rows of the model that are in kept lanes: the reference, from the requests of an engine."""
    rows = []
    for event in range(len(items)):
        for table in MODEL.features:
            local = int(items[event] if table.name == ITEM else features[table.name][event])
            if table.num_rows >= NUM_LANES and local % NUM_LANES in lanes:
                rows.append(MODEL.offsets[table.name] + local)
    return rows


def row_ids(space: RowSpace, kept: IntArray) -> list[int]:
    """Rows of the model for dense numbers of kept rows."""
    first_row = np.array([MODEL.offsets[MODEL.tables[i].name] for i in space.salt])
    table = np.searchsorted(space.first_kept, kept, side="right") - 1
    in_lane, slot = np.divmod(kept - space.first_kept[table], space.lanes.size)
    return (first_row[table] + in_lane * space.num_lanes + space.lanes[slot]).tolist()


def requests(trace: Trace) -> Iterator[tuple[int, RankRequest]]:
    whole = MODEL.model_copy(update={"window": 10_000})  # the reference needs full histories
    return enumerate(rank_requests(trace, whole))


@pytest.mark.parametrize("rate", [0.01, 0.13, 0.5, 1.0])
def test_kept_rows_are_those_the_engine_reads_less_the_other_lanes(trace: Trace, rate: float) -> None:
    space = row_space(trace, MODEL, rate)
    reads, lanes = row_reads(trace, space), set(space.lanes.tolist())
    out = np.empty(reads.max_rows, np.int64)
    for r, request in requests(trace):
        for first in {0, len(request.items) // 3, len(request.items)}:
            expected = rows_of(request.items[first:], {k: v[first:] for k, v in request.features.items()}, lanes)
            found = out[: history_rows(reads, r, first, out)]
            assert row_ids(space, found) == expected
            assert found.size <= reads.max_rows
            assert ((found >= 0) & (found < space.num_kept_rows)).all()
        expected = rows_of(request.candidates, dict(request.candidate_features), lanes)
        found = out[: candidate_rows(reads, r, out)]
        assert Counter(row_ids(space, found)) == Counter(expected)


def test_user_context_rows_are_the_engines(trace: Trace) -> None:
    space = row_space(trace, MODEL, 1.0)
    reads, out = row_reads(trace, space), np.empty(8, np.int64)
    for r, request in requests(trace):
        expected = [MODEL.offsets["user"] + request.context["user"]]  # `country` is smaller than the lanes
        assert row_ids(space, out[: context_rows(reads, r, out)]) == expected


def test_a_small_sample_of_lanes_is_spread_and_has_the_rate(trace: Trace) -> None:
    assert row_space(trace, MODEL, 0.001).lanes.tolist() == [8]
    space = row_space(trace, MODEL, 0.25)
    assert space.lanes.tolist() == [2, 6, 10, 14]
    assert space.rate == 0.25
    assert space.num_event_tables == 3


def test_every_lane_has_about_the_same_traffic() -> None:
    """A few lanes represent all: reads and distinct rows per lane hardly differ."""
    trace = small_trace(num_items=16_384)
    space = row_space(trace, tiny_config(features=(TableConfig(name=ITEM, num_rows=16_384),), **ENCODERS), 1.0)
    reads = row_reads(trace, space)
    out, seen = np.empty(reads.max_rows, np.int64), Counter[int]()
    for r in range(trace.num_requests):
        seen.update(out[: history_rows(reads, r, 0, out)].tolist())
        seen.update(out[: candidate_rows(reads, r, out)].tolist())
    total, distinct = np.zeros(NUM_LANES), np.zeros(NUM_LANES)
    for row, count in seen.items():
        total[row % NUM_LANES] += count
        distinct[row % NUM_LANES] += 1
    assert total.std() / total.mean() < 0.03
    assert distinct.std() / distinct.mean() < 0.08


ENCODERS = {
    "encoders": ({"name": "item", "tables": (ITEM,)},),
    "candidate_encoder": {"name": "candidate", "tables": (ITEM,)},
}


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_a_rate_that_is_no_share_is_refused(trace: Trace, rate: float) -> None:
    with pytest.raises(TraceError, match="rate must be"):
        row_space(trace, MODEL, rate)


def test_a_model_too_small_for_the_catalogue_is_refused(trace: Trace) -> None:
    with pytest.raises(TraceError, match=r"1003 items.*300 rows"):
        row_space(trace, tiny_config(), 1.0)
