"""Registry of the policies that commands accept. A policy is imported when one is made: names are needed for help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmrec.errors import ConfigError
from helmrec.extensions import POLICIES, extensions

if TYPE_CHECKING:
    from helmrec.control.policy import Policy

POLICY_NAMES = ("helm", "ppo")


def simulated_policy_names() -> tuple[str, ...]:
    """Names of the product's policies and of those that installed packages add for simulated nodes."""
    return (*POLICY_NAMES, *extensions(POLICIES))


def check_policy(text: str) -> None:
    """Raise ConfigError if no policy has this name."""
    name, _, value = text.partition(":")
    if name != "static" and (value or name not in POLICY_NAMES):
        known = ", ".join(POLICY_NAMES)
        raise ConfigError(f"policy must be {known}, static:ALPHA or, of a server, none, got {text!r}")


def make_policy(text: str) -> Policy:
    """Create the policy for `static:ALPHA`, which goes there at once, or for a name, within limits."""
    from helmrec.control.helm import Helm  # noqa: PLC0415
    from helmrec.control.policy import Limited, Limits  # noqa: PLC0415
    from helmrec.control.static import Static, StaticSettings  # noqa: PLC0415
    from helmrec.ppo.network import SHIPPED, Network  # noqa: PLC0415

    check_policy(text)
    name, _, value = text.partition(":")
    if name == "static":
        try:
            return Static(StaticSettings(alpha=float(value)))
        except ValueError:
            raise ConfigError(f"policy static needs an alpha from 0 to 1, as in static:0.4, got {text!r}") from None
    chooser = Network(SHIPPED) if name == "ppo" else None
    return Limited(Helm(chooser=chooser), Limits())


def needs_curves(text: str) -> bool:
    """Whether the policy predicts latency from miss curves, and so explains its decisions."""
    return not text.startswith("static:")
