"""Engines whose rows are mostly on disk: three tiers, faults of the disk, and no wrong score."""

import errno
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from numpy.typing import NDArray

from helmrec.clock import ManualClock, MonotonicClock
from helmrec.config import RelayConfig
from helmrec.engine.engine import Engine
from helmrec.engine.warm_up import warm_up
from helmrec.errors import ConfigError, DiskTooSlow, ModelError, RowLogError, RowsNotSynced, RowsUnreadable
from helmrec.memory.disk_reads import FileReader, Runs
from helmrec.memory.row_frames import RowFrames
from helmrec.model.weights import LoadedModel, load_model, save_model
from helmrec.serve.problems import of_error
from helmrec.types import PrefillRequest, RankRequest, RankResult
from tests.engine.test_cached_equals_uncached import Streams
from tests.helpers import random_request, tiny_engine, tiny_model
from tests.reference import Reference

NUM_FRAMES = 90  # of 349 rows; one request may read 50


def bytes_for(num_frames: int, model: LoadedModel) -> int:
    stride = model.config.row_stride
    num = 4 * model.config.num_rows
    while RowFrames.frames_for(num, model.config.num_rows, stride) < num_frames:
        num += 1
    return num


class FaultyReader(FileReader):
    """Reads files, unless a test says how it fails."""

    fault: Callable[[Runs, NDArray[np.int64]], NDArray[np.int64]] | None = None
    gate = threading.Event()
    reads = 0

    def read(self, runs: Runs, out: NDArray[np.uint8]) -> NDArray[np.int64]:
        self.gate.wait(20)
        FaultyReader.reads += 1
        found = super().read(runs, out)
        return found if FaultyReader.fault is None else FaultyReader.fault(runs, found)


@pytest.fixture(autouse=True)
def _faulty() -> Iterator[None]:
    FaultyReader.fault = None
    FaultyReader.gate.set()
    with patch("helmrec.memory.tiered_rows.FileReader", FaultyReader):
        yield
    FaultyReader.gate.set()


def engine_of(model: LoadedModel, folder: Path, num_frames: int = NUM_FRAMES, **overrides: Any) -> Engine:
    """An engine with most rows of a model in its folder."""
    if not folder.exists():
        save_model(folder, model.config, model.dense, model.tables)
    fixed: dict[str, Any] = {"host_rows_bytes": bytes_for(num_frames, model), "clock": ManualClock()} | overrides
    return tiny_engine(load_model(folder), **fixed)


seen: Counter[str] = Counter()


class DiskStreams(Streams):
    """The same random streams over pool, host memory and disk. The disk fails now and then."""

    keeps_order = False  # a request whose rows are in memory runs before one whose rows are on disk

    def make_engine(self, model: LoadedModel, **settings: Any) -> Engine:
        self.folder = tempfile.TemporaryDirectory()
        self.is_faulty = False
        FaultyReader.fault = None
        return engine_of(model, Path(self.folder.name) / "model", clock=self.clock, **settings)

    @rule(kind=st.sampled_from(["error", "short", "slow"]), every=st.integers(2, 5))
    def break_the_disk(self, kind: str, every: int) -> None:
        """Requests are served by a disk that fails: each gets its scores, or a clear error."""

        def fault(runs: Runs, found: NDArray[np.int64]) -> NDArray[np.int64]:
            if kind == "slow":
                time.sleep(0.002)
                return found
            is_bad = runs.offsets // 4_096 % every == 1
            return np.where(is_bad, -errno.EIO if kind == "error" else runs.needed - 1, found)

        self.is_faulty, FaultyReader.fault = kind != "slow", fault
        try:
            self.rank([(user, "whole", 0.0) for user in range(4)])
        finally:
            self.is_faulty, FaultyReader.fault = False, None
        seen[kind] += 1
        self.rank([(user, "whole", 0.0) for user in range(4)])

    def _compare_with(self, expected: NDArray[Any], request: RankRequest, future: "Future[RankResult]") -> None:
        error = future.exception(timeout=0)
        if self.is_faulty and isinstance(error, RowsUnreadable):
            seen["unreadable"] += 1
            return
        super()._compare_with(expected, request, future)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            tier = self.engine.stats().row_tier
            assert tier is not None
            assert tier.pinned_rows == 0, "rows are held that no request needs"
            seen["disk reads"] += tier.memory_misses
            seen["evictions"] += tier.memory_evictions
            seen["logged"] += tier.log_rows
            self.folder.cleanup()
        super().teardown()


def run_streams(max_examples: int) -> None:
    run_state_machine_as_test(
        seed(3)(DiskStreams),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=25,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_streams_over_three_tiers() -> None:
    run_streams(50)
    assert min(seen[what] for what in ("error", "short", "slow", "unreadable", "evictions", "logged")) > 0, seen
    assert seen["disk reads"] > 1_000


@pytest.mark.parametrize("bug", ["a failed read counts as read", "updates are not logged"])
def test_a_planted_bug_is_noticed(bug: str) -> None:
    publish, log = RowFrames.publish, RowFrames.log
    planted: Any = {
        "a failed read counts as read": lambda self, frames, is_read: publish(self, frames, np.ones_like(is_read)),
        "updates are not logged": lambda self, rows, slots: np.where(
            self._arrays.where[rows] >= 0, self._arrays.where[rows], -1
        ).astype(np.int32),
    }
    name = "publish" if bug == "a failed read counts as read" else "log"
    ends_of_bug = (AssertionError, ExceptionGroup)
    with patch.object(RowFrames, name, planted[bug]), pytest.raises(ends_of_bug):
        run_streams(50)
    assert {publish, log} == {RowFrames.publish, RowFrames.log}


@pytest.fixture(name="model")
def _model() -> LoadedModel:
    return tiny_model()


@pytest.mark.parametrize("row_index", ["host", "device"])
def test_scores_equal_those_with_all_rows_in_memory(model: LoadedModel, tmp_path: Path, row_index: str) -> None:
    rng = np.random.default_rng(0)
    requests = [random_request(rng, model.config, user_id=i % 9, num_events=12) for i in range(40)]
    with engine_of(model, tmp_path / "model", row_index=row_index) as engine, tiny_engine(model) as whole:
        for at in range(0, 40, 5):
            some = requests[at : at + 5]
            for one, other in zip(engine.rank(some), whole.rank(some), strict=True):
                np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)
        engine.check()
        tier = engine.stats().row_tier
    assert tier is not None
    assert tier.memory_misses > NUM_FRAMES
    assert tier.memory_hits > 0
    assert tier.disk_waits > 0
    assert tier.pinned_rows == 0


def test_updates_survive_a_restart_and_leave_the_model_as_it_is(model: LoadedModel, tmp_path: Path) -> None:
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    reference = Reference(model.config, model.dense, model.tables)
    requests = [random_request(rng, model.config, user_id=i, num_events=12) for i in range(8)]
    ids = np.unique(np.concatenate([np.asarray(request.items) for request in requests]))
    values = rng.standard_normal((ids.size, model.config.row_dim)).astype(np.float32)
    reference.update_rows("item", ids.tolist(), values.astype(np.float64))
    with engine_of(model, folder) as engine:
        files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        engine.rank(requests)
        engine.update_rows("item", ids, values)
        for request, result in zip(requests, engine.rank(requests), strict=True):
            np.testing.assert_allclose(result.scores, reference.scores(request), atol=1e-5)
    assert (tmp_path / "model.rows.log").is_file()
    with engine_of(model, folder) as engine:
        for request, result in zip(requests, engine.rank(requests), strict=True):
            np.testing.assert_allclose(result.scores, reference.scores(request), atol=1e-5)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_update_that_cannot_be_logged_changes_nothing(model: LoadedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    request = random_request(rng, model.config, num_events=12)
    with engine_of(model, tmp_path / "model", row_log=str(tmp_path / "nowhere" / "log")) as engine:
        (before,) = engine.rank([request])
        with pytest.raises(RowLogError, match="nowhere"):
            engine.update_rows("item", np.asarray(request.items[:1]), np.ones((1, model.config.row_dim), np.float32))
        (after,) = engine.rank([request])
    np.testing.assert_allclose(before.scores, after.scores, atol=1e-6)


def test_an_update_that_cannot_be_synced_is_served_and_the_error_says_so(model: LoadedModel, tmp_path: Path) -> None:
    request = random_request(np.random.default_rng(0), model.config, num_events=12)
    ids = np.asarray(request.items[:1])
    with engine_of(model, tmp_path / "model") as engine:
        (before,) = engine.rank([request])
        failing = patch("os.fdatasync", side_effect=OSError(errno.EIO, "Input/output error"))
        with failing, pytest.raises(RowsNotSynced, match="Input/output error") as raised:
            engine.update_rows("item", ids, np.ones((1, model.config.row_dim), np.float32))
        (after,) = engine.rank([request])
    assert np.abs(before.scores - after.scores).max() > 1e-4
    problem = of_error(raised.value, "id")
    assert problem.status == 507
    assert problem.type == "urn:helmrec:error:RowsNotSynced"
    assert "the update is served" in problem.detail
    assert str(tmp_path) not in problem.detail


def test_a_fault_fails_one_request_and_the_next_try_succeeds(model: LoadedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    good, bad = (random_request(rng, model.config, user_id=i, num_events=12) for i in range(2))
    with engine_of(model, tmp_path / "model") as engine:
        (known,) = engine.rank([good])
        FaultyReader.fault = lambda runs, found: np.full_like(found, -errno.EIO)
        futures = [engine.submit(bad), engine.submit(good)]
        while not all(future.done() for future in futures):
            engine.step()
        with pytest.raises(RowsUnreadable, match=r"item.safetensors at byte \d+: Input/output error"):
            futures[0].result()
        np.testing.assert_allclose(futures[1].result().scores, known.scores, atol=1e-6)
        FaultyReader.fault = None
        (result,) = engine.rank([bad])
        reference = Reference(model.config, model.dense, model.tables)
        np.testing.assert_allclose(result.scores, reference.scores(bad), atol=1e-5)
        tier = engine.stats().row_tier
        assert tier is not None
        assert tier.disk_errors == 1


def test_a_request_whose_rows_are_there_does_not_wait_for_another(model: LoadedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    slow, fast = (random_request(rng, model.config, user_id=i, num_events=10) for i in range(2))
    with engine_of(model, tmp_path / "model", num_frames=160) as engine:
        engine.rank([fast])
        FaultyReader.gate.clear()
        futures = [engine.submit(slow), engine.submit(fast)]
        while not futures[1].done():
            engine.step()
        assert not futures[0].done()
        FaultyReader.gate.set()
        while not futures[0].done():
            engine.step()
        assert futures[0].result().scores.size


def test_a_deadline_that_the_disk_cannot_meet_is_refused_early(model: LoadedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def slow(runs: Runs, found: NDArray[np.int64]) -> NDArray[np.int64]:
        time.sleep(0.05)
        return found

    with engine_of(model, tmp_path / "model", clock=MonotonicClock()) as engine:
        engine.rank([random_request(rng, model.config, user_id=0, num_events=12)])
        FaultyReader.fault = slow
        for user in range(1, 6):  # the disk is known to be slow now
            engine.rank([random_request(rng, model.config, user_id=user, num_events=12)])
        FaultyReader.gate.clear()
        began_s = time.monotonic()
        future = engine.submit(random_request(rng, model.config, user_id=9, num_events=12, deadline_ms=15.0))
        while not future.done():
            engine.step()
        assert time.monotonic() - began_s < 10
        with pytest.raises(DiskTooSlow, match=r"would pass while \d+ rows are read from disk"):
            future.result()
        FaultyReader.gate.set()
        assert engine.stats().refused == 1


def test_audits_read_rows_that_no_step_holds(model: LoadedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with engine_of(model, tmp_path / "model", audit_every=1) as engine:
        for user in (0, 1, 2, 0, 1):
            engine.rank([random_request(rng, model.config, user_id=user, num_events=12)])
        stats = engine.stats()
    assert (stats.audits, stats.audit_mismatches, stats.background_failures) == (5, 0, 0)


def test_too_little_memory_says_how_much_is_needed(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_rows_bytes must be at least \d+ for the index of 349 rows and the 50"):
        engine_of(model, tmp_path / "model", num_frames=20)
    with pytest.raises(ConfigError, match="a model that is not in a folder"):
        tiny_engine(model, host_rows_bytes=100_000)


def test_a_log_of_another_model_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with engine_of(model, folder) as engine:
        engine.update_rows("item", [1], np.ones((1, model.config.row_dim), np.float32))
    other = tmp_path / "other"
    with pytest.raises(ModelError, match="updates of another model"):
        engine_of(tiny_model(seed=1), other, row_log=str(tmp_path / "model.rows.log"))


def test_rows_that_were_hot_are_in_memory_before_the_first_request(model: LoadedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    request = random_request(rng, model.config, num_events=12)
    with engine_of(model, tmp_path / "model") as engine:
        engine.rank([request])
        rows = np.arange(60)
        engine.warm(rows)
        tier = engine.stats().row_tier
        assert tier is not None
        assert tier.resident_rows >= 60
        engine.rank([request])
        engine.check()


def test_an_engine_with_rows_on_disk_warms_up_and_leaves_no_log(model: LoadedModel, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "model", clock=MonotonicClock()) as engine:
        warm_up(engine)
        engine.check()
    assert not (tmp_path / "model.rows.log").exists()


def test_a_history_whose_rows_cannot_be_read_is_not_computed_ahead(model: LoadedModel, tmp_path: Path) -> None:
    """Its lease ends and nothing is tried again, while the disk keeps failing."""
    FaultyReader.fault = lambda runs, found: np.full_like(found, -errno.EIO)
    asked = random_request(np.random.default_rng(0), model.config, user_id=1, num_events=30)
    history = {name: getattr(asked, name) for name in ("user_id", "items", "actions", "timestamps", "features")}
    context = {table.name: asked.context[table.name] for table in model.config.user_context}
    with engine_of(model, tmp_path / "model", relay=RelayConfig(risk=0.0)) as engine:
        result = engine.prefill(PrefillRequest(**history, context=context, num_candidates=4))
        assert result.lease is not None
        for _ in range(200):
            if not engine.step():
                break
            time.sleep(0.001)
        else:
            pytest.fail("the engine tries for ever")
        assert engine.stats().relay.leases == 0
