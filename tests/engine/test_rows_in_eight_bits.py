"""Rows of eight bits in the pool, in host memory or both: the same scores, resident or not, after updates and moves."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase

from helmrec.config import EngineConfig, FixedRowDtype
from helmrec.engine import setup
from helmrec.engine.engine import Engine
from helmrec.engine.intake import RowUpdate
from helmrec.engine.precision import audit_tolerance, cache_version, choose_precision
from helmrec.engine.row_values import stored
from helmrec.errors import ConfigError, ModelError, RequestError
from helmrec.kernels import row_codec
from helmrec.kernels.kv_rounding import Codes
from helmrec.kernels.row_codec import RowCodec
from helmrec.memory.embedding_cache import EmbeddingCache
from helmrec.memory.row_master import RowMaster
from helmrec.model.precision import Precision, PrecisionFigures, PrecisionVerdicts
from helmrec.model.profiles import profile
from helmrec.model.shared_tables import row_bytes_of, values_of_bytes
from helmrec.model.weights import LoadedModel, init_model, load_model
from helmrec.sim.node.config import NodeConfig, make_setup
from helmrec.sim.plan import PlanConfig
from tests.engine.test_cached_equals_uncached import ENCODE, missed_places, round_by_batch, run, seen
from tests.helpers import QUERY_FRAMES, random_request, tiny_config, tiny_engine, tiny_model

CODES: list[FixedRowDtype] = ["fp8_e4m3", "int8"]
PLACES: list[tuple[FixedRowDtype, FixedRowDtype]] = [
    place for code in CODES for place in ((code, code), (code, "model"), ("model", code))
]
PLACE_IDS = [f"pool {here}, host {host}" for here, host in PLACES]


def rows_in(here: str, host: str) -> dict[str, Any]:
    return {"row_dtype": here, "host_row_dtype": host}


@pytest.mark.parametrize(("here", "host"), PLACES, ids=PLACE_IDS)
def test_streams_over_rounded_rows_never_return_a_wrong_score(here: str, host: str) -> None:
    """The reference rounds every row that it reads; the tolerance is that of rows as they are."""
    seen.clear()
    run(20, number=1, precision=rows_in(here, host))
    needed = {"reused", "row hits", "row evictions", "row refills", "boundary moves", "scored inside a delta"}
    assert not needed & set(missed_places()), dict(seen)


@pytest.mark.slow
@pytest.mark.parametrize(("here", "host"), PLACES, ids=PLACE_IDS)
def test_hundreds_of_streams_over_rounded_rows_never_return_a_wrong_score(here: str, host: str) -> None:
    run(300, precision=rows_in(here, host), derandomize=False)


def one_scale_for_all(values: torch.Tensor, dtype: torch.dtype) -> Codes:
    return round_by_batch(values, dtype) if len(values) else ENCODE(values, dtype)


def test_a_scale_that_depends_on_other_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codec, "encode", one_scale_for_all)
    with pytest.raises(AssertionError, match="off by"):
        run(100, number=0, precision=rows_in("int8", "model"), phases=(Phase.generate,), report_multiple_bugs=False)


@pytest.mark.parametrize("row_index", ["host", "device"])
@pytest.mark.parametrize("row_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("code", CODES)
def test_scores_are_the_same_wherever_rows_are_rounded(code: str, row_dtype: str, row_index: str) -> None:
    """Bit for bit, before and after updates and moves: what is rounded is a row, not a place."""
    rng, places = np.random.default_rng(0), [(code, code), (code, "model"), ("model", code)]
    settings: dict[str, Any] = {"row_index": row_index, "row_admission": "always", "audit_every": 1}
    engines = [tiny_engine(tiny_model(row_dtype=row_dtype), **rows_in(*place), **settings) for place in places]
    config = engines[0].model_config
    for i in range(12):
        if i % 3 == 0:
            ids = rng.choice(config.features[0].num_rows, 20, replace=False)
            values = rng.standard_normal((20, config.row_dim)).astype(np.float32)
            for engine in engines:
                engine.update_rows("item", ids, values)
                engine.move_alpha((0.6, 0.1)[i // 3 % 2])
        requests = [random_request(rng, config, user, 12) for user in rng.choice(5, 2, replace=False).tolist()]
        first, *others = ([result.scores for result in engine.rank(requests)] for engine in engines)
        for other in others:
            assert all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))
    for engine in engines:
        stats = engine.stats()
        assert stats.audits > 0
        assert stats.audit_mismatches == 0
        assert stats.pool.row_hits > 0
        assert stats.pool.row_misses > 0
        engine.check()
        engine.close()


@pytest.mark.parametrize("frame", QUERY_FRAMES)
def test_models_with_a_query_frame_read_rounded_rows_too(frame: str) -> None:
    rng, model = np.random.default_rng(0), tiny_model(**QUERY_FRAMES[frame])
    requests = [random_request(rng, model.config, user, 12) for user in range(3)]
    with tiny_engine(model) as engine:
        full = [result.scores for result in engine.rank(requests)]
    found = []
    for place in PLACES[:3]:
        with tiny_engine(tiny_model(**QUERY_FRAMES[frame]), audit_every=1, **rows_in(*place)) as engine:
            found.append([result.scores for result in engine.rank(requests)])
            assert engine.stats().audit_mismatches == 0
    for exact, first, *others in zip(full, *found, strict=True):
        assert 0 < np.abs(first - exact).max() < 0.5
        assert all(np.array_equal(first, other) for other in others)


def test_a_resident_row_has_the_record_of_the_master() -> None:
    with tiny_engine(row_index="host", row_admission="always", **rows_in("int8", "int8")) as engine:
        rng = np.random.default_rng(0)
        engine.rank([random_request(rng, engine.model_config, user, 12) for user in range(3)])
        resident = engine.hot_rows()
        assert isinstance(engine._pool.rows, EmbeddingCache)
        slots = engine._pool.rows.peek(resident)
        assert resident.size
        assert torch.equal(engine._arena.rows[torch.from_numpy(slots).long()], engine._master.gather(resident))


def test_a_version_knows_to_what_rows_are_rounded_not_where() -> None:
    configs = [EngineConfig(row_dtype=here, host_row_dtype=host) for here, host in PLACES]
    versions = {config.row_rounding: set[int]() for config in configs}
    for config in configs:
        versions[config.row_rounding].add(cache_version(7, config))
    assert all(len(each) == 1 for each in versions.values())
    others = [cache_version(7, EngineConfig()), cache_version(7, EngineConfig(kv_dtype="int8"))]
    others.append(cache_version(7, EngineConfig(kv_dtype="int8", row_dtype="int8")))
    assert len({*others, *itertools.chain(*versions.values())}) == len(others) + len(versions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (rows_in("fp8_e4m3", "int8"), "row_dtype must be 'model' or 'int8' with host_row_dtype 'int8', got 'fp8_e4m3'"),
        ({"host_row_dtype": "int8", "host_rows_bytes": "1GiB"}, "must be 'model' with host_rows_bytes, got 'int8'"),
        ({"row_dtype": "int4"}, "row_dtype"),
        ({"host_row_dtype": "auto"}, "host_row_dtype"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_differences_are_refused_by_rounded_host_memory_and_taken_by_a_rounded_pool() -> None:
    added = np.ones(2, np.bool_)
    with tiny_engine(**rows_in("int8", "int8")) as engine:
        update = RowUpdate(np.array([1, 2]), np.ones((2, engine.model_config.row_dim), np.float32), added)
        with pytest.raises(RequestError, match=r"rows of int8 \(host_row_dtype\) take new values only"):
            engine.apply_rows(update)
    with tiny_engine(**rows_in("int8", "model")) as engine:
        old = engine._master.gather(update.rows).clone()
        engine.apply_rows(update)
        assert torch.equal(engine._master.gather(update.rows), old + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_update_may_have_no_rows(dtype: torch.dtype) -> None:
    """As a skipped number of a stream has."""
    codec = RowCodec(16, dtype, "int8")
    none = stored(np.zeros((0, 16), np.float32), codec)
    assert none.shape == (0, codec.width)
    assert row_bytes_of(none).shape == (0, 32)
    assert values_of_bytes(row_bytes_of(none), codec).shape == (0, 16)


@pytest.mark.parametrize(("name", "least"), [("dlrmv3", 1.9), ("nvidia-bench", 1.8)])
def test_a_pool_of_64_gib_holds_nearly_twice_the_rows(name: str, least: float) -> None:
    model, pool = profile(name, 1_000), 64 << 30

    def num_rows(here: FixedRowDtype) -> int:
        geometry = model.page_geometry(128, row_dtype=here)
        return pool // geometry.page_bytes * geometry.rows_per_page

    assert num_rows("int8") == num_rows("fp8_e4m3") >= least * num_rows("model")
    assert model.row_stride >= least * model.record_bytes("int8")


def test_a_card_has_more_rows_though_their_index_grows() -> None:
    """The index takes 20 to 36 bytes per slot, rounded or not."""
    model = profile("dlrmv3", 40_000_000)

    def num_rows(here: FixedRowDtype) -> int:
        config = EngineConfig(device="cuda", pool_bytes="64GiB", row_dtype=here)
        geometry = setup.page_geometry(model, config)
        left = setup.without_row_index(config, geometry, model.num_rows)
        return left.sized_pool_bytes // geometry.page_bytes * geometry.rows_per_page

    assert num_rows("int8") >= 1.85 * num_rows("model")


@pytest.mark.parametrize("here", ["model", *CODES])
def test_simulated_nodes_have_the_pages_of_the_engine_and_the_bus_of_whole_rows(here: FixedRowDtype) -> None:
    from helmrec.costs.calibrated import default_cost  # noqa: PLC0415 - reads a file

    engine = EngineConfig(row_dtype=here, page_tokens=128, pool_bytes="1GiB")
    node = NodeConfig(model=profile("dlrmv3", 1_000), engine=engine)
    assert node.geometry == setup.page_geometry(node.model, engine)
    assert make_setup(node, default_cost(), 1.0).row_bytes == node.model.row_stride
    assert make_setup(node, default_cost(), 1.0).rows_per_page == node.geometry.rows_per_page
    assert PlanConfig(rate=1, row_dtype=here).row_dtype == here


def test_bytes_over_the_bus_are_those_of_host_memory() -> None:
    rng, model = np.random.default_rng(0), tiny_model(row_dtype="float16", row_dim=64)
    request = random_request(rng, model.config, 0, 12)
    with tiny_engine(model, **rows_in("int8", "model")) as engine:
        misses = engine.rank([request])[0].row_misses
        assert engine.stats().pool.bytes_by_cause["row-miss"] == 128 * misses
    with tiny_engine(model, **rows_in("model", "int8")) as engine:
        assert engine.rank([request])[0].row_misses == misses
        assert engine.stats().pool.bytes_by_cause["row-miss"] == 80 * misses


def test_tables_of_a_folder_are_rounded_as_they_are_loaded(tmp_path: Path) -> None:
    init_model(tmp_path / "model", tiny_config(row_dtype="bfloat16", row_dim=48), seed=3)
    model = load_model(tmp_path / "model")
    master = RowMaster.copied(model.tables, code="int8")
    every = torch.cat([model.tables[table.name] for table in model.config.tables])
    assert torch.equal(master.gather(np.arange(len(every))), master.codec.encode(every))
    assert master.num_bytes == len(every) * model.config.record_bytes("int8") < every.nbytes
    with Engine(
        model, EngineConfig(device="cpu", pool_bytes="1MiB", row_dtype="auto", host_row_dtype="int8")
    ) as engine:
        assert engine.config.row_dtype == "int8"
        assert "row_dtype: int8, chosen since host_row_dtype has rounded the rows already" in engine.report().choices


def test_a_table_that_is_not_finite_is_named_as_it_is_rounded() -> None:
    table = torch.ones(300, 4)
    table[217, 3] = torch.nan
    with pytest.raises(ModelError, match="table 'b': row 217 holds values that are not finite"):
        RowMaster.copied({"a": torch.ones(3, 4), "b": table}, code="fp8_e4m3")


FIGURES = {"requests": 200, "source": "x", "largest_difference": 0.1, "spread": 1.0}


def figures(difference: float, overlap: float = 1.0) -> PrecisionFigures:
    return PrecisionFigures(**FIGURES, mean_difference=difference, top_overlap=overlap, kendall_tau=overlap)


def test_auto_takes_the_rounding_that_was_checked_together_with_all_that_is_rounded() -> None:
    verdicts = PrecisionVerdicts(version="0")
    verdicts = verdicts.with_verdict(Precision(row_dtype="fp8_e4m3"), figures(0.02))
    verdicts = verdicts.with_verdict(Precision(row_dtype="int8"), figures(0.01))
    tiny = tiny_model()
    model = LoadedModel(tiny.config, tiny.version, tiny.dense, tiny.tables, precision=verdicts)

    def choice(**settings: Any) -> str:
        return str(choose_precision(EngineConfig(row_dtype="auto", **settings), model).config.row_dtype)

    assert choice() == "int8"
    assert choice(kv_dtype="int8") == "model", "the two together were not checked"
    both = verdicts.with_verdict(Precision("int8", row_dtype="fp8_e4m3"), figures(0.03))
    both = both.with_verdict(Precision("int8", row_dtype="int8"), figures(0.02, overlap=0.9))
    model = LoadedModel(tiny.config, tiny.version, tiny.dense, tiny.tables, precision=both)
    assert choice(kv_dtype="int8") == "fp8_e4m3", "the other is not allowed"
    assert choice(host_row_dtype="int8", kv_dtype="fp8_e4m3") == "int8"
    rounded = EngineConfig(kv_dtype="auto", host_row_dtype="fp8_e4m3")
    assert choose_precision(rounded, model).config.kv_dtype == "int8", "allowed together with these rows"
    assert choose_precision(EngineConfig(kv_dtype="auto"), model).config.kv_dtype == "model", "not checked alone"
    with pytest.raises(ConfigError, match="row_dtype must be 'model', 'fp8_e4m3' or 'int8' here, got 'auto'"):
        cache_version(1, EngineConfig(row_dtype="auto"))


def test_rounded_rows_need_no_other_tolerance() -> None:
    assert audit_tolerance("float32", EngineConfig(row_dtype="int8")) == audit_tolerance("float32", EngineConfig())
