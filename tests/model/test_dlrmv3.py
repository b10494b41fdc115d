"""Import of a published DLRMv3 and its scores, on a fixture in the published format (see published.py)."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.model_check import check_model
from helmrec.engine.row_stage import SentRows
from helmrec.errors import ConfigError, HelmRecError, ModelError, NonFiniteScores, RequestError
from helmrec.model.dlrmv3 import ImportOptions, import_dlrmv3, read_dense
from helmrec.model.dlrmv3_names import BITS, CheckpointSizes, published_shapes
from helmrec.model.ranker import HstuRanker
from helmrec.model.weights import load_model
from helmrec.types import PrefillRequest, RankRequest
from tests.cli.test_help import commands
from tests.model.meta_reference import MetaReference
from tests.model.published import (
    GOLDEN,
    HEADS,
    NOW,
    PUBLISHED,
    SMALL,
    WIDE,
    WIDE_ROWS,
    dense_weights,
    random_query,
    tables,
    wide_query,
    write_dense,
    write_published,
    write_tables,
)

OPTIONS = ImportOptions(num_heads=HEADS, window=40, max_candidates=16)
LAYER_0 = "_hstu_transducer._stu_module._stu_layers.0."


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_published(folder)
    return folder


@pytest.fixture(scope="module")
def model(published: Path) -> Path:
    import_dlrmv3(published, published / "sparse", published / "model", OPTIONS)
    return published / "model"


def engine_of(folder: Path, **overrides: Any) -> Engine:
    settings: dict[str, Any] = {"pool_bytes": "64KiB", "page_tokens": 4}
    return Engine.from_model(folder, EngineConfig(**settings | overrides))


def test_the_published_checkpoint_has_86_weights_of_16_7_million_numbers() -> None:
    shapes = published_shapes(PUBLISHED)
    assert len(shapes) == 86
    assert round(sum(int(np.prod(shape)) for shape in shapes.values()) / 1e6, 1) == 16.7


def test_the_reference_agrees_with_logits_of_metas_own_code() -> None:
    reference = MetaReference(dense_weights(GOLDEN), tables(GOLDEN), HEADS)
    for request, logits in golden():
        assert np.abs(reference.scores(request) - logits).max() <= 1e-7  # their path rounds some steps to float32


def test_an_imported_model_agrees_with_logits_of_metas_own_code(tmp_path: Path) -> None:
    write_published(tmp_path, GOLDEN)
    import_dlrmv3(tmp_path, tmp_path / "sparse", tmp_path / "model", OPTIONS)
    engine = engine_of(tmp_path / "model")
    for request, logits in golden():
        assert np.abs(engine.rank([request])[0].scores - logits).max() <= 1e-5


WIDE_OPTIONS = OPTIONS.model_copy(
    update={"extra": ("extra_a", "extra_b"), "context": ("ctx_user:20", "ctx_city:0", "ctx_age:0")}
)


def test_a_wider_model_of_the_production_form_agrees_with_logits_of_metas_own_code(tmp_path: Path) -> None:
    """Several contextual features, further features of events, three tasks, no clock; alone and in one batch."""
    write_published(tmp_path, WIDE, WIDE_ROWS)
    config = import_dlrmv3(tmp_path, tmp_path / "sparse", tmp_path / "model", WIDE_OPTIONS)
    assert [table.name for table in config.tables] == ["item", *list(WIDE_ROWS)[1:]]
    rng, engine = np.random.default_rng(0), engine_of(tmp_path / "model", pool_bytes="256KiB")
    cases = json.loads((Path(__file__).parent.parent / "data" / "production-golden.json").read_text())["cases"]
    requests = [wide_query(rng, case["user"], case["num_events"], case["num_candidates"]) for case in cases]
    for case, request, result in zip(cases, requests, engine.rank(requests), strict=True):
        assert np.abs(result.scores - np.array(case["logits"])).max() <= 1e-5
        assert np.abs(engine.rank([request])[0].scores - result.scores).max() <= 1e-6
    assert check_model(load_model(tmp_path / "model")).is_equal


def test_a_model_without_actions_context_and_further_features_is_imported(tmp_path: Path) -> None:
    sizes = replace(SMALL, num_bits=0, bit_dim=0, num_context=0, num_extra=0, num_item_features=1)
    weights = dense_weights(sizes)
    del weights[BITS]
    write_dense(tmp_path / "non_sparse.ckpt", weights)
    write_tables(tmp_path / "sparse", {"video": torch.randn(50, SMALL.row_dim)})
    options = OPTIONS.model_copy(update={"item": "video", "extra": (), "context": ()})
    import_dlrmv3(tmp_path, tmp_path / "sparse", tmp_path / "model", options)
    config = load_model(tmp_path / "model").config
    assert (config.num_actions, config.user_context, [table.name for table in config.tables]) == (1, (), ["item"])
    assert check_model(load_model(tmp_path / "model")).is_equal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": ()}, r"has 1 contextual features, but 0 are named: \[\]"),
        ({"extra": ("item_category_id", "colour")}, "has 1 features besides the item, but 2 are named"),
        ({"context": ("item_id",)}, "each feature needs a table of its own, 'item_id' is named twice"),
        ({"context": ("user_id:many",)}, "context must be NAME or NAME:EVENTS, got 'user_id:many'"),
    ],
)
def test_features_that_the_checkpoint_does_not_have_are_refused(
    published: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HelmRecError, match=message):
        import_dlrmv3(published, published / "sparse", tmp_path / "out", OPTIONS.model_copy(update=changes))


def golden() -> list[tuple[RankRequest, np.ndarray[Any, np.dtype[np.float64]]]]:
    path = Path(__file__).parent.parent / "data" / "dlrmv3-golden.json"
    cases = []
    for i, case in enumerate(json.loads(path.read_text())["cases"]):
        request = RankRequest(
            user_id=i,
            items=case["items"],
            actions=case["actions"],
            timestamps=case["timestamps"],
            candidates=case["candidates"],
            features={"category": case["categories"]},
            candidate_features={"category": case["candidate_categories"]},
            context={"user": case["user"]},
            request_time=case["request_time"],
        )
        cases.append((request, np.array(case["logits"])))
    return cases


@pytest.mark.parametrize("max_batch_requests", [1, 8])
def test_scores_are_metas_whatever_shares_the_batch(model: Path, max_batch_requests: int) -> None:
    """Lengths around the 20 tokens below which user context reads as zeros, and beyond the position table's end."""
    reference = MetaReference(dense_weights(SMALL), tables(SMALL), HEADS)
    rng = np.random.default_rng(0)
    sizes = [(0, 1), (0, 16), (1, 3), (5, 4), (17, 2), (18, 2), (23, 1), (30, 8), (40, 16)]
    requests = [random_query(rng, user, num, candidates) for user, (num, candidates) in enumerate(sizes)]
    engine = engine_of(model, max_batch_requests=max_batch_requests)
    for request, result in zip(requests, engine.rank(requests), strict=True):
        assert np.abs(result.scores - reference.scores(request)).max() <= 1e-5
    engine.check()
    with torch.no_grad():
        of_module = HstuRanker.from_model(load_model(model)).double()(requests).numpy()
    assert np.abs(of_module - np.concatenate([reference.scores(request) for request in requests])).max() <= 1e-5


def test_without_a_request_time_the_last_event_is_now(model: Path) -> None:
    reference = MetaReference(dense_weights(SMALL), tables(SMALL), HEADS)
    request = random_query(np.random.default_rng(1), 3, 9, 4, request_time=None)
    assert np.abs(engine_of(model).rank([request])[0].scores - reference.scores(request)).max() <= 1e-5


def test_of_a_longer_history_the_latest_events_count(model: Path) -> None:
    reference = MetaReference(dense_weights(SMALL), tables(SMALL), HEADS)
    long = random_query(np.random.default_rng(2), 3, 57, 4)
    latest = replace(
        long,
        items=long.items[17:],
        actions=long.actions[17:],
        timestamps=long.timestamps[17:],
        features={"category": long.features["category"][17:]},
    )
    result = engine_of(model).rank([long])[0]
    assert result.window_start == result.truncated_events == 17
    assert np.abs(result.scores - reference.scores(latest)).max() <= 1e-5


def test_history_is_computed_once_for_all_candidates_and_kept_for_no_other_request(model: Path) -> None:
    rng = np.random.default_rng(3)
    engine = engine_of(model, kv_admission="always", audit_every=1)
    first = random_query(rng, 1, 12, 16)
    for request in (first, replace(first, request_time=NOW + 10**6), first, random_query(rng, 1, 12, 16)):
        result = engine.rank([request])[0]
        assert result.reused_tokens == 0
        assert result.computed_tokens == 1 + 12 + 16
        engine.check()
    stats = engine.stats()
    assert stats.pool.resident_users == 0
    assert stats.pool.row_hits > 0, "rows are cached as ever"
    assert (stats.audits, stats.audit_mismatches) == (4, 0)


def test_two_users_events_in_one_batch_are_shared_only_by_the_same_query(model: Path) -> None:
    """Twice the same query in one step computes history once; another time of asking shares nothing."""
    reference = MetaReference(dense_weights(SMALL), tables(SMALL), HEADS)
    first = random_query(np.random.default_rng(4), 1, 12, 4)
    later = replace(first, request_time=NOW + 10**6)
    results = engine_of(model).rank([first, first, later])
    assert [result.reused_tokens for result in results] == [0, 13, 0]
    for request, result in zip((first, first, later), results, strict=True):
        assert np.abs(result.scores - reference.scores(request)).max() <= 1e-5


def test_the_engine_says_that_nothing_is_kept_and_refuses_what_would_need_it(model: Path) -> None:
    engine = engine_of(model)
    assert "depend on the query" in str(engine.report())
    ahead = PrefillRequest(1, [1], [1], [1], features={"category": [1]}, context={"user": 1})
    with pytest.raises(RequestError, match="nothing can be computed ahead"):
        engine.prefill(ahead)
    with pytest.raises(ConfigError, match="miss_curves"):
        engine_of(model, miss_curves=True)


def test_updated_rows_are_scored_with_their_new_values(model: Path) -> None:
    rng = np.random.default_rng(5)
    engine = engine_of(model)
    request = random_query(rng, 2, 20, 5, items=np.full(20, 7))
    engine.rank([request, request])
    new = rng.normal(size=(1, SMALL.row_dim)).astype(np.float16)
    engine.update_rows("item", [7], new)
    changed = tables(SMALL)
    changed["item_id"][7] = torch.from_numpy(new[0])
    reference = MetaReference(dense_weights(SMALL), changed, HEADS)
    assert np.abs(engine.rank([request])[0].scores - reference.scores(request)).max() <= 1e-5


def test_a_user_row_that_a_short_query_reads_as_zeros_may_hold_anything(model: Path) -> None:
    engine, reference = engine_of(model), MetaReference(dense_weights(SMALL), tables(SMALL), HEADS)
    short, long = (random_query(np.random.default_rng(6), 2, num, 4) for num in (12, 30))
    row = np.array([engine.model_config.offsets["user"] + 2])
    engine._runner.write_rows(SentRows(row, torch.full((1, SMALL.row_dim), torch.nan, dtype=torch.float16)))
    assert np.abs(engine.rank([short])[0].scores - reference.scores(short)).max() <= 1e-5
    with pytest.raises(NonFiniteScores):
        engine.rank([long])


def test_a_table_that_is_not_finite_is_not_imported(published: Path, tmp_path: Path) -> None:
    values = tables(SMALL)
    values["item_id"][150, 3] = torch.inf
    write_tables(tmp_path / "sparse", values)
    with pytest.raises(ModelError, match=r"tables/item.safetensors: row 150 holds values that are not finite"):
        import_dlrmv3(published, tmp_path / "sparse", tmp_path / "out", OPTIONS)


def test_bfloat16_weights_score_close_to_the_reference(published: Path, tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"dtype": "bfloat16"})
    import_dlrmv3(published, published / "sparse", tmp_path / "model", options)
    reference = MetaReference(dense_weights(SMALL), tables(SMALL), HEADS)
    request = random_query(np.random.default_rng(6), 1, 30, 16)
    assert np.abs(engine_of(tmp_path / "model").rank([request])[0].scores - reference.scores(request)).max() <= 0.05


def test_tables_arrive_bit_for_bit(model: Path) -> None:
    loaded = load_model(model).tables
    for ours, theirs in (("item", "item_id"), ("category", "item_category_id"), ("user", "user_id")):
        assert torch.equal(loaded[ours], tables(SMALL)[theirs])


def changed_weights(**changes: Tensor | None) -> dict[str, Tensor]:
    weights = dense_weights(SMALL) | {name: value for name, value in changes.items() if value is not None}
    return {name: value for name, value in weights.items() if name not in changes or changes[name] is not None}


WRONG_WEIGHTS: list[tuple[str, Tensor | None, str]] = [
    (f"{LAYER_0}_uvqk_beta", None, r"'.*0\._uvqk_beta' of 65 weights of a DLRMv3 checkpoint are missing"),
    (f"{LAYER_0}_relative_bias", torch.zeros(3), r"'.*_relative_bias' are no weights of a DLRMv3"),
    (f"{LAYER_0}_output_weight", torch.zeros(16, 16), r"_output_weight' must be \(48, 16\), got \(16, 16\)"),
    (f"{LAYER_0}_output_norm_weight", torch.zeros(HEADS), r"must be .* got"),  # one per head: another norm
    ("_item_embedding_mlp.0.weight", torch.zeros(14, 18), r"_item_embedding_mlp.0.weight' must be \(14, 12\)"),
    ("_item_embedding_mlp.2.bias", torch.full((16,), torch.nan), r"not finite"),
]


@pytest.mark.parametrize(("name", "value", "told"), WRONG_WEIGHTS)
def test_wrong_weights_are_refused_by_name(
    published: Path, tmp_path: Path, name: str, value: Tensor | None, told: str
) -> None:
    write_dense(tmp_path / "wrong.ckpt", changed_weights(**{name: value}))
    with pytest.raises(ModelError, match=told):
        import_dlrmv3(tmp_path / "wrong.ckpt", published / "sparse", tmp_path / "model", OPTIONS)
    assert not (tmp_path / "model").exists()


def test_heads_that_do_not_divide_the_widths_are_refused(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="5 heads do not divide widths of 16"):
        import_dlrmv3(published, published / "sparse", tmp_path / "model", OPTIONS.model_copy(update={"num_heads": 5}))


WRONG_TABLES: list[tuple[dict[str, Tensor], str]] = [
    ({"item_id": torch.zeros(9, 12), "user_id": torch.zeros(9, 12)}, "one table 'item_category_id' is needed"),
    (tables(SMALL) | {"country": torch.zeros(9, 12).half()}, "country.*is no table of a DLRMv3"),
    (tables(replace(SMALL, row_dim=8)), "rows of 12 and one type"),
    (tables(SMALL) | {"user_id": torch.zeros(9, 12)}, "rows of 12 and one type"),
]


@pytest.mark.parametrize(("values", "told"), WRONG_TABLES)
def test_wrong_tables_are_refused(published: Path, tmp_path: Path, values: dict[str, Tensor], told: str) -> None:
    write_tables(tmp_path / "sparse", values)
    with pytest.raises(ModelError, match=told):
        import_dlrmv3(published, tmp_path / "sparse", tmp_path / "model", OPTIONS)


class Attack:
    """Pickled, it is a call of os.system."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_checkpoint_that_would_run_code_is_refused_and_does_not_run_it(published: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    saved = {"dense_dict": dense_weights(SMALL), "optimizer_dict": Attack(marker)}
    torch.save(saved, tmp_path / "attack.ckpt")
    with pytest.raises(ModelError, match=r"refused: the pickle inside names (posix|os)\.system"):
        import_dlrmv3(tmp_path / "attack.ckpt", published / "sparse", tmp_path / "model", OPTIONS)
    assert not marker.exists()
    torch.load(tmp_path / "attack.ckpt", weights_only=False)
    assert marker.exists(), "the attack is a real one"


def test_the_command_imports_and_says_how_it_will_be_served(published: Path, tmp_path: Path) -> None:
    arguments = ["import", "dlrmv3", str(published), "--tables", str(published / "sparse"), "--heads", "2"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert "within a request only" in done.output
    assert load_model(tmp_path / "model").config.query_frame is not None
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "model")])
    assert again.exit_code == 2
    assert "not empty" in again.output


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"non_sparse\.ckpt cannot be read"):
        import_dlrmv3(tmp_path, tmp_path, tmp_path / "model", OPTIONS)


def test_only_the_dense_part_is_read_and_its_sizes_are_known(published: Path) -> None:
    weights = read_dense(published / "non_sparse.ckpt")
    assert CheckpointSizes.of(weights, SMALL.num_layers) == SMALL
    for name, value in dense_weights(SMALL).items():
        assert torch.equal(weights[name], value)


@pytest.mark.slow
def test_a_checkpoint_of_the_published_size_is_imported_and_scores_as_published(tmp_path: Path) -> None:
    write_published(tmp_path, PUBLISHED)
    import_dlrmv3(tmp_path, tmp_path / "sparse", tmp_path / "model", ImportOptions())
    reference = MetaReference(dense_weights(PUBLISHED), tables(PUBLISHED), num_heads=4)
    engine = engine_of(tmp_path / "model", pool_bytes="512MiB", page_tokens=32)
    request = random_query(np.random.default_rng(0), 1, 200, 64)
    scores, expected = engine.rank([request])[0].scores, reference.scores(request)
    assert np.abs(scores - expected).max() <= 1e-4 * max(1.0, float(np.abs(expected).max()))


def test_flags_of_dlrmv3_have_the_defaults_of_its_options() -> None:
    """They stand in both places, since the options are in a module that imports torch."""
    shown = {option.name: option.default for option in dict(commands())["import dlrmv3"].params}
    options = ImportOptions()
    given = (shown["heads"], shown["window"], shown["candidates"], shown["item"])
    assert given == (options.num_heads, options.window, options.max_candidates, options.item)
