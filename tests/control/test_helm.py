"""The whole policy: where it goes, what it never exceeds, and that every decision is told."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.control.burst import BurstSettings
from helmrec.control.by_name import check_policy, make_policy, needs_curves
from helmrec.control.explain import Explanation, read_explanations
from helmrec.control.guardrail import G
from helmrec.control.helm import HelmPolicy, HelmSettings, T
from helmrec.control.network import BasePolicy, following_layers, join_layers
from helmrec.control.outlook import Crowding
from helmrec.control.policy import Limited, Limits, Policy, WindowStats
from helmrec.control.rebalancer import Decision, Rebalancer
from helmrec.control.state import Served, load_learned, save_learned
from helmrec.errors import ConfigError
from tests.control.bowl import COST, Bowl, drive
from tests.control.test_rebalancer import Pool, Says

FOLLOWING = BasePolicy(join_layers(following_layers()), Crowding(), {})


BOWLS = (Bowl(), Bowl(emb_scale=0.5, kv_scale=0.1), Bowl(emb_scale=0.12, kv_scale=0.5))


def following(**flags: bool) -> HelmPolicy:
    return HelmPolicy(COST, HelmSettings(**flags), FOLLOWING)


def fearless() -> HelmPolicy:
    """Waits for no burst."""
    return HelmPolicy(COST, HelmSettings(burst=BurstSettings(caution=0)), FOLLOWING)


@pytest.mark.parametrize("bowl", BOWLS)
@pytest.mark.parametrize("start", [0.1, 0.9])
def test_it_reaches_the_bottom_and_rests_there(bowl: Bowl, start: float) -> None:
    path = drive(fearless(), bowl, start, 60)
    regret = bowl.latency_ms(path[-1]) / bowl.latency_ms(bowl.bottom()) - 1
    assert regret < 0.02
    assert np.ptp(path[-10:]) < 0.03


@pytest.mark.parametrize("bowl", BOWLS)
def test_what_is_paid_for_a_burst_that_never_comes_fades(bowl: Bowl) -> None:
    path = drive(following(), bowl, 0.5, 1_200)
    regrets = [bowl.latency_ms(path[at]) / bowl.latency_ms(bowl.bottom()) - 1 for at in (60, -1)]
    assert regrets[1] < 0.02
    assert regrets[1] <= regrets[0] < 0.1


def test_nothing_is_decided_without_curves_or_requests() -> None:
    policy, stats = following(), Bowl().window(0.5)
    assert policy.decide(replace(stats, curves=None)) is None
    assert policy.explanation is None
    assert policy.decide(replace(stats, traffic=replace(stats.traffic, num_requests=0, num_served=0))) is None


def test_without_layers_beside_the_base_no_other_layer_has_a_word() -> None:
    policy = following(has_residual=False, has_burst=False, has_guardrail=False)
    drive(policy, Bowl(noise=0.3), 0.2, 60)
    assert policy.explanation is not None
    assert policy.explanation.residual == 0
    assert policy.explanation.cause in {"base and residual", f"burst: {policy.explanation.burst}"}
    assert not policy.learned.any()


numbers = st.floats(0, 1e6, allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers, st.floats(0, 1), st.floats(0.02, 0.95)), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_whatever_it_sees_it_asks_for_a_split_within_reach(
    windows: list[tuple[float, float, float, float]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    wild = BasePolicy(rng.normal(0, 3, FOLLOWING.weights.size), Crowding(), {})
    policy = HelmPolicy(COST, base=wild)
    for number, (computed, missed, share, alpha) in enumerate(windows):
        stats = odd_window(Bowl(), number, (computed, missed, share, alpha))
        move = policy.decide(stats)
        if move is not None:
            assert abs(move.alpha - alpha) <= 0.1 + 1e-9
            assert min(0.1, alpha) - 1e-9 <= move.alpha <= max(0.9, alpha) + 1e-9
        assert policy.explanation is not None
        assert abs(policy.explanation.residual) <= 0.05


def odd_window(bowl: Bowl, number: int, odd: tuple[float, float, float, float]) -> WindowStats:
    computed, missed, share, alpha = odd
    stats = bowl.window(alpha, start_s=number)
    assert stats.curves is not None
    curves = replace(
        stats.curves,
        computed_tokens_per_request=np.full(9, computed),
        missed_rows_per_request=np.linspace(missed, 0, 9),
        num_requests=1.0 + missed,
    )
    traffic = replace(stats.traffic, hot_user_share=share, mean_ms=computed, p99_ms=missed, compute_busy=share)
    return replace(stats, traffic=traffic, curves=curves, new_tokens_per_request=computed)


def test_the_guardrail_takes_over_from_a_base_that_wanders() -> None:
    """A base that always steps down loses to any constant; without the guardrail it stays lost."""
    arrays = {name: np.zeros_like(array) for name, array in following_layers().items()}
    arrays["last.bias"][0] = 1.0
    down = BasePolicy(join_layers(arrays), Crowding(), {})
    bowl = Bowl(rate=50)
    waits_not = BurstSettings(caution=0)
    held = HelmPolicy(COST, HelmSettings(burst=waits_not), down)
    lost = HelmPolicy(COST, HelmSettings(burst=waits_not, has_guardrail=False), down)
    guarded, free = drive(held, bowl, 0.6, 120)[-1], drive(lost, bowl, 0.6, 120)[-1]
    assert free < 0.2
    assert guarded == pytest.approx(bowl.bottom(), abs=0.1)
    assert held.kept.guard[G.IS_ASIDE]
    assert held.explanation is not None
    assert held.explanation.cause == "guardrail: best constant"


HERE = Served(model="tiny 1a2b", pool_bytes=1 << 30)


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    policy, path = following(), tmp_path / "learned.json"
    drive(policy, Bowl(noise=0.2, rate=100), 0.3, 80)
    policy.learned = np.array([0.01, -0.02, 0.003])
    save_learned(path, policy, HERE)
    again = following()
    load_learned(path, again, HERE)
    np.testing.assert_array_equal(again.learned, policy.learned)
    again.decide(Bowl().window(0.5))
    assert again.learned.any(), "the first window starts from it"


def test_a_file_that_tells_nothing_learned_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    save_learned(path, following(), HERE)
    path.write_text(path.read_text().replace('"version": 2', '"version": 9'))
    with pytest.raises(ConfigError, match="version"):
        load_learned(path, following(), HERE)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_learned(path, following(), HERE)


OTHER_COST = COST.model_copy(update={"token_ms": 0.002})
OTHER_BASE = BasePolicy(FOLLOWING.weights * 2, Crowding(), {})


@pytest.mark.parametrize(
    ("policy", "served", "what"),
    [
        (following(), HERE._replace(model="tiny 9f"), "model: 'tiny 1a2b', here it is 'tiny 9f'"),
        (following(), HERE._replace(pool_bytes=1 << 31), "pool_bytes: 1073741824, here it is 2147483648"),
        (HelmPolicy(OTHER_COST, base=FOLLOWING), HERE, "calibration"),
        (HelmPolicy(COST, base=OTHER_BASE), HERE, "network"),
    ],
)
def test_what_was_learned_elsewhere_is_not_taken_over(
    tmp_path: Path, policy: HelmPolicy, served: Served, what: str
) -> None:
    path, learner = tmp_path / "learned.json", following()
    learner.learned = np.array([0.01, -0.02, 0.003])
    save_learned(path, learner, HERE)
    with pytest.raises(ConfigError, match=f"learned on another {what}"):
        load_learned(path, policy, served)
    assert not policy.learned.any()


def test_reset_forgets_all() -> None:
    policy = following()
    first = drive(policy, Bowl(), 0.2, 30)
    policy.learned = np.ones(3)
    policy.reset()
    assert not policy.learned.any()
    assert drive(policy, Bowl(), 0.2, 30) == first


def test_the_explanation_names_every_layer() -> None:
    policy = following()
    move = policy.decide(Bowl().window(0.2))
    told = policy.explanation
    assert told is not None
    assert move is not None
    assert (told.wanted, told.expected_gain_ms, told.cause) == (move.alpha, move.expected_gain_ms, move.reason)
    for word in ("base", "residual", "burst", "guardrail", "gain", "cost"):
        assert word in told.line()
    assert len(T) == len(Explanation._fields)


def test_explanations_come_back_from_a_log(tmp_path: Path) -> None:
    policy = following()
    policy.decide(Bowl().window(0.2))
    assert policy.explanation is not None
    path = tmp_path / "log.jsonl"
    path.write_text(policy.explanation.as_json() + "\n")
    (found,) = read_explanations(path)
    assert found == pytest.approx(policy.explanation, abs=1e-6)
    path.write_text("what\n")
    with pytest.raises(ConfigError, match="line 1"):
        list(read_explanations(path))


def test_it_has_a_name_and_reads_curves() -> None:
    made = make_policy("helm", COST)
    assert isinstance(made, Limited)
    assert isinstance(made.policy, HelmPolicy)
    assert needs_curves("helm")
    check_policy("helm")
    with pytest.raises(ConfigError, match="calibration"):
        make_policy("helm", None)


@pytest.mark.parametrize("policy", [Says(0.9), following()])
def test_static_mode_goes_to_its_alpha_in_steps_and_stays(policy: Policy) -> None:
    pool = Pool()
    rebalancer = Rebalancer(pool, policy, slo_ms=80, static_alpha=0.2)
    rebalancer.mode = "static"
    for second in range(12):
        rebalancer.tick(float(second))
    assert pool.moves[-1] == pytest.approx(0.2)
    assert max(abs(b - a) for a, b in zip(pool.moves, pool.moves[1:], strict=False)) <= Limits().max_step + 1e-9


def steady_rebalancer(pool: Pool) -> Rebalancer:
    """Three seconds of twenty requests each are behind it."""
    rebalancer = Rebalancer(pool, Says(0.5), slo_ms=80)
    for second in range(4):
        for _ in range(20):
            rebalancer.record(1, 5.0)
        rebalancer.tick(float(second))
    return rebalancer


def test_a_burst_of_requests_brings_the_tick_forward() -> None:
    rebalancer = steady_rebalancer(Pool())
    assert rebalancer.tick(3.3) is None
    for _ in range(100):
        rebalancer.record(1, 5.0)
    assert rebalancer.tick(3.5) is None, "not before a quarter of a tick after the last look"
    assert rebalancer.tick(3.55) is not None


def test_a_burst_on_a_saturated_node_shows_in_its_queue() -> None:
    pool = Pool()
    rebalancer = steady_rebalancer(pool)
    pool.looked.queue_length += 100
    assert rebalancer.tick(3.4) is not None, "nobody was answered any faster"
    pool.looked.queue_length -= 100
    assert rebalancer.tick(3.9) is None, "an emptying queue is no burst"


def test_a_move_is_logged_with_what_the_layers_said(caplog: pytest.LogCaptureFixture) -> None:
    bowl, pool = Bowl(), Pool()
    pool.curves = bowl.curves  # type: ignore[method-assign]
    seen = list[Decision]()
    rebalancer = Rebalancer(pool, Limited(following(), Limits()), slo_ms=80, on_decision=seen.append)
    with caplog.at_level(logging.INFO, logger="helmrec.control"):
        rebalancer.tick(0.0)
        rebalancer.record(1, 5.0)
        rebalancer.tick(1.0)
    assert seen[-1].explanation is not None
    assert any("guardrail" in record.getMessage() for record in caplog.records) == (seen[-1].move is not None)
