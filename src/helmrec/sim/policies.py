"""Policies that a simulated node can run under, by name: those of the product, and those that packages add."""

from collections.abc import Callable
from dataclasses import dataclass

from helmrec import policies
from helmrec.control.policy import Policy
from helmrec.extensions import POLICIES, extensions
from helmrec.sim.cost import CostModel
from helmrec.sim.node.config import NodeConfig
from helmrec.traffic.trace import Trace


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """How a policy is made for a node and its traffic."""

    make: Callable[[CostModel, NodeConfig, Trace], Policy]
    needs_curves: bool  # whether it looks at miss curves


def policy_names() -> tuple[str, ...]:
    """Besides `static:ALPHA`."""
    return (*policies.POLICY_NAMES, *extensions(POLICIES))


def find_policy(text: str) -> SimulatedPolicy:
    """`static:ALPHA`, or one of the others by name; a package that adds policies is loaded only for its own."""
    added = extensions(POLICIES).get(text) if text not in policies.POLICY_NAMES else None
    if added is not None:
        found: SimulatedPolicy = added.load()(text)
        return found
    return SimulatedPolicy(lambda *_: policies.make_policy(text), policies.needs_curves(text))
