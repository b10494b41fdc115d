"""Policies beside every constant on the same requests: who did how well, and how well one could have done."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from helmrec_bench.baselines.oracle import cheapest_path, switching_costs
from helmrec_bench.judging.contest import Floats, Score
from helmrec_bench.judging.contest_report import Hindsight, Row, hindsight, row, spent
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.policies import path_text
from helmrec_bench.lab.runs import Outcome, Run, Settings, Setup
from helmrec_bench.map.shifts import PRICES, switch_prices

_LOAD = 0.85  # of frozen scenarios: what a move delays others by


@dataclass(frozen=True)
class Field:
    """Where a contest is held."""

    scenario: str
    load: float = 1.0
    traffic: Settings = ()
    pressed: float = 1.0
    engine: Settings = ()

    def setups(self, lab: Lab) -> list[Setup]:
        return [lab.setup(self.scenario, seed, self.load, self.traffic, self.pressed) for seed in lab.seeds]

    def runs(self, lab: Lab, policy: str) -> list[Run]:
        """One a seed."""
        return [Run(setup, policy, self.engine) for setup in self.setups(lab)]


@dataclass(frozen=True)
class Contest:
    """What came of it, by seed."""

    constants: Mapping[float, list[Outcome]]
    found: Mapping[str, list[Outcome]]  # by policy
    oracle: list[Outcome]  # least cost of all replayed paths and constants

    @cached_property
    def seen(self) -> Hindsight:
        return hindsight({alpha: scores(outcomes) for alpha, outcomes in self.constants.items()})

    @property
    def best(self) -> list[Outcome]:
        return self.constants[self.seen.best_alpha]

    def row(self, outcomes: Sequence[Outcome]) -> Row:
        return row(scores(outcomes), scores(self.best), self.seen, spent(scores(self.oracle)))

    def figures(self) -> dict[str, Any]:
        named = {f"static {alpha:g}": outcomes for alpha, outcomes in self.constants.items()}
        named |= {"best static": self.best, "oracle, moves paid": self.oracle, **self.found}
        exact = self.seen.exact
        return {
            "best_alpha": self.seen.best_alpha,
            "alpha_star": exact.alpha.tolist(),
            "band": [exact.low.tolist(), exact.high.tolist()],
            "is_full": all(outcome.is_full for outcome in self.best),
            "policies": {name: _figures(self.row(outcomes), outcomes) for name, outcomes in named.items()},
        }


def _figures(found: Row, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    figures = asdict(found)
    del figures["decision_us"]  # another experiment times decisions
    figures["alphas"] = np.mean([outcome.score.alphas for outcome in outcomes], axis=0).round(4).tolist()
    return figures


def scores(outcomes: Sequence[Outcome]) -> list[Score]:
    return [outcome.score for outcome in outcomes]


def sweep(lab: Lab, field: Field, what: str) -> dict[float, list[Outcome]]:
    """Every constant of the tier, by seed."""
    runs = {alpha: field.runs(lab, f"static:{alpha:g}") for alpha in lab.tier.alphas}
    found = lab.run([run for ones in runs.values() for run in ones], what)
    return {alpha: [found[run] for run in ones] for alpha, ones in runs.items()}


def contest(lab: Lab, field: Field, policies: Sequence[str], what: str) -> Contest:
    """Constants and policies in one go, then the paths an oracle would have taken."""
    entered = {policy: field.runs(lab, policy) for policy in policies}
    constants = {alpha: field.runs(lab, f"static:{alpha:g}") for alpha in lab.tier.alphas}
    everyone = [run for ones in (*constants.values(), *entered.values()) for run in ones]
    found = lab.run(everyone, what)
    by_alpha = {alpha: [found[run] for run in ones] for alpha, ones in constants.items()}
    return Contest(
        constants=by_alpha,
        found={policy: [found[run] for run in ones] for policy, ones in entered.items()},
        oracle=_oracle(lab, field, by_alpha, what),
    )


def _oracle(lab: Lab, field: Field, constants: Mapping[float, list[Outcome]], what: str) -> list[Outcome]:
    """Paths planned in hindsight at several prices of moving, replayed with their moves; or the best constant."""
    seen = hindsight({alpha: scores(outcomes) for alpha, outcomes in constants.items()})
    start_s = field.setups(lab)[0].scenario.warm_up_s
    paths = {tuple(path.tolist()) for path in _plans(field.setups(lab)[0], seen, len(lab.seeds))}
    texts = [path_text(list(path), lab.tier.window_s, start_s) for path in sorted(paths)]
    runs = [field.runs(lab, text) for text in texts]
    found = lab.run([run for ones in runs for run in ones], f"{what}, oracles")
    replayed = [[found[run] for run in ones] for ones in runs]
    return min((*replayed, constants[seen.best_alpha]), key=lambda outcomes: spent(scores(outcomes)))


def _plans(setup: Setup, seen: Hindsight, num_seeds: int) -> list[Floats]:
    course = setup.course()
    prices = switching_costs(seen.alphas, switch_prices(course.node(), course.scenario.cost(), _LOAD))
    plans = [cheapest_path(seen.costs, seen.alphas, prices * price * num_seeds).alpha for price in PRICES]
    return [seen.exact.alpha, *plans]
