"""A trained network as the base of the controller: it moves alpha along a curve of predicted latency, or holds.

All parameters come with the file of weights. This module does not know how training works.
"""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file

from helmrec.config import Frozen
from helmrec.control.latency import ALPHAS
from helmrec.control.layers import View
from helmrec.errors import ConfigError, ModelError
from helmrec.ppo.observation import Sight, Signal, observe, signals_of
from helmrec.types import FloatArray

SHIPPED = Path(__file__).parent / "ppo.safetensors"


class NetworkRecord(Frozen):
    """The JSON file next to the weights."""

    near: tuple[float, ...] = Field(description="distances from the current split at which both curves are inputs")
    whole: tuple[float, ...] = Field(description="splits at which the averaged curve is an input")
    signals: tuple[str, ...] = Field(description="names of the signals that are inputs")
    steps: tuple[float, ...] = Field(description="changes of alpha, one per action")
    factor: float = Field(gt=0, description="factor of the mean step")
    least: float = Field(ge=0, description="smallest step; alpha holds below it")
    centre: tuple[float, ...] = Field(description="subtracted from inputs")
    scale: tuple[float, ...] = Field(description="divides inputs after that")
    most: float = Field(gt=0, description="largest absolute input after scaling")
    training: dict[str, Any] = Field(description="seed, steps, design, learning curve")

    @property
    def sight(self) -> Sight:
        """The inputs that the network takes."""
        unknown = set(self.signals) - {signal.name.lower() for signal in Signal}
        if unknown:
            raise ModelError(f"signals must be names of signals, got {sorted(unknown)}")
        signals = np.array([Signal[name.upper()] for name in self.signals], np.int64)
        return Sight(np.array(self.near, float), np.array(self.whole, float), signals)


class Network:
    """A trained chooser with ReLU layers. It takes the mean of the steps, weighted by their probability.

    The most probable step is not used: a policy that moves every other second is nearly as good as one that always
    moves, so training leaves a high probability of holding where a move is right. A factor on the mean corrects this.
    """

    def __init__(self, path: Path) -> None:
        """Load the weights at `path` and the record next to them."""
        try:
            self.record = NetworkRecord.model_validate_json(path.with_suffix(".json").read_bytes())
            weights = {name: value.astype(float) for name, value in load_file(path).items()}
        except (OSError, ValueError, ConfigError, SafetensorError) as error:
            raise ModelError(f"cannot read network {path}: {error}") from None
        self._sight = self.record.sight
        self._steps = np.array(self.record.steps)
        self._centre, self._scale = np.array(self.record.centre), np.array(self.record.scale)
        names = [(f"weight{number}", f"bias{number}") for number in range(len(weights) // 2)]
        if weights.keys() != {name for pair in names for name in pair}:
            raise ModelError(f"{path}: must hold weights and biases of layers, got {sorted(weights)}")
        self._layers = [(weights[weight], weights[bias]) for weight, bias in names]
        self._check(path)
        flat = np.ones(ALPHAS.size)
        observe(flat, flat, np.zeros(len(Signal)), self._sight)  # compile it now

    def _check(self, path: Path) -> None:
        sight, width = self._sight, self._centre.size
        num_inputs = 2 * sight.near.size + sight.whole.size + sight.signals.size
        if {num_inputs} != {width, self._scale.size}:
            raise ModelError(f"{path}: record must scale its {num_inputs} inputs, got {width} and {self._scale.size}")
        for number, (weight, bias) in enumerate(self._layers):
            if weight.shape != (bias.size, width):
                raise ModelError(f"{path}: layer {number} does not fit {width} inputs")
            width = bias.size
        if width != len(self.record.steps):
            raise ModelError(f"{path}: {width} outputs for {len(self.record.steps)} steps")

    def forward(self, inputs: FloatArray) -> FloatArray:
        """Logits of the steps."""
        x, last = inputs, len(self._layers) - 1
        for number, (weight, bias) in enumerate(self._layers):
            x = weight @ x + bias
            if number < last:
                x = np.maximum(x, 0)
        return x

    def choose(self, mean_ms: FloatArray, view: View) -> float:
        """The split to move to, within the bounds of the window."""
        signals = signals_of(view)
        inputs = (observe(mean_ms, view.newest.mean_ms, signals, self._sight) - self._centre) / self._scale
        logits = self.forward(np.clip(inputs, -self.record.most, self.record.most))
        likely = np.exp(logits - logits.max())
        step = self.record.factor * float(likely @ self._steps / likely.sum())
        start, low, high = view.window.alpha_target, signals[Signal.LOW], signals[Signal.HIGH]
        return start if abs(step) < self.record.least or low > high else float(min(max(start + step, low), high))
