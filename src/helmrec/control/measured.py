"""Latency measured at the splits the node has been at, over what was reckoned there: where the outlook errs.

A split that was never tried is taken to err as the others do. Kept apart by load, since what is wrong with a reckoning
depends on that more than on anything else. Compiled; knows ratios, not why they are what they are.
"""

from enum import IntEnum

from helmrec.control.compiled import inner
from helmrec.control.outlook import NUM_SPLITS, Floats, O, Outlook, Split, at_split, keep_of
from helmrec.control.window import Seen

NUM_LOADS = 3
_LOAD_FROM = (0.5, 0.8)  # share of the longer stage's time in use from which the next kind of load begins
_HALF_LIFE_S = 180.0
_PRIOR_S = 15.0  # seconds at a split that weigh as much as all that is known of others
_REACH = 2  # splits of the table, each side, that a window tells of
_MIN_RATIO, _MAX_RATIO = 0.5, 2.0
_SETTLED = 0.02


class M(IntEnum):
    """Rows for each kind of load."""

    RATIO = 0  # measured over reckoned, added up over seconds, old ones faded
    SECONDS = 1


NUM_ROWS = NUM_LOADS * len(M)


@inner
def _first_row(outlook: Outlook) -> int:
    best, splits = int(outlook.numbers[O.FRESH_BEST]), outlook.splits
    longer = max(splits[Split.FRESH_COMPUTE, best], splits[Split.FRESH_LEAD, best])
    load = outlook.numbers[O.FRESH_RATE] / 1e3 * longer
    return 2 * (int(load >= _LOAD_FROM[0]) + int(load >= _LOAD_FROM[1]))


@inner
def correct_by_measured(table: Floats, outlook: Outlook, window: Seen) -> None:
    """Take a window in and fill the row `Split.CORRECTED`. `table`: (NUM_ROWS, NUM_SPLITS), zeros at first."""
    splits, dt_s = outlook.splits, min(10.0, window.end_s - window.start_s)
    first = _first_row(outlook)
    ratios, seconds = table[first], table[first + 1]
    keep = keep_of(dt_s, _HALF_LIFE_S)
    for split in range(NUM_SPLITS):
        ratios[split] *= keep
        seconds[split] *= keep
    reckoned = at_split(splits, Split.FRESH, window.alpha)
    if window.mean_ms > 0 and reckoned > 0 and abs(window.alpha - window.alpha_target) <= _SETTLED:
        ratio = min(max(window.mean_ms / reckoned, _MIN_RATIO), _MAX_RATIO)
        low, high = splits[Split.ALPHA, 0], splits[Split.ALPHA, NUM_SPLITS - 1]
        at = int((window.alpha - low) / (high - low) * (NUM_SPLITS - 1) + 0.5)
        for split in range(max(0, at - _REACH), min(NUM_SPLITS, at + _REACH + 1)):
            weight = dt_s * (1 - abs(split - at) / (_REACH + 1))
            ratios[split] += weight * ratio
            seconds[split] += weight
    total, level = seconds.sum(), 1.0
    if total > 0:
        level = ratios.sum() / total
    for split in range(NUM_SPLITS):
        ratio = (ratios[split] + _PRIOR_S * level) / (seconds[split] + _PRIOR_S)
        splits[Split.CORRECTED, split] = splits[Split.FRESH, split] * ratio
