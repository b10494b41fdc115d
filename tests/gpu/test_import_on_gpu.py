"""An imported DLRMv3 on a card: scores against the float64 reference of the published arithmetic."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.meta_reference import MetaReference
from tests.model.published import (
    SMALL,
    WIDE,
    WIDE_ROWS,
    dense_weights,
    random_query,
    tables,
    wide_query,
    write_published,
)

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.model.dlrmv3 import ImportOptions, import_dlrmv3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS = 2
WIDE_TABLES = {"extra": ("extra_a", "extra_b"), "context": ("ctx_user", "ctx_city", "ctx_age")}
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_imported_model_scores_on_a_card_as_published(tmp_path: Path, dtype: str) -> None:
    sizes = replace(SMALL, dim=64, row_dim=64, width=HEADS * 64, qk_width=HEADS * 64, input_hidden=32, hidden=64)
    write_published(tmp_path, sizes)
    asked = {"num_heads": HEADS, "window": 300, "max_candidates": 16, "dtype": dtype}
    import_dlrmv3(tmp_path, tmp_path / "sparse", tmp_path / "model", ImportOptions.model_validate(asked))
    reference = MetaReference(dense_weights(sizes), tables(sizes), HEADS)
    engine = Engine.from_model(
        tmp_path / "model", EngineConfig.model_validate({"pool_bytes": "64MiB", "device": "cuda"})
    )
    assert engine.report().num_graphs > 0
    rng = np.random.default_rng(0)
    for _ in range(3):
        lengths = [(0, 1), (1, 3), (17, 2), (18, 2), (150, 16), (300, 16)]
        requests = [random_query(rng, user, num, candidates) for user, (num, candidates) in enumerate(lengths)]
        for request, result in zip(requests, engine.rank(requests), strict=True):
            assert np.abs(result.scores - reference.scores(request)).max() <= TOLERANCE[dtype]
            assert result.reused_tokens == 0
    engine.check()
    engine.close()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_steps_as_graphs_score_as_single_operations_do(tmp_path: Path, dtype: str) -> None:
    """Of a model with several contextual features and no time of the query; in float32 the portable kernel attends."""
    sizes = replace(WIDE, dim=64, row_dim=64, width=HEADS * 64, qk_width=HEADS * 64)
    write_published(tmp_path, sizes, WIDE_ROWS)
    asked = {"num_heads": HEADS, "window": 300, "max_candidates": 16, "dtype": dtype, **WIDE_TABLES}
    import_dlrmv3(tmp_path, tmp_path / "sparse", tmp_path / "model", ImportOptions.model_validate(asked))
    settings = {"pool_bytes": "64MiB", "device": "cuda"}
    engines = [
        Engine.from_model(tmp_path / "model", EngineConfig.model_validate({**settings, "cuda_graphs": graphs}))
        for graphs in (True, False)
    ]
    assert [engine.report().num_graphs > 0 for engine in engines] == [True, False]
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = [(1, 3), (17, 2), (150, 16), (300, 16)]
        requests = [wide_query(rng, user, num, candidates) for user, (num, candidates) in enumerate(lengths)]
        for fast, plain in zip(*(engine.rank(requests) for engine in engines), strict=True):
            assert np.abs(fast.scores - plain.scores).max() <= TOLERANCE[dtype]
    for engine in engines:
        engine.check()
        engine.close()
