"""Verdicts turn with the figures they are computed from."""

from typing import Any

import pytest

from helmrec_bench.experiments.registry import EXPERIMENTS
from helmrec_bench.experiments.results import verdicts

Figures = dict[str, Any]


def overall(change: float) -> Figures:
    ours = {"p99_change": {"mean": change, "low": None, "high": None}, "p99_ms": {"mean": 30 * (1 + change)}}
    return {"presets": {"Taobao": {"policies": {"helm": ours, "static:0.5": {"p99_ms": {"mean": 30.0}}}}}}


def ratio(shift: float) -> Figures:
    """Two regimes whose best splits are so far apart, each a third slower at the other's."""
    alphas = [0.3, 0.3 + shift]
    return {
        "scenario": "s",
        "alphas": alphas,
        "phases": {"calm": {"mean_ms": [10.0, 13.0]}, "burst": {"mean_ms": [13.0, 10.0]}},
    }


def routing(ours_ms: float) -> Figures:
    p99_ms = {"kv-aware": 30.0, "emb-aware": 40.0, "emb-kv-aware": ours_ms, "least-loaded": 50.0}
    return {
        "routers": {
            name: {"p99_ms": {"mean": ms}, "kv_hit_rate": {"mean": 0.3}, "emb_hit_rate": {"mean": 0.6}}
            for name, ms in p99_ms.items()
        }
    }


def slo(satisfaction: float) -> Figures:
    one = {"helm": {"mean": satisfaction}, "tuned on Steady": {"mean": 0.9}}
    return {"loads": {"1.15": dict.fromkeys(("Steady", "Trend", "Burst"), one)}}


def decisions(p50_us: float) -> Figures:
    return {"num_calls": 1, "times": {"p50_us": p50_us, "p99_us": p50_us, "p999_us": p50_us}}


def scale(stars: list[float]) -> Figures:
    return {"alpha_star": [stars]}


@pytest.mark.parametrize(
    ("name", "figures", "finding"),
    [
        ("overall-p99", overall(-0.3), "reproduced"),
        ("overall-p99", overall(-0.05), "partly"),
        ("overall-p99", overall(0.1), "not"),
        ("latency-vs-ratio", ratio(0.35), "reproduced"),
        ("latency-vs-ratio", ratio(0.2), "partly"),
        ("latency-vs-ratio", ratio(0.05), "not"),
        ("routing", routing(25.0), "reproduced"),
        ("routing", routing(31.0), "partly"),
        ("routing", routing(35.0), "not"),
        ("slo-by-family", slo(0.99), "reproduced"),
        ("slo-by-family", slo(0.9), "partly"),
        ("slo-by-family", slo(0.5), "not"),
        ("decision-latency", decisions(8.0), "reproduced"),
        ("decision-latency", decisions(40.0), "partly"),
        ("decision-latency", decisions(400.0), "not"),
        ("scale-and-hot-share", scale([0.1, 0.5, 0.9]), "reproduced"),
        ("scale-and-hot-share", scale([0.5, 0.9]), "partly"),
        ("scale-and-hot-share", scale([0.9, 0.9]), "not"),
    ],
)
def test_the_first_claim_of_an_experiment_is_judged_by_its_figures(name: str, figures: Figures, finding: str) -> None:
    assert verdicts(EXPERIMENTS[name], figures, "quick")[0].finding == finding
    assert verdicts(EXPERIMENTS[name], figures, "smoke")[0].finding == "not judged"
