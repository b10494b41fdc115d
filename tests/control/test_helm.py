"""The policy that steers by what it measures, on a made-up node whose best split is known."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from helmrec.control.adaptive import Adaptive, AdaptiveSettings

from helmrec.control.by_name import make_policy, needs_curves
from helmrec.control.latency import ALPHAS
from helmrec.control.policy import Limited, Limits, Policy, WindowStats
from helmrec.memory.miss_curves import JointCurves
from helmrec.steps import Step, no_steps
from tests.control.bowl import ROWS, TOKENS, Bowl
from tests.control.made_up_steps import COSTS, timed

CANDIDATES = 500
SHARED = 4  # requests of a step


@dataclass(frozen=True)
class Served:
    """A bowl whose windows hold steps; shadows may promise more or less than comes of it."""

    bowl: Bowl
    promised_rows: float = 1.0  # factor of the shadows on missed rows

    def window(self, alpha: float, start_s: float) -> WindowStats:
        """One second."""
        stats = self.bowl.window(alpha, start_s)
        num_steps = max(1, round(self.bowl.rate / SHARED))
        steps = np.zeros((num_steps, len(Step)))
        spread = np.linspace(0.5, 1.5, num_steps)  # no two steps are alike
        computed, missed = stats.new_tokens_per_request * spread, stats.missed_rows_per_request * spread[::-1]
        steps[:, Step.REQUESTS] = SHARED
        steps[:, Step.TOKENS] = SHARED * (CANDIDATES + computed)
        steps[:, Step.PAIRS] = SHARED * (CANDIDATES * TOKENS + computed * TOKENS / 2)
        steps[:, Step.ROWS_READ], steps[:, Step.ROWS_MISSED] = SHARED * ROWS, SHARED * missed
        return replace(stats, steps=timed(steps), curves=self._curves(start_s))

    def _curves(self, start_s: float) -> JointCurves:
        """Of this second alone: what came before has faded away."""
        curves = self.bowl.curves()
        missed = curves.missed_rows_per_request * self.promised_rows
        return replace(curves, num_requests=self.bowl.rate, missed_rows_per_request=missed, faded=-100 * start_s)

    def best(self) -> float:
        """Where stages together are shortest."""

        def stages_ms(alpha: float) -> float:
            computed, missed = self.bowl.computed(alpha), self.bowl.missed(alpha)
            return computed * (COSTS.token_ms + COSTS.pair_ms * TOKENS / 2) + missed * COSTS.missed_row_ms

        return float(min(ALPHAS, key=stages_ms))


def driven(policy: Policy, served: Served, alpha: float, seconds: int, start_s: int = 0) -> list[float]:
    """Let a policy steer; returns alpha after each second."""
    path = []
    for second in range(start_s, start_s + seconds):
        move = policy.decide(served.window(alpha, float(second)))
        alpha = alpha if move is None else move.alpha
        path.append(alpha)
    return path


def limited(**settings: object) -> Limited:
    return Limited(Adaptive(AdaptiveSettings(**settings)), Limits())


@pytest.mark.parametrize("start", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kv_scale", [0.15, 0.3, 0.6])
def test_the_bottom_is_found_from_anywhere_within_ten_seconds(start: float, kv_scale: float) -> None:
    served = Served(Bowl(kv_scale=kv_scale))
    assert 0.15 < served.best() < 0.85
    path = driven(limited(), served, start, 40)
    assert abs(path[10] - served.best()) < 0.12
    assert abs(path[-1] - served.best()) < 0.1


def test_it_stays_where_it_found_the_bottom() -> None:
    path = driven(limited(), Served(Bowl()), 0.5, 120)
    assert len(set(path[20:])) == 1


@pytest.mark.parametrize("lacks", ["curves", "steps", "answers"])
def test_it_holds_while_it_knows_too_little(lacks: str) -> None:
    policy, served = Adaptive(), Served(Bowl())
    for second in range(10):
        window = served.window(0.1, float(second))
        if lacks == "curves":
            window = replace(window, curves=None)
        elif lacks == "steps":
            window = replace(window, steps=no_steps())
        else:
            window = replace(window, traffic=replace(window.traffic, num_requests=0, num_served=0))
        assert policy.decide(window) is None


def test_it_never_leaves_what_the_pool_allows() -> None:
    policy, served = Adaptive(), Served(Bowl(kv_scale=0.1, emb_scale=0.6))
    for second in range(20):
        move = policy.decide(replace(served.window(0.4, float(second)), alpha_min=0.3, alpha_max=0.45))
        assert move is None or 0.3 <= move.alpha <= 0.45


def test_shadows_that_promise_wrong_are_corrected_by_what_is_measured() -> None:
    served = Served(Bowl(), promised_rows=1.8)
    blind = driven(limited(has_residual=False), served, 0.5, 60)[-1]
    corrected = driven(limited(), served, 0.5, 60)[-1]
    assert abs(corrected - served.best()) < abs(blind - served.best())
    assert abs(corrected - served.best()) < 0.1


def test_after_a_burst_it_stands_nearer_to_what_the_burst_wanted() -> None:
    calm, burst = Served(Bowl(rate=20)), Served(Bowl(rate=100, kv_scale=0.1))
    ends = {}
    for has_memory in (False, True):
        policy = limited(has_burst_memory=has_memory)
        alpha, now_s = 0.5, 0
        for served, seconds in ((calm, 60), (burst, 15), (calm, 60)):
            alpha, now_s = driven(policy, served, alpha, seconds, now_s)[-1], now_s + seconds
        ends[has_memory] = alpha
    assert ends[True] > ends[False] + 0.02
    assert calm.best() < burst.best()


def test_what_was_seen_is_forgotten_on_reset() -> None:
    policy = Adaptive()
    driven(policy, Served(Bowl()), 0.5, 20)
    assert policy.estimator.costs is not None
    policy.reset()
    assert policy.estimator.costs is None
    assert policy.forecast is None


def test_it_is_known_by_name_and_looks_at_curves() -> None:
    policy = make_policy("adaptive", None)
    assert isinstance(policy, Limited)
    assert isinstance(policy.policy, Adaptive)
    assert needs_curves("adaptive")
