"""What a policy has learned online, kept across restarts as a small JSON file."""

import json
import os
from pathlib import Path

import numpy as np

from helmrec.control.helm import HelmPolicy
from helmrec.errors import ConfigError

_VERSION = 1


def save_learned(path: Path, policy: HelmPolicy) -> None:
    """Whole or not at all: the file is put in place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"version": _VERSION, "residual": policy.learned.tolist()}) + "\n")
    os.replace(new, path)  # noqa: PTH105 - replaces on every system


def load_learned(path: Path, policy: HelmPolicy) -> None:
    """Give a policy what another one had learned."""
    try:
        found = json.loads(path.read_text())
        version, residual = found["version"], np.array(found["residual"], np.float64)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read what was learned from {path}: {error}") from None
    if version != _VERSION:
        raise ConfigError(f"{path}: version must be {_VERSION}, got {version!r}")
    if residual.shape != policy.learned.shape or not np.isfinite(residual).all():
        raise ConfigError(f"{path}: residual must be {policy.learned.size} numbers, got {found['residual']!r}")
    policy.learned = residual
