"""The dense stage as graphs, without a card: a graph is a function here that runs again over the same buffers.

What is not shown without a card: that the work can be captured at all, and the order of streams.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.config import EngineConfig
from helmrec.engine import row_graphs, setup
from helmrec.engine.capture import GraphMaker
from helmrec.engine.dense import Dense, Memory
from helmrec.engine.engine import Engine
from helmrec.engine.graphs import DeviceClock, GraphedDense, GraphLaunch
from helmrec.engine.probe import EngineProbe
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.staging import BlockPart
from helmrec.memory.arena import Arena
from helmrec.memory.geometry import PageGeometry
from helmrec.model.hstu import HstuModel
from tests.helpers import OPTIONS, QUERY_FRAMES, random_request, tiny_engine, tiny_model

COPIES_TO_CARD = 2  # of a step
FRAMES: dict[str, dict[str, Any]] = {"no option": {}, **QUERY_FRAMES}


class Stream:
    """Runs everything at once."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class Event:
    """Has always happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class Replayed:
    """Stands for a captured graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    @torch.inference_mode()
    def replay(self) -> None:
        self._work()


def capture(maker: GraphMaker, work: Callable[[], None]) -> Replayed:
    with torch.inference_mode():
        work()
    return Replayed(work)


def graphed(hstu: HstuModel, arena: Arena, geometry: PageGeometry, rows: Any, config: EngineConfig) -> Dense:
    assert isinstance(rows, DeviceRowStage)
    rows.cache.stream = rows.stream = Stream()  # type: ignore[assignment]
    return GraphedDense(
        hstu, Memory(arena.k_pages, arena.v_pages), rows, setup.graph_limits(hstu.config, geometry, config)
    )


@pytest.fixture
def _no_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("Stream", Stream), ("Event", Event), ("graph_pool_handle", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("synchronize", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(GraphMaker, "capture", capture)
    monkeypatch.setattr(setup, "_make_dense", graphed)
    yield


def engine_of(option: dict[str, Any]) -> Engine:
    settings: dict[str, Any] = {"row_index": "device", "max_batch_requests": 3, "max_batch_tokens": 96}
    if "query_frame" not in option:
        settings["kv_admission"] = "always"
    return tiny_engine(tiny_model(**option), **settings)


@pytest.mark.usefixtures("_no_card")
@pytest.mark.parametrize("option", FRAMES | OPTIONS)
def test_steps_as_graphs_score_every_option_as_single_operations_do(option: str) -> None:
    engine = engine_of((FRAMES | OPTIONS)[option])
    model, rng = engine.model_config, np.random.default_rng(0)
    assert engine.report().num_graphs > 0
    histories = {user: random_request(rng, model, user, 24) for user in range(5)}
    for i in range(25):
        requests = []
        for user in rng.choice(5, int(rng.integers(1, 5)), replace=False):
            whole, length = histories[int(user)], int(rng.integers(model.unkept_events, 24))
            requests.append(
                random_request(
                    rng,
                    model,
                    int(user),
                    num_candidates=int(rng.integers(1, 9)),
                    items=whole.items[:length],
                    actions=whole.actions[:length],
                    timestamps=whole.timestamps[:length],
                    features={"category": whole.features["category"][:length]},
                    request_time=10_000 + 977 * i if i % 2 else None,
                )
            )
        for request, result in zip(requests, engine.rank(requests), strict=True):
            plain = engine._runner.score_without_caches(engine._intake.prepare(request))
            assert np.abs(result.scores - plain).max() < 1e-5
        engine.check()
    assert (engine.stats().pool.reused_tokens > 0) == model.is_append_stable


@pytest.mark.usefixtures("_no_card")
def test_rows_are_admitted_by_the_graphs_that_read_them_where_slots_are_assigned_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches = []
    for assigned_beside_from in (1, 1 << 30):
        monkeypatch.setattr(row_graphs, "_ASSIGN_BESIDE", assigned_beside_from)
        rng, done = np.random.default_rng(0), list[tuple[int, int]]()
        engine = engine_of({})
        requests = [random_request(rng, engine.model_config, user % 4, 9 + user) for user in range(12)]
        results = [engine.rank([request])[0] for request in requests]
        engine.check()
        EngineProbe(engine).dense.warm_up(lambda num, total, done=done: done.append((num, total)))  # type: ignore[misc]
        assert done[-1] == (engine.report().num_graphs,) * 2
        caches.append(([result.row_misses for result in results], engine.hot_rows().tolist()))
        assert sum(result.row_hits for result in results) > 0
    assert caches[0] == caches[1]


@pytest.mark.usefixtures("_no_card")
def test_what_a_step_sends_stays_in_its_block_until_the_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a step may run late: the next step must be laid out elsewhere."""
    send, wait, sent, waits = BlockPart.send, GraphLaunch.wait, deque[tuple[torch.Tensor, torch.Tensor]](), list[int]()

    def noted_send(part: BlockPart, turn: int) -> None:
        sent.append((part.hosts[turn], part.hosts[turn].clone()))
        send(part, turn)

    def checked_wait(launch: GraphLaunch) -> Any:
        waits.append(len(sent))
        for _ in range(COPIES_TO_CARD):
            block, before = sent.popleft()
            assert torch.equal(block, before), "the block of a running step was overwritten"
        return wait(launch)

    engine, rng = engine_of({}), np.random.default_rng(0)
    monkeypatch.setattr(BlockPart, "send", noted_send)
    monkeypatch.setattr(GraphLaunch, "wait", checked_wait)
    futures = [engine.submit(random_request(rng, engine.model_config, user, 9 + user)) for user in range(12)]
    while engine.step():
        pass
    for future in futures:
        future.result(timeout=0)
    assert not sent, "a step made another number of copies"
    assert max(waits) == 2 * COPIES_TO_CARD, "two steps were meant to be in flight"


def test_an_event_that_is_recorded_again_dates_no_other() -> None:
    clock, events = DeviceClock(), [Event(), Event()]
    assert clock.wait(events[0]) == 0.0, "nothing is known of the past yet"  # type: ignore[arg-type]
    assert clock.wait(events[1]) > 0.0, "it happened when the first one did"  # type: ignore[arg-type]
    clock.forget(events[0])  # type: ignore[arg-type]
    assert clock.wait(events[0]) > 0.0, "another event was dated since"  # type: ignore[arg-type]
    clock.forget(events[0])  # type: ignore[arg-type]
    assert clock.wait(events[1]) == 0.0  # type: ignore[arg-type]
