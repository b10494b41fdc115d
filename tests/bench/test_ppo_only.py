"""The network alone: other layers stay silent, and without a file it says what is missing."""

from pathlib import Path

import pytest

from helmrec.bench.ppo_only import ppo_only, ppo_only_file
from helmrec.errors import ConfigError
from tests.bench.drift import COST, bowls, follow

SHIPPED = ppo_only_file().with_name("base.safetensors")  # of the same shape


def test_only_the_network_speaks() -> None:
    policy = ppo_only(COST, SHIPPED)
    path = follow(policy, bowls(100))
    assert path.min() < path.max(), "it never moved"
    told = policy.explanation
    assert told is not None
    assert told.residual == 0
    assert not told.is_aside


def test_a_missing_network_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trained by PPO alone, there is none at .*nowhere\.safetensors"):
        ppo_only(COST, tmp_path / "nowhere.safetensors")
