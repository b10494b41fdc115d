"""The ladder on a card: its search, what a call that is cut short leaves to the next one, courses of a small model."""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest

from helmrec_bench.measure.cards import ladder
from helmrec_bench.measure.cards.ladder import ShapeLadder, described, rungs_of, table
from helmrec_bench.measure.cards.ladder_search import (
    LEAST,
    MOST,
    CallClock,
    Course,
    OutOfTime,
    best_rates,
    largest_load,
    load_of,
    rate_factor,
    worst_factors,
)
from helmrec_bench.measure.cards.ladder_stand import ALONE, CUMULATIVE, FIRST, QUICK, RUNGS, LadderStand, Rung
from helmrec_bench.registry import REGISTERED

BEARS = {name: 1.0 + 0.08 * number for number, name in enumerate(RUNGS)}  # of the best constant's throughput


@pytest.mark.parametrize("limit", [LEAST, -37, -1, 0, 5, 22, MOST - 3])
@pytest.mark.parametrize("guess", [-30, 0, 4, 40])
@pytest.mark.parametrize("stride", [1, 4])
def test_the_search_finds_the_largest_load_from_any_guess(limit: int, guess: int, stride: int) -> None:
    tried: list[int] = []

    def is_met(load: int) -> bool:
        tried.append(load)
        return load <= limit

    found = largest_load(is_met, guess, stride)
    assert found == limit or (found is None and limit < min(tried)), "a load that no search reaches is none"
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 * math.log2(200) + 2


def test_a_rung_that_holds_no_load_has_none() -> None:
    assert largest_load(lambda load: False, 0) is None


def test_loads_are_steps_of_a_fortieth() -> None:
    assert rate_factor(0) == 1.0
    assert [load_of(rate_factor(load)) for load in (-40, 0, 7)] == [-40, 0, 7]
    assert load_of(1e-9) == LEAST


def test_rates_are_those_of_the_constant_that_loses_least_where_it_suits_least() -> None:
    throughput = {"0.2": {"a": 100.0, "b": 400.0}, "0.5": {"a": 180.0, "b": 380.0}, "0.8": {"a": 200.0, "b": 100.0}}
    assert best_rates(throughput) == throughput["0.5"]
    assert worst_factors(throughput, throughput["0.5"]) == {
        "0.2": pytest.approx(100 / 180),
        "0.5": 1.0,
        "0.8": pytest.approx(100 / 380),
    }


class CountedServer(LadderStand):
    """Serves nothing; a rung bears what the table says, and a constant away from 0.5 less."""

    def __init__(self) -> None:
        self.rates = {}
        self.made: list[tuple[str, str, int, int]] = []
        self.engines = 0

    def use(self, kind: Any) -> None:
        self.engines += 1

    def serve(self, rung: str, policy: str, load: int, seed: int, seconds: float) -> Course:
        self.made.append((rung, policy, load, seed))
        name, _, value = policy.partition(":")
        away = abs(float(value) - 0.5) if name == "static" else 0.0
        keeps = rate_factor(load) <= (BEARS[rung] - away) * (1 + 0.01 * seed)
        return {"offered_per_s": 100.0, "p99_ms": 70.0 if keeps else None, "keeps": keeps}

    def saturated(self, rung: str, alpha: float) -> dict[str, float]:
        return {mix: rate * (1 - abs(alpha - 0.5)) for mix, rate in (("0.35", 500.0), ("0.6", 600.0), ("0.85", 1e3))}

    def without_reuse(self, alpha: float) -> float:
        return 250.0


def flags_of(**changed: Any) -> Namespace:
    asked = {"seconds": 2.0, "screen_s": 1.0, "repeats": 3, "policy": "helm", "quick": False, "rungs": None}
    return Namespace(**asked | changed)


def measure(found: dict[str, Any], server: CountedServer, rungs: Sequence[Rung], clock: CallClock) -> None:
    ShapeLadder(found, flags_of(), clock, lambda: None).measure(server, rungs)


def test_a_call_that_is_cut_short_is_continued_with_the_courses_it_has() -> None:
    whole, server = dict[str, Any](), CountedServer()
    measure(whole, server, CUMULATIVE, CallClock(math.inf))
    cut, again = dict[str, Any](), CountedServer()
    calls = 0
    while ShapeLadder(cut, flags_of(), CallClock(math.inf), lambda: None).missing(CUMULATIVE):
        calls += 1
        with_limit = CallClock(math.inf)
        allowed = iter(range(9))
        with_limit.need = lambda seconds, left=allowed: _take(left)  # type: ignore[method-assign, misc]
        try:
            measure(cut, again, CUMULATIVE, with_limit)
        except OutOfTime:
            continue
    assert calls > 3
    assert cut == whole
    assert sorted(again.made) == sorted(server.made), "no course is served twice"


def _take(left: Any) -> None:
    if next(left, None) is None:
        raise OutOfTime


def test_rungs_are_held_against_the_fixed_split_on_the_same_seeds() -> None:
    found, flags = dict[str, Any](), flags_of()
    measure(found, CountedServer(), [*CUMULATIVE, *ALONE], CallClock(math.inf))
    assert found["rungs"][FIRST.name]["policy"] == "static:0.5"
    said = described(found, flags)
    over = {name: one["over_fixed_split"]["mean"] for name, one in said["rungs"].items()}
    assert over[FIRST.name] == 1.0
    assert over["+ relay"] == pytest.approx(BEARS["+ relay"], abs=0.05)
    assert not said["rungs"]["+ controller"]["is_expected_met"], "1.3 is asked for"
    assert said["rungs"]["admission alone"]["seeds"] == 1
    meta = said["meta_without_reuse"]
    assert meta["our_step_ms"] == 32.0
    assert meta["saturated_per_s"] == pytest.approx(8e3 / (32.0 + 11.68 - 8.354), rel=1e-3)
    shown = table("wide", said)
    assert "Meta's layers without reuse, computed" in shown
    assert "+ FP8 compute" in shown
    assert not ShapeLadder(found, flags, CallClock(math.inf), lambda: None).missing([*CUMULATIVE, *ALONE])


def test_rungs_alone_are_measured_on_the_wide_shape() -> None:
    assert rungs_of("dlrmv3", flags_of()) == list(CUMULATIVE)
    assert rungs_of("wide", flags_of()) == [*CUMULATIVE, *ALONE]
    assert rungs_of("dlrmv3", flags_of(rungs=[FIRST.name])) == [FIRST]


def test_a_file_of_another_plan_is_not_continued(tmp_path: Any) -> None:
    out = tmp_path / "ladder.json"
    out.write_text('{"plan": {}, "shapes": {}}')
    flags = REGISTERED["ladder-card"].parse(["--quick", "--out", str(out)])
    with pytest.raises(SystemExit, match="another plan"):
        ladder.main(flags)


@pytest.mark.slow
def test_every_kind_of_rung_serves_a_course_of_a_small_model() -> None:
    stand = LadderStand("wide", QUICK)
    stand.rates = {0.35: 10.0, 0.6: 10.0, 0.85: 10.0}
    for name, policy in ((FIRST.name, "static:0.5"), ("+ controller", "helm"), ("+ relay", "helm")):
        stand.use(RUNGS[name].kind)
        seen = stand.serve(name, policy, 0, 1, 1.5)
        assert seen["requests"] > 5, "those of the settling time are not counted"
        assert 0 <= seen["within_slo"] <= 1
        assert (seen["signals"] != {}) == RUNGS[name].relay
    rates = stand.saturated("+ relay", 0.5)
    assert set(rates) == {"0.35", "0.6", "0.85"}
    assert min(rates.values()) > 0
    stand.close()
