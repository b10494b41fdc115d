"""The controller as a whole, on a made-up node whose best split is known."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from helmrec.cli.explain import read_explanations
from helmrec.control.explain import Explanation
from helmrec.control.helm import Helm, HelmSettings
from helmrec.control.latency import ALPHAS
from helmrec.control.policy import Limited, Limits
from helmrec.errors import ConfigError
from helmrec.policies import make_policy, needs_curves
from helmrec.steps import no_steps
from tests.control.bowl import Bowl
from tests.control.served import Served, driven, latency_ms

CALM, BURST = Served(Bowl(rate=60)), Served(Bowl(rate=250, kv_scale=0.05))


def limited(**settings: bool) -> Limited:
    return Limited(Helm(HelmSettings(**settings)), Limits())


def explained(helm: Helm) -> Explanation:
    assert helm.explanation is not None
    return helm.explanation


@pytest.mark.parametrize("start", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kv_scale", [0.15, 0.3, 0.6])
def test_the_bottom_is_found_from_anywhere_within_ten_seconds(start: float, kv_scale: float) -> None:
    served = Served(Bowl(kv_scale=kv_scale))
    assert 0.1 < served.best() < 0.9
    path, least_ms = driven(limited(), served, start, 40), latency_ms(served.bowl, served.best())
    assert latency_ms(served.bowl, start) > 1.05 * least_ms or start == 0.5
    assert latency_ms(served.bowl, path[10]) < 1.05 * least_ms
    assert latency_ms(served.bowl, path[-1]) < 1.02 * least_ms


def test_it_stays_where_it_found_the_bottom() -> None:
    path = driven(limited(), Served(Bowl()), 0.5, 120)
    assert len(set(path[20:])) == 1


@pytest.mark.parametrize("lacks", ["curves", "steps", "answers"])
def test_it_holds_while_it_knows_too_little(lacks: str) -> None:
    helm, served = Helm(), Served(Bowl())
    for second in range(10):
        window = served.window(0.1, float(second))
        if lacks == "curves":
            window = replace(window, curves=None)
        elif lacks == "steps":
            window = replace(window, steps=no_steps())
        else:
            window = replace(window, traffic=replace(window.traffic, num_requests=0, num_served=0))
        assert helm.decide(window) is None
        assert (helm.explanation, helm.prediction) == (None, None)


def test_it_never_leaves_what_the_pool_allows() -> None:
    helm, served = Helm(), Served(Bowl(kv_scale=0.1, emb_scale=0.6))
    for second in range(20):
        move = helm.decide(replace(served.window(0.4, float(second)), alpha_min=0.3, alpha_max=0.45))
        assert move is None or 0.3 <= move.alpha <= 0.45


@pytest.mark.parametrize("start", [0.0, 0.02, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("policy", ["helm", "ppo"])
def test_its_numbers_can_be_sent_as_json_at_every_split(start: float, policy: str) -> None:
    helm, served, alpha = make_policy(policy), Served(Bowl(filled=0.9)), start
    for second in range(30):
        move = helm.decide(served.window(alpha, float(second)))
        inner = helm.policy if isinstance(helm, Limited) else helm
        assert isinstance(inner, Helm)
        msgspec.json.encode((move, inner.explanation))
        alpha = start if second < 15 or move is None else move.alpha


@pytest.mark.parametrize("num_pages", [8, 12])
def test_small_steps_add_up_to_a_page_of_a_small_pool(num_pages: int) -> None:
    served, helm, alpha = Served(Bowl(kv_scale=0.15, filled=0.5)), limited(), 2 / num_pages
    for second in range(300):
        window = replace(served.window(alpha, float(second)), num_pages=num_pages, alpha_max=1 - 2 / num_pages)
        if (move := helm.decide(window)) is not None:
            alpha = round(move.alpha * num_pages) / num_pages
    assert abs(alpha - served.best()) <= 1.5 / num_pages


def test_shadows_that_promise_wrong_are_corrected_by_what_is_measured() -> None:
    served = Served(Bowl(), promised_rows=1.8)
    blind = driven(limited(has_residual=False), served, 0.5, 60)[-1]
    corrected = driven(limited(), served, 0.5, 60)[-1]
    assert abs(corrected - served.best()) < abs(blind - served.best())
    assert abs(corrected - served.best()) < 0.1


def test_predictions_become_what_is_measured_where_stages_explain_too_little() -> None:
    served, helm = Served(Bowl(rate=60), stall=1.4), Helm()
    errors = []
    for second in range(90):
        helm.decide(served.window(0.5, float(second)))
        told = helm.explanation
        if told is not None and told.predicted_ms is not None:
            errors.append(told.predicted_ms / told.measured_ms - 1)
    assert errors[0] < -0.2
    assert abs(np.mean(errors[-10:])) < 0.1


def after_a_burst(policy: Limited) -> float:
    """Where it stands in the last of three half minutes, on average; a burst came before the first."""
    alpha, now_s, path = 0.5, 0, list[float]()
    for served, seconds in ((CALM, 60), (BURST, 15), (CALM, 90)):
        path = driven(policy, served, alpha, seconds, now_s)
        alpha, now_s = path[-1], now_s + seconds
    return float(np.mean(path[-30:]))


def test_a_burst_is_answered_at_once() -> None:
    policy = limited()
    alpha = driven(policy, CALM, 0.5, 60)[-1]
    path = driven(policy, BURST, alpha, 4, 60)
    assert alpha < BURST.best() - 0.2
    assert path[0] > alpha + 0.05
    assert path[-1] == pytest.approx(BURST.best(), abs=0.1)


def test_after_a_burst_it_stands_nearer_to_what_the_burst_wanted() -> None:
    assert CALM.best() < BURST.best()
    assert after_a_burst(limited()) > after_a_burst(limited(has_bursts=False)) + 0.02


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, ["base", "residual"]),
        ({"has_residual": False}, ["base"]),
        ({"has_residual": False, "has_bursts": False}, ["base"]),
    ],
)
def test_layers_speak_in_order_and_those_put_aside_say_nothing(settings: dict[str, bool], layers: list[str]) -> None:
    helm = Helm(HelmSettings(**settings))
    driven(helm, CALM, 0.5, 20)
    told = explained(helm)
    assert [one.layer for one in told.proposals] == layers
    assert told.decided is told.proposals[-1]


def test_a_move_is_that_of_the_last_layer_and_says_so() -> None:
    helm = Helm()
    moves = [helm.decide(CALM.window(0.1, float(second))) for second in range(10)]
    move = next(one for one in moves if one is not None)
    assert move.reason.startswith("residual: predicts ")
    assert move.expected_gain_ms is not None
    assert move.expected_gain_ms > 0


def test_only_moves_that_were_made_are_recorded() -> None:
    stays, goes = Helm(), Helm()
    asked = [stays.decide(CALM.window(0.1, float(second))) for second in range(20)]  # somebody holds the boundary
    assert any(move is not None for move in asked)
    assert stays.moves.last is None
    path = driven(goes, CALM, 0.1, 20)
    assert goes.moves.last is not None
    assert goes.moves.last.layer == "residual"
    assert goes.moves.last.alpha == path[-1]


def test_a_frozen_base_of_another_kind_takes_part_in_every_layer() -> None:
    class Middle:
        def choose(self, mean_ms: object, view: object) -> float:
            return 0.5

    helm = Helm(chooser=Middle())
    assert driven(helm, CALM, 0.1, 20)[-1] == 0.5
    assert {one.alpha for one in explained(helm).proposals} == {0.5}


def test_a_move_is_followed_until_its_gain_is_known() -> None:
    policy = limited()
    driven(policy, CALM, 0.1, 90)
    helm = policy.policy
    assert isinstance(helm, Helm)
    move = helm.moves.last
    assert move is not None
    assert move.start == 0.1
    assert move.alpha == pytest.approx(CALM.best(), abs=0.1)
    assert move.predicted_gain_ms > 0
    assert move.realised_gain_ms is not None
    assert move.realised_gain_ms > 0


def test_what_was_seen_is_forgotten_on_reset() -> None:
    helm = Helm()
    driven(helm, CALM, 0.1, 20)
    assert helm.model.estimator.costs is not None
    assert helm.moves.last is not None
    helm.reset()
    assert helm.model.estimator.costs is None
    assert (helm.explanation, helm.prediction) == (None, None)
    assert helm.moves.last is None


def test_what_was_learned_is_there_after_a_restart() -> None:
    first, second = limited(), Helm()
    after_a_burst(first)
    before = first.policy
    assert isinstance(before, Helm)
    learned = json.loads(json.dumps(before.learned))  # as a snapshot keeps it
    assert set(learned) == {"costs", "residual", "bursts"}
    second.relearn(learned)
    assert second.learned == before.learned
    here, there = before.model.estimator.costs, second.model.estimator.costs
    assert here is not None
    assert there is not None
    assert there == pytest.approx(here, rel=0.01, abs=1e-9)
    second.decide(CALM.window(0.5, 0.0))
    assert [one.layer for one in explained(second).proposals] == ["base", "residual", "burst recovery"]


def test_a_controller_that_learned_nothing_gives_nothing_to_learn_from() -> None:
    first, second = Helm(), Helm()
    second.relearn(first.learned)
    assert second.model.estimator.costs is None
    assert driven(second, CALM, 0.1, 20) == driven(first, CALM, 0.1, 20)


def test_it_is_known_by_name_and_looks_at_curves() -> None:
    policy = make_policy("helm")
    assert isinstance(policy, Limited)
    assert isinstance(policy.policy, Helm)
    assert needs_curves("helm")


@pytest.mark.parametrize("text", ["rudder", "helm:0.3", "static", "static:far", "argmin"])
def test_a_name_nobody_has_is_refused_with_it(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_policy(text)


def told_after(seconds: int, start: float = 0.1) -> Explanation:
    policy = limited()
    driven(policy, CALM, start, seconds)
    assert isinstance(policy.policy, Helm)
    return explained(policy.policy)


def test_a_log_line_says_what_each_layer_proposed_and_what_came_of_the_last_move() -> None:
    line = told_after(90).line()
    for words in ("alpha ", "base 0.", "residual 0.", "predicts", "last move 0.100 -> ", "ms realised", "measured"):
        assert words in line
    assert "requests/s" in line


def test_a_move_that_is_under_way_is_said_to_be_not_known_yet() -> None:
    assert "not known yet" in told_after(8).line()


def test_decisions_come_back_from_their_lines_as_they_were(tmp_path: Path) -> None:
    found = [told_after(8), told_after(90)]
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(f"{one.as_json()}\n" for one in found))
    assert list(read_explanations(path)) == found


def test_a_file_that_holds_no_decisions_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(f"{told_after(8).as_json()}\nnonsense\n")
    with pytest.raises(ConfigError, match=r"line 2: not a decision, got 'nonsense'"):
        list(read_explanations(path))
    empty = json.loads(told_after(8).as_json()) | {"proposals": []}
    path.write_text(json.dumps(empty))
    with pytest.raises(ConfigError, match="line 1: a decision without proposals"):
        list(read_explanations(path))
    with pytest.raises(ConfigError, match="cannot read decisions"):
        list(read_explanations(tmp_path / "none.jsonl"))


def test_splits_that_are_compared_are_those_of_the_miss_curves() -> None:
    assert (ALPHAS[0], ALPHAS[-1]) == (0.03, 0.9)
