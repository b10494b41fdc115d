"""Distillation: the network learns to take the steps whose cost to go, by the oracle, is least.

Not by imitation of one path: every example knows what all seven steps would have cost from where it stands, and the
loss is the cost its choice is expected to add. Steps that hardly differ so hardly matter.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from helmrec.control.features import NUM_FEATURES, STEPS
from helmrec.control.network import NUM_HIDDEN
from helmrec.control.outlook import Floats
from helmrec.train.rollout import Examples

_BATCH = 512
_MAX_REGRET = 1.0  # a blunder is a blunder


class StepNetwork(nn.Module):
    """The network of `control.network` in torch; the last layer sees the features beside the hidden values."""

    def __init__(self, arrays: dict[str, Floats]) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_HIDDEN)
        self.second = nn.Linear(NUM_HIDDEN, NUM_HIDDEN)
        self.last = nn.Linear(NUM_HIDDEN + NUM_FEATURES, len(STEPS))
        with torch.no_grad():
            for name, layer in self.named_children():
                assert isinstance(layer, nn.Linear)
                if arrays[f"{name}.weight"].any():
                    layer.weight.copy_(torch.from_numpy(arrays[f"{name}.weight"].T))
                    layer.bias.copy_(torch.from_numpy(arrays[f"{name}.bias"]))

    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(features))))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat((self.hidden(features), features), dim=-1))

    def arrays(self) -> dict[str, Floats]:
        """By the names of the file."""
        found: dict[str, Floats] = {}
        for name, layer in self.named_children():
            assert isinstance(layer, nn.Linear)
            found[f"{name}.weight"] = layer.weight.detach().numpy().T.astype(np.float64)
            found[f"{name}.bias"] = layer.bias.detach().numpy().astype(np.float64)
        return found


def distil(
    arrays: dict[str, Floats], examples: Examples, num_epochs: int, seed: int, tell: Callable[[float], None]
) -> dict[str, Floats]:
    """Train from `arrays` on; `tell` gets the expected regret of each epoch."""
    torch.manual_seed(seed)
    network = StepNetwork(arrays)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_epochs)
    inputs = torch.from_numpy(examples.features).float()
    regrets = torch.from_numpy(np.minimum(examples.regrets, _MAX_REGRET)).float()
    for _ in range(num_epochs):
        total = 0.0
        for batch in torch.randperm(len(inputs)).split(_BATCH):
            chances = torch.softmax(network(inputs[batch]), dim=-1)
            loss = (chances * regrets[batch]).sum(dim=-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch)
        schedule.step()
        tell(total / len(inputs))
    return network.arrays()


def expected_regret(arrays: dict[str, Floats], examples: Examples) -> float:
    """Of the steps the network would take, in seconds' worth of cost."""
    with torch.no_grad():
        chosen = StepNetwork(arrays)(torch.from_numpy(examples.features).float()).argmax(dim=-1).numpy()
    return float(examples.regrets[np.arange(chosen.size), chosen].mean())
