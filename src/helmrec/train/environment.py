"""A Gymnasium environment over simulated nodes: an observation is the base's features, an action one of its steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from numpy.typing import NDArray

from helmrec.control.features import NUM_FEATURES, STEPS
from helmrec.control.outlook import Crowding
from helmrec.control.policy import WindowStats
from helmrec.control.static import Static
from helmrec.sim.node import Node
from helmrec.sim.node_config import prepare_requests
from helmrec.sim.node_state import make_outcomes
from helmrec.sim.steered import NodeLoop, SteeredNode
from helmrec.train.labels import FINE
from helmrec.train.lessons import WINDOW_S, Lesson
from helmrec.train.observer import Observer

Seen = NDArray[np.float32]  # (NUM_FEATURES,)

_WARM_TICKS = 15
_MAX_LOSS = 2.0


class SplitEnvironment(gymnasium.Env[Seen, np.int64]):
    """One second a step. The reward is what the second cost beyond the best split's, and what missed its SLO, negative.

    Episodes go through lessons in random order, each from a split at random; their first seconds only warm the caches.
    """

    def __init__(self, lessons: Sequence[Lesson], crowding: Crowding, slo_weight: float = 0.5) -> None:
        self.observation_space = gymnasium.spaces.Box(-4.0, 4.0, (NUM_FEATURES,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(STEPS))
        self._lessons = lessons
        self._requests = [prepare_requests(one.ground.trace, one.ground.config) for one in lessons]
        self._crowding = crowding
        self._slo_weight = slo_weight

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        super().reset(seed=seed)
        which = int(self.np_random.integers(len(self._lessons)))
        self._lesson = lesson = self._lessons[which]
        ground = lesson.ground
        config = ground.born_at(float(self.np_random.choice(FINE)))
        self._node = Node(config, ground.cost, self._requests[which], make_outcomes(ground.trace.num_requests))
        self._node.send(np.arange(ground.trace.num_requests), ground.trace.time_s)
        self._loop = NodeLoop(SteeredNode(self._node), Static(), 1.0)
        self._loop.set_mode("freeze")  # it only looks; actions move the boundary
        self._observer = Observer(ground.service, self._crowding)
        self._best = lesson.costs.min(axis=1) / WINDOW_S
        self._tick = 0
        while self._tick < _WARM_TICKS:
            self._pass()
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[Seen, SupportsFloat, bool, bool, dict[str, Any]]:
        self._node.aim(float(np.clip(self._alpha + STEPS[int(action)], FINE[0], FINE[-1])))
        traffic = self._pass().traffic
        at = min(int((self._tick - 1) / WINDOW_S), self._best.size - 1)
        best = max(float(self._best[at]), 1e-6)
        loss = min(traffic.num_requests * traffic.mean_ms / best - 1, _MAX_LOSS)
        missed = 1 - traffic.slo_satisfaction if traffic.num_requests else 0.0
        is_over = self._tick >= self._lesson.num_ticks - 1
        return self._seen(), -loss - self._slo_weight * missed, False, is_over, {}

    def _pass(self) -> WindowStats:
        """Let a second go by and look at it."""
        self._tick += 1
        self._node.run_until(float(self._tick))
        window = self._loop.tick(float(self._tick))
        assert window is not None, "a second is a window"
        stats = window.stats
        self._alpha = min(max(stats.alpha_target, FINE[0]), FINE[-1])
        curves = self._lesson.curves[min(self._tick, len(self._lesson.curves)) - 1]
        self._is_seen = self._observer.observe(replace(stats, curves=curves))
        return stats

    def _seen(self) -> Seen:
        found = self._observer.features(self._alpha) if self._is_seen else np.zeros(NUM_FEATURES)
        return np.clip(found, -4, 4).astype(np.float32)
