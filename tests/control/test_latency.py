"""The latency model against its plain twin, simulated nodes, and what must hold of any queue."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from helmrec.control.helm import Helm
from helmrec.control.latency import (
    _NUM_STREAMS,
    _PARTS,
    ALPHAS,
    RECENT_S,
    Arrivals,
    Bias,
    EngineModel,
    Fading,
    LatencyModel,
    play,
)
from helmrec.control.policy import Move, WindowStats
from helmrec.memory.curve_shape import between
from helmrec.sim.simulate import Options, simulate
from helmrec.steps import no_steps
from helmrec.types import FloatArray
from helmrec_bench.drawn import draw
from helmrec_bench.judging.first_times import OPENING_S
from tests.control.bowl import GRID, ROWS, TOKENS, Bowl
from tests.control.served import CANDIDATES, ENGINE, Asked, PlainEngine, Served, latency_ms

BOWL = Bowl()
WORK_MS = np.array([[0.2, 0.3], [0.5, 1.5], [1.0, 3.0]])  # host, rows and compute of who is known, of who is new


def stream_of(num: int, rng: np.random.Generator) -> FloatArray:
    return np.stack((rng.exponential(1.0, num), rng.random(num)))


def played(stream: FloatArray, gap_ms: float, engine: EngineModel, room: int = 1 << 30, queued: int = 0) -> float:
    work_ms = np.ascontiguousarray(WORK_MS[:, :, None])
    return float(play(stream, Arrivals(gap_ms, queued), np.array([0.25]), work_ms, engine, np.array([room]))[0])


def learned_from(served: Served, alpha: float = 0.5, seconds: int = 10) -> LatencyModel:
    model = LatencyModel()
    for second in range(seconds):
        assert model.update(served.window(alpha, float(second))) == (model.estimator.costs is not None)
    assert model.estimator.costs is not None
    return model


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("gap_ms", [0.5, 3.0, 8.0, 50.0])
@pytest.mark.parametrize("queued", [0, 37])
def test_the_compiled_engine_serves_as_its_plain_twin_does(
    overlaps: bool, most: int, gap_ms: float, queued: int
) -> None:
    rng = np.random.default_rng(most)
    new_users = np.array([0.0, 0.3, 1.0])
    stream, engine = stream_of(200, rng), EngineModel(0.4, 0.1, 0.5, most, overlaps)
    work_ms = rng.uniform(0.1, 3.0, (3, 2, new_users.size))
    arrived_ms = np.concatenate((np.zeros(queued), np.cumsum(stream[0]) * gap_ms))
    room = np.array([1, most + 1, 2 * most])
    found = play(stream, Arrivals(gap_ms, queued), new_users, work_ms, engine, room)
    for split, share in enumerate(new_users):
        kinds = np.where(np.concatenate((stream[1, :queued], stream[1])) < share, 1, 0)
        asked = [Asked(at, *work_ms[:, kind, split]) for at, kind in zip(arrived_ms, kinds, strict=True)]
        latencies_ms = PlainEngine(engine, int(room[split])).latencies_ms(asked)
        assert found[split] == pytest.approx(np.mean(latencies_ms[queued:]), rel=1e-9)


@pytest.mark.parametrize("overlaps", [False, True])
def test_stage_times_that_are_no_numbers_end_all_the_same(overlaps: bool) -> None:
    engine = EngineModel(float("nan"), 0.1, 0.5, 8, overlaps)
    assert np.isnan(played(stream_of(100, np.random.default_rng(3)), 1.0, engine))


def test_a_lone_request_takes_the_sum_of_its_stages() -> None:
    stream, engine = stream_of(400, np.random.default_rng(0)), EngineModel(0.4, 0.1, 0.5, 8, overlaps=True)
    share = float((stream[1] < 0.25).mean())
    known_ms, new_ms = WORK_MS.sum(axis=0)
    stages_ms = 1.0 + (1 - share) * known_ms + share * new_ms
    assert played(stream, 1e6, engine) == pytest.approx(stages_ms)


@pytest.mark.parametrize("overlaps", [False, True])
def test_latency_grows_with_arrivals_and_stays_finite_in_overload(overlaps: bool) -> None:
    stream, engine = stream_of(500, np.random.default_rng(1)), EngineModel(0.4, 0.1, 0.5, 8, overlaps)
    means = [played(stream, gap_ms, engine) for gap_ms in (1e3, 10.0, 4.0, 2.0, 0.1)]
    assert all(more > less for less, more in itertools.pairwise(means))
    assert np.isfinite(means[-1])


def test_steps_that_overlap_are_faster_under_load() -> None:
    stream = stream_of(500, np.random.default_rng(2))
    apart, overlapping = (played(stream, 2.5, EngineModel(0.4, 0.1, 0.5, 8, overlaps)) for overlaps in (False, True))
    assert overlapping < 0.9 * apart


def test_a_step_that_holds_more_bears_more() -> None:
    stream = stream_of(500, np.random.default_rng(3))
    few, many = (played(stream, 3.0, EngineModel(2.0, 0.1, 0.5, most, overlaps=False)) for most in (1, 16))
    assert many < few


def test_a_share_that_holds_the_kv_of_few_requests_bears_less() -> None:
    stream, engine = stream_of(500, np.random.default_rng(4)), EngineModel(0.4, 0.1, 0.5, 8, overlaps=True)
    two_steps, one_and_a_bit, half = (played(stream, 2.2, engine, room) for room in (16, 9, 4))
    assert two_steps < 0.9 * one_and_a_bit < 0.9 * half


def test_requests_that_wait_already_delay_those_that_come_until_they_are_served() -> None:
    stream, engine = stream_of(500, np.random.default_rng(5)), EngineModel(0.4, 0.1, 0.5, 8, overlaps=True)
    alone, few, many = (played(stream, 4.0, engine, queued=queued) for queued in (0, 20, 100))
    assert alone < few < many
    assert (
        few - alone < (many - alone) / 10
    )  # a queue five times as long takes five times as long, for five times as many


def test_a_queue_weighs_most_where_the_node_bears_least() -> None:
    calm, busy = Served(Bowl(rate=200.0)), LatencyModel()
    for second in range(10):
        window = calm.window(0.5, float(second))
        busy.update(replace(window, traffic=replace(window.traffic, num_queued=400)))
    added_ms = busy.predict(Bias()).mean_ms - learned_from(calm).predict(Bias()).mean_ms
    stages_ms = busy.predict(Bias()).stages_ms
    assert (added_ms > 0).all()
    assert added_ms[stages_ms.argmax()] > 1.2 * added_ms[stages_ms.argmin()]


def test_a_split_without_room_for_two_steps_is_predicted_to_be_slow() -> None:
    """Of ten pages, requests of 4,000 tokens: the last splits hold one request at a time, the first ones nine."""
    served = Served(Bowl(rate=250.0))
    ample, tight = LatencyModel(), LatencyModel()
    for second in range(10):
        window = served.window(0.5, float(second))
        ample.update(window)
        tight.update(replace(window, num_pages=10, page_tokens=int(TOKENS)))
    longer = tight.predict(Bias()).mean_ms / ample.predict(Bias()).mean_ms
    assert longer[0] == pytest.approx(1.0, abs=0.02)
    assert longer[-1] > 1.1


@pytest.mark.parametrize("rate", [20.0, 120.0])
def test_a_node_whose_steps_were_measured_is_predicted_at_splits_it_has_not_been_at(rate: float) -> None:
    bowl = Bowl(rate=rate)
    model = learned_from(Served(bowl))
    found = list[FloatArray]()
    for model._turn in range(_NUM_STREAMS):
        found.append(model.predict(Bias()).mean_ms)
    mean_ms = np.mean(found, axis=0)
    for alpha in (0.2, 0.4, 0.6, 0.8):
        assert np.interp(alpha, ALPHAS, mean_ms) == pytest.approx(latency_ms(bowl, alpha), rel=0.05), alpha


class Watched:
    """Looks and predicts, and never moves."""

    def __init__(self) -> None:
        self.helm = Helm()
        self.errors: list[float] = []  # of a window's latency, predicted in the one before

    def decide(self, stats: WindowStats) -> Move | None:
        before = self.helm.prediction
        if before is not None and stats.traffic.num_served and stats.traffic.start_s >= OPENING_S:
            self.errors.append(abs(before.at(stats.alpha) / stats.traffic.mean_ms - 1))
        self.helm.decide(stats)
        return None

    def reset(self) -> None:
        self.helm.reset()


def test_a_steady_node_is_predicted_a_window_ahead() -> None:
    drawn, watched = draw("train", 12, load=0.7), Watched()
    simulate(drawn.make_trace(0), drawn.node_at(0.4), drawn.cost, watched, options=Options(has_curves=True))
    assert len(watched.errors) > 20
    assert np.median(watched.errors) < 0.25


def test_what_was_measured_scales_what_shadows_promise() -> None:
    model = learned_from(Served(BOWL))
    plain, corrected = (one.stages_ms for one in map(model.predict, (Bias(), Bias(tokens=0.5, rows=2.0))))
    computed, missed = np.array([(BOWL.computed(alpha), BOWL.missed(alpha)) for alpha in GRID]).T
    costs = model.estimator.costs
    assert costs is not None
    fewer_ms = computed / 2 * (costs.token_ms + costs.host_token_ms + costs.pair_ms * TOKENS / 2)
    more_ms = missed * (costs.host_missed_row_ms + costs.missed_row_ms)
    changed = np.interp(GRID, ALPHAS, corrected - plain)
    np.testing.assert_allclose(changed, more_ms - fewer_ms, rtol=0.02, atol=0.005)


def test_the_pace_scales_latency_and_not_stage_times() -> None:
    model = learned_from(Served(BOWL))
    model.rate = 1e-3
    plain, slow = model.predict(Bias()), model.predict(Bias(pace=1.5))
    np.testing.assert_allclose(slow.mean_ms, 1.5 * plain.mean_ms, rtol=1e-6)
    np.testing.assert_allclose(slow.stages_ms, plain.stages_ms)  # which are what clocks measure


def test_stages_of_a_lone_request_are_what_it_takes_on_an_idle_node() -> None:
    model = learned_from(Served(BOWL))
    model.rate = 1e-3
    found = model.predict(Bias())
    np.testing.assert_allclose(found.mean_ms, found.stages_ms, rtol=0.02)


def test_what_is_shown_of_the_uncorrected_prediction_is_whole_after_some_windows() -> None:
    model = learned_from(Served(BOWL))
    whole = model.uncorrected_ms()
    np.testing.assert_allclose(whole, model.predict(Bias()).mean_ms)
    model.rate /= 2
    for model._turn in range(_PARTS):
        assert not np.allclose(whole, model.predict(Bias()).mean_ms, rtol=1e-3)
        found = model.uncorrected_ms()
    assert (found < whole).all()  # each part was of another stream


def interpolated_plainly(values: FloatArray, known_at: FloatArray, at: float) -> float:
    """The plain twin of `between`, of one curve at one place."""
    at = min(max(at, known_at[0]), known_at[-1])
    piece = max(i for i in range(known_at.size - 1) if known_at[i] <= at)
    widths = np.diff(known_at)
    rises = np.diff(values) / widths
    slopes = [rises[0]]
    for (w0, w1), (r0, r1) in zip(itertools.pairwise(widths), itertools.pairwise(rises), strict=True):
        weights = (2 * w1 + w0, w1 + 2 * w0) if r0 * r1 > 0 else (0, 0)  # harmonic mean, or flat where it turns
        slopes.append(sum(weights) / (weights[0] / r0 + weights[1] / r1) if r0 * r1 > 0 else 0.0)
    slopes.append(rises[-1])
    t, width = (at - known_at[piece]) / widths[piece], widths[piece]
    basis = np.array([2 * t**3 - 3 * t**2 + 1, t**3 - 2 * t**2 + t, -2 * t**3 + 3 * t**2, t**3 - t**2])
    ends = np.array([values[piece], width * slopes[piece], values[piece + 1], width * slopes[piece + 1]])
    return float(basis @ ends)


@pytest.mark.parametrize("seed", range(5))
def test_curves_are_interpolated_as_by_a_plain_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known, known_at = rng.normal(size=(3, 8)).cumsum(axis=1), np.sort(rng.random(8))
    at = np.linspace(0.0, 1.0, 50)
    found = between(known, known_at, at)
    plain = [[interpolated_plainly(values, known_at, place) for place in at] for values in known]
    np.testing.assert_allclose(found, plain, rtol=1e-9, atol=1e-12)


def test_curves_bend_between_their_points_and_never_beyond_them() -> None:
    work = learned_from(Served(BOWL)).work
    assert work is not None
    for found, known in ((work.computed_tokens, BOWL.computed), (work.missed_rows, BOWL.missed)):
        rises = np.diff(found)
        assert (rises >= 0).all() or (rises <= 0).all()
        at = np.array([known(alpha) for alpha in ALPHAS])
        inside = (ALPHAS >= 0.1) & (ALPHAS <= 0.9)
        straight = np.interp(ALPHAS, np.array(GRID), [known(alpha) for alpha in GRID])
        assert np.abs(found - at)[inside].mean() < np.abs(straight - at)[inside].mean()
    np.testing.assert_allclose(work.read_rows, ROWS)


@pytest.mark.parametrize("lacks", ["curves", "steps", "answers"])
def test_a_window_that_says_too_little_is_no_ground_for_a_prediction(lacks: str) -> None:
    model = LatencyModel()
    for second in range(10):
        assert not model.update(without(lacks, Served(BOWL).window(0.5, float(second))))


def without(lacks: str, window: WindowStats) -> WindowStats:
    if lacks == "curves":
        return replace(window, curves=None)
    if lacks == "steps":
        return replace(window, steps=no_steps())
    return replace(window, traffic=replace(window.traffic, num_requests=0, num_served=0))


def test_a_fading_mean_follows_a_jump_by_half_after_its_half_life() -> None:
    mean = Fading(half_life_s=10.0)
    for _ in range(200):
        mean.add(np.array(1.0), 5.0, 1.0)
    for _ in range(10):
        found = mean.add(np.array(3.0), 5.0, 1.0)
    assert float(found) == pytest.approx(2.0, abs=0.01)


def test_the_engine_of_these_tests_holds_candidates_and_histories_apart() -> None:
    """The model's `others` are the candidates: tokens that are computed at every split."""
    model = learned_from(Served(BOWL))
    assert model._others == pytest.approx(CANDIDATES)
    assert model._history == pytest.approx(TOKENS)
    assert model.most_requests == ENGINE.most


def test_only_what_is_new_in_miss_curves_is_averaged_with_windows_before() -> None:
    served, model = Served(BOWL), LatencyModel()
    first = served.window(0.5, 0.0)
    assert first.curves is not None
    curves = replace(first.curves, num_requests=100.0, faded=0.0)
    later = replace(curves, num_requests=200.0, missed_rows_per_request=1.5 * curves.missed_rows_per_request)
    model.update(replace(first, curves=curves))
    assert model.work is not None
    before = model.work.missed_rows
    model.update(replace(first, curves=later))  # the newest hundred missed twice as many
    kept = 100 * 2 ** (-1 / RECENT_S)
    np.testing.assert_allclose(model.work.missed_rows, before * (kept + 2 * 100) / (kept + 100), rtol=1e-6)


def test_new_curves_in_place_of_those_that_failed_count_from_their_first_request() -> None:
    """The old ones had faded for millions of requests."""
    served = Served(BOWL)
    model = learned_from(served)
    for num, faded in [(5_900.0, -720.0), (5_900.0, -720.1), (400.0, -0.1)]:
        window = served.window(0.5, 100.0)
        assert window.curves is not None
        assert model.update(replace(window, curves=replace(window.curves, num_requests=num, faded=faded)))
    assert np.isfinite(model.predict(Bias()).mean_ms).all()


def test_a_request_has_a_token_even_if_tokens_were_counted_in_another_window() -> None:
    """Tokens found new by lookups belong to more requests than the steps that ended. At some splits none is new."""
    served = Served(BOWL)
    model, window = learned_from(served), served.window(0.5, 100.0)
    assert window.curves is not None
    curves = replace(
        window.curves, computed_tokens_per_request=np.zeros_like(window.curves.computed_tokens_per_request)
    )
    assert model.update(replace(window, curves=curves, new_tokens_per_request=1e6))
    model.start_over()
    assert np.isfinite(model.predict(Bias()).mean_ms).all()
