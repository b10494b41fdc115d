"""A fleet of nodes as the vectorised environment of Stable-Baselines3."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from helmrec.control.latency import ALPHAS
from helmrec.ppo.observation import Sight, Signal, observe
from helmrec.types import FloatArray
from helmrec_bench.train.designs import STEPS, Design
from helmrec_bench.train.fleet import Fleet

MOST = 5.0  # largest input after scaling, either sign
_SEEN_S = 200  # seconds of random steps that inputs are scaled by
_FINITE = 20.0  # largest input before scaling: the time since a move that never was is infinite


class SteeringEnv(VecEnv):
    """An action is the number of a step of alpha. Episodes end by time, and the next node follows at once."""

    render_mode = None

    def __init__(self, design: Design, num_nodes: int, seed: int) -> None:
        self.design, self._sight = design, design.sight
        self.centre, self.scale = input_scale(design)
        space = spaces.Box(-MOST, MOST, (self.centre.size,), np.float32)
        super().__init__(num_nodes, space, spaces.Discrete(len(STEPS)))
        self.fleet = Fleet(num_nodes, seed)
        self._actions = np.zeros(num_nodes, np.int64)
        self.lost = np.zeros(2)  # sum of expected latency over the least one, as logarithms, and seconds of nodes

    def reset(self) -> NDArray[np.float32]:
        return self._observe()

    def step_async(self, actions: NDArray[np.int64]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        start = self.fleet.signals[:, Signal.ALPHA].copy()
        targets = np.clip(start + np.array(STEPS)[self._actions], ALPHAS[0], ALPHAS[-1])
        outcome = self.fleet.step(targets)
        self.lost += (outcome.expected.sum(), float(targets.size))
        rewards = self.design.rewards(outcome, np.abs(targets - start)).astype(np.float32)
        seen = self._observe()
        return seen, rewards, outcome.is_over > 0, [{} for _ in range(self.num_envs)]

    def _observe(self) -> NDArray[np.float32]:
        return scaled(observe_all(self.fleet, self._sight), self.centre, self.scale)

    def close(self) -> None:
        """There is nothing to give back."""

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        raise NotImplementedError("nodes are drawn, not set")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("nodes have no methods of their own")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))


def observe_all(fleet: Fleet, sight: Sight) -> FloatArray:
    """Inputs of every node, not yet scaled."""
    return _observe_all(fleet.mean_ms, fleet.newest_ms, fleet.signals, sight)


def scaled(inputs: FloatArray, centre: FloatArray, scale: FloatArray) -> NDArray[np.float32]:
    return np.clip((inputs - centre) / scale, -MOST, MOST).astype(np.float32)


@cache
def input_scale(design: Design) -> Sequence[FloatArray]:
    """Mean and deviation of every input, over nodes that wander; the same for every seed of a training."""
    fleet, sight = Fleet(64, seed=0), design.sight
    seen = []
    for _ in range(_SEEN_S):
        steps = fleet.rng.uniform(STEPS[0], STEPS[-1], 64) * (fleet.rng.random(64) < 0.2)
        fleet.step(np.clip(fleet.signals[:, Signal.ALPHA] + steps, ALPHAS[0], ALPHAS[-1]))
        seen.append(np.clip(observe_all(fleet, sight), -_FINITE, _FINITE))
    inputs = np.concatenate(seen)
    return inputs.mean(axis=0).round(6), np.maximum(inputs.std(axis=0), 1e-3).round(6)


@numba.njit(cache=True)
def _observe_all(mean_ms: FloatArray, newest_ms: FloatArray, signals: FloatArray, sight: Sight) -> FloatArray:
    num = 2 * sight.near.size + sight.whole.size + sight.signals.size
    inputs = np.empty((len(signals), num))
    for number in range(len(signals)):
        inputs[number] = observe(mean_ms[number], newest_ms[number], signals[number], sight)
    return inputs
