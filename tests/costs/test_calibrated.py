from pathlib import Path

import numpy as np
import pytest

from helmrec.costs.calibrated import BusLoad, default_cost, load_cost, reload_ms, rows_ms, tokens_ms
from helmrec.errors import ConfigError

COST = default_cost()
TERMS = COST.terms()


def rows_of(num: float) -> BusLoad:
    return BusLoad(hit_bytes=0.0, miss_bytes=num * 1_024, num_missed=num)


def test_every_figure_says_where_it_was_measured() -> None:
    assert COST.unexplained == []
    assert COST.name == "h200"


def test_the_committed_calibration_predicts_what_it_was_fitted_to() -> None:
    errors = np.abs(np.array(list(COST.fit.values())) - 1)
    assert errors.size > 60, "kinds of steps"
    assert np.median(errors) < 0.06
    assert np.quantile(errors, 0.9) < 0.16
    assert errors.max() < 0.3


def test_rows_come_slower_beside_compute_and_speed_up_when_it_ends() -> None:
    alone, beside = rows_ms(TERMS, rows_of(65_536), 0.0, 1.0), rows_ms(TERMS, rows_of(65_536), 1e9, 1.0)
    assert alone == pytest.approx(65_536 * 1_024 / TERMS.sorted_alone_gb_per_s / 1e6)
    assert beside == pytest.approx(65_536 * 1_024 / TERMS.sorted_beside_gb_per_s / 1e6)
    assert alone < rows_ms(TERMS, rows_of(65_536), beside / 2, 1.0) < beside


def test_few_rows_come_in_arrival_order_and_a_slow_bus_is_slow() -> None:
    few = rows_of(1_000)
    assert rows_ms(TERMS, few, 0.0, 1.0) == pytest.approx(1_024_000 / TERMS.alone_gb_per_s / 1e6)
    assert rows_ms(TERMS, few, 0.0, 0.25) == pytest.approx(4 * rows_ms(TERMS, few, 0.0, 1.0))
    assert reload_ms(TERMS, 0.0, 1.0) == 0


def test_long_prefixes_are_worth_taking_back_before_short_ones() -> None:
    """Bytes grow with the tokens, computing them with their square."""
    ratios = [tokens_ms(TERMS, 0, n, 6) / reload_ms(TERMS, float(n * 10_240), 1.0) for n in (1_000, 4_000, 16_000)]
    assert ratios == sorted(ratios)
    assert tokens_ms(TERMS, 500, 1_000, 6) > tokens_ms(TERMS, 0, 500, 6), "later tokens look at more"


def test_an_invalid_calibration_raises_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for text, words in (
        ("{", "cannot read"),
        ('{"name": "x"}', "is required"),
        (COST.model_dump_json().replace('"intake_ms":"', '"other":"'), "missing intake_ms"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_cost(path)
    path.write_text(COST.model_dump_json())
    assert load_cost(path) == COST
