"""The comparison of row caches: its traces, its table, and what it counts, on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helmrec.kernels.row_index import IndexForm
from helmrec_bench.measure.cards.row_caches import (
    SECOND_TOUCH,
    Ours,
    PlainTorch,
    index_bytes,
    measure,
    over_the_bus,
    placed,
)
from helmrec_bench.measure.cards.row_traces import QUICK, make_table, numbers_of, zipf_steps


def test_rows_of_the_table_are_their_own_numbers() -> None:
    table = make_table(3_000, 8)
    rows = torch.tensor([0, 1, 1_023, 1_024, 2_999])
    assert torch.equal(numbers_of(table[rows]), rows)


def test_popularity_changes_only_where_the_profile_drifts() -> None:
    profile = replace(QUICK, warm_up=200, measured=200)
    for drift, is_same in ((0.0, True), (0.02, False)):
        first, last = np.split(zipf_steps(replace(profile, drift=drift), 0), 2)
        popular = [np.bincount(part.ravel(), minlength=4_000).argsort()[-20:].tolist() for part in (first, last)]
        assert (len({*popular[0]} & {*popular[1]}) > 15) == is_same


def test_a_repeat_of_a_missed_row_does_not_cross_the_bus() -> None:
    profile = replace(QUICK, warm_up=3, measured=4)
    with placed(profile, "cpu") as place:
        found = over_the_bus(place, 0.1, zipf_steps(profile, 0))
    assert 0 < found["rows_once_a_step"] < found["rows_each_lookup"] < profile.step_rows
    assert found["bytes_once_a_step"] == pytest.approx(found["rows_once_a_step"] * 128, abs=64)


def test_both_caches_serve_the_rows_they_are_asked_for() -> None:
    steps = zipf_steps(QUICK, 1)
    with torch.inference_mode(), placed(QUICK, "cpu") as place:
        ours, plain = (
            measure(place, make, steps)
            for make in (lambda: Ours(place, 0.1, SECOND_TOUCH), lambda: PlainTorch(place, 0.1))
        )
        compact = measure(place, lambda: Ours(place, 0.1, SECOND_TOUCH, IndexForm.COMPACT), steps)
    assert 0.5 < plain["hit_rate"] < ours["hit_rate"] < 0.9
    assert ours["refused"] == 0
    assert 0 <= compact["refused"] < 0.01 * compact["admitted"]
    assert abs(ours["hit_rate"] - compact["hit_rate"]) < 0.01


def test_a_compact_index_of_a_billion_rows_is_sized_by_its_slots() -> None:
    small, large = index_bytes((0.01, 0.05))
    assert small["dense"] == large["dense"] == 4 * (10**9 + 1)
    assert small["compact"] == pytest.approx(16 * 10**7, rel=1e-3)
    assert large["compact"] == pytest.approx(16 * 5 * 10**7, rel=1e-3)
