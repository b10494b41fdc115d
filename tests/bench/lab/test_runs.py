from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec.policies import make_policy
from helmrec.sim.scenario import load_scenario
from helmrec_bench.experiments.loads import Entry, largest_loads
from helmrec_bench.judging.contest import Course
from helmrec_bench.lab import runs
from helmrec_bench.lab.curve_file import load_curves, save_curves
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.policies import is_blind, started_policy
from helmrec_bench.lab.runs import Run, tasks_of
from helmrec_bench.lab.store import Store, digest_of_code
from helmrec_bench.lab.tiers import TIERS, for_nodes, resized
from tests.bench.conftest import SCENARIOS, MakeLab

NAME = "main-burst-20s"


def test_a_run_is_what_a_contest_makes_of_the_same_policy(make_lab: MakeLab) -> None:
    lab = make_lab()
    setup = lab.setup(NAME, 0)
    ran = lab.run([Run(setup, "helm"), Run(setup, "static:0.5")], "test")
    course = Course(setup.scenario, 0, window_s=lab.tier.window_s)
    judged = course.judge(make_policy("helm"))
    score = ran[Run(setup, "helm")].score
    assert (score.mean_ms, score.costs, score.alphas) == (judged.mean_ms, judged.costs, judged.alphas)
    assert ran[Run(setup, "static:0.5")].score.mean_ms == course.static(0.5).mean_ms != score.mean_ms


def test_a_finished_run_is_not_run_again(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(make_lab().setup(NAME, 0), "static:0.5")
    first = make_lab().run([run], "test")

    def never(*_: object) -> None:
        raise AssertionError("it was kept")

    monkeypatch.setattr(runs, "_outcome", never)
    assert make_lab().run([run], "test") == first
    with pytest.raises(AssertionError, match="kept"):
        make_lab().run([Run(run.setup, "static:0.6")], "test")


def test_runs_of_one_ground_that_need_its_curves_are_one_task(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab()
    here, there = lab.setup(NAME, 0), lab.setup(NAME, 1)
    asked = [Run(there, "helm"), *(Run(here, policy) for policy in ("helm", "pid", "pid", "helm base", "static:0.5"))]
    tasks = tasks_of(asked, tmp_path)
    assert [[run.policy for run in task.runs] for task in tasks] == [
        ["helm", "helm base"],
        ["helm"],
        ["pid", "static:0.5"],
    ]


@pytest.mark.parametrize(
    "policy", ["static:0.5", "jump:0.3>0.5@2", "path:1@1=0.5", "helm", "helm base", "argmin", "pid"]
)
def test_who_is_taken_for_blind_is_shown_no_curves(make_lab: MakeLab, policy: str) -> None:
    cost = make_lab().setup(NAME, 0).course().service_cost
    assert is_blind(policy) != started_policy(policy, cost).has_curves


@pytest.mark.parametrize("changed", ["seed", "load", "traffic"])
def test_other_traffic_is_another_ground(make_lab: MakeLab, changed: str) -> None:
    lab = make_lab()
    other = {"seed": lab.setup(NAME, 1), "load": lab.setup(NAME, 0, 1.1)}
    other["traffic"] = lab.setup(NAME, 0, traffic=(("hot_share", 0.2),))
    assert other[changed].digest != lab.setup(NAME, 0).digest == lab.setup(NAME, 0).digest
    assert not np.array_equal(other[changed].course().trace.user, lab.setup(NAME, 0).course().trace.user)


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    Store(path, "a").put("one", 1)
    with path.open("a") as file:
        file.write('{"digest": "a", "name": "tw')
    assert Store(path, "a").found == {"one": 1}
    assert Store(path, "b").found == {}


def test_curves_come_back_from_their_file_as_they_were(make_lab: MakeLab, tmp_path: Path) -> None:
    curves = make_lab().setup(NAME, 0).course().curves
    save_curves(tmp_path / "curves.npz", curves)
    back = load_curves(tmp_path / "curves.npz")
    assert [one is None for one in back] == [one is None for one in curves]
    known, kept = next((a, b) for a, b in zip(curves, back, strict=True) if a is not None and b is not None)
    assert np.array_equal(known.missed_rows_per_request, kept.missed_rows_per_request)
    assert known.num_requests == kept.num_requests


def test_a_smaller_tier_keeps_rates_and_what_is_hot_beside_the_pool() -> None:
    scenario = load_scenario(SCENARIOS / f"{NAME}.toml")
    small = resized(scenario, 0.1, 0.05)
    assert small.workload is not None
    assert scenario.workload is not None
    assert small.workload.duration_s == pytest.approx(0.1 * scenario.workload.duration_s)
    before, after = scenario.workload.phases[1], small.workload.phases[1]
    assert (after.rate, after.hot_share) == (before.rate, before.hot_share)
    assert after.hot_users / small.engine.sized_pool_bytes == pytest.approx(
        before.hot_users / scenario.engine.sized_pool_bytes
    )
    assert after.hot_first[0] == after.hot_users
    assert resized(scenario, 1, 1) == scenario


def test_a_policy_nobody_has_is_refused_with_its_name(make_lab: MakeLab) -> None:
    cost = make_lab().setup(NAME, 0).course().service_cost
    with pytest.raises(ConfigError, match="nobody:1"):
        started_policy("nobody:1", cost)
    with pytest.raises(ConfigError, match=r"static:0\.x"):
        started_policy("static:0.x", cost)


def test_tiers_grow() -> None:
    smoke, quick, full = TIERS["smoke"], TIERS["quick"], TIERS["full"]
    assert smoke.num_seeds <= quick.num_seeds < full.num_seeds == 5
    assert smoke.time < quick.time <= full.time == full.size == full.pressed == 1
    assert not smoke.is_judged


def test_a_cluster_has_so_many_times_the_users_and_requests() -> None:
    scenario = load_scenario(SCENARIOS / f"{NAME}.toml")
    assert scenario.workload is not None
    one, four = scenario.workload.phases[1], for_nodes(scenario.workload, 4, 0.5).phases[1]
    assert (four.rate[0], four.hot_users, four.hot_first) == (2 * one.rate[0], 4 * one.hot_users, (2_400, 2_400))
    assert four.hot_share == one.hot_share


class _Made:
    """A lab whose nodes bear so much load; what is not a constant bears a tenth more."""

    tier = TIERS["quick"]
    seeds = (0, 1)

    def __init__(self, bears: float) -> None:
        self._bears, self.num_runs = bears, 0

    def scenario(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(slo_ms=80.0)

    def setup(self, name: str, seed: int, load: float) -> float:
        return load

    def run(self, wanted: list[Run], what: str) -> dict[Run, SimpleNamespace]:
        self.num_runs += len(wanted)
        return {run: self._outcome(run) for run in wanted}

    def _outcome(self, run: Run) -> SimpleNamespace:
        """What is known to come is borne at twice the load."""
        load, bears = cast("float", run.setup), self._bears * (1.1 if run.policy == "helm" else 1.0)
        score = SimpleNamespace(meets=lambda slo_ms: load <= bears)
        return SimpleNamespace(score=score, meets_when_known=lambda slo_ms: load <= 2 * bears)


@pytest.mark.parametrize(
    ("bears", "constant", "ours", "known"), [(1.02, 1.0, 1.1, 1.35), (0.62, 0.0, 0.65, 1.2), (9.0, 1.35, 1.35, 1.35)]
)
def test_the_largest_load_is_found_for_all_at_once(bears: float, constant: float, ours: float, known: float) -> None:
    lab = _Made(bears)
    entries: dict[str, Entry] = {"constant": ("static:0.5", ()), "ours": ("helm", ())}
    found = largest_loads(cast("Lab", lab), NAME, entries, "test")
    assert found == {"constant": [constant] * 2, "ours": [ours] * 2}
    assert lab.num_runs <= 2 * 2 * 4, "four bisections over fifteen loads"
    found = largest_loads(cast("Lab", lab), NAME, entries, "test", counts_first=False)
    assert found == {"constant": [known] * 2, "ours": [1.35] * 2}


def test_code_is_told_apart_by_its_source() -> None:
    assert digest_of_code("control") == digest_of_code("control") != digest_of_code("control", "sim")
    with pytest.raises(AssertionError, match="nothing"):
        digest_of_code("nothing")
