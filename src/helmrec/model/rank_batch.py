"""Requests of a training step as flat tensors, and where their tokens go.

It knows tables, windows and times, not the arithmetic of a model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helmrec.errors import RequestError
from helmrec.model.config import ModelConfig, QueryFrame
from helmrec.model.query_frame import Query, age_buckets, latest_window, places, query_arrays
from helmrec.model.window import window_anchor
from helmrec.types import IntArray, RankRequest


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """Requests of one step, one after another without padding. All tensors are int64; ids count within their table.

    `lengths` is `offsets.diff()` where a data loader has offsets.
    """

    events: Mapping[str, Tensor]  # by feature table: (events,) ids, the oldest event of a request first
    actions: Tensor  # (events,)
    timestamps: Tensor  # (events,)
    lengths: Tensor  # (requests,) events of each request, at most the model's window
    candidates: Mapping[str, Tensor]  # by feature table: (candidates,) ids
    num_candidates: Tensor  # (requests,)
    request_times: Tensor  # (requests,) not before the last event
    context: Mapping[str, Tensor] = field(default_factory=dict)  # by context table: (requests,) ids

    @classmethod
    def of(cls, requests: Sequence[RankRequest], config: ModelConfig) -> "RankBatch":
        """Lay requests out flat, with the events in the window that an engine would choose."""
        anchor = window_anchor if config.query_frame is None else latest_window
        starts = [anchor(r.first_event, len(r.items), config.window) - r.first_event for r in requests]
        times = [np.asarray(r.timestamps)[start:] for r, start in zip(requests, starts, strict=True)]
        now = [t[-1] if t.size else 0 for t in times]
        tables = [table.name for table in config.features]
        context = [table.name for table in (*config.user_context, *config.request_context)]

        def window(name: str, table: str | None = None) -> Tensor:
            given = [_given(r, name, table, len(r.items)) for r in requests]
            return _flat(ids[start:] for ids, start in zip(given, starts, strict=True))

        def candidates(name: str, table: str | None = None) -> Tensor:
            return _flat(_given(r, name, table, len(r.candidates)) for r in requests)

        return cls(
            events={tables[0]: window("items")} | {table: window("features", table) for table in tables[1:]},
            actions=window("actions"),
            timestamps=window("timestamps"),
            lengths=_flat([[t.size for t in times]]),
            candidates={tables[0]: candidates("candidates")}
            | {table: candidates("candidate_features", table) for table in tables[1:]},
            num_candidates=_flat([[len(r.candidates) for r in requests]]),
            request_times=_flat(
                [[t if r.request_time is None else r.request_time for r, t in zip(requests, now, strict=True)]]
            ),
            context={table: _flat([_given(r, "context", table, 1) for r in requests]) for table in context},
        )

    def to(self, device: torch.device | str) -> "RankBatch":
        return RankBatch(**{each.name: _moved(getattr(self, each.name), device) for each in fields(self)})

    def check(self, config: ModelConfig) -> None:
        """Raise RequestError that names the first field and value that do not fit the model or each other."""
        _check_ids("lengths", self.lengths, self.lengths.numel(), config.window + 1)
        if config.retrieval is not None and (none := (self.lengths == 0).nonzero()).numel():
            raise RequestError(f"lengths[{int(none[0])}]", 0, "a retrieval head needs at least one event")
        _check_ids("num_candidates", self.num_candidates, self.lengths.numel(), None)
        num_events, num_candidates = int(self.lengths.sum()), int(self.num_candidates.sum())
        for table in config.features:
            limit = table.num_rows if table.unknown_row is None else None
            _check_ids(f"events[{table.name!r}]", self.events.get(table.name), num_events, limit)
            _check_ids(f"candidates[{table.name!r}]", self.candidates.get(table.name), num_candidates, limit)
        for table in (*config.user_context, *config.request_context):
            limit = table.num_rows if table.unknown_row is None else None
            _check_ids(f"context[{table.name!r}]", self.context.get(table.name), self.lengths.numel(), limit)
        _check_ids("actions", self.actions, num_events, config.num_actions)
        _check_ids("timestamps", self.timestamps, num_events, None)
        _check_ids("request_times", self.request_times, self.lengths.numel(), None)
        layout = Layout.of(self, config)
        for name, waits in (("timestamps", layout.waits), ("request_times", layout.request_waits)):
            if (back := (waits < 0).nonzero()).numel():
                at = int(back[0])
                raise RequestError(f"{name}[{at}]", int(getattr(self, name)[at]), "time runs backwards")


@dataclass(frozen=True, slots=True, eq=False)
class QueryInputs:
    """What tokens read of their request's query, in a model with a query frame."""

    positions: Tensor  # (events + candidates,) entries of the position table
    ages: Tensor  # (events + candidates,) time buckets
    context_ages: Tensor  # (requests,) time buckets
    context_kept: Tensor  # (requests, user context tables) 1, or 0 where a row reads as zeros
    num_tokens: Tensor  # (requests,) what attention is divided by
    clocks: Tensor  # (candidates, 2 * cycles) float32


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where tokens go. Their flat order: context tokens, table by table; events; candidates."""

    positions: Tensor  # (events,)
    waits: Tensor  # (events,) time since the event before; 0 for the first
    request_waits: Tensor  # (requests,) time since the last event; 0 without events
    candidate_owner: Tensor  # (candidates,) request of each
    last_tokens: Tensor  # (requests,) flat position of the last token before the candidates
    prefix_slots: Tensor  # (context tokens + events,) request * prefix_len + place
    candidate_slots: Tensor  # (candidates,) request * candidates_len + place
    times: Tensor  # (requests, prefix_len + 1) of the events and then of the request, without context
    num_prefix: Tensor  # (requests,) tokens before the candidates
    query: QueryInputs | None  # in a model with a query frame
    num_requests: int
    prefix_len: int  # tokens before the candidates in the longest request
    candidates_len: int

    @property
    def token_owner(self) -> Tensor:  # (tokens,) request of each
        return torch.cat([self.prefix_slots // max(1, self.prefix_len), self.candidate_owner])

    @classmethod
    def of(cls, batch: RankBatch, config: ModelConfig) -> "Layout":
        lengths, num_user = batch.lengths, len(config.user_context)
        num_context = num_user + len(config.request_context)
        owner, positions = _runs(lengths)
        candidate_owner, candidate_places = _runs(batch.num_candidates)
        requests = torch.arange(lengths.numel(), device=lengths.device)
        times = torch.cat([batch.timestamps.new_zeros(1), batch.timestamps])
        last = torch.where(lengths > 0, times[lengths.cumsum(0)], batch.request_times)
        places = [torch.full_like(lengths, i) if i < num_user else lengths + i for i in range(num_context)]
        prefix_len = num_context + int(lengths.max()) if lengths.numel() else num_context
        candidates_len = int(batch.num_candidates.max()) if lengths.numel() else 0
        candidate_slots = candidate_owner * candidates_len + candidate_places
        if config.retrieval is not None:  # candidates are no tokens
            candidates_len, candidate_slots = 0, candidate_slots[:0]
        padded = batch.timestamps.new_zeros((lengths.numel(), prefix_len + 1))
        if config.attention_bias is not None:  # then a prefix is of events alone
            padded[owner, positions] = batch.timestamps
            padded[requests, lengths] = batch.request_times
        if config.request_context:
            last_tokens = (num_context - 1) * lengths.numel() + requests
        else:
            last_tokens = num_context * lengths.numel() + lengths.cumsum(0) - 1
        return cls(
            positions=positions,
            waits=torch.where(positions == 0, 0, batch.timestamps - times[:-1]),
            request_waits=batch.request_times - last,
            candidate_owner=candidate_owner,
            prefix_slots=torch.cat(
                [*(requests * prefix_len + place for place in places), owner * prefix_len + num_user + positions]
            ),
            candidate_slots=candidate_slots,
            last_tokens=last_tokens,
            times=padded,
            num_prefix=num_context + lengths,
            query=None if config.query_frame is None else _query_inputs(batch, config, config.query_frame),
            num_requests=lengths.numel(),
            prefix_len=prefix_len,
            candidates_len=candidates_len,
        )


def _query_inputs(batch: RankBatch, config: ModelConfig, frame: QueryFrame) -> QueryInputs:
    """Compute them with the functions of the engine, on the host."""
    device, num_user, num_buckets = batch.lengths.device, len(config.user_context), config.time_buckets
    lengths, num_candidates, times = (
        each.cpu().numpy() for each in (batch.lengths, batch.num_candidates, batch.request_times)
    )
    asked = np.stack([times, np.full_like(lengths, num_user), lengths, num_candidates], axis=1).tolist()
    queries = query_arrays(frame, num_buckets, [Query(*each) for each in asked])
    owner, candidate_owner = (np.repeat(np.arange(num.size), num) for num in (lengths, num_candidates))
    index = np.arange(owner.size) - (lengths.cumsum() - lengths)[owner]
    steps_back = np.concatenate([lengths[owner] - index, np.zeros_like(candidate_owner)])
    ages_s = np.concatenate([times[owner] - batch.timestamps.cpu().numpy(), np.zeros_like(candidate_owner)])

    def put(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return QueryInputs(
        positions=put(places(frame, num_user + steps_back)),
        ages=put(age_buckets(frame, num_buckets, ages_s)),
        context_ages=put(queries.context_gaps),
        context_kept=put(queries.context_kept.reshape(lengths.size, num_user)),
        num_tokens=put(queries.lengths),
        clocks=put(queries.clocks[candidate_owner]),
    )


def _runs(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the owner of each of sum(counts) things, and its place among those of its owner."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(owner.numel(), device=counts.device) - (counts.cumsum(0) - counts)[owner]


def _given(request: RankRequest, name: str, table: str | None, num: int) -> IntArray:  # (num,)
    """Return a field of a request, or its values for a table; raise RequestError if there are not `num` of them."""
    values = getattr(request, name)
    if table is not None:
        if table not in values:
            raise RequestError(name, sorted(values), f"a value for {table!r} is needed")
        name, values = f"{name}[{table!r}]", values[table]
    ids = np.atleast_1d(np.asarray(values))
    if ids.shape != (num,) or (num and ids.dtype.kind not in "iu"):
        raise RequestError(name, f"{ids.dtype} {ids.shape}", f"integers of shape ({num},) are needed")
    return ids.astype(np.int64)


def _flat(parts: Iterable[Any]) -> Tensor:  # (all,) int64
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(np.asarray(part, np.int64) for part in parts)]))


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else {name: each.to(device) for name, each in value.items()}


def _check_ids(name: str, values: Tensor | None, num: int, limit: int | None) -> None:
    """Raise RequestError unless `values` are `num` integers of int64 from 0 to below `limit`, if there is one."""
    if values is None:
        raise RequestError(name, None, "ids of this table are needed")
    if values.dtype != torch.int64 or tuple(values.shape) != (num,):
        raise RequestError(name, f"{values.dtype} {tuple(values.shape)}", f"a tensor of torch.int64 ({num},) is needed")
    is_outside = (values < 0) if limit is None else (values < 0) | (values >= limit)
    if (outside := is_outside.nonzero()).numel():
        at, top = int(outside[0]), "" if limit is None else f" to {limit - 1}"
        raise RequestError(f"{name}[{at}]", int(values[at]), f"values run from 0{top}")
