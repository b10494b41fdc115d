"""PPO on the simulated environment (Stable-Baselines3), from a distilled network or from one that knows nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from helmrec.control.features import NUM_FEATURES
from helmrec.control.network import NUM_HIDDEN
from helmrec.control.outlook import Crowding, Floats
from helmrec.train.distil import StepNetwork
from helmrec.train.environment import SplitEnvironment
from helmrec.train.lessons import Lesson


@dataclass(frozen=True, slots=True)
class PPOPlan:
    """How long and how boldly to learn."""

    num_steps: int
    learning_rate: float = 1e-4
    sharpness: float = 1.0  # scores are multiplied by it where actions are drawn: a distilled network hardly explores
    seed: int = 0


class _Trunk(nn.Module):
    """Hidden values for both heads: the actor's beside the features, the critic's own."""

    def __init__(self, network: StepNetwork) -> None:
        super().__init__()
        self.network = network
        self.critic = nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.latent_dim_pi, self.latent_dim_vf = NUM_HIDDEN + NUM_FEATURES, 64

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.network.hidden(features), features), dim=-1)

    def forward_critic(self, features: torch.Tensor) -> torch.Tensor:
        return self.critic(features)


class StepPolicy(ActorCriticPolicy):
    """Our network as Stable-Baselines3 wants it."""

    def __init__(self, *args: Any, arrays: dict[str, Floats], **kwargs: Any) -> None:
        self._start = arrays
        kwargs["ortho_init"] = False  # which would throw away what was learned so far
        super().__init__(*args, **kwargs)

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = _Trunk(StepNetwork(self._start))  # type: ignore[assignment]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        last = self.network.last
        self.action_net = last
        if not any(array.any() for array in self._start.values()):
            for layer in self.network.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, gain=0.01 if layer is last else 2**0.5)
                    nn.init.zeros_(layer.bias)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=lr_schedule(1), eps=1e-5)

    @property
    def network(self) -> StepNetwork:
        trunk: Any = self.mlp_extractor
        found = trunk.network
        assert isinstance(found, StepNetwork)
        return found


class _Teller(BaseCallback):
    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def _on_step(self) -> bool:
        self._tell(self.num_timesteps)
        return True


def train_ppo(
    arrays: dict[str, Floats],
    lessons: Sequence[Lesson],
    crowding: Crowding,
    plan: PPOPlan,
    tell: Callable[[int], None] = lambda num_steps: None,
) -> dict[str, Floats]:
    """Go on from `arrays`; all zeros is a network that knows nothing."""
    scale = {name: plan.sharpness if name.startswith("last") else 1.0 for name in arrays}
    start = {name: array * scale[name] for name, array in arrays.items()}
    environments = DummyVecEnv([lambda: SplitEnvironment(lessons, crowding)])
    model = PPO(
        StepPolicy,
        environments,
        learning_rate=plan.learning_rate,
        n_steps=1_024,
        batch_size=256,
        n_epochs=5,
        gamma=0.9,
        gae_lambda=0.9,
        clip_range=0.1,
        ent_coef=0.001,
        policy_kwargs={"arrays": start},
        seed=plan.seed,
        device="cpu",
    )
    model.learn(plan.num_steps, callback=_Teller(tell))
    assert isinstance(model.policy, StepPolicy)
    return model.policy.network.arrays()
