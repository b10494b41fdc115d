"""A small LSTM that predicts the best split from the last windows: the published prediction-only baseline."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from helmrec.config import Frozen
from helmrec_bench.baselines.features import NUM_FEATURES, Episode, Examples, Floats, examples


class LSTMSettings(Frozen):
    """What the network is and how long it learns."""

    num_windows: int = Field(8, ge=1, description="windows looked at")
    width: int = Field(24, ge=1, description="of the hidden state")
    num_epochs: int = Field(30, ge=1, description="passes over all examples")
    learning_rate: float = Field(0.01, gt=0)
    batch: int = Field(128, ge=1, description="examples per step")


class _Network(nn.Module):
    def __init__(self, width: int, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.mean, self.scale = mean, scale
        self.lstm = nn.LSTM(NUM_FEATURES, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:  # (examples, windows, features) -> (examples,)
        states, _ = self.lstm((inputs - self.mean) / self.scale)
        return torch.sigmoid(self.head(states[:, -1])).squeeze(-1)


class LSTM:
    """A trained network."""

    def __init__(self, network: _Network, num_windows: int) -> None:
        self.num_windows = num_windows
        self._network = network.eval()

    @torch.inference_mode()
    def predict(self, inputs: Floats) -> float:
        return float(self._network(torch.from_numpy(inputs).float()[None])[0])


def train_lstm(episodes: Sequence[Episode], settings: LSTMSettings | None = None, seed: int = 0) -> LSTM:
    """Least squares on the wanted split. The caller's random state is left as it was."""
    settings = settings or LSTMSettings()
    data = examples(episodes, settings.num_windows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LSTM(_trained(data, settings), settings.num_windows)


def _trained(data: Examples, settings: LSTMSettings) -> _Network:
    inputs, alphas = torch.from_numpy(data.inputs).float(), torch.from_numpy(data.alphas).float()
    flat = inputs.reshape(-1, NUM_FEATURES)
    scale = flat.std(dim=0, correction=0).clamp_min(1e-3)  # what never changed in training must not explode later
    network = _Network(settings.width, flat.mean(dim=0), scale)
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    for _ in range(settings.num_epochs):
        for chosen in torch.randperm(len(alphas)).split(settings.batch):
            optimiser.zero_grad()
            nn.functional.mse_loss(network(inputs[chosen]), alphas[chosen]).backward()
            optimiser.step()
    return network
