"""Row updates on a live engine on a card: no step ever sees an old row, wherever the row is."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import random_request, tiny_engine, tiny_model

from helmrec.engine import row_graphs
from helmrec.engine.engine import Engine
from helmrec.kernels.row_index import ABSENT
from helmrec.memory.device_rows import DeviceRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


ROWS_IN = [("model", "model"), ("int8", "int8"), ("fp8_e4m3", "model"), ("model", "int8")]


@pytest.mark.parametrize("assigned_beside_from", [1, 1_000_000])
@pytest.mark.parametrize("row_dim", [16, 11])
@pytest.mark.parametrize(("here", "host"), ROWS_IN)
def test_scores_after_updates_are_those_of_a_model_born_with_the_new_rows(
    here: str, host: str, row_dim: int, assigned_beside_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_graphs, "_ASSIGN_BESIDE", assigned_beside_from)
    shape = {"qk_dim": 32, "v_dim": 32, "dim": 64, "hidden_dim": 64, "window": 64, "normaliser": 64}
    model = tiny_model(row_dim=row_dim, row_dtype="float16", **shape)
    rows: dict[str, Any] = {"row_dtype": here, "host_row_dtype": host}
    born = tiny_model(row_dim=row_dim, row_dtype="float16", **shape)
    plain = tiny_engine(born, page_tokens=64, kernels="torch", **rows)
    rng = np.random.default_rng()
    settings = {"row_admission": "always", "kv_admission": "always"} | rows
    with tiny_engine(model, device="cuda", page_tokens=64, **settings) as engine:
        requests = [random_request(rng, model.config, user, 40) for user in range(6)]
        hits = misses = 0
        for i in range(40):
            table = model.config.tables[i % len(model.config.tables)]
            ids = rng.choice(table.num_rows, min(table.num_rows, 30), replace=False)
            values = rng.standard_normal((ids.size, row_dim)).astype(np.float16).astype(np.float32)
            for one in (engine, plain):
                one.update_rows(table.name, ids, values)
            asked = [requests[int(user)] for user in rng.choice(6, 2, replace=False)]
            asked.append(random_request(rng, model.config, 100 + i, 10))
            for request, result in zip(asked, engine.rank(asked), strict=True):
                expected = plain._runner.score_without_caches(plain._intake.prepare(request))
                assert np.abs(result.scores - expected).max() < 1e-4
                hits, misses = hits + result.row_hits, misses + result.row_misses
            engine.check()
            _check_resident_copies(engine)
        assert hits > 0
        assert misses > 0


def _check_resident_copies(engine: Engine) -> None:
    """Every row in the arena is, bit for bit, the master's in the form of the arena."""
    rows = engine._pool.rows
    assert isinstance(rows, DeviceRows)
    torch.cuda.synchronize()
    slots = (rows.table.row_of != ABSENT).nonzero().flatten()
    resident = rows.table.row_of[slots].cpu().numpy().astype(np.int64)
    assert resident.size
    codec, kept = engine._runner._model.row_codec, engine._arena.rows[slots].cpu()
    wanted = engine._master.codec.recode(engine._master.gather(resident), codec)
    used = codec.dim + (codec.code is not None)  # the padding of a record is of no account
    assert torch.equal(kept[:, :used], wanted[:, :used])
