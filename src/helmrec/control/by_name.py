"""Policies by the names commands know them by."""

from collections.abc import Callable

from helmrec.control.adaptive import Adaptive
from helmrec.control.helm import HelmPolicy
from helmrec.control.heuristics import PID, HillClimber, OneCache
from helmrec.control.model_based import MarginalUtility, MissCurveArgmin
from helmrec.control.policy import Limited, Limits, Policy
from helmrec.control.service_cost import ServiceCost
from helmrec.control.static import Static, StaticSettings
from helmrec.errors import ConfigError

_WITHOUT_COST: dict[str, Callable[[], Policy]] = {
    "kv-only": lambda: OneCache("kv"),
    "emb-only": lambda: OneCache("emb"),
    "hill": HillClimber,
    "adaptive": Adaptive,
}
_WITH_COST: dict[str, Callable[[ServiceCost], Policy]] = {
    "pid": PID,
    "marginal": MarginalUtility,
    "argmin": MissCurveArgmin,
    "helm": HelmPolicy,
}
POLICY_NAMES = (*_WITHOUT_COST, *_WITH_COST)
_BLIND = ("static", "pid", "hill")


def check_policy(text: str) -> None:
    """Refuse a name nobody has, before anything is made ready for it."""
    name, _, value = text.partition(":")
    if name != "static" and (value or name not in POLICY_NAMES):
        raise ConfigError(f"policy must be static:ALPHA or one of {', '.join(POLICY_NAMES)}, got {text!r}")


def make_policy(text: str, cost: ServiceCost | None) -> Policy:
    """`static:ALPHA`, or one of the others by name, held to the limits every policy is held to."""
    check_policy(text)
    name, _, value = text.partition(":")
    if name == "static":
        try:
            return Static(StaticSettings(alpha=float(value)))
        except ValueError:
            raise ConfigError(f"policy static needs an alpha, as in static:0.4, got {text!r}") from None
    if name in _WITHOUT_COST:
        return Limited(_WITHOUT_COST[name](), Limits())
    if cost is None:
        raise ConfigError(f"policy {name} reckons with costs: a calibration is needed")
    return Limited(_WITH_COST[name](cost), Limits())


def needs_curves(text: str) -> bool:
    """Whether the policy looks at miss curves."""
    return text.partition(":")[0] not in _BLIND
