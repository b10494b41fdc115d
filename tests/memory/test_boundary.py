import math

import pytest

from helmrec.memory.boundary import SHARE_PER_S, moves_between_steps

GIB = 1 << 30
PAGE = 1 << 20


@pytest.mark.parametrize("pool_gib", [1, 6, 46, 130])
@pytest.mark.parametrize("step_s", [0.002, 0.014, 0.07, 0.2])
def test_a_tenth_of_any_pool_changes_owner_within_a_second(pool_gib: int, step_s: float) -> None:
    num_pages, pages_per_move = pool_gib * GIB // PAGE, 16
    a_step = pages_per_move * moves_between_steps(num_pages, pages_per_move, step_s)
    assert a_step * math.ceil(1 / step_s) >= SHARE_PER_S * num_pages


def test_a_small_pool_makes_one_move_a_step() -> None:
    assert moves_between_steps(6 * GIB // PAGE, 16, 0.014) == 1
    assert moves_between_steps(6 * GIB // PAGE, 16, 0.0) == 1


def test_a_step_after_an_idle_minute_moves_no_more_than_one_after_a_quarter_of_a_second() -> None:
    assert moves_between_steps(130 * GIB // PAGE, 16, 60.0) == moves_between_steps(130 * GIB // PAGE, 16, 0.25)
