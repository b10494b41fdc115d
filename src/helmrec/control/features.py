"""What the base policy looks at: an outlook and a window as numbers of order one, seen from where alpha is aimed.

Costs at other splits are relative to the cost here, so one network serves pools and models of any size. Compiled.
"""

import numpy as np

from helmrec.control.burst import B
from helmrec.control.compiled import inner
from helmrec.control.outlook import Floats, O, Outlook, Split, at_split
from helmrec.control.window import Seen

STEPS = (-0.10, -0.05, -0.02, 0.0, 0.02, 0.05, 0.10)
NAMES = (
    *(f"lasting cost at {step:+.2f}" for step in STEPS if step),
    *(f"fresh cost at {step:+.2f}" for step in STEPS if step),
    "way to the lasting best",
    "way to the fresh best",
    "lasting gain there",
    "fresh gain there",
    "compute load",
    "lead load",
    "fresh over lasting rate",
    "mean latency over SLO",
    "P99 over SLO",
    "queue",
    "alpha",
    "way still to go",
    "drift of the lasting best",
    "burst score",
    "in a burst",
    "burst has lasted",
    "burst is expected to last",
    "share of tokens computed",
    "share of the lead in both stages",
    "hot users",
)
NUM_FEATURES = len(NAMES)
_NUM_OTHERS = len(STEPS) - 1


@inner
def _within(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


@inner
def fill_features(out: Floats, outlook: Outlook, burst: Floats, window: Seen, alpha: float) -> None:
    """Features seen from `alpha`, where the base's own path is."""
    numbers, splits = outlook.numbers, outlook.splits
    _fill_costs(out, splits, alpha)
    at = 2 * _NUM_OTHERS
    lasting_best, fresh_best = int(numbers[O.LASTING_BEST]), int(numbers[O.FRESH_BEST])
    lasting, fresh = at_split(splits, Split.LASTING, alpha), at_split(splits, Split.FRESH, alpha)
    out[at] = _within(2 * (splits[Split.ALPHA, lasting_best] - alpha), 1.0)
    out[at + 1] = _within(2 * (splits[Split.ALPHA, fresh_best] - alpha), 1.0)
    out[at + 2] = _within(5 * (lasting - splits[Split.LASTING, lasting_best]) / lasting, 2.0)
    out[at + 3] = _within(5 * (fresh - splits[Split.FRESH, fresh_best]) / fresh, 2.0)
    per_ms = numbers[O.LASTING_RATE] / 1e3
    out[at + 4] = _within(per_ms * at_split(splits, Split.COMPUTE, alpha), 2.0)
    out[at + 5] = _within(per_ms * at_split(splits, Split.LEAD, alpha), 2.0)
    out[at + 6] = _within(np.log((numbers[O.FRESH_RATE] + 1) / (numbers[O.LASTING_RATE] + 1)), 2.0)
    out[at + 7] = _within(window.mean_ms / window.slo_ms, 2.0)
    out[at + 8] = _within(window.p99_ms / window.slo_ms, 2.0)
    out[at + 9] = np.log(window.num_queued + 1) / 4
    out[at + 10] = alpha
    out[at + 11] = _within(10 * (window.alpha - window.alpha_target), 1.0)
    out[at + 12] = _within(50 * numbers[O.DRIFT], 1.0)
    out[at + 13] = _within(burst[B.SCORE] / 6, 2.0)
    out[at + 14] = burst[B.IS_BURST]
    out[at + 15] = _within(burst[B.IS_BURST] * (window.end_s - burst[B.ONSET_S]) / 30, 2.0)
    out[at + 16] = _within(burst[B.LEFT_S] / 30, 2.0)
    compute, lead = at_split(splits, Split.COMPUTE, window.alpha), at_split(splits, Split.LEAD, window.alpha)
    out[at + 17] = _within(window.new_tokens / max(1.0, numbers[O.TOKENS]), 2.0)
    out[at + 18] = _within(lead / max(1e-9, compute + lead), 1.0)
    out[at + 19] = window.hot_user_share


@inner
def _fill_costs(out: Floats, splits: Floats, alpha: float) -> None:
    for view in range(2):
        row = Split.LASTING if view == 0 else Split.FRESH
        here = at_split(splits, row, alpha)
        place = view * _NUM_OTHERS
        for step in STEPS:
            if step != 0:
                out[place] = _within(5 * (at_split(splits, row, alpha + step) / here - 1), 2.0)
                place += 1
