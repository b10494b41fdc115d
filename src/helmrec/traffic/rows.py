"""The embedding rows that a request reads, restricted to the rows of some lanes: a sample for fast simulation.

Feature rows are a hash of the item that preserves its lane: row r of any table with at least `num_lanes` rows lies in
lane r mod num_lanes, and an item reads rows of its own lane only. So keeping m of L lanes keeps m/L of the rows of
every table, and all reads of those rows. Derived histories visit the lanes in turn, so the kept events of a history of
n are found in n·m/L steps.

Kept rows are numbered densely from 0 to `num_kept_rows`, so that a simulator can use arrays instead of hash maps.
Capacities are scaled by `rate`. Hot rows make the *number* of kept reads noisy for real data: scale misses by 1/rate
and take totals from token counts, which are exact (as in SHARDS-adj).

Tables with fewer rows than lanes are left out: every event reads them, and they are always resident. Rows of
request-context tables are left out for the same reason.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import TraceError
from helmrec.model.config import ModelConfig
from helmrec.traffic.popularity import (
    Draws,
    Index,
    draw_block,
    draw_lane_candidates,
    lane_of,
    mix,
    prepare_draws,
    rules_at,
    scale,
    user_word,
)
from helmrec.traffic.trace import Trace, index_histories
from helmrec.types import IntArray


class RowSpace(NamedTuple):
    """The kept rows of a model. Tables are in this order: item table, other event tables, user context."""

    num_lanes: int
    num_event_tables: int  # of the tables below
    lanes: IntArray  # kept lanes, ascending
    slot: IntArray  # (lanes in all,) index into `lanes`, -1 for lanes not kept
    salt: IntArray  # (tables,) index of the table in the model's list
    lane_rows: IntArray  # (tables,) rows per lane
    first_kept: IntArray  # (tables + 1,) first dense number of each table
    layout: IntArray  # (tables, 3) salt, lane_rows and first_kept side by side, for compiled loops

    @property
    def num_kept_rows(self) -> int:
        """Kept rows of all tables."""
        return int(self.first_kept[-1])

    @property
    def rate(self) -> float:
        """Share of the rows that are kept."""
        return self.lanes.size / self.num_lanes


def row_space(trace: Trace, model: ModelConfig, rate: float) -> RowSpace:
    """The row space of a model with about a share `rate` of the lanes, at least one."""
    if not 0 < rate <= 1:
        raise TraceError(f"rate must be more than 0 and at most 1, got {rate}")
    check_items_fit(trace, model)
    num_lanes = trace.catalogue.num_lanes
    num_kept = max(1, round(rate * num_lanes))
    lanes = ((np.arange(num_kept) + 0.5) * num_lanes / num_kept).astype(np.int64)  # spread: lane 0 has the top item
    slot = np.full(num_lanes, -1, np.int64)
    slot[lanes] = np.arange(num_kept)
    shown = [i for i, t in enumerate(model.tables[: _num_streamed(model)]) if t.num_rows >= num_lanes]
    num_events = sum(i < len(model.features) for i in shown)
    salt = np.array(shown, np.int64)
    lane_rows = np.array([_lane_rows(i, model, num_lanes) for i in shown], np.int64)
    first_kept = np.concatenate(([0], np.cumsum(lane_rows * num_kept))).astype(np.int64)
    return RowSpace(
        num_lanes=num_lanes,
        num_event_tables=num_events,
        lanes=lanes,
        slot=slot,
        salt=salt,
        lane_rows=lane_rows,
        first_kept=first_kept,
        layout=np.column_stack((salt, lane_rows, first_kept[:-1])),
    )


def check_items_fit(trace: Trace, model: ModelConfig) -> None:
    """Raise TraceError if the item table of the model is too small for the trace."""
    if model.features[0].num_rows < trace.catalogue.num_items:
        raise TraceError(
            f"the trace names {trace.catalogue.num_items} items, "
            f"the item table of {model.name!r} has {model.features[0].num_rows} rows"
        )


def _num_streamed(model: ModelConfig) -> int:
    return len(model.features) + len(model.user_context)


def _lane_rows(table: int, model: ModelConfig, num_lanes: int) -> int:
    """Rows per lane. The item table uses all its rows; other tables do not use an incomplete block at the end."""
    rows = model.tables[table].num_rows
    return -(-rows // num_lanes) if table == 0 else rows // num_lanes


class RowReads(NamedTuple):
    """A trace and a row space as arrays, for the compiled functions below."""

    draws: Draws
    space: RowSpace
    user: IntArray  # (requests,)
    epoch: NDArray[np.int32]  # (requests,)
    num_candidates: NDArray[np.int32]  # (requests,)
    candidate_seed: NDArray[np.uint64]  # (requests,)
    length: IntArray  # (requests,) of the history
    backlog: NDArray[np.int32]  # (users,)
    own_start: IntArray  # (users + 1,)
    kept_before: NDArray[np.int32]  # (own events + 1,) number of own events of kept lanes before this one
    kept_item: IntArray  # own events of kept lanes

    @property
    def max_rows(self) -> int:
        """The size of `out` that is enough for any call."""
        events = int(self.length.max(initial=0)) + self.space.num_lanes
        candidates = int(self.num_candidates.max(initial=0)) + self.space.num_lanes
        own = int(np.diff(self.kept_before[self.own_start]).max(initial=0))
        per_lane = max(events, candidates) // self.space.num_lanes + 1
        kept = min(events, per_lane * self.space.lanes.size + own)
        return max(kept, per_lane * self.space.lanes.size) * self.space.num_event_tables + self.space.salt.size


def row_reads(trace: Trace, space: RowSpace) -> RowReads:
    """Prepare the reads of a trace. Own events are filtered here; everything else is derived per call."""
    histories = index_histories(trace)
    is_kept = space.slot[trace.item % space.num_lanes] >= 0
    kept_before = np.zeros(trace.item.size + 1, np.int32)
    np.cumsum(is_kept, out=kept_before[1:])
    return RowReads(
        draws=prepare_draws(trace.catalogue),
        space=space,
        user=trace.user,
        epoch=trace.epoch,
        num_candidates=trace.num_candidates,
        candidate_seed=trace.candidate_seed,
        length=histories.length,
        backlog=trace.backlog,
        own_start=histories.own_start,
        kept_before=kept_before,
        kept_item=trace.item[is_kept],
    )


class KeptItem(NamedTuple):
    """An item of a kept lane."""

    block: Index
    item: Index
    slot: int  # index of its lane among the kept ones


@numba.njit(cache=True)
def history_rows(reads: RowReads, request: int, first: int, out: IntArray) -> int:
    """Write the kept rows that events [first, length) of a request's history read to `out`; return how many.

    Rows are in the order of events. `first` is the number of resident events, or the window's anchor if that is later.
    """
    user, space, count = reads.user[request], reads.space, 0
    backlog, own, num_tables = np.int64(reads.backlog[user]), reads.own_start[user], space.num_event_tables
    num_lanes, lanes, slot, layout = space.num_lanes, space.lanes, space.slot, space.layout
    if first < backlog:
        word, draws = user_word(reads.draws, user), reads.draws
        alias, rules = draws.alias[draws.law[0]], rules_at(draws, 0)
        turn = first - lane_of(num_lanes, word, first)  # first event of this turn through the lanes
        while turn < backlog:
            for i in range(lanes.size):
                index = turn + lanes[i]
                if first <= index < backlog:
                    block = draw_block(alias, rules, mix(index, word))
                    kept = KeptItem(block, block * num_lanes + lanes[i], i)
                    put_rows(layout, lanes.size, kept, num_tables, out, count)
                    count += num_tables
            turn += num_lanes
    begin = reads.kept_before[own + max(first - backlog, 0)]
    end = reads.kept_before[own + reads.length[request] - backlog]
    kept_item = reads.kept_item
    for i in range(begin, end):
        item = kept_item[i]
        kept = KeptItem(item // num_lanes, item, slot[item & (num_lanes - 1)])
        put_rows(layout, lanes.size, kept, num_tables, out, count)
        count += num_tables
    return count


@numba.njit(cache=True)
def candidate_rows(reads: RowReads, request: int, out: IntArray) -> int:
    """Write the kept rows that a request's candidates read to `out`, lane by lane; return how many."""
    space, draws, num_candidates, count = reads.space, reads.draws, reads.num_candidates[request], 0
    num_lanes, lanes, layout, num_tables = space.num_lanes, space.lanes, space.layout, space.num_event_tables
    blocks = np.empty(num_candidates // num_lanes + 1, np.int64)
    seed, epoch = reads.candidate_seed[request], reads.epoch[request]
    alias, rules = draws.alias[draws.law[epoch]], rules_at(draws, epoch)
    for slot in range(lanes.size):
        lane = lanes[slot]
        for i in range(draw_lane_candidates(alias, rules, seed, num_candidates, lane, blocks)):
            kept = KeptItem(blocks[i], blocks[i] * num_lanes + lane, slot)
            put_rows(layout, lanes.size, kept, num_tables, out, count)
            count += num_tables
    return count


@numba.njit(cache=True)
def context_rows(reads: RowReads, request: int, out: IntArray) -> int:
    """Write the kept user-context rows to `out`, which are read if no token is resident; return how many."""
    space, user, count = reads.space, reads.user[request], 0
    for table in range(space.num_event_tables, space.salt.size):
        lane = scale(mix(user, 0xC0), space.num_lanes)
        if space.slot[lane] >= 0:
            in_lane = scale(mix(user, space.salt[table] + 0xC1), space.lane_rows[table])
            out[count] = space.first_kept[table] + in_lane * space.lanes.size + space.slot[lane]
            count += 1
    return count


@numba.njit(cache=True, inline="always")
def put_rows(layout: IntArray, num_kept: int, kept: KeptItem, num_tables: int, out: IntArray, count: int) -> None:
    """Write the kept rows of an item, one per event table, to `out` from index `count` on."""
    out[count] = kept.block * num_kept + kept.slot
    for table in range(1, num_tables):
        in_lane = scale(mix(kept.item, layout[table, 0]), layout[table, 1])
        out[count + table] = layout[table, 2] + in_lane * num_kept + kept.slot


@numba.njit(cache=True, inline="always")
def feature_row(item: int, table: int, num_rows: int, num_lanes: int) -> np.int64:
    """The row of an item in the event table with index `table` > 0 of the model's list."""
    word = mix(item, table)
    if num_rows < num_lanes:
        return scale(word, num_rows)
    return scale(word, num_rows // num_lanes) * num_lanes + item % num_lanes


@numba.njit(cache=True)
def put_feature_rows(table_rows: IntArray, num_lanes: int, columns: IntArray) -> None:
    """Fill lines 1, 2, ... of `columns` (tables or more, n) with the feature rows of the items in line 0."""
    for table in range(1, table_rows.size):
        for i in range(columns.shape[1]):
            columns[table, i] = feature_row(columns[0, i], table, table_rows[table], num_lanes)


@numba.njit(cache=True)
def context_row(user: int, table: int, num_rows: int, num_lanes: int) -> np.int64:
    """The row of a user in the user-context table with index `table` of the model's list."""
    word = mix(user, table + 0xC1)
    if num_rows < num_lanes:
        return scale(word, num_rows)
    return scale(word, num_rows // num_lanes) * num_lanes + scale(mix(user, 0xC0), num_lanes)
