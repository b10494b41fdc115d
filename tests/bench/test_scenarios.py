"""Frozen scenarios are what controllers were judged on: changing one silently would change every figure."""

import hashlib

import pytest

from helmrec.control.static import Static, StaticSettings
from helmrec.sim.scenario import load_scenario
from helmrec.sim.simulate import simulate
from helmrec.traffic.generate import generate
from helmrec_bench.lab.place import Place
from helmrec_bench.measure.controller import cases
from helmrec_bench.measure.simulated import baseline_runs

FOLDER = Place().scenarios
HASHES = {
    "control-burst-20s": "ebf1a745d26132a9",
    "control-burst-3s": "76547322722b8d54",
    "control-burst-60s": "a7b8d298757f08fa",
    "control-cold-flood": "18cf169d56ca0f72",
    "control-flash-items": "def7b7e60cf1142e",
    "control-steady": "ea86f4d55c19fee0",
    "control-trend": "5e83c5bd38b19cd0",
    "main-burst-20s": "b479897ef80c2228",
    "main-burst-3s": "2012f9c136324943",
    "main-burst-60s": "1e1e531e5f05d71a",
    "main-cold-flood": "dda5ef79d6eba6df",
    "main-flash-items": "47aff93a7a1bc6ba",
    "main-steady": "b462ac92643ad223",
    "main-trend": "eacc6b297ff83376",
    "stress-burst-20s": "4f9025b67049ddf2",
    "stress-burst-3s": "b4e924c34a40bfea",
    "stress-burst-60s": "02e9bd53c50db8a8",
    "stress-cold-flood": "b6a4340de9276e1b",
    "stress-flash-items": "a0d1b0fbfaf65b26",
    "stress-steady": "f6b3bed69946aeb9",
    "stress-trend": "805d28c2b82e18be",
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


def test_measurements_find_the_scenarios_from_any_folder() -> None:
    assert cases.SCENARIOS == baseline_runs.SCENARIOS == Place().scenarios
    assert Place().scenarios.is_absolute()
    assert (Place().scenarios / "main-steady.toml").is_file()
