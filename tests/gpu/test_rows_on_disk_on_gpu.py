"""Rows on disk behind an engine on a card: missed rows are read by frame, and updates reach frames, log and pool."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import random_request, tiny_engine, tiny_model

from helmrec.memory.row_frames import RowFrames
from helmrec.model.weights import LoadedModel, load_model, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE: dict[str, Any] = {"qk_dim": 32, "v_dim": 32, "dim": 64, "hidden_dim": 64, "window": 64, "normaliser": 64}
NUM_FRAMES = 200  # of 349 rows; one request may read 146


def bytes_for(model: LoadedModel) -> int:
    num = 4 * model.config.num_rows
    while RowFrames.frames_for(num, model.config.num_rows, model.config.row_stride) < NUM_FRAMES:
        num += 1
    return num


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("row_dim", [16, 11])
def test_scores_equal_those_without_caches_while_rows_change(tmp_path: Path, row_dim: int, cuda_graphs: bool) -> None:
    model = tiny_model(row_dim=row_dim, row_dtype="float16", **SHAPE)
    save_model(tmp_path / "model", model.config, model.dense, model.tables)
    plain = tiny_engine(model, page_tokens=64, kernels="torch")
    settings: dict[str, Any] = {"device": "cuda", "page_tokens": 64, "cuda_graphs": cuda_graphs}
    rng = np.random.default_rng(0)
    requests = [random_request(rng, model.config, user, 40) for user in range(12)]
    with tiny_engine(load_model(tmp_path / "model"), host_rows_bytes=bytes_for(model), **settings) as engine:
        for i in range(40):
            table = model.config.tables[i % len(model.config.tables)]
            ids = rng.choice(table.num_rows, min(table.num_rows, 30), replace=False)
            values = rng.standard_normal((ids.size, row_dim)).astype(np.float16).astype(np.float32)
            for one in (engine, plain):
                one.update_rows(table.name, ids, values)
            asked = [requests[int(user)] for user in rng.choice(12, 3, replace=False)]
            asked.append(random_request(rng, model.config, 100 + i, 10))
            for request, result in zip(asked, engine.rank(asked), strict=True):
                expected = plain._runner.score_without_caches(plain._intake.prepare(request))
                assert np.abs(result.scores - expected).max() < 1e-4
            engine.check()
        tier = engine.stats().row_tier
        assert tier is not None
        assert tier.memory_evictions > 0
        assert tier.log_rows > 0
    plain.close()
