"""What the evaluation adds to the product is found by name. Install the package again after pyproject.toml changed."""

import numpy as np
import pytest

from helmrec import policies
from helmrec.cluster.config import OURS
from helmrec.extensions import COMMANDS, POLICIES, ROUTERS, SCENARIOS, extensions
from helmrec.policies import simulated_policy_names
from helmrec.router.policy import RoutingPolicy
from helmrec.sim.policies import SimulatedPolicy, find_policy
from helmrec_bench import scenarios
from helmrec_bench.baselines import registry, routers
from tests.router.cases import COST


def test_commands_of_the_evaluation_are_found() -> None:
    assert {"bench", "loadgen", "trace", "train"} <= extensions(COMMANDS).keys()


def test_every_baseline_is_found_as_a_simulated_policy() -> None:
    assert set(simulated_policy_names()) == set(registry.POLICY_NAMES)
    assert not set(extensions(POLICIES)) & set(policies.POLICY_NAMES), "a name of the product is taken"


@pytest.mark.parametrize("name", registry.POLICY_NAMES)
def test_a_policy_looks_at_miss_curves_wherever_it_is_found(name: str) -> None:
    found = find_policy(name)
    assert isinstance(found, SimulatedPolicy)
    assert found.needs_curves == registry.needs_curves(name)


def test_every_router_a_cluster_may_name_is_found() -> None:
    known = routers.policies(COST, np.random.default_rng(0))
    assert {OURS, *extensions(ROUTERS)} == known.keys()
    for name, entry in extensions(ROUTERS).items():
        made: RoutingPolicy = entry.load()(name, COST, np.random.default_rng(0))
        assert type(made) is type(known[name]())


def test_names_come_in_alphabetical_order_without_loading_anything() -> None:
    names = list(extensions(POLICIES))
    assert names == sorted(names)
    assert extensions("helmrec.nothing") == {}


def test_frozen_scenarios_are_a_package_that_is_found() -> None:
    assert [entry.load() for entry in extensions(SCENARIOS).values()] == [scenarios]
