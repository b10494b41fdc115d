"""A made-up node that is served in steps of known costs, and a plain engine that says how long its requests take."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from helmrec.control.latency import ALPHAS, EngineModel
from helmrec.control.policy import Policy, WindowStats
from helmrec.memory.miss_curves import JointCurves
from helmrec.steps import Step
from tests.control.bowl import ROWS, TOKENS, Bowl
from tests.control.made_up_steps import COSTS, timed

CANDIDATES = 500
SHARED = (4, 1, 7, 2, 6)  # requests of steps, in turn
MEAN_SHARED = 4
NUM_SERVED = 2_000  # requests behind a mean latency


class Asked(NamedTuple):
    """A request: when it comes, and what it takes in each stage."""

    arrived_ms: float
    host_ms: float
    rows_ms: float
    compute_ms: float


class _Launched(NamedTuple):
    requests: list[Asked]
    host_ms: float  # when the host was done with it
    done_ms: float


class PlainEngine:
    """Serves requests in steps, one event at a time: the plain twin of `helmrec.control.latency.play`."""

    def __init__(self, engine: EngineModel, room: int = 1 << 30) -> None:
        """room: requests whose KV fits the pool at once."""
        self._engine, self._room = engine, room
        self._host_ms = self._bus_ms = self._device_ms = 0.0  # when each is free

    def latencies_ms(self, asked: list[Asked]) -> list[float]:
        return list(self._serve(deque(asked)))

    def _serve(self, waiting: deque[Asked]) -> Iterator[float]:
        running: _Launched | None = None
        while waiting or running is not None:
            if running is None:
                self._host_ms = max(self._host_ms, waiting[0].arrived_ms)
                running = self._launch(waiting, self._room)
                self._host_ms = running.host_ms
                continue
            somebody_waits = bool(waiting) and waiting[0].arrived_ms <= self._host_ms
            room = self._room - len(running.requests)
            following = self._launch(waiting, room) if somebody_waits and self._engine.overlaps and room > 0 else None
            free_ms = self._host_ms if following is None else following.host_ms
            self._host_ms = max(free_ms, running.done_ms)
            yield from (self._host_ms - one.arrived_ms for one in running.requests)
            running = following

    def _launch(self, waiting: deque[Asked], room: int) -> _Launched:
        """All that wait, as many as a step holds and there is room for."""
        engine, requests = self._engine, list[Asked]()
        while waiting and waiting[0].arrived_ms <= self._host_ms and len(requests) < min(engine.most, room):
            requests.append(waiting.popleft())
        host_ms = self._host_ms + engine.host_ms + sum(one.host_ms for one in requests)
        self._bus_ms = max(self._bus_ms, host_ms) + engine.rows_ms + sum(one.rows_ms for one in requests)
        compute_ms = engine.compute_ms + sum(one.compute_ms for one in requests)
        self._device_ms = max(self._device_ms, self._bus_ms) + compute_ms
        return _Launched(requests, host_ms, self._device_ms)


ENGINE = EngineModel(COSTS.host_step_ms, COSTS.rows_step_ms, COSTS.compute_step_ms, max(SHARED), overlaps=False)


@dataclass(frozen=True)
class Served:
    """A bowl whose windows hold steps; shadows may promise more or less than comes of it."""

    bowl: Bowl
    promised_rows: float = 1.0  # factor of the shadows on missed rows
    stall: float = 1.0  # factor on measured latency that no stage explains

    def window(self, alpha: float, start_s: float) -> WindowStats:
        """One second."""
        stats = self.bowl.window(alpha, start_s)
        num_steps = max(1, round(self.bowl.rate / MEAN_SHARED))
        steps = np.zeros((num_steps, len(Step)))
        shared = np.resize(SHARED, num_steps)
        spread = np.linspace(0.5, 1.5, num_steps)  # no two steps are alike
        computed = stats.new_tokens_per_request * spread / np.average(spread, weights=shared)
        missed = stats.missed_rows_per_request * spread[::-1] / np.average(spread[::-1], weights=shared)
        steps[:, Step.REQUESTS] = shared
        steps[:, Step.TOKENS] = shared * (CANDIDATES + computed)
        steps[:, Step.PAIRS] = shared * (CANDIDATES * TOKENS + computed * TOKENS / 2)
        steps[:, Step.ROWS_READ], steps[:, Step.ROWS_MISSED] = shared * ROWS, shared * missed
        traffic = replace(stats.traffic, mean_ms=self.stall * latency_ms(self.bowl, alpha))
        return replace(stats, traffic=traffic, steps=timed(steps), curves=self._curves(start_s))

    def _curves(self, start_s: float) -> JointCurves:
        """Of this second alone: what came before has faded away."""
        curves = self.bowl.curves()
        missed = curves.missed_rows_per_request * self.promised_rows
        return replace(curves, num_requests=self.bowl.rate, missed_rows_per_request=missed, faded=-100 * start_s)

    def best(self) -> float:
        """Where latency is least."""
        return float(min(ALPHAS, key=lambda alpha: latency_ms(self.bowl, float(alpha))))


@cache
def latency_ms(bowl: Bowl, alpha: float) -> float:
    """Mean latency at a split: some users find all of their history, the others none."""
    rng = np.random.default_rng(0)
    arrived_ms = np.cumsum(rng.exponential(1e3 / bowl.rate, NUM_SERVED))
    is_new = rng.permutation(NUM_SERVED) + 0.5 < NUM_SERVED * bowl.computed(alpha) / TOKENS
    rows, missed = (num / (CANDIDATES + bowl.computed(alpha)) for num in (ROWS, bowl.missed(alpha)))  # per token
    asked = [
        _asked(float(at), TOKENS if new else 0.0, rows, missed) for at, new in zip(arrived_ms, is_new, strict=True)
    ]
    return float(np.mean(PlainEngine(ENGINE).latencies_ms(asked)))


def _asked(arrived_ms: float, computed: float, rows: float, missed: float) -> Asked:
    tokens, pairs = CANDIDATES + computed, CANDIDATES * TOKENS + computed * TOKENS / 2
    return Asked(
        arrived_ms=arrived_ms,
        host_ms=COSTS.host_request_ms + (COSTS.host_token_ms + COSTS.host_missed_row_ms * missed) * tokens,
        rows_ms=(COSTS.read_row_ms * rows + COSTS.missed_row_ms * missed) * tokens,
        compute_ms=COSTS.token_ms * tokens + COSTS.pair_ms * pairs,
    )


def driven(policy: Policy, served: Served, alpha: float, seconds: int, start_s: int = 0) -> list[float]:
    """Let a policy steer; returns alpha after each second."""
    path = []
    for second in range(start_s, start_s + seconds):
        move = policy.decide(served.window(alpha, float(second)))
        alpha = alpha if move is None else move.alpha
        path.append(alpha)
    return path
