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
    "control-burst-20s": "89fdf2bf99419217",
    "control-burst-3s": "8f410ed79475eeb2",
    "control-burst-60s": "576d6e7b071fc48e",
    "control-cold-flood": "59e8d527d4b11cd9",
    "control-flash-items": "c1050625214bb829",
    "control-steady": "df794e919f7b2d05",
    "control-trend": "fc5208e179f35cf5",
    "main-burst-20s": "dccde90eac865484",
    "main-burst-3s": "a40bba142d21dfdf",
    "main-burst-60s": "61f616ebc9532583",
    "main-cold-flood": "f0527b74039f794b",
    "main-flash-items": "23646e4f70a00dc4",
    "main-steady": "fec5430d2e00bc97",
    "main-trend": "01bf441aff91abac",
    "stress-burst-20s": "a0063f153e78c03b",
    "stress-burst-3s": "71ba06551995a7e2",
    "stress-burst-60s": "40ca2f756b7ea70a",
    "stress-cold-flood": "4fd5ade6103f1fb2",
    "stress-flash-items": "243a675c0879356f",
    "stress-steady": "8da0d58b695523c2",
    "stress-trend": "f51328e16acce7f2",
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
