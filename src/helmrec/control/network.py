"""The base policy's network: a file of six arrays, and its forward pass without torch.

Two hidden layers with ReLU; the last layer sees the features beside them, so that what a model reckons reaches the
answer directly and the hidden layers need only correct it. Knows numbers, not what they mean.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from helmrec.control.compiled import inner
from helmrec.control.features import NAMES, NUM_FEATURES, STEPS
from helmrec.control.outlook import Crowding, Floats
from helmrec.errors import ModelError

NUM_HIDDEN = 32
NUM_STEPS = len(STEPS)
_SHAPES = {
    "first.weight": (NUM_FEATURES, NUM_HIDDEN),
    "first.bias": (NUM_HIDDEN,),
    "second.weight": (NUM_HIDDEN, NUM_HIDDEN),
    "second.bias": (NUM_HIDDEN,),
    "last.weight": (NUM_HIDDEN + NUM_FEATURES, len(STEPS)),
    "last.bias": (len(STEPS),),
}


class Layers(NamedTuple):
    """Inputs by outputs, the bias as one more row."""

    first: Floats
    second: Floats
    last: Floats


@dataclass(frozen=True, slots=True, eq=False)
class BasePolicy:
    """A trained network with the record of its training."""

    weights: Floats  # all layers in a row, for `as_layers`
    crowding: Crowding
    record: dict[str, Any]


def load_base(path: Path) -> BasePolicy:
    """Read a network and, beside it, its record (`.json`); shapes and features must be those of this version."""
    try:
        arrays: dict[str, NDArray[Any]] = load_file(path)
        record = json.loads(path.with_suffix(".json").read_text())
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read policy {path}: {error}") from None
    for name, shape in _SHAPES.items():
        if name not in arrays or arrays[name].shape != shape:
            raise ModelError(f"{path}: {name} must be {shape}, got {arrays[name].shape if name in arrays else 'none'}")
        if not np.isfinite(arrays[name]).all():
            raise ModelError(f"{path}: {name} must be finite numbers")
    if record.get("features") != list(NAMES):
        raise ModelError(f"{path}: made for other features; train it anew (helmrec train)")
    return BasePolicy(join_layers(arrays), Crowding(**record["crowding"]), record)


def save_base(path: Path, arrays: dict[str, Floats], record: dict[str, Any]) -> None:
    """Write a network and its record; `arrays` by the names and shapes `load_base` wants."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(arrays[name], np.float32) for name in _SHAPES}, path)
    path.with_suffix(".json").write_text(json.dumps({**record, "features": list(NAMES)}, indent=2) + "\n")


@cache
def shipped_base() -> BasePolicy:
    """The network of this package."""
    with resources.as_file(resources.files("helmrec.control")) as folder:
        return load_base(folder / "policies" / "base.safetensors")


def join_layers(arrays: dict[str, NDArray[Any]]) -> Floats:
    """One array of all: what compiled code is handed costs by the piece."""
    parts = [arrays[f"{name}.{part}"].ravel() for name in ("first", "second", "last") for part in ("weight", "bias")]
    return np.concatenate(parts).astype(np.float64)


@inner
def as_layers(weights: Floats) -> Layers:
    second = (NUM_FEATURES + 1) * NUM_HIDDEN
    last = second + (NUM_HIDDEN + 1) * NUM_HIDDEN
    return Layers(
        weights[:second].reshape(NUM_FEATURES + 1, NUM_HIDDEN),
        weights[second:last].reshape(NUM_HIDDEN + 1, NUM_HIDDEN),
        weights[last:].reshape(NUM_HIDDEN + NUM_FEATURES + 1, NUM_STEPS),
    )


def following_layers(eagerness: float = 40.0, reluctance: float = 0.15) -> dict[str, Floats]:
    """A network that takes the step of least lasting cost, if that is enough better than to stay: no hidden layer.

    What training starts from. Features count costs five times over.
    """
    arrays = {name: np.zeros(shape) for name, shape in _SHAPES.items()}
    others = [index for index, step in enumerate(STEPS) if step]
    for place, index in enumerate(others):
        for view in range(2):
            arrays["last.weight"][NUM_HIDDEN + view * len(others) + place, index] = -eagerness / 10
        arrays["last.bias"][index] = -reluctance
    return arrays


@inner
def forward(layers: Layers, features: Floats, hidden: Floats, out: Floats) -> None:
    """`hidden` is (2, NUM_HIDDEN) to work in; `out` gets a score per step."""
    _affine(layers.first, features, hidden[0])
    _affine(layers.second, hidden[0], hidden[1])
    last, size = layers.last, hidden.shape[1]
    for j in range(out.size):
        out[j] = last[-1, j]
    _add(last[:size], hidden[1], out)
    _add(last[size:], features, out)


@inner
def _affine(weights: Floats, values: Floats, out: Floats) -> None:
    """ReLU of weights and bias applied to values."""
    for j in range(out.size):
        out[j] = weights[-1, j]
    _add(weights, values, out)
    for j in range(out.size):
        out[j] = max(out[j], 0.0)


@inner
def _add(weights: Floats, values: Floats, out: Floats) -> None:
    for i in range(values.size):
        value = values[i]
        if value != 0:  # half of all hidden values are
            for j in range(out.size):
                out[j] += value * weights[i, j]
