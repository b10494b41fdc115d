"""A stream of row deltas on a card: rows are written while steps run, and every answer is right at its position."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from tests.deltas import test_exact_streams as streams
from tests.helpers import random_request, tiny_engine, tiny_model

from helmrec.deltas import consumer
from helmrec.engine.intake import prepare_rows
from helmrec.kernels.compiling import num_compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE: dict[str, Any] = {"qk_dim": 32, "v_dim": 32, "dim": 64, "hidden_dim": 64, "window": 64, "normaliser": 64}
ON_CARD: dict[str, Any] = {"device": "cuda", "page_tokens": 64, "row_index": "device"}


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "operation by operation"])
def test_cached_equals_uncached_at_the_stated_position(has_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "_POLL_S", 0.0005)
    streams.seen.clear()
    settings = ON_CARD | {"cuda_graphs": has_graphs, "overlap": True, "host_kv_bytes": 0}
    for seed in range(8):
        stream = streams.Stream(seed, SHAPE, settings, is_threaded=seed % 4 == 0)
        with stream.engine:
            stream.run(tolerance=1e-4)
    assert streams.seen["written while a step runs"], dict(streams.seen)
    assert streams.seen["stale cuts"], dict(streams.seen)


def test_a_write_waits_neither_for_layers_nor_for_row_reads() -> None:
    """The host goes on although the stream that reads rows is kept busy for a while."""
    with tiny_engine(tiny_model(row_dtype="float16", **SHAPE), **ON_CARD) as engine:
        engine.rank([random_request(np.random.default_rng(0), engine.model_config)])
        update = prepare_rows(engine.model_config, "item", np.arange(100), np.full((100, 16), 0.5, np.float32))
        engine.apply_rows(engine.stage_rows(update))
        torch.cuda.synchronize()
        staged = engine.stage_rows(update._replace(values=update.values * 2))
        stream = engine._dense.rows.stream
        assert stream is not None
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # clock cycles: about 0.2 s
        started_s = time.perf_counter()
        engine.apply_rows(staged)
        took_s = time.perf_counter() - started_s
        assert not stream.query(), "the sleep was too short to show anything"
        assert took_s < 0.05
        engine._dense.rows.finish_writes()
        assert bool((engine._master.gather(update.rows) == 1.0).all())


def test_a_slice_is_written_by_one_launch_that_was_compiled_before() -> None:
    """Whatever the size of a delta and of its slices."""
    with tiny_engine(tiny_model(row_dtype="float16", **SHAPE), **ON_CARD) as engine:
        engine.rank([random_request(np.random.default_rng(0), engine.model_config)])
        rng = np.random.default_rng(1)
        cases = [
            (rng.standard_normal((sum(each), 16)).astype(np.float16), each) for each in ([1], [16, 16, 5], [299, 1])
        ]
        updates = [
            prepare_rows(engine.model_config, "item", rng.permutation(300)[: len(values)], values)
            for values, _ in cases
        ]
        before = num_compiled()
        for update, (values, slices) in zip(updates, cases, strict=True):
            staged = engine.stage_rows(update)
            torch.cuda.synchronize()
            ends = np.cumsum(slices).tolist()
            cuda = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=cuda, acc_events=True) as profile:  # else it warns that it forgets
                for start, end in zip([0, *ends[:-1]], ends, strict=True):
                    engine.apply_rows(staged.part(start, end))
                torch.cuda.synchronize()
            on_card = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
            assert on_card == ["_write_kernel"] * len(slices)
            engine._dense.rows.finish_writes()
            assert torch.equal(engine._master.gather(update.rows), torch.from_numpy(values))
        assert num_compiled() == before, "a write was compiled while the engine served"
