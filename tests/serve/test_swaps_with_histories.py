"""Models are swapped under a server that keeps histories: random streams, against a cache-free reference.

Whatever the served model has rows for may be appended, nothing else; every stored history can be ranked, with the
scores of the served model; a swap that would lock users out is refused. Planted faults show that it would notice.
"""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from helmrec.config import EngineConfig
from helmrec.errors import TablesTooSmall
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema
from helmrec.model.config import ITEM, TableConfig
from helmrec.model.weights import LoadedModel, save_model
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.node import make_port
from helmrec.serve.settings import ServeConfig
from helmrec.types import RankRequest
from tests.helpers import TINY_PAGES, tiny_engine, tiny_geometry, tiny_model
from tests.history.places import running_redis
from tests.reference import Reference
from tests.serve.asgi import Caller, Reply, send
from tests.serve.cases import events_body, stored_body
from tests.serve.conftest import TOKEN

ADMIN = {"authorization": f"Bearer {TOKEN}"}
EVENTS = "/v1/events"
TOLERANCE = 1e-5
CONFIG = HistoryConfig(sync="os", map_bytes=1 << 20, read_timeout_ms=60_000, write_timeout_ms=60_000)
NUM_USERS = 3
seen: Counter[str] = Counter()


def sized(seed: int, num_items: int, num_categories: int = 20, num_actions: int = 4) -> LoadedModel:
    tables = (TableConfig(name=ITEM, num_rows=num_items), TableConfig(name="category", num_rows=num_categories))
    return tiny_model(seed, features=tables, num_actions=num_actions)


MODELS = {
    "first": sized(0, 300),
    "trained": sized(1, 300),
    "grown": sized(2, 500),
    "wider": sized(3, 500, num_categories=30),
    "shrunk": sized(4, 100),
    "mixed": sized(5, 900, num_categories=10),
    "fewer": sized(6, 900, 30, num_actions=3),
}
SIZES = {
    name: (m.config.features[0].num_rows, m.config.features[1].num_rows, m.config.num_actions)
    for name, m in MODELS.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        save_model(folder / name, model.config, model.dense, model.tables)
    return folder


@contextmanager
def serving(folder: Path, place: Path | str, name: str = "first", *, is_apart: bool = False) -> Iterator[Caller]:
    pool_bytes = TINY_PAGES * tiny_geometry(tiny_model().config).page_bytes
    serve = ServeConfig(
        engine_process=is_apart, ring_bytes=1 << 20, log_level="error", admin_token=TOKEN, models_path=str(folder)
    )
    port = make_port(folder / name, EngineConfig(pool_bytes=pool_bytes, page_tokens=4), serve)
    with Caller(make_app(port, serve, StoredHistories.open(place, port.model, CONFIG))) as caller:
        caller.wait_until_ready()
        yield caller


@pytest.fixture(params=["folder", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    if request.param == "folder":
        yield tmp_path / "histories"
        return
    pytest.importorskip("redis", reason="helmrec[cluster] is not installed")
    with tempfile.TemporaryDirectory(prefix="redis-") as redis, running_redis(Path(redis)) as url:
        yield url


def swap(caller: Caller, name: str) -> Any:
    return caller.post("/v1/admin/model", {"name": name}, ADMIN)


@pytest.mark.parametrize("is_apart", [False, True], ids=["in process", "apart"])
def test_events_follow_the_swapped_model_and_a_shrinking_swap_is_refused(
    folder: Path, place: Path | str, is_apart: bool
) -> None:
    with serving(folder, place, is_apart=is_apart) as caller:
        assert caller.post(EVENTS, events_body(0, items=[1, 2, 299])).status == 200
        assert caller.post(EVENTS, events_body(3, items=[400] * 3, timestamps=[40] * 3)).status == 400
        assert swap(caller, "grown").status == 200
        assert caller.post(EVENTS, events_body(3, items=[400] * 3, timestamps=[40] * 3)).json["version"] == 6
        for name, told in (
            ("first", "table 'item' has 300 rows, the events kept in the history store were taken for 500"),
            ("mixed", "table 'category' has 10 rows, the events kept in the history store were taken for 20"),
            ("fewer", "table 'actions' has 3 rows, the events kept in the history store were taken for 4"),
        ):
            refused = swap(caller, name)
            assert (refused.status, refused.json["type"]) == (400, "urn:helmrec:error:ModelError")
            assert told in refused.json["detail"]
        ranked = caller.post("/v1/rank", stored_body()).json
        assert ranked["history_version"] == 6
        np.testing.assert_allclose(ranked["scores"], wanted("grown"), atol=TOLERANCE)


def wanted(name: str) -> Any:
    """Scores of the stored history of the test above."""
    request = RankRequest(
        **stored_body(),
        items=[1, 2, 299, 400, 400, 400],
        actions=[0, 1, 2] * 2,
        timestamps=[10, 20, 30, 40, 40, 40],
        features={"category": [1, 1, 2] * 2},
    )
    return tiny_engine(MODELS[name]).rank([request])[0].scores


def test_a_server_is_not_started_with_a_model_that_lacks_rows_of_kept_events(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "kept") as caller:
        assert caller.post(EVENTS, events_body(0)).status == 200
    with pytest.raises(TablesTooSmall, match=r"table 'item' has 100 rows, .* were taken for 300"):
        StoredHistories.open(tmp_path / "kept", MODELS["shrunk"].config, CONFIG)


Event = tuple[int, int, int, int]  # item, category, action, timestamp


class SwapsWithHistories(RuleBasedStateMachine):
    """A few users whose events are kept, while the model changes."""

    models: Path

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.place = tempfile.TemporaryDirectory()
        self.served = "first"
        self.kept: list[list[Event]] = [[] for _ in range(NUM_USERS)]
        self.running = ExitStack()
        self.caller = self.running.enter_context(serving(self.models, self.place.name))

    @rule(user=st.integers(0, NUM_USERS - 1), num=st.integers(1, 5), beyond=st.sampled_from([None, None, 0, 1, 2]))
    def append(self, user: int, num: int, beyond: int | None) -> None:
        """Up to the last row of the served model, or one beyond it in one of the tables."""
        new = [self._event(user, SIZES[self.served]) for _ in range(num)]
        if beyond is not None:
            wrong = list(new[-1])
            wrong[beyond] = SIZES[self.served][beyond]
            new[-1] = (wrong[0], wrong[1], wrong[2], wrong[3])
        reply = self.caller.post(EVENTS, self._body(user, new))
        assert reply.status == (200 if beyond is None else 400), f"{self.served} {new}: {reply.body!r}"
        if beyond is None:
            self.kept[user] += new
        seen["appends"] += beyond is None
        seen["appends beyond"] += beyond is not None

    @rule(name=st.sampled_from([*MODELS, "trained", "grown", "wider"]), user=st.integers(0, NUM_USERS - 1))
    def swap(self, name: str, user: int) -> None:
        """With appends on their way that either model takes."""
        fits = self._fits(name)
        either = tuple(min(sizes) for sizes in zip(SIZES[name], SIZES[self.served], strict=True))
        new = [self._event(user, either) for _ in range(3)]

        async def both() -> list[Reply]:
            headers = {**ADMIN, "content-type": "application/json"}
            body, events = json.dumps({"name": name}).encode(), json.dumps(self._body(user, new)).encode()
            swapping = asyncio.create_task(send(self.caller.app, "POST", "/v1/admin/model", body, headers))
            await asyncio.sleep(float(self.rng.random()) * 0.02)
            appended = await send(self.caller.app, "POST", EVENTS, events)
            return [await swapping, appended]

        swapped, appended = self.caller.run(both())
        assert appended.status == 200, f"an append failed: {appended.body!r}"
        self.kept[user] += new
        assert swapped.status == (200 if fits else 400), f"{self.served} to {name}: {swapped.body!r}"
        if fits:
            self.served = name
        seen["swaps" if fits else "refused swaps"] += 1
        seen["grown tables"] += fits and name in {"grown", "wider"}
        self.append(user, 1, None)  # now, whatever was faster, the store has followed the served model

    @rule(user=st.integers(0, NUM_USERS - 1))
    def rank(self, user: int) -> None:
        reply = self.caller.post("/v1/rank", stored_body(user_id=user))
        assert reply.status == 200, f"a user is locked out: {reply.body!r}"
        assert reply.json["history_version"] == len(self.kept[user])
        columns = np.array(self.kept[user], np.int64).reshape(-1, 4).T
        history = {"items": columns[0], "actions": columns[2], "timestamps": columns[3]}
        request = RankRequest(**stored_body(user_id=user), **history, features={"category": columns[1]})
        model = MODELS[self.served]
        expected = Reference(model.config, model.dense, model.tables).scores(request)
        worst = np.abs(np.array(reply.json["scores"]) - expected).max()
        assert worst <= TOLERANCE, f"off by {worst:.2g} with {self.served}"
        seen["reused"] += reply.json["reused_tokens"] > 1

    @rule()
    def rank_all(self) -> None:
        for user in [*range(NUM_USERS)] * 3:  # a prefix is kept from the second visit on, and used at the third
            self.rank(user)

    @rule(user=st.integers(0, NUM_USERS - 1))
    def forget(self, user: int) -> None:
        assert self.caller.delete(f"/v1/users/{user}").json["had_events"] == bool(self.kept[user])
        self.kept[user] = []

    @rule(name=st.sampled_from([*MODELS, "served"]))
    def restart(self, name: str) -> None:
        """With any model whose tables are no smaller, or, if nothing is kept, with any at all."""
        self.running.close()
        too_small = [other for other in MODELS if any(self.kept) and not self._fits(other)]
        for other in too_small:
            assert self._is_refused_by_the_store(other), f"{self.served}, then {other}: users would be locked out"
        if name in MODELS and name not in too_small:
            self.served = name
        seen["refused starts"] += len(too_small)
        self.caller = self.running.enter_context(serving(self.models, self.place.name, self.served))
        seen["restarts"] += 1

    def _fits(self, name: str) -> bool:
        return all(new >= old for new, old in zip(SIZES[name], SIZES[self.served], strict=True))

    def _is_refused_by_the_store(self, name: str) -> bool:
        try:
            EmbeddedHistory(self.place.name, EventSchema.of_model(MODELS[name].config), CONFIG).close()
        except TablesTooSmall:
            return True
        return False

    def _event(self, user: int, sizes: tuple[int, ...]) -> Event:
        last = self.kept[user][-1][3] if self.kept[user] else 10
        at = [size - 1 if self.rng.random() < 0.5 else int(self.rng.integers(size)) for size in sizes]
        return at[0], at[1], at[2], last

    def _body(self, user: int, new: list[Event]) -> dict[str, Any]:
        items, categories, actions, timestamps = (list(line) for line in zip(*new, strict=True))
        history = {"items": items, "actions": actions, "timestamps": timestamps, "features": {"category": categories}}
        return {"user_id": user, "base_version": len(self.kept[user]), **history}

    def teardown(self) -> None:
        if hasattr(self, "running"):
            self.running.close()
            self.place.cleanup()


def run(num_streams: int, models: Path, **extra: Any) -> None:
    seen.clear()
    SwapsWithHistories.models = models
    options: dict[str, Any] = {
        "max_examples": num_streams,
        "stateful_step_count": 20,
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }
    run_state_machine_as_test(SwapsWithHistories, settings=settings(**options | extra))


def assert_streams_went_everywhere() -> None:
    places = [
        "appends",
        "appends beyond",
        "swaps",
        "refused swaps",
        "grown tables",
        "reused",
        "restarts",
        "refused starts",
    ]
    assert all(seen[place] for place in places), dict(seen)


def test_streams_of_swaps_and_appends_never_lock_a_user_out(folder: Path) -> None:
    run(15, folder)
    assert_streams_went_everywhere()


@pytest.mark.slow
def test_a_thousand_streams_of_swaps_and_appends_never_lock_a_user_out(folder: Path) -> None:
    run(1_000, folder, derandomize=False)
    assert_streams_went_everywhere()


async def stay_with_the_first_model(self: StoredHistories, model: Any) -> None:
    """The store keeps the limits of the model it was opened for."""


async def let_any_model_in(self: StoredHistories, model: Any, served: Any) -> None:
    """A swap is not held against what is kept."""


def follow_without_a_note(self: EmbeddedHistory, schema: Any) -> None:
    """The store takes events for larger tables, and forgets that it did."""
    self._schema = schema


PLANTED: list[tuple[Any, str, Callable[..., Any]]] = [
    (StoredHistories, "_follow", stay_with_the_first_model),
    (StoredHistories, "check_swap", let_any_model_in),
    (EmbeddedHistory, "follow", follow_without_a_note),
]


@pytest.mark.parametrize(("where", "name", "bug"), PLANTED, ids=[bug.__name__ for _, _, bug in PLANTED])
def test_a_planted_bug_is_caught(
    where: Any, name: str, bug: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(AssertionError):
        run(100, folder, phases=(Phase.generate,), derandomize=True, report_multiple_bugs=False)
