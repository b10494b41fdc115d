"""Converts a trace to the requests of an engine, one at a time, in order.

Stores the histories of users with later requests only. It knows the tables of the model, not the engine.
"""

from collections.abc import Iterator

import numpy as np

from helmrec.errors import TraceError
from helmrec.model.config import ModelConfig
from helmrec.traffic.popularity import draw_backlog, draw_candidates, prepare_draws
from helmrec.traffic.rows import check_items_fit, context_row, put_feature_rows
from helmrec.traffic.trace import Trace, index_histories
from helmrec.types import IntArray, RankRequest


def rank_requests(trace: Trace, model: ModelConfig) -> Iterator[RankRequest]:
    """Yield the requests of a trace. Of a history longer than the model's window the tail is sent.

    The arrays of a request are read-only views of the user's history, valid until the user's next request.
    """
    check_items_fit(trace, model)
    most = int(trace.num_candidates.max(initial=1))
    if most > model.max_candidates:
        raise TraceError(f"the trace has {most} candidates in a request, {model.name!r} takes {model.max_candidates}")
    return _Replay(trace, model).requests()


class _Replay:
    """The histories of users while a trace is replayed."""

    def __init__(self, trace: Trace, model: ModelConfig) -> None:
        self._trace = trace
        self._model = model
        self._draws = prepare_draws(trace.catalogue)
        self._histories = index_histories(trace)
        self._table_rows = np.array([table.num_rows for table in model.features], np.int64)
        self._users: dict[int, _Growing] = {}

    def requests(self) -> Iterator[RankRequest]:
        trace, model = self._trace, self._model
        for request in range(trace.num_requests):
            user = int(trace.user[request])
            history = self._history(user, int(self._histories.length[request]))
            begin = max(0, history.length - model.window)
            now = max(trace.catalogue.start_time_s + int(trace.time_s[request]), history.last_timestamp)
            candidates = self._candidates(request)
            yield RankRequest(
                user_id=user,
                items=history.column(0, begin),
                actions=history.column(-2, begin),
                timestamps=history.column(-1, begin),
                candidates=candidates[0],
                features={t.name: history.column(i + 1, begin) for i, t in enumerate(model.features[1:])},
                candidate_features={t.name: candidates[i + 1] for i, t in enumerate(model.features[1:])},
                context=self._context(user, now),
                first_event=begin,
                request_time=now,
            )
            if self._histories.is_last[request]:
                del self._users[user]

    def _candidates(self, request: int) -> IntArray:
        """Items and their feature rows, (features, candidates)."""
        trace = self._trace
        rows = np.empty((len(self._model.features), trace.num_candidates[request]), np.int64)
        draw_candidates(self._draws, trace.epoch[request], trace.candidate_seed[request], rows[0])
        put_feature_rows(self._table_rows, trace.catalogue.num_lanes, rows)
        return rows

    def _history(self, user: int, length: int) -> "_Growing":
        """The user's history, extended to `length` events."""
        history = self._users.setdefault(user, _Growing(len(self._model.features) + 2))
        if length > history.length:
            history.extend(self._events(user, history.length, length))
        return history

    def _events(self, user: int, begin: int, end: int) -> IntArray:
        """Item and feature rows, actions and timestamps, (features + 2, end - begin)."""
        trace, model = self._trace, self._model
        columns = np.empty((len(model.features) + 2, end - begin), np.int64)
        backlog, own = int(trace.backlog[user]), int(self._histories.own_start[user])
        split = max(0, min(end, backlog) - begin)
        stored = slice(own + begin + split - backlog, own + end - backlog)
        derived = np.empty((3, split), np.int64)
        draw_backlog(self._draws, user, backlog, begin, derived)
        columns[0] = np.concatenate((derived[0], trace.item[stored]))
        columns[-2] = np.concatenate((derived[1], trace.action[stored]))
        columns[-1] = np.concatenate((derived[2], trace.timestamp_s[stored]))
        np.minimum(columns[-2], model.num_actions - 1, out=columns[-2])
        put_feature_rows(self._table_rows, trace.catalogue.num_lanes, columns)
        return columns

    def _context(self, user: int, now: int) -> dict[str, int]:
        """The context rows: of the user, a hash of its id; of the request, the hour."""
        model, num_lanes = self._model, self._trace.catalogue.num_lanes
        by_user = {
            table.name: int(context_row(user, len(model.features) + i, table.num_rows, num_lanes))
            for i, table in enumerate(model.user_context)
        }
        return by_user | {table.name: now // 3_600 % table.num_rows for table in model.request_context}


class _Growing:
    """Columns of one history with spare room, so that appending copies only the new events."""

    def __init__(self, num_columns: int) -> None:
        self._columns = np.empty((num_columns, 0), np.int64)
        self.length = 0

    @property
    def last_timestamp(self) -> int:
        return int(self._columns[-1, self.length - 1]) if self.length else 0

    def column(self, index: int, begin: int) -> IntArray:
        view = self._columns[index, begin : self.length]
        view.flags.writeable = False
        return view

    def extend(self, events: IntArray) -> None:
        end = self.length + events.shape[1]
        if not self.length:  # most users have one request: no copy for them
            self._columns, self.length = events, end
            return
        if end > self._columns.shape[1]:
            grown = np.empty((self._columns.shape[0], end + end // 8), np.int64)
            grown[:, : self.length] = self._columns[:, : self.length]
            self._columns = grown
        self._columns[:, self.length : end] = events
        self.length = end
