"""The engine on a card: cached equals uncached over a random stream with boundary moves."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import OPTIONS, random_request, tiny_engine, tiny_model

from helmrec.config import FixedKVDtype
from helmrec.engine.precision import audit_tolerance
from helmrec.model.config import ITEM, TableConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
ALPHAS = (0.6, 0.05, 0.4, 0.1)  # in turn: rows of a large share have no room in the next


@pytest.mark.parametrize(("head_dim", "page_tokens"), [(32, 64), (64, 128)], ids=["portable kernel", "hopper kernel"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["concat", "gated"])
def test_a_random_stream_scores_as_it_would_without_caches(
    dtype: str, form: str, head_dim: int, page_tokens: int
) -> None:
    compare_with_uncached(dtype, form, head_dim, page_tokens, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_scores_as_it_would_without_caches(option: str, dtype: str) -> None:
    compare_with_uncached(dtype, "gated", 64, 128, OPTIONS[option])


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_codes_score_as_they_would_without_caches(kv_dtype: FixedKVDtype, dtype: str, head_dim: int) -> None:
    compare_with_uncached(dtype, "concat", head_dim, 64, {}, {"kv_dtype": kv_dtype})


@pytest.mark.parametrize(
    ("here", "host"), [("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("int8", "model"), ("model", "fp8_e4m3")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_rows_score_as_they_would_without_caches(dtype: str, here: str, host: str) -> None:
    compare_with_uncached(dtype, "concat", 64, 128, {}, {"row_dtype": here, "host_row_dtype": host})


def test_everything_in_eight_bits_scores_as_it_would_without_caches() -> None:
    every = dict.fromkeys(("kv_dtype", "compute_dtype", "row_dtype", "host_row_dtype"), "fp8_e4m3")
    compare_with_uncached("bfloat16", "concat", 64, 128, {}, every)


def compare_with_uncached(
    dtype: str,
    form: str,
    head_dim: int,
    page_tokens: int,
    options: dict[str, Any],
    precision: dict[str, Any] | None = None,
) -> None:
    precision = precision or {}
    is_smaller = bool({"kv_dtype", "row_dtype"} & precision.keys())
    model = tiny_model(
        **options,
        dtype=dtype,
        form=form,
        num_layers=3,
        qk_dim=head_dim,
        v_dim=head_dim,
        dim=64,
        hidden_dim=64,
        window=256,
        normaliser=256,
        row_dim=128,
        features=(TableConfig(name=ITEM, num_rows=20_000), TableConfig(name="category", num_rows=20)),
    )
    host: dict[str, Any] = {"host_kv_bytes": "4MiB", "kv_reload": "always"}
    engine = tiny_engine(
        model,
        device="cuda",
        page_tokens=page_tokens,
        pool_bytes=(8 if head_dim == 64 else 2) * (1 << 20) // (2 if is_smaller else 1),
        **precision,
        kv_admission="always",
        max_batch_requests=2,  # so that steps overlap
        **host,
    )
    assert engine.report().num_graphs > 0
    rng = np.random.default_rng(0)
    histories = {user: random_request(rng, model.config, user, 400) for user in range(12)}
    worst = 0.0
    is_long = (dtype, form, head_dim) == ("bfloat16", "concat", 64) and not {"row_dtype"} & precision.keys()
    for i in range(700 if is_long else 60):  # three requests each
        if i % 15 == 0:
            engine.move_alpha(ALPHAS[i // 15 % len(ALPHAS)])
        requests = []
        for user in rng.choice(12, 3):
            whole = histories[int(user)]
            length = int(rng.integers(model.config.unkept_events, 400))
            context = {**whole.context, "hour": i % 24} if model.config.request_context else whole.context
            requests.append(
                random_request(
                    rng,
                    model.config,
                    int(user),
                    items=whole.items[:length],
                    actions=whole.actions[:length],
                    timestamps=whole.timestamps[:length],
                    features={"category": whole.features["category"][:length]},
                    context=context,
                )
            )
        for request, result in zip(requests, engine.rank(requests), strict=True):
            plain = engine._runner.score_without_caches(engine._intake.prepare(request))
            assert np.isfinite(result.scores).all()
            worst = max(worst, float(np.abs(result.scores - plain).max()))
        engine.check()
    stats = engine.stats().pool
    assert stats.reused_tokens > 0
    assert stats.kv_evicted_pages > 0
    assert stats.host_reloaded_pages > 0
    assert stats.row_evictions > 0
    assert stats.row_refills > 0
    assert engine.stats().background_failures == 0
    print(f"{stats.total_tokens} tokens, {stats.reused_tokens} reused; worst difference {worst:.1e}")  # noqa: T201 - kept with the run
    assert worst <= audit_tolerance(dtype, engine.config), worst
