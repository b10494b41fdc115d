"""Ids without a row: refused, or read as the row that a table has for them, with the scores of that row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.cluster.hint import Describer
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError, RequestError, TablesTooSmall
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema, NewEvents, find_beyond
from helmrec.model.config import ModelConfig, TableConfig
from helmrec.model.ranker import HstuRanker
from helmrec.model.weights import LoadedModel, load_model, save_model
from helmrec.serve.metrics import Metrics, ServerView
from helmrec.types import RankRequest
from tests.helpers import random_request, tiny_config, tiny_engine, tiny_model

ROWS = {"item": 299, "category": 0, "country": 2, "hour": 5}  # read for unknown ids of each table
FAR = 2**62


def lenient(table: TableConfig) -> TableConfig:
    return TableConfig(name=table.name, num_rows=table.num_rows, unknown="row", unknown_row=ROWS[table.name])


def lenient_config(**changes: Any) -> ModelConfig:
    plain = tiny_config(**changes)
    fields = ("features", "user_context", "request_context")
    tables = {name: tuple(lenient(table) for table in getattr(plain, name)) for name in fields}
    return ModelConfig(**plain.model_dump() | tables)


def lenient_model() -> LoadedModel:
    return replace(tiny_model(), config=lenient_config())


def with_unknown(request: RankRequest) -> tuple[RankRequest, RankRequest]:
    """The request with unknown ids in every table, and what it must be read as."""
    config = tiny_config()
    first_unknown = {table.name: table.num_rows for table in config.tables}

    def change(name: str, ids: Any, at: list[int], is_mapped: bool) -> Any:
        ids = np.array(ids)
        ids[at] = ROWS[name] if is_mapped else [first_unknown[name], FAR][: len(at)]
        return ids

    return tuple(  # type: ignore[return-value]
        replace(
            request,
            items=change("item", request.items, [0, 3], is_mapped),
            features={"category": change("category", request.features["category"], [1], is_mapped)},
            candidates=change("item", request.candidates, [1], is_mapped),
            candidate_features={"category": change("category", request.candidate_features["category"], [0], is_mapped)},
            context={name: ROWS[name] if is_mapped else FAR for name in request.context},
        )
        for is_mapped in (False, True)
    )


def some_request(seed: int = 1, user: int = 0) -> RankRequest:
    return random_request(np.random.default_rng(seed), tiny_config(), user, num_events=6, request_time=10**6)


def test_scores_are_exactly_those_of_the_row_for_unknown_ids() -> None:
    unknown, mapped = with_unknown(some_request())
    (one,), (other,) = tiny_engine(lenient_model()).rank([unknown]), tiny_engine().rank([mapped])
    assert np.array_equal(one.scores, other.scores)
    engine = tiny_engine(lenient_model())
    for request in (unknown, mapped, unknown):
        (again,) = engine.rank([request])
        np.testing.assert_allclose(again.scores, other.scores, atol=1e-5)
    assert again.reused_tokens == 7, "hashes are of the rows that are read: the same prefix, whatever the id was"
    engine.check()


def test_unknown_ids_are_counted_by_table() -> None:
    engine = tiny_engine(lenient_model())
    unknown, mapped = with_unknown(some_request())
    engine.rank([unknown, mapped])
    engine.rank([unknown])
    counted = {"item": 6, "category": 4, "country": 2, "hour": 2}
    assert engine.stats().unknown_ids == counted
    shown = (
        Metrics(80.0)
        .render(
            ServerView(
                stats=engine.stats(),
                history=None,
                store=None,
                is_ready=True,
                num_restarts=0,
                body_bytes=0,
                replicas=None,
            )
        )
        .decode()
    )
    assert 'helmrec_unknown_ids_total{table="item"} 6.0' in shown


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"items": [300, 1, 2, 3, 4, 5]}, "items[0]"),
        ({"candidates": [1, 2, 10**6]}, "candidates[2]"),
        ({"context": {"country": 10**6, "hour": 1}}, "context['country']"),
    ],
)
def test_unknown_ids_are_refused_unless_the_model_says_otherwise(change: dict[str, Any], field: str) -> None:
    request = replace(some_request(), **change)
    with pytest.raises(RequestError) as caught:
        tiny_engine().rank([request])
    assert caught.value.field == field
    assert tiny_engine(lenient_model()).rank([request])[0].scores.size


@pytest.mark.parametrize("change", [{"items": [-1, 1, 2, 3, 4, 5]}, {"context": {"country": -1, "hour": 1}}])
def test_negative_ids_are_refused_in_any_case(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="got -1"):
        tiny_engine(lenient_model()).rank([replace(some_request(), **change)])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"unknown": "row"}, "unknown='row' needs an unknown_row"),
        ({"unknown_row": 3}, "unknown='refuse' has no unknown_row"),
        ({"unknown": "row", "unknown_row": 9}, "unknown_row must be below num_rows, 9, got 9"),
        ({"unknown": "zero"}, "unknown"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TableConfig(name="item", num_rows=9, **settings)


def test_the_module_scores_unknown_ids_as_the_engine_does(tmp_path: Path) -> None:
    unknown, mapped = with_unknown(some_request())
    torch.manual_seed(0)
    ranker = HstuRanker(lenient_config())
    with torch.no_grad():
        found, expected = ranker([unknown]), ranker([mapped])
    assert torch.equal(found, expected)
    save_model(tmp_path / "model", ranker)
    assert load_model(tmp_path / "model").config.features[0].unknown_row == ROWS["item"]
    engine = Engine.from_model(tmp_path / "model", tiny_engine().config)
    np.testing.assert_allclose(engine.rank([unknown])[0].scores, found.numpy(), atol=1e-4)


def test_stored_histories_keep_ids_for_a_model_that_will_know_them(tmp_path: Path) -> None:
    schema = EventSchema.of_model(lenient_config())
    with EmbeddedHistory(tmp_path, schema) as store:
        store.append("ann", 0, NewEvents([1, 300, FAR], [0, 1, 2], [1, 2, 3], {"category": [1, 20, 2]}))
        events = store.read_last("ann", 10)
    assert events.items.tolist() == [1, 300, FAR]
    assert find_beyond(schema, events) is None
    with pytest.raises(TablesTooSmall, match=r"table 'item' refuses unknown ids.* set unknown='row'"):
        EmbeddedHistory(tmp_path, EventSchema.of_model(tiny_config()))


def test_the_router_sees_the_rows_that_are_read() -> None:
    unknown, mapped = with_unknown(some_request())
    describer = Describer(lenient_config())
    assert describer.hint(unknown) == describer.hint(mapped)
