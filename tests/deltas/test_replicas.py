"""Replicas of a server under one stream: at the same position they give the same scores; a late one joins them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.deltas.producer import DeltaProducer
from helmrec.deltas.schedule import SnapshotPlan, make_snapshot
from helmrec.model.weights import save_model
from helmrec.serve.app import make_app
from helmrec.serve.node import make_port
from helmrec.serve.settings import ServeConfig
from tests.deltas.producing import push_next
from tests.helpers import tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import rank_body
from tests.serve.test_process_port import engine_config

BODIES = [rank_body(user_id=user, candidates=[10 * user, 10 * user + 1]) for user in range(6)]


def serving(folder: Path, **more: Any) -> Caller:
    places = {"row_deltas": str(folder / "deltas"), "row_snapshots": str(folder / "snapshots")}
    config = ServeConfig(**places, policy="none", log_level="error", **more)
    return Caller(make_app(make_port(folder / "tiny", engine_config(), config), config))


class Answers:
    """Asks a replica without a pause, in a thread of its own."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self.is_over = caller, threading.Event()
        self.scores: dict[tuple[int, int], list[float]] = {}  # by position and request
        self.positions: list[int] = []
        self.statuses: set[int] = set()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self.is_over.is_set():
            for number, body in enumerate(BODIES):
                answer = self._caller.post("/v1/rank", body)
                self.statuses.add(answer.status)
                at = answer.json["row_position"]
                assert at["offset"] == 0
                self.positions.append(at["sequence"])
                self.scores[at["sequence"], number] = answer.json["scores"]

    @contextmanager
    def asking(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self.is_over.set()
            self._thread.join()


def assert_equal(a: Answers, b: Answers) -> None:
    both = a.scores.keys() & b.scores.keys()
    assert both, "they have answered at the same position"
    for key in both:
        np.testing.assert_allclose(a.scores[key], b.scores[key], atol=1e-6)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["threads", "processes"])
def test_replicas_agree_and_a_late_one_joins_them(tmp_path: Path, apart: bool) -> None:
    made = tiny_model()
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    plan = SnapshotPlan(model=tmp_path / "tiny", deltas=str(tmp_path / "deltas"), folder=tmp_path / "snapshots")
    plan.folder.mkdir()
    more = {"engine_process": apart}
    with DeltaProducer(plan.deltas) as producer:
        push_next(producer)
        with serving(tmp_path, **more) as one, serving(tmp_path, **more) as two:
            a, b = Answers(one), Answers(two)
            for caller in (one, two):
                caller.wait_until_ready()
            with a.asking(), b.asking():
                push_for(producer, 1.0)
                assert make_snapshot(plan) is not None
                at_join = producer.newest
                with serving(tmp_path, **more) as three:
                    pushing = threading.Thread(target=push_until, args=(producer, three))
                    pushing.start()
                    three.wait_until_ready()
                    c = Answers(three)
                    with c.asking():
                        pushing.join()
                        wait_for(lambda: min(each.positions[-1] for each in (a, b, c)) == producer.newest)
                        wait_for(lambda: all((producer.newest, 5) in each.scores for each in (a, b, c)))
                    stream = three.get("/v1/pool").json["row_stream"]
    assert stream["deltas"] == producer.newest - at_join, "it began at the snapshot"
    for each in (a, b, c):
        assert each.statuses == {200}, "serving goes on for all of them"
        assert each.positions == sorted(each.positions)
    assert len({at for at in a.positions if at > at_join}) > 1, "rows came while the third one started"
    for first, second in ((a, b), (a, c), (b, c)):
        assert_equal(first, second)


def push_for(producer: DeltaProducer, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        push_next(producer)
        time.sleep(0.02)


def push_until(producer: DeltaProducer, caller: Caller) -> None:
    """Push while a server starts, and a little longer."""
    while caller.get("/readyz").status != 200:
        push_for(producer, 0.1)
    push_for(producer, 0.5)
