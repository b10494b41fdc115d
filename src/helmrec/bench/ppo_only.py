"""A network trained by PPO from random weights, on its own: no teacher, no correction online, no guard."""

from importlib import resources
from pathlib import Path

from helmrec.control.helm import HelmPolicy, HelmSettings
from helmrec.control.network import load_base
from helmrec.control.service_cost import ServiceCost
from helmrec.errors import ConfigError

FILE = "ppo_only.safetensors"


def ppo_only_file() -> Path:
    """Where the trained network lies."""
    return Path(str(resources.files("helmrec.control"))) / "policies" / FILE


def ppo_only(cost: ServiceCost, path: Path | None = None) -> HelmPolicy:
    """`path`: another network than the one that is shipped."""
    path = path or ppo_only_file()
    if not path.exists():
        raise ConfigError(f"this rival needs a network trained by PPO alone, there is none at {path}")
    settings = HelmSettings(has_residual=False, has_burst=False, has_guardrail=False)
    return HelmPolicy(cost, settings, load_base(path))
