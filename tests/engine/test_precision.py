"""K/V of eight bits in an engine: the same scores alone, in a batch, resident or not; and twice as many tokens."""

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig, FixedKVDtype
from helmrec.engine import setup
from helmrec.engine.intake import Intake
from helmrec.engine.precision import audit_tolerance, cache_version
from helmrec.errors import ConfigError
from helmrec.memory.prefix_hash import HashKey
from helmrec.model.precision import (
    FULL_PRECISION,
    LOW_PRECISIONS,
    Precision,
    PrecisionFigures,
    PrecisionVerdicts,
)
from helmrec.model.profiles import profile
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.plan import PlanConfig
from tests.helpers import random_request, tiny_config, tiny_engine, tiny_model

KV_DTYPES: list[FixedKVDtype] = ["model", "fp8_e4m3", "int8"]
CODES = KV_DTYPES[1:]


@pytest.mark.parametrize("precision", LOW_PRECISIONS.values())
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scores_are_the_same_alone_in_a_batch_and_with_a_resident_history(
    precision: Precision, dtype: str, rng: np.random.Generator
) -> None:
    model = tiny_model(dtype=dtype)
    requests = [random_request(rng, model.config, user, 14, 4) for user in range(6)]
    settings: dict[str, Any] = {**precision._asdict(), "kv_admission": "always", "alpha": 0.1, "audit_every": 1}
    with tiny_engine(model, **settings) as engine, tiny_engine(model, **settings) as lone:
        first = engine.rank(requests)
        again = engine.rank(requests)
        alone = [lone.rank([request])[0] for request in requests]
        stats = engine.stats()
    assert any(result.reused_tokens for result in again)
    assert stats.audits == 12
    assert stats.audit_mismatches == 0
    tolerance = audit_tolerance(dtype, EngineConfig(**precision._asdict()))
    for results in (again, alone):
        for one, other in zip(first, results, strict=True):
            assert np.abs(one.scores - other.scores).max() <= tolerance


@pytest.mark.parametrize("precision", LOW_PRECISIONS.values())
def test_rounding_changes_scores_a_little(precision: Precision, rng: np.random.Generator) -> None:
    model = tiny_model()
    request = random_request(rng, model.config, 0, 14, 8)
    with tiny_engine(model) as engine, tiny_engine(model, **precision._asdict()) as coarse:
        difference = np.abs(engine.rank([request])[0].scores - coarse.rank([request])[0].scores).max()
    assert 1e-6 < difference < 0.1


def test_a_history_has_other_hashes_in_another_precision(rng: np.random.Generator) -> None:
    """So that no prefix, page of the host tier or snapshot of one precision is found in another."""
    config, key = tiny_config(), HashKey.random()
    request = random_request(rng, config, 0, 9)
    versions = [cache_version(7, EngineConfig(kv_dtype=kv_dtype)) for kv_dtype in KV_DTYPES]
    versions += [cache_version(7, EngineConfig(kv_dtype=kv, compute_dtype="fp8_e4m3")) for kv in KV_DTYPES]
    versions.append(cache_version(8, EngineConfig()))
    states = [Intake(config, version, 100, key).prepare(request).history.states for version in versions]
    for one, other in itertools.combinations(states, 2):
        assert not np.intersect1d(one, other).size


def test_pages_whose_values_lay_token_by_token_are_not_found_any_more() -> None:
    """The layout of pages with K/V and products in fp8_e4m3 has changed; all other caches stay as they are."""

    def before(precision: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"7 {precision}".encode(), digest_size=8).digest(), "little") >> 1

    fp8 = EngineConfig(kv_dtype="fp8_e4m3", compute_dtype="fp8_e4m3")
    with_rows = fp8.model_copy(update={"row_dtype": "fp8_e4m3"})
    assert cache_version(7, fp8) != before("fp8_e4m3 fp8_e4m3")
    assert cache_version(7, with_rows) != before("fp8_e4m3 fp8_e4m3 rows fp8_e4m3")
    assert cache_version(7, EngineConfig(kv_dtype="fp8_e4m3")) == before("fp8_e4m3")
    assert cache_version(7, EngineConfig(kv_dtype="int8", compute_dtype="fp8_e4m3")) == before("int8 fp8_e4m3")


@pytest.mark.parametrize(("name", "least"), [("dlrmv3", 1.9), ("nvidia-bench", 1.9), ("kuairand", 1.9)])
def test_a_pool_holds_nearly_twice_the_tokens_of_a_bfloat16_model(name: str, least: float) -> None:
    model, pool = profile(name, 1_000), 64 << 30
    assert model.dtype == "bfloat16"
    tokens = {kv: pool // model.page_geometry(128, kv).page_bytes * 128 for kv in KV_DTYPES}
    assert tokens["fp8_e4m3"] == tokens["int8"] >= least * tokens["model"]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_simulated_nodes_have_the_pages_of_the_engine(kv_dtype: FixedKVDtype) -> None:
    model, engine = profile("dlrmv3", 1_000), EngineConfig(kv_dtype=kv_dtype, page_tokens=128, pool_bytes="1GiB")
    node = NodeConfig(model=model, engine=engine)
    assert node.geometry == setup.page_geometry(model, engine)
    assert PlanConfig(rate=1, kv_dtype=kv_dtype).kv_dtype == kv_dtype


@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize("precision", [FULL_PRECISION, *LOW_PRECISIONS.values()])
@pytest.mark.parametrize("name", ["dlrmv3", "wide", "nvidia-bench", "kuairand", "paper"])
def test_a_card_can_copy_keys_out_of_pages_in_every_precision(
    name: str, precision: Precision, page_tokens: int
) -> None:
    config = EngineConfig(device="cuda", page_tokens=page_tokens, **precision._asdict())
    geometry = setup.page_geometry(profile(name, 1_000), config)
    assert geometry.is_tma_aligned
    assert geometry.kv_waste < 0.05


def test_wide_heads_in_codes_are_refused_before_hopper() -> None:
    wide, config = tiny_model(v_dim=256), EngineConfig(device="cuda", kv_dtype="int8")
    setup.choose_readable_precision(config, wide, 9)
    setup.choose_readable_precision(config, tiny_model(v_dim=128), 8)
    with pytest.raises(ConfigError, match=r"heads of 256 values need 'model' on a card before .* 9\.0, got 'int8'"):
        setup.choose_readable_precision(config, wide, 8)


def test_auto_takes_only_codes_that_the_card_reads() -> None:
    figures = PrecisionFigures(
        requests=200,
        source="made up",
        largest_difference=0.1,
        mean_difference=0.01,
        spread=1.0,
        top_overlap=1.0,
        kendall_tau=1.0,
    )
    verdicts = PrecisionVerdicts(version="0").with_verdict(Precision("int8"), figures)
    verdicts = verdicts.with_verdict(Precision(row_dtype="int8"), figures)
    wide = replace(tiny_model(v_dim=256), precision=verdicts)
    config = EngineConfig(device="cuda", kv_dtype="auto", row_dtype="auto")
    for generation in (9, None):
        assert setup.choose_readable_precision(config, wide, generation).config.kv_dtype == "int8"
    chosen = setup.choose_readable_precision(config, wide, 8)
    assert (chosen.config.kv_dtype, chosen.config.row_dtype) == ("model", "int8")
    expected = "kv_dtype: model, chosen since heads of 256 values need 'model' on a card before compute capability 9.0"
    assert expected in chosen.reasons
