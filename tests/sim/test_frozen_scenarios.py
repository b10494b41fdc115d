"""The scenarios of scenarios/ are what controllers were judged on: changing one silently would change every figure."""

import hashlib
from pathlib import Path

import pytest

from helmrec.control.static import Static, StaticSettings
from helmrec.sim.generate import generate
from helmrec.sim.scenario import load_scenario
from helmrec.sim.simulate import simulate

FOLDER = Path(__file__).parents[2] / "scenarios"
HASHES = {
    "control-burst-20s": "ebf1a745d26132a9",
    "control-burst-3s": "76547322722b8d54",
    "control-burst-60s": "a7b8d298757f08fa",
    "control-cold-flood": "511b7ee8c1e6a8a2",
    "control-flash-items": "def7b7e60cf1142e",
    "control-steady": "ea86f4d55c19fee0",
    "control-trend": "5e83c5bd38b19cd0",
    "main-burst-20s": "33900d045e65373f",
    "main-burst-3s": "32f72e6f8a4ed040",
    "main-burst-60s": "61e7a5531d7274ce",
    "main-cold-flood": "cf73c673b9225721",
    "main-flash-items": "9c02b84aa44ca95f",
    "main-steady": "5ff2ddd91c2ca37d",
    "main-trend": "c7ca33913c8b9c75",
    "stress-burst-20s": "3e493cbcdbbe8480",
    "stress-burst-3s": "6cdfb4c15ed6c0d7",
    "stress-burst-60s": "c82dda8d84ee54a3",
    "stress-cold-flood": "cf909efaaecc932e",
    "stress-flash-items": "d5d92a97a11b7a13",
    "stress-steady": "f62105fe40c076f9",
    "stress-trend": "ad3f81b246b8a373",
}


def test_every_scenario_is_one_that_was_frozen() -> None:
    found = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in FOLDER.glob("*.toml")}
    assert found == HASHES, "docs/decisions/0015-frozen-scenarios.md says when they may change"


@pytest.mark.parametrize("name", sorted(HASHES))
def test_every_scenario_can_be_read_and_is_warm_before_it_counts(name: str) -> None:
    scenario = load_scenario(FOLDER / f"{name}.toml")
    assert scenario.name == name
    assert scenario.workload is not None
    assert scenario.workload.opening[0].duration_s == scenario.warm_up_s


@pytest.mark.parametrize("name", ["control-steady", "main-steady", "stress-steady"])
def test_both_caches_evict_before_anything_counts(name: str) -> None:
    scenario = load_scenario(FOLDER / f"{name}.toml")
    assert scenario.workload is not None
    opening = scenario.workload.opening
    trace = generate(scenario.workload.model_copy(update={"opening": (), "phases": opening}), 0)
    config = scenario.node_config(trace)
    engine = config.engine.model_copy(update={"alpha": 0.5})
    static = Static(StaticSettings(alpha=0.5))
    result = simulate(trace, config.model_copy(update={"engine": engine}), scenario.cost(), static)
    assert result.evicting_from_s is not None
    assert result.evicting_from_s <= scenario.warm_up_s
