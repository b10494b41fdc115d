"""Random streams of deltas, between steps and while steps run: every answer has the scores of the position it states.

Expected scores come from a float64 reference without caches, whose tables are made from the deltas alone. Planted bugs
show that the comparison would notice.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helmrec.deltas import consumer as consumer_module
from helmrec.deltas.consumer import ConsumerLimits, RowConsumer
from helmrec.deltas.delta import Delta, TablePart
from helmrec.engine.engine import Engine
from helmrec.engine.runner import Runner, Running
from helmrec.kernels import row_write
from helmrec.kernels.row_write import RowTargets
from helmrec.memory.kv_cache import KVCache
from helmrec.memory.prefix import EpochRun, KVPlan
from helmrec.model.weights import LoadedModel
from helmrec.types import RankRequest, RankResult, RowPosition
from tests.helpers import random_request, tiny_engine, tiny_model
from tests.reference import Reference

TOLERANCE = 1e-5  # rows may be stored in float16, and are computed with in float32
NUM_USERS = 4
NUM_EVENTS = 40
seen: Counter[str] = Counter()


class Journal:
    """A third party's source that also knows the tables at every position."""

    name = "a journal"

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._first = {name: rows.clone() for name, rows in model.tables.items()}  # an engine writes to the model's own
        self._deltas: list[Delta] = []
        self._references: dict[RowPosition, Reference] = {}

    def read(self, after: int) -> Iterator[Delta]:
        yield from self._deltas[after:]

    def newest(self) -> int:
        return len(self._deltas)

    def close(self) -> None: ...

    def add(self, parts: tuple[TablePart, ...]) -> None:
        self._deltas.append(Delta("s", len(self._deltas) + 1, 0, time.time(), parts))

    def tables_at(self, position: RowPosition) -> dict[str, torch.Tensor]:
        """Every delta up to the position, one row at a time, as the master keeps rows."""
        tables = {name: rows.clone() for name, rows in self._first.items()}
        for delta in self._deltas[: position.sequence + bool(position.offset)]:
            left = delta.num_rows if delta.sequence <= position.sequence else position.offset
            for part in delta.parts:
                table = tables[part.table]
                for row, value in list(zip(part.ids, torch.from_numpy(np.array(part.values)), strict=True))[:left]:
                    new = table[row].float() + value.float() if part.is_difference else value
                    table[row] = new.to(table.dtype)
                left = max(0, left - part.ids.size)
        return tables

    def scores(self, position: RowPosition, request: RankRequest) -> NDArray[np.float64]:
        if position not in self._references:
            model = self._model
            self._references[position] = Reference(model.config, model.dense, self.tables_at(position))
        return self._references[position].scores(request)


class Stream:
    """Four users whose histories grow, an engine that serves them, and a stream of deltas of the rows they read."""

    def __init__(self, seed: int, shape: dict[str, Any], settings: dict[str, Any], *, is_threaded: bool) -> None:
        """`shape` is of the model, `settings` of the engine: they go before what the seed says."""
        self.rng = rng = np.random.default_rng(seed)
        self.model = tiny_model(seed % 3, **{"row_dtype": str(rng.choice(["float32", "float16"]))} | shape)
        self.journal = Journal(self.model)
        drawn: dict[str, Any] = {
            "alpha": float(rng.choice([0.1, 0.1, 0.4])),
            "overlap": bool(rng.integers(4)),
            "row_index": str(rng.choice(["host", "device"])),
            "row_admission": "always",
            "kv_admission": "always",
            "max_batch_requests": 3,
            "audit_every": int(rng.choice([0, 3])),
            "host_kv_bytes": int(rng.choice([0, 40_000])),
        }
        self.engine = tiny_engine(self.model, **drawn | settings)
        self.is_threaded = is_threaded
        limits = ConsumerLimits(slice_rows=int(rng.integers(1, 12)))
        self.consumer = RowConsumer(self.journal, self.engine, limits=limits)
        self.histories = [random_request(rng, self.model.config, user, NUM_EVENTS) for user in range(NUM_USERS)]
        self.ends = rng.integers(1, 16, NUM_USERS)
        self.waiting: list[tuple[RankRequest, Future[RankResult]]] = []
        self.is_over = threading.Event()

    def run(self, tolerance: float = TOLERANCE) -> None:
        self.consumer.start()
        applier = threading.Thread(target=self._apply_until_over)
        if self.is_threaded:
            applier.start()
        try:
            for _ in range(30):
                self._do_something()
            while self.engine.step():
                self._apply()
            self._reach(self.journal.newest())
        finally:
            self.is_over.set()
            if self.is_threaded:
                applier.join()
            self.consumer.close()
        self._check(tolerance)

    def _do_something(self) -> None:
        match self.rng.choice(["ask", "ask", "train", "step", "step", "apply"]):
            case "ask":
                for user in self.rng.choice(NUM_USERS, int(self.rng.integers(1, 4)), replace=False):
                    self._ask(int(user))
            case "train":
                self._train()
            case "step":
                self.engine.step()
            case _:
                self._apply()

    def _apply_until_over(self) -> None:
        while not self.is_over.is_set():
            self.consumer.apply(time.monotonic())
            time.sleep(0.0002)

    def _apply(self) -> None:
        if self.is_threaded:
            return
        while self.engine.row_position.sequence < self.journal.newest() and not self.consumer._ahead:
            time.sleep(0.0002)  # let the reader run
        before, is_running = self.engine.row_position, not self.engine._pipeline.is_empty
        self.consumer.apply(time.monotonic())
        if self.engine.row_position != before:
            seen["written while a step runs"] += is_running and not self.engine._pipeline.is_empty

    def _ask(self, user: int) -> None:
        if self.rng.random() < 0.6:
            self.ends[user] = min(NUM_EVENTS, self.ends[user] + int(self.rng.integers(1, 4)))
        whole, end = self.histories[user], int(self.ends[user])
        request = random_request(
            self.rng,
            self.model.config,
            user,
            items=whole.items[:end],
            actions=whole.actions[:end],
            timestamps=whole.timestamps[:end],
            features={name: ids[:end] for name, ids in whole.features.items()},
            context=whole.context,
        )
        self.waiting.append((request, self.engine.submit(request)))

    def _train(self) -> None:
        """New rows or differences of one or two tables, mostly of recent events; sometimes a skipped number."""
        rng, parts, end = self.rng, [], int(self.ends.max())
        start = int(rng.choice([0, self.ends.min()]))
        for table in rng.choice(["item", "category"], int(rng.integers(0, 3)), replace=False):
            read = np.concatenate(
                [(h.items if table == "item" else h.features[table])[start:end] for h in self.histories]
            )
            ids = rng.permutation(np.unique(read))[: int(rng.integers(1, 9))]
            values = (rng.standard_normal((ids.size, self.model.config.row_dim)) / 8).astype(np.float32)
            parts.append(TablePart(str(table), ids.astype(np.int64), values, bool(rng.integers(2))))
        self.journal.add(tuple(parts))

    def _reach(self, position: int) -> None:
        end = time.monotonic() + 20
        while self.consumer.stats().position < position:
            self._apply()
            assert time.monotonic() < end, self.consumer.stats()

    def _check(self, tolerance: float) -> None:
        for request, future in self.waiting:
            result = future.result(timeout=0)
            at = result.row_position
            worst = np.abs(result.scores - self.journal.scores(at, request)).max()
            assert worst <= tolerance, f"off by {worst:.2g} at {at}"
            seen["answers"] += 1
            seen["reused"] += result.reused_tokens > 0
            seen["inside a delta"] += at.offset > 0
            seen["behind a delta"] += at.sequence > 0
        self.engine.check()
        stats = self.engine.stats()
        assert (stats.audit_mismatches, stats.background_failures) == (0, 0), "off by an audit"
        seen.update({"stale cuts": stats.pool.stale_cuts, "audits": stats.audits, "streams": 1})
        last = self.journal.tables_at(RowPosition(self.journal.newest()))
        offsets = self.model.config.offsets
        self.engine._dense.rows.finish_writes()
        for name, rows in last.items():
            found = self.engine._master.gather(np.arange(len(rows)) + offsets[name])
            assert torch.equal(found, rows), f"rows of {name} are off by a delta"


@pytest.fixture(autouse=True)
def _reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_module, "_POLL_S", 0.0005)


def run(first: int, num_streams: int) -> None:
    seen.clear()
    for seed in range(first, first + num_streams):
        stream = Stream(seed, {}, {}, is_threaded=seed % 4 == 0)
        with stream.engine:
            stream.run()
    places = ["reused", "inside a delta", "behind a delta", "written while a step runs", "stale cuts", "audits"]
    assert all(seen[place] for place in places), dict(seen)


def test_cached_equals_uncached_at_the_stated_position() -> None:
    run(0, 40)


@pytest.mark.slow
def test_cached_equals_uncached_at_the_stated_position_in_a_thousand_streams() -> None:
    """Other streams each time, by the clock."""
    run(time.time_ns() % 2**40, 1_000)


def stamp_with_the_newest_epoch(self: KVCache, plan: KVPlan, *args: Any, **kwargs: Any) -> None:
    """KV of a step counts as computed when it ends, not when its rows were read."""
    if plan.prefix is not None and plan.num_new:
        plan.prefix.made_at.append(EpochRun(plan.num_resident, self._epochs.current))
    COMMIT(self, plan, *args, **kwargs)


def admit_old_rows(self: Runner, running: Running) -> None:
    """Rows that a step has read are kept, although they have changed since."""
    running.launched.admit()


def keep_old_copies(values: Any, rows: Any, first: int, num: int, targets: RowTargets, **_: Any) -> None:
    """An update that reaches the master only."""
    assert targets.master is not None
    targets.master[rows[first : first + num]] = values[first : first + num]


def write_the_first_slice_again(values: Any, rows: Any, first: int, num: int, targets: RowTargets, **_: Any) -> None:
    """Every slice of a delta writes the values of its first one."""
    WRITE(values, rows, 0, num, targets)


def name_the_position_of_the_end(self: Runner, running: Running) -> Any:
    """An answer states the position at its step's end."""
    output = FINISH(self, running)
    return output._replace(running=running._replace(row_position=self.row_position))


COMMIT, FINISH, WRITE = KVCache.commit, Runner.finish, row_write.write_rows
PLANTED: list[tuple[Any, str, Callable[..., Any]]] = [
    (KVCache, "commit", stamp_with_the_newest_epoch),
    (Runner, "admit", admit_old_rows),
    (row_write, "write_rows", keep_old_copies),
    (row_write, "write_rows", write_the_first_slice_again),
    (Runner, "finish", name_the_position_of_the_end),
]


@pytest.mark.parametrize(("where", "name", "bug"), PLANTED, ids=[bug.__name__ for _, _, bug in PLANTED])
def test_a_planted_bug_is_caught(
    where: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(AssertionError, match="off by"):
        run(0, 200)


def test_an_update_does_not_end_the_running_step() -> None:
    rng = np.random.default_rng(0)
    with tiny_engine(tiny_model(), overlap=True) as engine:
        first, second = (engine.submit(random_request(rng, engine.model_config, user)) for user in range(2))
        engine.step()
        engine.update_rows("item", [1, 2], np.ones((2, 16), np.float32))
        assert not engine._pipeline.is_empty
        assert not first.done()
        while engine.step():
            pass
        assert first.done()
        assert second.done()


def test_a_step_that_is_audited_ends_before_rows_change() -> None:
    rng = np.random.default_rng(0)
    with tiny_engine(tiny_model(), overlap=True, audit_every=1) as engine:
        future = _submit(engine, rng)
        engine.step()
        engine.update_rows("item", np.arange(300), np.ones((300, 16), np.float32))
        assert future.done()
        assert (engine.stats().audits, engine.stats().audit_mismatches) == (1, 0)


def _submit(engine: Engine, rng: np.random.Generator) -> "Future[RankResult]":
    return engine.submit(random_request(rng, engine.model_config))
