"""Train a network with PPO, keep checkpoints, write what the controller loads.

A checkpoint is one file of arrays, with JSON in its header. A resumed training goes on with weights, optimiser and
step count, on new nodes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from helmrec.config import Frozen
from helmrec.errors import ConfigError, ModelError
from helmrec.ppo.network import NetworkRecord
from helmrec_bench.train.designs import DESIGNS, STEPS, design
from helmrec_bench.train.env import MOST, SteeringEnv

CHECKPOINT = "checkpoint.safetensors"
_FACTOR = 6.0  # of the mean step: the best of 1, 3, 6 and 12 on other nodes
_LEAST = 0.001  # step of alpha that is worth a move of the boundary
_ROUND = 64  # steps of each node between two updates


class TrainSettings(Frozen):
    """One training."""

    design: str = Field("expected", description=f"one of {', '.join(DESIGNS)}")
    steps: int = Field(2_000_000, ge=1, description="seconds of nodes, in all")
    seed: int = Field(0, ge=0, description="same seed, same network")
    nodes: int = Field(128, ge=1, description="nodes that are steered at once")
    hidden: int = Field(32, ge=1, description="units of each of the two hidden layers")
    learning_rate: float = Field(1e-3, gt=0, description="of Adam at the start; falls to a tenth")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy of the actions in the loss")
    discount: float = Field(0.95, gt=0, lt=1, description="of a reward one second later")


class Point(Frozen):
    """A point of a learning curve: means of the seconds since the last one."""

    steps: int
    reward: float
    lost: float = Field(description="expected latency over the least one at any split, minus 1")


class Training:
    """`run` until the steps of the settings are done; `save` at any time."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.curve: list[Point] = []
        self._make(num_done=0)

    def _make(self, num_done: int) -> None:
        settings = self.settings
        torch.set_num_threads(1)
        self.env = SteeringEnv(design(settings.design), settings.nodes, settings.seed * 1_000_003 + num_done + 1)
        self.model = PPO(
            "MlpPolicy",
            self.env,
            n_steps=_ROUND,
            batch_size=min(2_048, _ROUND * settings.nodes),
            n_epochs=6,
            gamma=settings.discount,
            gae_lambda=0.9,
            ent_coef=settings.entropy,
            learning_rate=self._learning_rate,
            policy_kwargs={"net_arch": [settings.hidden, settings.hidden], "activation_fn": torch.nn.ReLU},
            seed=settings.seed,
            device="cpu",
        )
        self.model.num_timesteps = num_done

    def _learning_rate(self, _: float) -> float:
        """Falls with the steps that are done, whatever the run they were done in."""
        done = self.model.num_timesteps if hasattr(self, "model") else 0
        return self.settings.learning_rate * max(0.1, 1 - done / self.settings.steps)

    @property
    def num_done(self) -> int:
        return int(self.model.num_timesteps)

    def run(self, on_round: Callable[[int], None] = lambda num_done: None) -> None:
        if self.num_done < self.settings.steps:
            left = self.settings.steps - self.num_done
            self.model.learn(left, callback=_EachRound(self, on_round), reset_num_timesteps=False)

    def note(self) -> None:
        """Add a point to the learning curve."""
        lost, num = self.env.lost.tolist()
        self.env.lost[:] = 0
        reward = float(self.model.rollout_buffer.rewards.mean())
        lost = float(np.expm1(lost / max(1.0, num)))
        self.curve.append(Point(steps=self.num_done, reward=round(reward, 5), lost=round(lost, 5)))

    def save(self, folder: Path) -> None:
        """A checkpoint; `network.safetensors` and `network.json` are what the controller loads."""
        folder.mkdir(parents=True, exist_ok=True)
        policy = self.model.policy
        tensors = {f"policy.{name}": value.contiguous() for name, value in policy.state_dict().items()}
        for number, state in policy.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        known = {"settings": self.settings.model_dump(), "done": self.num_done, "curve": self._points()}
        unfinished = folder / "checkpoint.tmp"
        unfinished.write_bytes(save(tensors, {"training": json.dumps(known)}))  # `save_file` ignores the umask
        unfinished.replace(folder / CHECKPOINT)
        (folder / "network.safetensors").write_bytes(save(self._weights()))
        (folder / "network.json").write_text(self._record().model_dump_json() + "\n")

    def _points(self) -> list[dict[str, Any]]:
        return [point.model_dump() for point in self.curve]

    def _weights(self) -> dict[str, torch.Tensor]:
        """Of the layers that end in the steps, in the names of `ppo.network`."""
        state = self.model.policy.state_dict()
        inner = sorted(
            name for name in state if name.startswith("mlp_extractor.policy_net") and name.endswith("weight")
        )
        found = {}
        for number, name in enumerate([*inner, "action_net.weight"]):
            found[f"weight{number}"] = state[name].clone()
            found[f"bias{number}"] = state[name.removesuffix("weight") + "bias"].clone()
        return found

    def _record(self) -> NetworkRecord:
        chosen = design(self.settings.design)
        return NetworkRecord(
            near=chosen.near,
            whole=chosen.whole,
            signals=chosen.signals,
            steps=STEPS,
            factor=_FACTOR,
            least=_LEAST,
            centre=tuple(self.env.centre.tolist()),
            scale=tuple(self.env.scale.tolist()),
            most=MOST,
            training={**self.settings.model_dump(), "done": self.num_done, "curve": self._points()},
        )

    @classmethod
    def resume(cls, folder: Path, settings: TrainSettings) -> "Training":
        """Go on from a checkpoint of the same settings; only `steps` may differ."""
        try:
            with safe_open(folder / CHECKPOINT, "pt") as file:
                known = json.loads((file.metadata() or {})["training"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            before, num_done = TrainSettings(**known["settings"]), int(known["done"])
            curve = [Point(**point) for point in known["curve"]]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"cannot read checkpoint {folder}: {error}") from None
        if before.model_copy(update={"steps": settings.steps}) != settings:
            raise ConfigError(f"{folder} is a training with other settings: {before.model_dump_json()}")
        training = cls(settings)
        training._make(num_done)
        training.curve = curve
        training._restore(tensors)
        return training

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        policy = self.model.policy
        weights = {name.removeprefix("policy."): value for name, value in tensors.items() if name.startswith("policy.")}
        policy.load_state_dict(weights)
        state = policy.optimizer.state_dict()
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                state["state"].setdefault(int(number), {})[key] = value
        policy.optimizer.load_state_dict(state)


class _EachRound(BaseCallback):
    def __init__(self, training: Training, on_round: Callable[[int], None]) -> None:
        super().__init__()
        self._training, self._on_round = training, on_round

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._training.note()
        self._on_round(self._training.num_done)
