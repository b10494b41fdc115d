"""Stages of steps on a card, by its events: all are timed, and grow with the work they did."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import random_request, tiny_engine, tiny_model

from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.model.config import ITEM, TableConfig
from helmrec.steps import Step, Steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STAGES = [Step.HOST_MS, Step.ROWS_MS, Step.COMPUTE_MS]
LONG = 16_000  # events
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "operations": {"cuda_graphs": False},
    "plain torch": {"kernels": "torch"},
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(way: str) -> Iterator[Engine]:
    """Rows of 1 KiB; users that come again find their pages on the host."""
    model = tiny_model(
        dtype="bfloat16",
        row_dtype="bfloat16",
        num_layers=3,
        num_heads=8,
        qk_dim=64,
        v_dim=64,
        dim=512,
        hidden_dim=512,
        window=16_384,
        normaliser=16_384,
        row_dim=512,
        features=(TableConfig(name=ITEM, num_rows=200_000), TableConfig(name="category", num_rows=20)),
    )
    settings: dict[str, Any] = {
        "device": "cuda",
        "page_tokens": 128,
        "pool_bytes": "1GiB",
        "alpha": 0.4,
        "row_admission": "always",
        "kv_admission": "always",
        "host_kv_bytes": "256MiB",
        "kv_reload": "always",
        "save_bytes_per_step": "256MiB",
        "max_batch_requests": 2,
    }
    with tiny_engine(model, MonotonicClock(), **settings | WAYS[way]) as engine:
        engine.rank([random_request(np.random.default_rng(9), model.config, 9, num) for num in (10, 2_000)])
        engine.take_steps()
        yield engine
        engine.check()
        assert engine.stats().background_failures == 0


def steps_of(engine: Engine, rng: np.random.Generator, sizes: list[int], **fields: Any) -> Steps:
    """One step for each number of events, each of a user of its own, one after another."""
    users = rng.integers(1, 1 << 40, len(sizes))
    for user, num_events in zip(users.tolist(), sizes, strict=True):
        engine.rank([random_request(rng, engine.model_config, user, num_events, **fields)])
    steps = engine.take_steps()
    assert len(steps) == len(sizes)
    return steps


def test_every_stage_of_every_step_is_timed(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    requests = [random_request(rng, engine.model_config, 100 + i, 300 + 40 * i) for i in range(24)]
    results = engine.rank(requests)  # all queued at once, so that steps overlap where they may
    steps = engine.take_steps()
    assert len(steps) >= 12
    assert np.isfinite(steps).all()
    assert (steps[:, STAGES] > 0).all()
    took_ms = (steps[:, Step.END_S] - steps[:, Step.BEGIN_S]) * 1e3
    for stage in (Step.ROWS_MS, Step.COMPUTE_MS):  # the host goes on when a step has ended
        assert (steps[:, stage] <= took_ms + 0.1).all(), stage.name
    assert steps[:, Step.TOKENS].sum() == sum(result.computed_tokens for result in results)
    assert steps[:, Step.ROWS_MISSED].sum() == sum(result.row_misses for result in results)
    assert steps[:, Step.ROWS_READ].sum() == sum(result.row_misses + result.row_hits for result in results)


def test_stages_of_one_stream_do_not_overlap(engine: Engine, way: str) -> None:
    """Together, the row stages of overlapping steps take no longer than all of the steps did, nor do their others."""
    rng = np.random.default_rng(1)
    engine.rank([random_request(rng, engine.model_config, 200 + i, 2_000) for i in range(40)])
    steps = engine.take_steps()
    assert (steps[1:, Step.BEGIN_S] < steps[:-1, Step.END_S]).any() == (way == "graphs")
    wall_ms = (steps[-1, Step.END_S] - steps[0, Step.BEGIN_S]) * 1e3
    assert steps[:, Step.COMPUTE_MS].sum() <= wall_ms
    assert steps[:, Step.ROWS_MS].sum() <= wall_ms


def test_compute_grows_with_tokens(engine: Engine, way: str) -> None:
    if way != "graphs":
        pytest.skip("called one by one, operations take the host longer than the device")
    steps = steps_of(engine, np.random.default_rng(2), [64, LONG] * 8)[4:]
    short, long = steps[::2], steps[1::2]
    assert long[:, Step.TOKENS].min() > 30 * short[:, Step.TOKENS].max()
    assert long[:, Step.COMPUTE_MS].min() > 1.5 * short[:, Step.COMPUTE_MS].min()


def test_reading_rows_takes_longer_the_more_of_them_are_missed(engine: Engine, way: str) -> None:
    if way != "graphs":
        pytest.skip("called one by one, operations take the host longer than the device")
    rng, num = np.random.default_rng(3), LONG
    hits, misses = [], []
    for i in range(10):  # the same number of rows either way
        hits.append(steps_of(engine, rng, [num], items=rng.permutation(num)))
        misses.append(steps_of(engine, rng, [num], items=20_000 + i * num + rng.permutation(num)))
    hit, miss = np.concatenate(hits[2:]), np.concatenate(misses[2:])
    assert (miss[:, Step.ROWS_READ] == hit[:, Step.ROWS_READ]).all()
    assert np.median(miss[:, Step.ROWS_MISSED]) > 3 * np.median(hit[:, Step.ROWS_MISSED])
    assert miss[:, Step.ROWS_MS].min() > hit[:, Step.ROWS_MS].min()


def test_pages_from_the_host_are_part_of_the_row_stage(engine: Engine, way: str) -> None:
    request = random_request(np.random.default_rng(4), engine.model_config, 300, 4_000)
    reloaded_before = engine.stats().pool.host_reloaded_pages
    for _ in range(8):
        engine.rank([request])  # its pages are resident, but for the first time
        engine._pool.kv.evict(1 << 20)
        engine.rank([request])  # they come from the host
    steps = engine.take_steps()
    assert np.isfinite(steps).all()
    assert (steps[:, STAGES] > 0).all()
    assert steps[:, Step.PAGES_RELOADED].sum() == engine.stats().pool.host_reloaded_pages - reloaded_before
    resident, reloaded = steps[2::2], steps[3::2]
    assert (resident[:, Step.PAGES_RELOADED] == 0).all()
    assert (reloaded[:, Step.PAGES_RELOADED] == 31).all()
    if way == "graphs":  # called one by one, operations take the host longer than pages take the bus
        assert reloaded[:, Step.ROWS_MS].min() > resident[:, Step.ROWS_MS].min()
