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
    "control-burst-20s": "7b353c26960a7076",
    "control-burst-3s": "91de3b5a0841cdc5",
    "control-burst-60s": "bea5388f678901e8",
    "control-cold-flood": "5d9bc80791359f93",
    "control-flash-items": "a1ca446587af2a36",
    "control-steady": "95a38d488e28b284",
    "control-trend": "5e451495bcbe843c",
    "main-burst-20s": "6881ab18b192f41d",
    "main-burst-3s": "d877275293e85781",
    "main-burst-60s": "b9ab311112d4831b",
    "main-cold-flood": "43478112b1522d9f",
    "main-flash-items": "c522d02eb82f07c3",
    "main-steady": "f9ba9f8104086719",
    "main-trend": "7a8b0e52d36dcb17",
    "stress-burst-20s": "31a2cbfa29dba3cb",
    "stress-burst-3s": "3201247bf5a99770",
    "stress-burst-60s": "a57913bb131b1215",
    "stress-cold-flood": "1f1012e004e36d46",
    "stress-flash-items": "9e0fda3a30cddec6",
    "stress-steady": "a53a4ed55b926aa2",
    "stress-trend": "d2dd18d6cb2dcb77",
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
