"""What a policy has learned online, kept across restarts as a small JSON file.

What was learned on another model, pool, calibration or network is refused: it would be wrong here and nobody would see.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helmrec.control.helm import HelmPolicy
from helmrec.errors import ConfigError

_VERSION = 2


class Served(NamedTuple):
    """What a node serves, as far as what is learned there depends on it."""

    model: str  # a name or fingerprint that changes with the model
    pool_bytes: int


def identity(policy: HelmPolicy, served: Served) -> dict[str, str | int]:
    """All that learning belongs to, by name."""
    return {
        "model": served.model,
        "pool_bytes": served.pool_bytes,
        "calibration": _digest(policy.cost.model_dump_json().encode()),
        "network": _digest(policy.base.weights.tobytes()),
        "residual settings": _digest(policy.settings.residual.model_dump_json().encode()),
    }


def _digest(told: bytes) -> str:
    return hashlib.sha256(told).hexdigest()[:16]


def save_learned(path: Path, policy: HelmPolicy, served: Served) -> None:
    """Whole or not at all: the file is put in place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    told = {"version": _VERSION, "of": identity(policy, served), "residual": policy.learned.tolist()}
    new.write_text(json.dumps(told) + "\n")
    os.replace(new, path)  # noqa: PTH105 - replaces on every system


def load_learned(path: Path, policy: HelmPolicy, served: Served) -> None:
    """Give a policy what another one had learned on the same model, pool, calibration and network."""
    try:
        found = json.loads(path.read_text())
        version, residual, of = found["version"], np.array(found["residual"], np.float64), dict(found.get("of", {}))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read what was learned from {path}: {error}") from None
    if version != _VERSION:
        raise ConfigError(f"{path}: version must be {_VERSION}, got {version!r}")
    for name, here in identity(policy, served).items():
        if of.get(name) != here:
            raise ConfigError(f"{path}: learned on another {name}: {of.get(name)!r}, here it is {here!r}")
    if residual.shape != policy.learned.shape or not np.isfinite(residual).all():
        raise ConfigError(f"{path}: residual must be {policy.learned.size} numbers, got {found['residual']!r}")
    policy.learned = residual
