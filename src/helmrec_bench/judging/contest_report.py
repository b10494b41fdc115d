"""From scores of many policies on one scenario to the rows of a table. Pure: takes scores by seed, runs nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from helmrec_bench.baselines.oracle import best_static
from helmrec_bench.judging.contest import Floats, Score
from helmrec_bench.judging.judge import Interval, interval, paired_change
from helmrec_bench.judging.quasi_static import QuasiStatic, quasi_static

Scores = Sequence[Score]  # one per seed


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one scenario. Regrets are shares of what an oracle spends, below 0 is better than it."""

    mean_ms: Interval
    p99_ms: Interval
    p99_change: Interval  # against the best constant in hindsight, seed by seed
    slo_satisfaction: Interval
    regret_quasi_static: float
    regret_switching: float
    gap: float  # mean |alpha - alpha*|
    share_inside: float  # windows inside the band around alpha* whose regret is below 1%
    num_refused: int
    decision_us: tuple[float, float]  # median and 99th percentile; the median over seeds of each


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What sweeps over constants say of a scenario. Summed over seeds, so that one lucky window decides nothing."""

    alphas: Floats
    costs: Floats  # (windows, alphas)

    @property
    def exact(self) -> QuasiStatic:
        return quasi_static(self.costs, self.alphas)

    @property
    def best_alpha(self) -> float:
        return float(best_static(self.costs, self.alphas).alpha[0])


def hindsight(statics: Mapping[float, Scores]) -> Hindsight:
    alphas = sorted(statics)
    by_seed = [np.sum([score.costs for score in statics[alpha]], axis=0) for alpha in alphas]
    return Hindsight(np.array(alphas), np.column_stack(by_seed))


def row(scores: Scores, reference: Scores, seen: Hindsight, oracle_cost: float) -> Row:
    """`reference`: the best constant's scores on the same seeds; `oracle_cost`: of the oracle that pays its moves."""
    exact, spent = seen.exact, float(np.sum([score.costs for score in scores]))
    return Row(
        mean_ms=interval([score.mean_ms for score in scores]),
        p99_ms=interval([score.p99_ms for score in scores]),
        p99_change=paired_change([score.p99_ms for score in scores], [score.p99_ms for score in reference]),
        slo_satisfaction=interval([score.slo_satisfaction for score in scores]),
        regret_quasi_static=spent / float(exact.cost.sum()) - 1,
        regret_switching=spent / oracle_cost - 1,
        gap=float(np.mean([exact.gap(np.array(score.alphas)) for score in scores])),
        share_inside=float(np.mean([exact.share_inside(np.array(score.alphas)) for score in scores])),
        num_refused=sum(score.num_refused for score in scores),
        decision_us=(
            float(np.median([score.decision_us[0] for score in scores])),
            float(np.median([score.decision_us[1] for score in scores])),
        ),
    )


def spent(scores: Scores) -> float:
    return float(np.sum([score.costs for score in scores]))
