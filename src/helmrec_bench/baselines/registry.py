"""Simple policies by name, beside those of `helmrec.policies`: what the controller is compared with."""

from collections.abc import Callable

from helmrec import policies
from helmrec.control.policy import Limited, Limits, Policy
from helmrec.sim.policies import SimulatedPolicy
from helmrec_bench.baselines.heuristics import PID, HillClimber, OneCache
from helmrec_bench.baselines.model_based import MarginalUtility, MissCurveArgmin
from helmrec_bench.baselines.service_cost import ServiceCost, service_cost

_WITHOUT_COST: dict[str, Callable[[], Policy]] = {
    "kv-only": lambda: OneCache("kv"),
    "emb-only": lambda: OneCache("emb"),
    "hill": HillClimber,
}
_WITH_COST: dict[str, Callable[[ServiceCost], Policy]] = {
    "pid": PID,
    "marginal": MarginalUtility,
    "argmin": MissCurveArgmin,
}
POLICY_NAMES = (*policies.POLICY_NAMES, *_WITHOUT_COST, *_WITH_COST)
_BLIND = ("static", "pid", "hill")


def make_policy(text: str, cost: ServiceCost) -> Policy:
    """Any policy by name, held to the limits every policy is held to; `cost` is for baselines that have a model."""
    if text in _WITHOUT_COST:
        return Limited(_WITHOUT_COST[text](), Limits())
    if text in _WITH_COST:
        return Limited(_WITH_COST[text](cost), Limits())
    return policies.make_policy(text)


def needs_curves(text: str) -> bool:
    """Whether the policy looks at miss curves."""
    return text.partition(":")[0] not in _BLIND


def simulated(name: str) -> SimulatedPolicy:
    """A baseline as `helmrec simulate` finds it, through the entry points of this package."""
    return SimulatedPolicy(
        lambda cost, config, trace: make_policy(name, service_cost(cost, config, trace)), needs_curves(name)
    )
