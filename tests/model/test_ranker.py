"""The module that users train computes what the engine serves, and every weight of it learns."""

from typing import Any

import numpy as np
import pytest
import torch

from helmrec.errors import RequestError
from helmrec.model import EncoderConfig, HstuRanker, RankBatch, RetrievalHead, TableConfig
from helmrec.model.config import ITEM, ModelConfig
from helmrec.model.ranker import Rows
from helmrec.model.weights import LoadedModel
from helmrec.model.window import gap_bucket
from helmrec.types import RankRequest
from tests.helpers import OPTIONS, QUERY_FRAMES, random_request, tiny_config, tiny_engine, tiny_model
from tests.reference import Reference


def random_config(rng: np.random.Generator) -> ModelConfig:
    """A small shape with any number of tables, encoders, layers, heads and tasks."""

    def tables(start: str, num: int) -> tuple[TableConfig, ...]:
        return tuple(TableConfig(name=f"{start}{i}", num_rows=int(rng.integers(3, 40))) for i in range(num))

    def encoder(name: str, names: list[str]) -> EncoderConfig:
        chosen = rng.permutation(names)[: rng.integers(1, len(names) + 1)]
        pooling, kind = str(rng.choice(["concat", "sum"])), str(rng.choice(kinds))
        return EncoderConfig(name=name, tables=tuple(map(str, chosen)), pooling=pooling, kind=kind)

    kinds = ["mlp", "mlp", "linear"]
    retrieval = RetrievalHead(
        state_norm=rng.choice(["none", "l2", "layer"]), item_norm=rng.choice(["none", "l2"]), temperature=0.5
    )
    is_retrieval = bool(rng.integers(2))
    features = (TableConfig(name=ITEM, num_rows=200), *tables("f", int(rng.integers(0, 3))))
    names = [table.name for table in features]
    return tiny_config(
        form=str(rng.choice(["concat", "gated"])),
        num_layers=int(rng.integers(1, 4)),
        num_heads=int(rng.integers(1, 4)),
        qk_dim=int(rng.integers(2, 9)),
        v_dim=int(rng.integers(2, 9)),
        dim=int(rng.integers(4, 20)),
        input_hidden_dim=None if rng.random() < 0.5 else 12,
        num_tasks=1 if is_retrieval else int(rng.integers(1, 4)),
        retrieval=retrieval if is_retrieval else None,
        time_buckets=int(rng.integers(2, 70)),
        output_bias=bool(rng.integers(2)),
        features=features,
        user_context=tables("u", int(rng.integers(0, 3))),
        request_context=tables("r", int(rng.integers(0, 3))),
        encoders=tuple(encoder(f"e{i}", names) for i in range(rng.integers(1, 3))),
        candidate_encoder=encoder("candidate", names),
    )


def random_model(seed: int) -> LoadedModel:
    config = random_config(np.random.default_rng(seed))
    return tiny_model(seed, **{name: getattr(config, name) for name in ModelConfig.model_fields})


def ragged_requests(rng: np.random.Generator, config: ModelConfig) -> list[RankRequest]:
    """Histories from none to longer than the window, with and without a time of the request."""
    requests = []
    fewest = 0 if config.retrieval is None else 1
    for user, num_events in enumerate((fewest, 1, 7, 16, 23, fewest)):
        request_time = None if user % 3 == 2 else 10**6 + int(rng.integers(0, 10**6))
        num_candidates = int(rng.integers(1, 9))
        requests.append(random_request(rng, config, user, num_events, num_candidates, request_time=request_time))
    return requests


def served(model: LoadedModel, requests: list[RankRequest]) -> np.ndarray[Any, Any]:
    with tiny_engine(model) as engine:
        return np.concatenate([engine.rank([request])[0].scores for request in requests])


@pytest.mark.parametrize("seed", range(16))
def test_the_module_scores_as_the_engine_does(seed: int) -> None:
    model, rng = random_model(seed), np.random.default_rng(seed)
    requests = ragged_requests(rng, model.config)
    with torch.no_grad():
        logits = HstuRanker.from_model(model)(requests).numpy()
    assert logits.dtype == np.float32
    assert np.abs(logits - served(model, requests)).max() <= 1e-5


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["ranking", *OPTIONS])
@pytest.mark.parametrize("form", ["concat", "gated"])
def test_the_module_in_double_precision_is_the_published_arithmetic(form: str, options: dict[str, Any]) -> None:
    model, rng = tiny_model(form=form, **options), np.random.default_rng(0)
    requests, reference = ragged_requests(rng, model.config), Reference(model.config, model.dense, model.tables)
    with torch.no_grad():
        logits = HstuRanker.from_model(model).double()(requests).numpy()
    expected = np.concatenate([reference.scores(request) for request in requests])
    assert np.abs(logits - expected).max() <= 1e-12


def test_a_request_scores_the_same_alone_and_in_any_batch() -> None:
    ranker = HstuRanker(tiny_config())
    requests = ragged_requests(np.random.default_rng(0), ranker.config)
    together = ranker(requests).split([len(request.candidates) for request in requests])
    for request, logits in zip(requests, together, strict=True):
        assert torch.allclose(ranker([request]), logits, atol=1e-6)
    assert ranker([]).shape == (0, 2)


@pytest.mark.parametrize("form", ["concat", "gated"])
def test_every_weight_gets_a_gradient(form: str) -> None:
    ranker = HstuRanker(tiny_config(form=form))
    ranker(ragged_requests(np.random.default_rng(0), ranker.config)).square().sum().backward()
    gradients = {name: weight.grad for name, weight in ranker.named_parameters()}
    assert [name for name, grad in gradients.items() if grad is None or not grad.abs().sum() > 0] == []


def test_gradients_are_those_of_the_function() -> None:
    ranker = HstuRanker(tiny_config(num_layers=1)).double()
    requests = ragged_requests(np.random.default_rng(0), ranker.config)[1:3]
    ranker(requests).sum().backward()
    weight, step = ranker.get_parameter("layers.0.uvqk_weight"), 1e-6
    assert weight.grad is not None
    slope = weight.grad[3, 5].item()
    with torch.no_grad():
        weight[3, 5] += step
        above = ranker(requests).sum()
        weight[3, 5] -= 2 * step
        assert (above - ranker(requests).sum()).item() / (2 * step) == pytest.approx(slope, rel=1e-4)


class OneTable(torch.nn.Module):
    """All tables in one, as a user's own embedding module might hold them."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.offsets = model.config.offsets
        self.all = torch.nn.Embedding.from_pretrained(torch.cat(list(model.tables.values())), freeze=False)

    def forward(self, ids: Rows) -> Rows:
        return {table: self.all(each + self.offsets[table]) for table, each in ids.items()}


def test_users_can_bring_their_own_embedding_module() -> None:
    model = tiny_model()
    requests = ragged_requests(np.random.default_rng(0), model.config)
    ranker = HstuRanker(model.config, tables=OneTable(model))
    assert [name for name in ranker.state_dict() if name.startswith("tables.")] == ["tables.all.weight"]
    ranker.load_state_dict(model.dense, strict=False)
    logits = ranker(requests)
    logits.sum().backward()
    assert torch.equal(logits, HstuRanker.from_model(model)(requests))
    assert ranker.get_parameter("tables.all.weight").grad is not None
    assert ranker.dense().keys() == model.dense.keys()
    assert ranker.table_rows() == {}


def test_names_that_torch_modules_use_are_allowed_for_tables_and_encoders() -> None:
    ranker = HstuRanker(
        tiny_config(
            features=(TableConfig(name=ITEM, num_rows=9), TableConfig(name="type", num_rows=3)),
            user_context=(TableConfig(name="a.b", num_rows=3),),
            encoders=(EncoderConfig(name="train", tables=("type", ITEM)),),
            candidate_encoder=EncoderConfig(name="c", tables=(ITEM,)),
        )
    )
    names = set(ranker.state_dict())
    assert {"tables.type.rows", "tables.a.b.rows", "encoders.train.0.weight"} <= names
    assert set(ranker.table_rows()) == {ITEM, "type", "a.b", "hour"}


def test_time_buckets_are_those_of_the_engine() -> None:
    for num_buckets in (2, 3, 64, 200):
        edges = HstuRanker(tiny_config(time_buckets=num_buckets))._gap_edges
        gaps = sorted({max(0, (1 << i) * half // 2 + d) for i in range(62) for half in (2, 3) for d in (-1, 0, 1)})
        expected = [gap_bucket(gap, num_buckets) for gap in gaps]
        assert torch.bucketize(torch.tensor(gaps), edges, right=True).tolist() == expected


@pytest.mark.parametrize("frame", QUERY_FRAMES)
@pytest.mark.parametrize("form", ["concat", "gated"])
def test_a_model_with_a_query_frame_scores_as_the_engine_does(form: str, frame: str) -> None:
    model, rng = tiny_model(form=form, **QUERY_FRAMES[frame]), np.random.default_rng(0)
    requests, ranker = ragged_requests(rng, model.config), HstuRanker.from_model(model)
    with torch.no_grad():
        together, alone = ranker(requests).numpy(), [ranker([request]).numpy() for request in requests]
    assert np.abs(together - served(model, requests)).max() <= 1e-5
    assert np.abs(together - np.concatenate(alone)).max() <= 1e-5
    assert ranker([]).shape == (0, model.config.num_tasks)


def test_every_weight_of_a_query_frame_gets_a_gradient() -> None:
    ranker = HstuRanker(tiny_config(**QUERY_FRAMES["clock and context"]))
    ranker(ragged_requests(np.random.default_rng(0), ranker.config)).square().sum().backward()
    gradients = {name: weight.grad for name, weight in ranker.named_parameters()}
    assert [name for name, grad in gradients.items() if grad is None or not grad.abs().sum() > 0] == []


def batch_with(**changed: Any) -> RankBatch:
    values: dict[str, Any] = {
        "events": {ITEM: torch.tensor([1, 2, 3]), "category": torch.tensor([1, 2, 3])},
        "actions": torch.tensor([0, 1, 2]),
        "timestamps": torch.tensor([10, 20, 5]),
        "lengths": torch.tensor([2, 1]),
        "candidates": {ITEM: torch.tensor([1, 2, 3]), "category": torch.tensor([1, 2, 3])},
        "num_candidates": torch.tensor([1, 2]),
        "request_times": torch.tensor([20, 5]),
        "context": {"country": torch.tensor([1, 2]), "hour": torch.tensor([1, 2])},
    }
    return RankBatch(**values | changed)


def test_flat_tensors_are_taken_as_they_are() -> None:
    assert HstuRanker(tiny_config())(batch_with()).shape == (3, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": torch.tensor([17, 1])}, r"lengths\[0\]: values run from 0 to 16, got 17"),
        ({"lengths": torch.tensor([1, 1])}, r"events\['item'\]: .* \(2,\) is needed, got 'torch.int64 \(3,\)'"),
        ({"actions": torch.tensor([0, 4, 0])}, r"actions\[1\]: values run from 0 to 3, got 4"),
        ({"actions": torch.tensor([0.0, 1.0, 2.0])}, "actions: .* got 'torch.float32"),
        ({"events": {ITEM: torch.tensor([1, 2, 3])}}, r"events\['category'\]: ids of this table are needed"),
        ({"candidates": {ITEM: torch.tensor([1, -2, 300])}}, r"candidates\['item'\]\[1\]: .* got -2"),
        ({"context": {"country": torch.tensor([1, 5])}}, r"context\['country'\]\[1\]: values run from 0 to 4, got 5"),
        ({"timestamps": torch.tensor([10, 9, 5])}, r"timestamps\[1\]: time runs backwards, got 9"),
        ({"request_times": torch.tensor([20, 4])}, r"request_times\[1\]: time runs backwards, got 4"),
    ],
)
def test_a_batch_that_does_not_fit_is_named_with_field_and_value(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        HstuRanker(tiny_config())(batch_with(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"features": {}}, r"features: a value for 'category' is needed, got \[\]"),
        ({"actions": [1, 2]}, r"actions: integers of shape \(5,\) are needed, got 'int64 \(2,\)'"),
        ({"candidates": [1.5, 2.0, 3.0]}, "candidates: .* got 'float64"),
        ({"context": {"hour": 3}}, r"context: a value for 'country' is needed, got \['hour'\]"),
    ],
)
def test_a_request_that_does_not_fit_is_named_with_its_field(changed: dict[str, Any], message: str) -> None:
    ranker = HstuRanker(tiny_config())
    with pytest.raises(RequestError, match=message):
        ranker([random_request(np.random.default_rng(0), ranker.config, **changed)])
