"""Steps of a node whose costs are known, for what learns them."""

import numpy as np

from helmrec.costs.learned import StageCosts
from helmrec.steps import Step, Steps

COSTS = StageCosts(
    host_step_ms=0.4,
    host_request_ms=0.05,
    host_token_ms=1e-5,
    host_missed_row_ms=2e-6,
    rows_step_ms=0.1,
    read_row_ms=1e-6,
    missed_row_ms=4e-5,
    reloaded_page_ms=0.02,
    compute_step_ms=0.5,
    token_ms=3e-4,
    pair_ms=2e-8,
    overlap=0.0,
)


def work_of(num_steps: int, rng: np.random.Generator, pages: int = 20) -> Steps:
    """Steps whose work is drawn at random; no times yet."""
    steps = np.zeros((num_steps, len(Step)))
    steps[:, Step.REQUESTS] = rng.integers(1, 9, num_steps)
    steps[:, Step.TOKENS] = steps[:, Step.REQUESTS] * rng.integers(200, 6_000, num_steps)
    steps[:, Step.PAIRS] = steps[:, Step.TOKENS] * rng.uniform(500, 9_000, num_steps)
    steps[:, Step.ROWS_READ] = 6 * steps[:, Step.TOKENS]
    steps[:, Step.ROWS_MISSED] = steps[:, Step.ROWS_READ] * rng.uniform(0, 0.5, num_steps)
    steps[:, Step.PAGES_RELOADED] = rng.integers(0, pages, num_steps) if pages else 0
    return steps


def timed(steps: Steps, costs: StageCosts = COSTS, gap_s: float = 0.0) -> Steps:
    """The same steps with the times these costs give them, one after another, `gap_s` apart.

    With an overlap above 0 a step begins when the one before it begins to compute.
    """
    done = steps.copy()
    done[:, Step.HOST_MS] = (
        costs.host_step_ms
        + costs.host_request_ms * steps[:, Step.REQUESTS]
        + costs.host_token_ms * steps[:, Step.TOKENS]
        + costs.host_missed_row_ms * steps[:, Step.ROWS_MISSED]
    )
    done[:, Step.ROWS_MS] = (
        costs.rows_step_ms
        + costs.read_row_ms * steps[:, Step.ROWS_READ]
        + costs.missed_row_ms * steps[:, Step.ROWS_MISSED]
        + costs.reloaded_page_ms * steps[:, Step.PAGES_RELOADED]
    )
    done[:, Step.COMPUTE_MS] = (
        costs.compute_step_ms + costs.token_ms * steps[:, Step.TOKENS] + costs.pair_ms * steps[:, Step.PAIRS]
    )
    begin_s = free_s = 0.0
    for line in done:
        ready_s = begin_s + (line[Step.HOST_MS] + line[Step.ROWS_MS]) / 1e3
        started_s = max(ready_s, free_s)
        line[Step.BEGIN_S], line[Step.END_S] = begin_s, started_s + line[Step.COMPUTE_MS] / 1e3
        free_s = line[Step.END_S]
        begin_s = (started_s if costs.overlap else free_s) + gap_s
    return done
