"""Registry of the policies that commands accept."""

from helmrec.control.helm import Helm
from helmrec.control.policy import Limited, Limits, Policy
from helmrec.control.static import Static, StaticSettings
from helmrec.errors import ConfigError
from helmrec.ppo.network import SHIPPED, Network

POLICY_NAMES = ("helm", "ppo")


def check_policy(text: str) -> None:
    """Raise ConfigError if no policy has this name."""
    name, _, value = text.partition(":")
    if name != "static" and (value or name not in POLICY_NAMES):
        known = ", ".join(POLICY_NAMES)
        raise ConfigError(f"policy must be {known}, static:ALPHA or, of a server, none, got {text!r}")


def make_policy(text: str) -> Policy:
    """Create the policy for `static:ALPHA` or a name, within the limits that hold for every policy."""
    check_policy(text)
    name, _, value = text.partition(":")
    if name == "static":
        try:
            return Static(StaticSettings(alpha=float(value)))
        except ValueError:
            raise ConfigError(f"policy static needs an alpha, as in static:0.4, got {text!r}") from None
    chooser = Network(SHIPPED) if name == "ppo" else None
    return Limited(Helm(chooser=chooser), Limits())


def needs_curves(text: str) -> bool:
    """Whether the policy uses miss curves."""
    return not text.startswith("static:")
