"""Tokens that are not finite on a card: the compiled kernels let them reach those that see them and nobody else."""

from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.helpers import random_request, tiny_engine, tiny_model
from tests.kernels.ragged_cases import Heads, Lengths, harmed_by, random_case, relative_error, spoil

from helmrec.config import RelayConfig
from helmrec.errors import NonFiniteScores
from helmrec.kernels import hopper_attention, triton_append, triton_attention
from helmrec.kernels.attention_plan import plan_for
from helmrec.model.config import ITEM, TableConfig

pytestmark = pytest.mark.gpu

MIXED = [Lengths(513, 300, 5), Lengths(0, 0, 0), Lengths(3000, 7, 400), Lengths(128, 128, 0), Lengths(0, 700, 2)]
BAD = 77


@pytest.mark.parametrize("wrong", ["key", "value", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("heads", [Heads(4, 128, 128), Heads(2, 64, 64), Heads(2, 8, 24)])
def test_a_token_that_is_not_finite_reaches_those_that_see_it_and_nobody_else(
    heads: Heads, is_hopper: bool, dtype: torch.dtype, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_hopper:
        monkeypatch.setattr(hopper_attention, "supports", lambda *_: False)
    rng = np.random.default_rng(0)
    case = random_case(rng, MIXED, heads, 128, dtype, num_context=3, device="cuda")
    tokens = spoil(case, wrong, [0, 2, 3, 4])
    sound = case._replace(**{name: getattr(case, name).clone() for name in ("k", "v", "k_pages", "v_pages")})
    for each in (sound.k, sound.v):
        each[tokens] = 1.0
    sound.append()
    expected, harmed = sound.reference(heads.qk**-0.5, 1000.0), harmed_by(case, tokens)
    triton_append.append_kv(*case[1:])
    plan = plan_for(case.q, case.v, case.batch)
    for _ in range(2):
        out = torch.full(case.v.shape, torch.inf, dtype=dtype, device="cuda")
        triton_attention.attend(*case, scale=heads.qk**-0.5, normaliser=1000.0, plan=plan, out=out)
        assert out[: case.num_live][harmed].isnan().all()
        assert relative_error(out[: case.num_live][~harmed], expected[~harmed]) < 1e-2


@pytest.mark.parametrize(("head_dim", "page_tokens"), [(32, 64), (64, 128)], ids=["portable kernel", "hopper kernel"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bad_row_fails_its_requests_and_heals_while_batch_mates_stay_exact(
    dtype: str, head_dim: int, page_tokens: int
) -> None:
    shape: dict[str, Any] = {"qk_dim": head_dim, "v_dim": head_dim, "dim": 64, "hidden_dim": 64, "row_dim": 128}
    features = (TableConfig(name=ITEM, num_rows=20_000), TableConfig(name="category", num_rows=20))
    model = tiny_model(dtype=dtype, num_layers=3, window=512, normaliser=512, features=features, **shape)
    relay = RelayConfig(risk=0, chunk_tokens=256, max_held=1.0, max_compute=1.0)
    settings: dict[str, Any] = {"device": "cuda", "page_tokens": page_tokens, "pool_bytes": "8MiB"}
    engine = tiny_engine(model, kv_admission="always", relay=relay, host_kv_bytes="4MiB", **settings)
    rng = np.random.default_rng(0)
    good = [random_request(rng, model.config, user, 300) for user in range(4)]
    bad = [random_request(rng, model.config, user, 300) for user in range(10, 14)]
    for request in (*good, *bad):
        np.asarray(request.items)[np.asarray(request.items) == BAD] = 1
    for request in bad:
        np.asarray(request.items)[150] = BAD
    finite = engine._master.gather(np.array([BAD])).float().numpy()
    for _ in range(3):
        _write_bad_row(engine)
        asked = [request for pair in zip(bad, good, strict=True) for request in pair]
        futures = [engine.submit(request) for request in asked]
        while engine.step():
            pass
        for request, future in zip(asked, futures, strict=True):
            assert isinstance(future.exception(), NonFiniteScores) == (request in bad)
            if request in good:
                _assert_exact(engine, request, future.result().scores)
        engine.check()
        engine.update_rows("item", [BAD], finite)
        for request, result in zip(asked, engine.rank(asked), strict=True):
            _assert_exact(engine, request, result.scores)
        engine._pool.kv.evict(1 << 20)  # the next round is computed in pages that held them
    assert engine.stats().background_failures == 0
    engine.close()


def _write_bad_row(engine: Any) -> None:
    """As if it had passed every check."""
    rows = np.array([BAD + engine.model_config.offsets["item"]])
    values = torch.full((1, engine.model_config.row_dim), torch.nan, dtype=engine._master.codec.dtype)
    engine.check()
    engine._pool.row_epochs.mark(rows)
    engine._runner.write_rows(engine._dense.rows.send(rows, values))


def _assert_exact(engine: Any, request: Any, scores: Any) -> None:
    plain = engine._runner.score_without_caches(engine._intake.prepare(request))
    assert np.abs(scores - plain).max() <= 5e-2
