"""Registry of the policies for simulated nodes: those of the product and of installed packages."""

from collections.abc import Callable
from dataclasses import dataclass

from helmrec import policies
from helmrec.control.policy import Policy
from helmrec.costs.calibrated import CostModel
from helmrec.errors import ConfigError
from helmrec.extensions import POLICIES, extensions
from helmrec.sim.node.config import NodeConfig
from helmrec.traffic.trace import Trace


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """A policy that can be created for a node and its traffic."""

    make: Callable[[CostModel, NodeConfig, Trace], Policy]
    needs_curves: bool  # whether it uses miss curves


def find_policy(text: str) -> SimulatedPolicy:
    """The policy for `static:ALPHA` or a name. A package that adds policies is loaded only for its own names."""
    added = extensions(POLICIES).get(text) if text not in policies.POLICY_NAMES else None
    if added is not None:
        found: SimulatedPolicy = added.load()(text)
        return found
    if ":" not in text and text not in policies.POLICY_NAMES:
        known = ", ".join(policies.simulated_policy_names())
        raise ConfigError(f"policy must be static:ALPHA, {known}, got {text!r}")
    return SimulatedPolicy(lambda *_: policies.make_policy(text), policies.needs_curves(text))
