"""The demonstration: real servers, the same traffic each time, and words that are true whoever won."""

import html
import math
import re
from dataclasses import replace
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from helmrec.demo.plan import PARTS, QUICK, DemoPlan
from helmrec.demo.report import DemoResults
from helmrec.demo.run import run_demo, verdict
from helmrec.demo.side import Side
from helmrec.demo.simulated import SCENARIO, Simulated, best_static, shown_ways, simulate_ways
from helmrec.demo.trial import SplitTrial
from helmrec.sim.scenario import load_scenario


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResults, str, str]:
    """What a quick run found, printed and wrote."""
    console = Console(record=True, width=120, file=StringIO())
    report = tmp_path_factory.mktemp("demo") / "report.html"
    story = run_demo(console, QUICK, report)
    return story, console.export_text(), report.read_text()


def test_both_sides_answer_the_same_traffic_and_no_score_is_wrong(shown: tuple[DemoResults, str, str]) -> None:
    story, text, _ = shown
    *constants, adaptive = story.sides
    assert constants[0].name == "untuned 0.5"
    assert adaptive.name == "helm"
    for side in story.sides:
        assert side.end.answered == side.end.offered > 0
        assert all(side.parts[part].requests > 0 for part in PARTS)
        assert side.samples, "a sample a second"
        assert side.stats.audits > 0
        assert side.stats.audit_mismatches == 0
        assert 0 <= side.in_slo <= 1
        assert math.isfinite(side.mean_ms)
    assert len({side.end.offered for side in story.sides}) == 1
    best = min(story.trials, key=lambda trial: trial.cpu_ms).alpha
    assert len(constants) == len({0.5, best})
    for side, alpha in zip(constants, (0.5, best), strict=False):
        assert [sample.alpha for sample in side.samples] == pytest.approx([alpha] * len(side.samples), abs=0.02)
    assert len(re.findall(r"dashboard at http://127.0.0.1:\d+/", text)) == len(story.sides)
    assert "0 wrong" in " ".join(text.split()), "lines may break anywhere"


def test_the_report_is_one_page_with_plots_and_nothing_from_outside(shown: tuple[DemoResults, str, str]) -> None:
    story, _, page = shown
    assert page.count("<svg") == 4
    assert 'name="viewport"' in page, "phones show it at its own width"
    assert page.count("<polyline") == 4 * len(story.sides)
    assert not re.search(r"(src|href)=|https?://|url\(", page)
    assert all(part in page for part in PARTS)
    assert "mean latency" in page
    assert all(f"<p>{html.escape(line)}</p>" in page for line in story.verdict.splitlines())


TRIALS = [SplitTrial(0.3, 7.0, 8.0), SplitTrial(0.5, 7.5, 8.0)]  # the split hardly matters
FAR_APART = [SplitTrial(0.3, 7.0, 8.0), SplitTrial(0.5, 9.0, 9.0)]


def at(side: Side, name: str, latency: float, cpu: float = 1.0, alpha: float = 0.2) -> Side:
    """The side under another name, with its latency and processor time multiplied, and moved by `alpha`."""
    parts = {part: replace(each, mean_ms=latency * each.mean_ms) for part, each in side.parts.items()}
    moved = [msgspec.structs.replace(sample, alpha=sample.alpha + alpha) for sample in side.samples]
    return replace(side, name=name, parts=parts, cpu_ms=5.0 * cpu, in_slo=0.9, samples=moved)


def test_the_verdict_says_in_one_sentence_whether_ours_is_better_and_if_not_why(
    shown: tuple[DemoResults, str, str],
) -> None:
    best = at(shown[0].sides[0], "best constant 0.3", 1, alpha=0.0)

    def first_sentence(trials: list[SplitTrial], latency: float, cpu: float) -> str:
        return verdict(trials, [best, at(best, "helm", latency, cpu)], []).splitlines()[0]

    same = first_sentence(TRIALS, 1.0, 1.0)
    assert "helm is not better than the best constant split: mean latency +0.0%, processor time +0.0%" in same
    assert "the worst of 2 constant splits takes only 7% more processor time" in same
    found_late = first_sentence(FAR_APART, 1.2, 1.1)
    assert "helm is not better" in found_late
    assert "because the best constant split was chosen beforehand" in found_late
    lucky = first_sentence(FAR_APART, 0.8, 1.02)
    assert "helm is not shown to be better" in lucky
    assert "because its server did not work less" in lucky
    assert "because its server did not work less" in first_sentence(TRIALS, 0.8, 1.02), (
        "wherever the split matters little"
    )
    stayed = verdict(FAR_APART, [best, at(best, "helm", 3.0, alpha=0.0)], [])
    assert "because it stayed at that split, 0.5" in stayed
    better = first_sentence(TRIALS, 0.8, 0.9)
    assert "helm is better than the best constant split: mean latency -20.0%, processor time -10.0%" in better
    assert "because" not in better


def test_the_verdict_names_a_queue_and_the_simulation(shown: tuple[DemoResults, str, str]) -> None:
    side = at(shown[0].sides[0], "untuned 0.5", 1)
    simulated = [Simulated("static:0.5", 20.0, 90.0, 0.9), Simulated("static:0.65", 30.0, 95.0, 0.8),
                 Simulated("helm", 15.0, 70.0, 0.99)]  # fmt: skip
    text = verdict(TRIALS, [side, replace(side, name="helm")], simulated)
    assert "queue" not in text
    assert "helm takes 15.0 ms" in text
    assert "(static:0.5) 20.0 and 90.0: the mean is -25.0%" in text
    assert [each.name for each in shown_ways(simulated)] == ["static:0.5", "helm"]
    text = verdict(TRIALS, [replace(side, in_slo=0.2), side], [])
    assert "most of the latency is time in the queue" in text


def test_the_traffic_goes_from_steady_over_trend_to_burst() -> None:
    plan = DemoPlan(seconds=90)
    assert plan.workload(10).duration_s == pytest.approx(plan.side_s, rel=0.01)
    names = [phase.name for phase in plan.workload(10).phases]
    assert names == ["steady", "before", "trend", "after", *["calm", "burst"] * 2]
    assert [plan.part_at(second) for second in (0, 9.9, 10.1, 29, 31)] == [
        "steady",
        "steady",
        "trend",
        "burst",
        "burst",
    ]


def test_the_simulated_scenario_has_the_objective_that_the_report_names() -> None:
    assert load_scenario(SCENARIO).slo_ms == 80


@pytest.mark.slow
def test_the_simulation_ranks_every_split_and_the_policy() -> None:
    found = simulate_ways("helm", 0)
    assert [each.name for each in found][-1] == "helm"
    assert len({alpha for _, alpha, _ in found[-1].path}) > 5, "alpha follows"
    assert best_static(found) in found[:-1]
    assert all(0 < each.mean_ms <= each.p99_ms for each in found)
