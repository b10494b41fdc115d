"""Each layer by itself: the network, the residual, bursts and the guardrail."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.control.burst import (
    CALM,
    CHASE,
    HEDGE,
    HOLD,
    RETURN,
    B,
    BurstSettings,
    answer,
    begin_burst,
    burst_terms,
    move_cost,
    watch,
)
from helmrec.control.features import NAMES, NUM_FEATURES, STEPS
from helmrec.control.guardrail import G, GuardSettings, Paths, begin_guard, guard_terms, judge
from helmrec.control.measured import NUM_ROWS, correct_by_measured
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
from helmrec.control.outlook import NUM_SPLITS, O, Outlook, Split
from helmrec.control.readiness import Q, note_burst, wait_alpha
from helmrec.control.residual import R, ResidualSettings, correction, learn, residual_terms
from helmrec.control.window import Seen, seen
from helmrec.errors import ModelError
from tests.control.bowl import Bowl
from tests.control.test_outlook import TERMS, outlook_for, take

BURST = BurstSettings()


def looked(bowl: Bowl, alpha: float = 0.5) -> tuple[Outlook, Seen]:
    stats = bowl.window(alpha)
    outlook = outlook_for(stats)
    take(outlook, stats)
    window = Seen(*seen(stats))
    correct_by_measured(np.zeros((NUM_ROWS, NUM_SPLITS)), outlook, window)
    return outlook, window


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


def test_the_residual_goes_away_from_splits_that_were_measured_to_be_worse_than_reckoned() -> None:
    bowl = Bowl(rate=50)
    outlook, _ = looked(bowl)
    bottom = bowl.bottom()
    table, terms = np.zeros((NUM_ROWS, NUM_SPLITS)), residual_terms(ResidualSettings())
    for alpha, factor in ((bottom + 0.06, 1.8), (bottom - 0.1, 1.0)) * 30:
        window = Seen(*seen(bowl.window(alpha)))
        window = window._replace(mean_ms=factor * reckoned_at(outlook, alpha))
        correct_by_measured(table, outlook, window)
    weights = np.zeros(len(R))
    for _ in range(200):
        learn(weights, terms, outlook, window, bottom)
    assert correction(weights, terms, outlook, window) < -0.01


def reckoned_at(outlook: Outlook, alpha: float) -> float:
    return float(np.interp(alpha, outlook.splits[Split.ALPHA], outlook.splits[Split.FRESH]))


def plain_corrected(told: list[tuple[float, float]], outlook: Outlook) -> np.ndarray:
    """Twin of `correct_by_measured` for windows of a second under one kind of load: (alpha, ratio) each."""
    alphas = outlook.splits[Split.ALPHA]
    ratios, seconds = np.zeros(NUM_SPLITS), np.zeros(NUM_SPLITS)
    for alpha, ratio in told:
        ratios, seconds = ratios * 0.5 ** (1 / 180), seconds * 0.5 ** (1 / 180)
        at = int(np.abs(alphas - alpha).argmin())
        weight = np.clip(1 - np.abs(np.arange(NUM_SPLITS) - at) / 3, 0, None)
        ratios, seconds = ratios + weight * ratio, seconds + weight
    level = ratios.sum() / seconds.sum()
    return outlook.splits[Split.FRESH] * (ratios + 15 * level) / (seconds + 15)


def test_correction_by_measured_latency_is_that_of_its_plain_twin() -> None:
    bowl, told = Bowl(rate=50), [(0.3, 1.2), (0.3, 1.3), (0.7, 0.8), (0.45, 1.0)]
    outlook, _ = looked(bowl)
    table = np.zeros((NUM_ROWS, NUM_SPLITS))
    for alpha, ratio in told:
        window = Seen(*seen(bowl.window(alpha)))._replace(mean_ms=ratio * reckoned_at(outlook, alpha))
        correct_by_measured(table, outlook, window)
    np.testing.assert_allclose(outlook.splits[Split.CORRECTED], plain_corrected(told, outlook), rtol=1e-9)


def test_a_window_in_which_the_boundary_moved_tells_of_no_split() -> None:
    outlook, window = looked(Bowl(rate=50))
    table = np.zeros((NUM_ROWS, NUM_SPLITS))
    correct_by_measured(table, outlook, window._replace(alpha=0.5, alpha_target=0.6))
    assert not table.any()


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
        watch(numbers, terms, now, 100.0 * (burst.rate / 100 if is_burst else 1))
    return numbers, outlook, now


def test_calm_is_calm() -> None:
    numbers, outlook, now = calm_then(Bowl(rate=100), 20, hot_share=0.5)
    assert not numbers[B.IS_BURST]
    answer(numbers, burst_terms(BURST), TERMS, outlook, now)
    assert numbers[B.VERDICT] == CALM


@pytest.mark.parametrize(("rate", "hot_share"), [(220.0, 0.5), (45.0, 0.5), (100.0, 0.15)])
def test_a_burst_of_rate_or_of_strangers_is_seen_at_once(rate: float, hot_share: float) -> None:
    numbers, _, _ = calm_then(Bowl(rate=rate), 1, hot_share)
    assert numbers[B.IS_BURST]
    assert numbers[B.SAVED_ALPHA] == 0.5


def test_one_window_off_by_little_is_no_burst_but_many_are() -> None:
    assert not calm_then(Bowl(rate=120), 1, hot_share=0.5)[0][B.IS_BURST]
    assert calm_then(Bowl(rate=120), 6, hot_share=0.5)[0][B.IS_BURST]


def test_a_burst_lasts_until_traffic_has_been_back_for_two_windows() -> None:
    numbers, _, now = calm_then(Bowl(rate=100), 1, hot_share=0.5)
    seen_as_burst = []
    for second, rate in enumerate((100, 220, 220, 100, 220, 100, 100, 100)):
        later = now._replace(start_s=now.end_s + second, end_s=now.end_s + second + 1)
        watch(numbers, burst_terms(BURST), later, float(rate))
        seen_as_burst.append(bool(numbers[B.IS_BURST]))
    assert seen_as_burst == [False, True, True, True, True, True, False, False]


@pytest.mark.parametrize(("length_s", "is_longer"), [(8, False), (40, True)])
def test_a_burst_ends_and_its_length_is_remembered(length_s: int, is_longer: bool) -> None:
    numbers, _, now = calm_then(Bowl(rate=220.0), length_s, hot_share=0.5)
    expected = numbers[B.LOG_LENGTH]
    terms = burst_terms(BURST)
    for second in range(3):
        later = now._replace(start_s=now.end_s + second, end_s=now.end_s + second + 1)
        watch(numbers, terms, later, 100.0)
    assert not numbers[B.IS_BURST]
    assert (numbers[B.LOG_LENGTH] > expected) == is_longer, "the first guess is 15 s"


def test_what_lasts_too_long_is_the_new_normal() -> None:
    assert calm_then(Bowl(rate=220.0), int(BURST.max_s) - 2, hot_share=0.5)[0][B.IS_BURST]
    assert not calm_then(Bowl(rate=220.0), int(BURST.max_s) + 10, hot_share=0.5)[0][B.IS_BURST]


def burst_at(alpha: float, left_s: float, saved: float = 0.15) -> tuple[float, float, np.ndarray]:
    """What the layer wants in a burst, its verdict and its numbers."""
    numbers, outlook, now = calm_then(Bowl(rate=300.0), 1, hot_share=0.0)
    numbers[B.LEFT_S], numbers[B.SAVED_ALPHA] = left_s, saved
    wanted = answer(numbers, burst_terms(BURST), TERMS, outlook, now._replace(alpha_target=alpha))
    return wanted, numbers[B.VERDICT], numbers


def test_a_burst_is_chased_only_if_it_outlasts_what_the_move_costs() -> None:
    outlook, _ = looked(Bowl(rate=100))
    best = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    _, _, numbers = burst_at(0.15, 1.0)
    per_second = numbers[B.GAIN] / numbers[B.COST]
    for share, verdict, wanted in ((0.9, HOLD, 0.15), (1.5, HEDGE, 0.15 + 0.6 * (best - 0.15)), (2.2, CHASE, best)):
        found, said, _ = burst_at(0.15, share / per_second)
        assert said == verdict
        assert found == pytest.approx(wanted)


def test_a_chase_that_has_begun_does_not_pay_its_way_back_again() -> None:
    """What the rest of the way costs, per unit of alpha, is the same from half way as from the start."""
    outlook, _ = looked(Bowl(rate=100))
    best = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    half = (0.15 + best) / 2
    whole, rest = (burst_at(alpha, 10.0)[2][B.COST] for alpha in (0.15, half))
    assert rest == pytest.approx(whole / 2, rel=1e-6)


def test_a_way_up_costs_rows_and_a_way_down_prefixes() -> None:
    outlook, window = looked(Bowl(rate=100))
    up, down = (move_cost(TERMS, outlook, window.pool_bytes, change) for change in (0.1, -0.1))
    busy = window.pool_bytes * 0.1 / TERMS.row_bytes * TERMS.row_ms
    assert up > busy, "others wait for it"
    assert down / up == pytest.approx(
        (TERMS.token_ms / TERMS.kv_token_bytes) / (TERMS.row_ms / TERMS.row_bytes), rel=1e-6
    )


def test_after_a_burst_alpha_is_led_back_step_by_step_if_calm_is_better_there() -> None:
    outlook, window = looked(Bowl(rate=100))
    best = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    numbers, terms = np.zeros(B.SIZE), burst_terms(BURST)
    for saved, here, verdict, wanted in (
        (best, best - 0.3, RETURN, best - 0.3 + BURST.return_step),
        (best, best + 0.15, RETURN, best + 0.15 - BURST.return_step),
        (best - 0.3, best, CALM, best),
    ):
        numbers[B.ENDED_S], numbers[B.SAVED_ALPHA] = window.end_s - 1, saved
        found = answer(numbers, terms, TERMS, outlook, window._replace(alpha_target=here))
        assert numbers[B.VERDICT] == verdict
        assert found == pytest.approx(wanted)
    numbers[B.ENDED_S], numbers[B.SAVED_ALPHA] = window.end_s - BURST.return_s - 1, best
    answer(numbers, terms, TERMS, outlook, window._replace(alpha_target=best - 0.3))
    assert numbers[B.VERDICT] == CALM, "too late"


def went_through_a_burst(extra_ms: float) -> tuple[np.ndarray, Outlook, Seen]:
    """Calm at 0.3, a burst that wants 0.6 and is `extra_ms` slower until it is there, calm again."""
    outlook, window = looked(Bowl(rate=100))
    numbers, burst = np.zeros(len(Q)), np.zeros(B.SIZE)
    path = [0.3] * 20 + [0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6] + [0.6]
    for second, alpha in enumerate(path):
        now = window._replace(start_s=second, end_s=second + 1, alpha=alpha, alpha_target=alpha, num_served=100.0)
        burst[B.IS_BURST], burst[B.ONSET_S] = float(20 <= second < 30), 20.0
        burst[B.ENDED_S] = 31.0
        is_moving = 20 <= second < 24
        note_burst(numbers, burst, outlook, now._replace(mean_ms=10.0 + extra_ms * is_moving))
    return numbers, outlook, now


def waits(numbers: np.ndarray, caution: float, outlook: Outlook, window: Seen) -> float:
    """Where calm that wants 0.3 waits."""
    return float(wait_alpha(numbers, burst_terms(BURST)._replace(caution=caution), TERMS, outlook, window, 0.3))


def test_what_a_burst_cost_until_the_boundary_had_followed_is_measured() -> None:
    numbers, _, _ = went_through_a_burst(extra_ms=5.0)
    assert numbers[Q.LOSS] == pytest.approx(4 * 100 * 5.0)
    assert (numbers[Q.ALPHA], numbers[Q.WAY]) == pytest.approx((0.6, 0.3))
    assert np.exp(numbers[Q.LOG_CALM_S]) == pytest.approx(20.0)


@pytest.mark.parametrize(("extra_ms", "low", "high"), [(0.0, 0.3, 0.3), (0.5, 0.32, 0.58), (1e4, 0.57, 0.6)])
def test_calm_waits_nearer_to_the_next_burst_the_more_the_last_one_cost(
    extra_ms: float, low: float, high: float
) -> None:
    numbers, outlook, now = went_through_a_burst(extra_ms)
    outlook.splits[Split.FRESH] = 5 + 2 * (outlook.splits[Split.ALPHA] - 0.3) ** 2
    assert low - 1e-9 <= waits(numbers, 1.0, outlook, now) <= high + 1e-9
    assert waits(numbers, 0.0, outlook, now) == 0.3, "without caution nobody waits"


def test_the_longer_no_burst_comes_the_less_is_waited_for_one() -> None:
    numbers, outlook, now = went_through_a_burst(0.5)
    outlook.splits[Split.FRESH] = 5 + 2 * (outlook.splits[Split.ALPHA] - 0.3) ** 2
    soon = waits(numbers.copy(), 1.0, outlook, now)
    late = waits(numbers.copy(), 1.0, outlook, now._replace(end_s=now.end_s + 600))
    assert 0.3 <= late < soon


def test_a_burst_that_wants_no_other_split_teaches_no_waiting() -> None:
    outlook, window = looked(Bowl(rate=100))
    best = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    numbers, burst = np.zeros(len(Q)), np.zeros(B.SIZE)
    for second in range(20):
        burst[B.IS_BURST], burst[B.ENDED_S] = float(5 <= second < 15), 16.0
        now = window._replace(start_s=second, end_s=second + 1, mean_ms=10.0 + second, alpha=best, alpha_target=best)
        note_burst(numbers, burst, outlook, now)
    assert numbers[Q.NUM_BURSTS] == 0


def test_bursts_too_short_to_be_followed_are_learned_from_too() -> None:
    """Two seconds, the boundary goes a third of the way, and all of it was slower than reckoned at the wanted split."""
    outlook, window = looked(Bowl(rate=100))
    outlook.splits[Split.FRESH] = 5 + 20 * (outlook.splits[Split.ALPHA] - 0.6) ** 2
    outlook.numbers[O.FRESH_BEST] = outlook.splits[Split.FRESH].argmin()
    numbers, burst = np.zeros(len(Q)), np.zeros(B.SIZE)
    for second, alpha in enumerate([0.3] * 10 + [0.3, 0.4] + [0.4]):
        now = window._replace(start_s=second, end_s=second + 1, alpha=alpha, alpha_target=alpha, num_served=100.0)
        burst[B.IS_BURST], burst[B.ONSET_S], burst[B.ENDED_S] = float(10 <= second < 12), 10.0, 13.0
        note_burst(numbers, burst, outlook, now._replace(mean_ms=15.0))
    assert numbers[Q.NUM_BURSTS] == 1
    assert numbers[Q.ALPHA] == pytest.approx(0.6, abs=0.03)
    assert numbers[Q.LOSS] == pytest.approx(2 * 100 * 10.0, rel=0.02)


def test_before_the_first_burst_calm_waits_for_one_that_is_feared_and_less_as_time_passes() -> None:
    """Strangers want rows; without anything to fear nobody waits."""
    outlook, window = looked(Bowl(rate=200))
    calm = float(outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])])
    later = window._replace(start_s=99_999.0, end_s=100_000.0)

    def wait(now: Seen, **feared: float) -> float:
        numbers = np.zeros(len(Q))
        note_burst(numbers, np.zeros(B.SIZE), outlook, window)
        found = wait_alpha(numbers, burst_terms(BURST)._replace(**feared), TERMS, outlook, now, calm)
        assert min(calm, numbers[Q.FEARED_ALPHA]) <= found <= max(calm, numbers[Q.FEARED_ALPHA])
        return float(found)

    assert wait(window, feared_rate=1.0, feared_reuse=1.0) == calm
    assert wait(window) > calm + 0.02
    assert calm <= wait(later) < wait(window)


class Court:
    """A guardrail by itself, over a bowl under one load."""

    def __init__(self, alpha_max: float = 1.0) -> None:
        self.outlook, window = looked(Bowl(rate=50))
        self.window = window._replace(alpha_max=alpha_max, num_served=100.0)
        self.numbers, self.constants = np.zeros(G.SIZE), np.zeros(NUM_SPLITS)
        begin_guard(self.numbers)

    def hear(self, alpha: float, num_windows: int, move_cost_ms: float = 0.0, length_s: float = 1.0) -> "Court":
        """So many windows with the boundary, and the adaptive path, at `alpha`."""
        start_s = self.window.start_s
        window = self.window._replace(alpha=alpha, alpha_target=alpha, end_s=start_s + length_s)
        for _ in range(num_windows):
            paths = Paths(alpha, alpha, move_cost_ms, is_elsewhere=False)
            judge(self.numbers, self.constants, guard_terms(GuardSettings()), self.outlook, window, paths)
        return self


def test_the_guardrail_puts_a_loser_aside_for_the_best_constant_and_not_before_its_time() -> None:
    bottom = Bowl(rate=50).bottom()
    grace = int(GuardSettings().patience_s)
    assert not Court().hear(0.1, grace + int(GuardSettings().patience_s) - 1).numbers[G.IS_ASIDE]
    lost = Court().hear(0.1, grace + int(GuardSettings().patience_s)).numbers
    assert lost[G.IS_ASIDE]
    assert lost[G.STATIC_ALPHA] == pytest.approx(bottom, abs=0.08)
    assert not Court().hear(lost[G.STATIC_ALPHA], 100).numbers[G.IS_ASIDE]


def test_short_windows_do_not_shorten_the_guardrail_s_patience() -> None:
    seconds = 2 * int(GuardSettings().patience_s)
    assert not Court().hear(0.1, 4 * seconds - 4, length_s=0.25).numbers[G.IS_ASIDE]
    assert Court().hear(0.1, 4 * seconds, length_s=0.25).numbers[G.IS_ASIDE]


def test_moves_that_cost_more_than_they_gain_lose_too() -> None:
    best = Court().hear(0.5, 30).numbers[G.STATIC_ALPHA]
    per_window = 100 * float(Court().outlook.splits[Split.CORRECTED].min())
    assert not Court().hear(best, 60, move_cost_ms=0.02 * per_window).numbers[G.IS_ASIDE]
    assert Court().hear(best, 60, move_cost_ms=0.06 * per_window).numbers[G.IS_ASIDE]


def test_the_guardrail_waits_for_no_constant_the_pool_cannot_be_at() -> None:
    numbers = Court(alpha_max=0.4).hear(0.1, 60).numbers
    assert 0.3 < numbers[G.STATIC_ALPHA] <= 0.4
    assert numbers[G.IS_ASIDE]


def test_the_guardrail_sees_that_a_split_is_worse_than_the_outlook_says() -> None:
    """The base believes in a split that was measured to be half as slow again; the one it came from was not."""
    court, good = Court(), 0.35
    believed = float(court.outlook.splits[Split.ALPHA, court.outlook.splits[Split.FRESH].argmin()])
    table = np.zeros((NUM_ROWS, NUM_SPLITS))
    for alpha, ratio in ((good, 1.0),) * 60 + ((believed, 1.5),) * 60:
        window = court.window._replace(
            alpha=alpha, alpha_target=alpha, mean_ms=ratio * reckoned_at(court.outlook, alpha)
        )
        correct_by_measured(table, court.outlook, window)
    court.hear(believed, 60)
    assert court.numbers[G.IS_ASIDE]
    assert abs(court.numbers[G.STATIC_ALPHA] - believed) > 0.05


def test_adapting_is_taken_back_once_it_would_win_again() -> None:
    court = Court()
    best = court.outlook.splits[Split.ALPHA, court.outlook.splits[Split.CORRECTED].argmin()]
    for alpha, num_windows, is_aside in ((0.1, 60, True), (best, 400, False)):
        assert bool(court.hear(alpha, num_windows).numbers[G.IS_ASIDE]) == is_aside
