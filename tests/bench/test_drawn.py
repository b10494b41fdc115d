"""Drawn scenarios: always the same for a number, never the same in two ranges, and as loaded as they say."""

import numpy as np

from helmrec.control.static import Static, StaticSettings
from helmrec.sim.simulate import simulate
from helmrec_bench.drawn import KINDS, LONG_S, Drawn, draw
from helmrec_bench.judging.first_times import OPENING_S


def fingerprint(drawn: Drawn) -> tuple[str, str, str]:
    return drawn.workload.model_dump_json(), drawn.config.model_dump_json(), drawn.cost.model_dump_json()


def test_a_number_is_always_the_same_scenario_and_ranges_never_meet() -> None:
    once, again, other = draw("train", 2), draw("train", 2), draw("validation", 2)
    assert fingerprint(once) == fingerprint(again)
    assert fingerprint(once) != fingerprint(other)


def test_half_of_the_kinds_are_long_and_all_kinds_come() -> None:
    assert sum(duration_s == LONG_S for _, duration_s in KINDS) == len(KINDS) / 2
    assert {kind for kind, _ in KINDS} == {
        "steady",
        "step",
        "ramp",
        "sine",
        "growth",
        "burst",
        "flood",
        "turnover",
    }


def test_bursts_are_where_they_are_said_to_be() -> None:
    drawn = draw("train", 2)
    assert drawn.kind == "burst"
    time_s = drawn.make_trace(0).time_s
    phases = {phase.name: phase.rate[0] for phase in drawn.workload.phases}
    for from_s, until_s in drawn.bursts_s:
        num = np.count_nonzero((time_s >= from_s) & (time_s < until_s))
        expected = phases["burst"] * (until_s - from_s)
        assert abs(num - expected) < 5 * np.sqrt(expected) + 1


def test_a_node_bears_nine_tenths_of_its_capacity_at_some_split_and_not_at_all_of_them() -> None:
    drawn = draw("train", 10, load=0.9)
    trace = drawn.make_trace(0)
    shares = []
    for alpha in (0.05, 0.35, 0.9):
        result = simulate(trace, drawn.node_at(alpha), drawn.cost, Static(StaticSettings(alpha=alpha)))
        shares.append(result.summary(OPENING_S).slo_satisfaction)
    assert max(shares) > 0.97
    assert min(shares) < 0.9
