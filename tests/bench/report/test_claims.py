import math

import pytest

from helmrec_bench.report.claims import Rule, judged, unjudged


@pytest.mark.parametrize(
    ("value", "finding"),
    [(0.3, "reproduced"), (0.24, "reproduced"), (0.1, "partly"), (0.02, "partly"), (0.019, "not"), (-0.3, "not")],
)
def test_more_is_better_unless_a_rule_says_otherwise(value: float, finding: str) -> None:
    assert Rule(0.24, 0.02).finding(value) == finding


@pytest.mark.parametrize(("value", "finding"), [(0.02, "reproduced"), (0.05, "partly"), (0.0601, "not")])
def test_less_is_better_where_a_rule_says_so(value: float, finding: str) -> None:
    assert Rule(0.029, 0.06, is_more_better=False).finding(value) == finding


def test_a_figure_that_is_none_is_not_judged() -> None:
    assert Rule(1.0, 0.5).finding(math.nan) == "not judged"


def test_a_rule_is_stated_with_its_thresholds() -> None:
    rule = Rule(0.029, 0.06, is_more_better=False, unit="alpha")
    assert rule.details() == "reproduced: at most 0.029; partly: at most 0.060; else not reproduced"
    assert rule.details(is_papers=False) == "met: at most 0.029; partly: at most 0.060; else missed"


def test_a_claim_without_a_paper_is_ours() -> None:
    assert judged("c", "p", 1.0, Rule(1, 1), "r").is_papers
    assert not judged("c", None, 1.0, Rule(1, 1), "r").is_papers


def test_what_is_not_judged_keeps_its_figure_and_says_why() -> None:
    verdict = unjudged(judged("c", "p", 0.5, Rule(0.4, 0.1), "r"), "too short")
    assert (verdict.ours, verdict.finding, verdict.reason) == ("50.0%", "not judged", "too short")
