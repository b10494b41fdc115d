"""Each layer by itself: the network, the residual, bursts and the guardrail."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.control.burst import CALM, CHASE, HOLD, B, BurstSettings, answer, begin_burst, burst_terms, watch
from helmrec.control.features import NAMES, NUM_FEATURES, STEPS
from helmrec.control.guardrail import G, GuardSettings, Paths, begin_guard, guard_terms, judge
from helmrec.control.network import (
    NUM_HIDDEN,
    as_layers,
    following_layers,
    forward,
    join_layers,
    load_base,
    save_base,
    shipped_base,
)
from helmrec.control.outlook import NUM_SPLITS, O, Outlook, Seen, Split, seen
from helmrec.control.residual import R, ResidualSettings, correction, learn, residual_terms
from helmrec.errors import ModelError
from tests.control.bowl import Bowl
from tests.control.test_outlook import TERMS, outlook_for, take

BURST = BurstSettings()


def looked(bowl: Bowl, alpha: float = 0.5) -> tuple[Outlook, Seen]:
    stats = bowl.window(alpha)
    outlook = outlook_for(stats)
    take(outlook, stats)
    return outlook, Seen(*seen(stats))


def plain_forward(arrays: dict[str, np.ndarray], features: np.ndarray) -> np.ndarray:
    hidden = np.maximum(features @ arrays["first.weight"] + arrays["first.bias"], 0)
    hidden = np.maximum(hidden @ arrays["second.weight"] + arrays["second.bias"], 0)
    return np.concatenate((hidden, features)) @ arrays["last.weight"] + arrays["last.bias"]


def some_arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, array.shape) for name, array in following_layers().items()}


def test_the_forward_pass_is_that_of_its_plain_twin() -> None:
    for seed in range(5):
        arrays, rng = some_arrays(seed), np.random.default_rng(seed)
        features, scores = rng.normal(size=NUM_FEATURES), np.zeros(len(STEPS))
        forward(as_layers.py_func(join_layers(arrays)), features, np.zeros((2, NUM_HIDDEN)), scores)
        np.testing.assert_allclose(scores, plain_forward(arrays, features))


def test_a_network_comes_back_from_its_file(tmp_path: Path) -> None:
    arrays = some_arrays(1)
    save_base(tmp_path / "a.safetensors", arrays, {"crowding": {"first": 0.2, "second": 0.5}, "note": "x"})
    found = load_base(tmp_path / "a.safetensors")
    np.testing.assert_allclose(found.weights, join_layers(arrays), rtol=1e-6)
    assert (found.crowding.first, found.record["note"]) == (0.2, "x")


def test_a_file_that_is_no_network_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ModelError, match="cannot read policy"):
        load_base(path)
    save_base(path, some_arrays(1), {"crowding": {}})
    record = path.with_suffix(".json")
    record.write_text(record.read_text().replace(NAMES[0], "something else"))
    with pytest.raises(ModelError, match="made for other features"):
        load_base(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot read policy"):
        load_base(path)


def test_the_shipped_network_loads_and_names_its_training() -> None:
    base = shipped_base()
    assert np.isfinite(base.weights).all()
    assert {"crowding", "chosen", "features"} <= base.record.keys()


def test_a_residual_that_has_learned_nothing_changes_nothing() -> None:
    outlook, window = looked(Bowl())
    assert correction(np.zeros(len(R)), residual_terms(ResidualSettings()), outlook, window) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=len(R), max_size=len(R)), st.floats(0, 0.2))
def test_the_residual_stays_within_its_bound_whatever_its_weights(weights: list[float], bound: float) -> None:
    outlook, window = looked(Bowl())
    found = correction(np.array(weights), residual_terms(ResidualSettings(bound=bound)), outlook, window)
    assert abs(found) <= bound


@pytest.mark.parametrize(("alpha", "sign"), [(0.3, 1), (0.85, -1)])
def test_the_residual_learns_to_go_downhill(alpha: float, sign: int) -> None:
    outlook, window = looked(Bowl(rate=100))
    weights, terms = np.zeros(len(R)), residual_terms(ResidualSettings())
    for _ in range(300):
        learn(weights, terms, outlook, window, alpha)
    found = correction(weights, terms, outlook, window)
    assert sign * found > 0.01
    assert abs(found) <= terms.bound


def calm_then(burst: Bowl, num_windows: int, hot_share: float) -> tuple[np.ndarray, Outlook, Seen]:
    """Thirty calm seconds, then as many of something else."""
    numbers, terms = np.zeros(B.SIZE), burst_terms(BURST)
    begin_burst(numbers, BURST)
    outlook, window = looked(Bowl(rate=100))
    for second in range(30 + num_windows):
        is_burst = second >= 30
        now = window._replace(
            start_s=second, end_s=second + 1, hot_user_share=hot_share if is_burst else 0.5, alpha_target=0.5
        )
        watch(numbers, terms, now, 6_000.0, 100.0 * (burst.rate / 100 if is_burst else 1))
    return numbers, outlook, now


def test_calm_is_calm() -> None:
    numbers, outlook, now = calm_then(Bowl(rate=100), 20, hot_share=0.5)
    assert not numbers[B.IS_BURST]
    answer(numbers, burst_terms(BURST), TERMS, outlook, now)
    assert numbers[B.VERDICT] == CALM


@pytest.mark.parametrize(("rate", "hot_share"), [(220.0, 0.5), (100.0, 0.15)])
def test_a_burst_of_rate_or_of_strangers_is_seen_within_two_windows(rate: float, hot_share: float) -> None:
    numbers, _, _ = calm_then(Bowl(rate=rate), 2, hot_share)
    assert numbers[B.IS_BURST]
    assert numbers[B.SAVED_ALPHA] == 0.5


def test_a_burst_ends_and_its_length_is_remembered() -> None:
    numbers, _, now = calm_then(Bowl(rate=220.0), 8, hot_share=0.5)
    expected = numbers[B.LOG_LENGTH]
    terms = burst_terms(BURST)
    for second in range(3):
        later = now._replace(start_s=now.end_s + second, end_s=now.end_s + second + 1)
        watch(numbers, terms, later, 6_000.0, 100.0)
    assert not numbers[B.IS_BURST]
    assert numbers[B.LOG_LENGTH] < expected, "it was shorter than the first guess"


def test_what_lasts_too_long_is_the_new_normal() -> None:
    numbers, _, _ = calm_then(Bowl(rate=220.0), int(BURST.max_s) + 10, hot_share=0.5)
    assert not numbers[B.IS_BURST]


@pytest.mark.parametrize(("length_s", "verdict"), [(0.001, HOLD), (80.0, CHASE)])
def test_a_burst_is_chased_only_if_it_outlasts_what_the_move_costs(length_s: float, verdict: float) -> None:
    numbers, outlook, now = calm_then(Bowl(rate=300.0), 1, hot_share=0.0)
    numbers[B.LEFT_S] = length_s
    far = now._replace(alpha_target=0.15)
    wanted = answer(numbers, burst_terms(BURST), TERMS, outlook, far)
    assert numbers[B.VERDICT] == verdict
    best = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    assert wanted == (0.15 if verdict == HOLD else best)


def judged(adaptive: float, num_windows: int) -> np.ndarray:
    outlook, _ = looked(Bowl(rate=50))
    numbers, constants, terms = np.zeros(G.SIZE), np.zeros(NUM_SPLITS), guard_terms(GuardSettings())
    begin_guard(numbers)
    for _ in range(num_windows):
        judge(numbers, constants, terms, outlook, Paths(adaptive, adaptive, 100.0, 0.0, 1.0))
    return numbers


def test_the_guardrail_puts_a_loser_aside_for_the_best_constant_and_not_before_its_time() -> None:
    bottom = Bowl(rate=50).bottom()
    grace = GuardSettings().num_windows
    assert not judged(0.1, grace + GuardSettings().num_windows - 1)[G.IS_ASIDE]
    lost = judged(0.1, grace + GuardSettings().num_windows)
    assert lost[G.IS_ASIDE]
    assert lost[G.STATIC_ALPHA] == pytest.approx(bottom, abs=0.08)
    assert not judged(lost[G.STATIC_ALPHA], 100)[G.IS_ASIDE]


def test_adapting_is_taken_back_once_it_would_win_again() -> None:
    outlook, _ = looked(Bowl(rate=100))
    numbers, constants, terms = np.zeros(G.SIZE), np.zeros(NUM_SPLITS), guard_terms(GuardSettings())
    begin_guard(numbers)
    best = outlook.splits[Split.ALPHA, outlook.splits[Split.FRESH].argmin()]
    for alpha, num_windows, is_aside in ((0.1, 60, True), (best, 400, False)):
        for _ in range(num_windows):
            judge(numbers, constants, terms, outlook, Paths(alpha, alpha, 100.0, 0.0, 1.0))
        assert bool(numbers[G.IS_ASIDE]) == is_aside
