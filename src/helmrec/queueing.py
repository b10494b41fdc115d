"""The rules of the queue: which requests are refused, which run next, and what is known of the steps' times.

The engine's scheduler and the simulated node follow the same functions. Time is an argument.
"""

from typing import NamedTuple

from helmrec.jit import rule

ADMITTED_SHARE = 0.85  # of its deadline that a request may be expected to take when it is submitted
_CAUTION = 3  # mean deviations by which a step is assumed to exceed its mean
_SMOOTHING = 0.1


class StepTimes(NamedTuple):
    """Moving averages over the steps that have ended."""

    step_s: float = 0.0
    deviation_s: float = 0.0  # mean absolute error of `step_s`
    request_ms: float = 0.0  # of a request's share of its step


@rule
def with_step(times: StepTimes, took_s: float, num_requests: int) -> StepTimes:
    """Add a step. One that was computed ahead of its requests has none, and says nothing about a request's share."""
    error_s = took_s - times.step_s
    request_ms = times.request_ms
    if num_requests:
        request_ms += _SMOOTHING * (took_s * 1e3 / num_requests - request_ms)
    deviation_s = times.deviation_s + _SMOOTHING * (abs(error_s) - times.deviation_s)
    return StepTimes(times.step_s + _SMOOTHING * error_s, deviation_s, request_ms)


@rule
def expected_ms(times: StepTimes, num_waiting: int, num_running: int, spent_s: float) -> float:
    """Expected time to the answer of a request that arrives behind others.

    spent_s: time since the oldest running step began, or since the step before it ended.
    """
    left_ms = max(0.0, times.request_ms * num_running - spent_s * 1e3) if num_running else 0.0
    ahead_ms = times.request_ms * (num_waiting + 1) + left_ms
    slower = times.deviation_s / times.step_s if times.step_s else 0.0  # a slow phase lasts for some steps
    return ahead_ms * (1 + slower) + _CAUTION * times.deviation_s * 1e3


@rule
def needed_s(times: StepTimes, num_waiting: int) -> float:
    """Time that a request must have left to be started. The only one that waits is always tried."""
    return times.step_s + _CAUTION * times.deviation_s if num_waiting > 1 else 0.0


@rule
def may_fit(budget: int, num_tokens: int, num_resident: int) -> bool:
    """Whether a request of `num_tokens` may join a step that can compute `budget` more, if all its KV is fresh."""
    return num_tokens - num_resident <= budget
