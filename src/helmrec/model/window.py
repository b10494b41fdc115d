"""The window of events that the model reads. Its anchor advances in large steps.

If the window moved with every event, all cached positions would change. Times are gaps between events for the same
reason.
"""

import numba
import numpy as np


def window_anchor(first_event: int, num_events: int, window: int) -> int:
    """Return the absolute index of the first event in the window, for events [first_event, first_event + num_events).

    It depends on absolute indices only: while a history grows, the anchor stays for a quarter of the window and then
    advances by that much. A client that sends fewer events than the window gets smaller steps.
    """
    end = first_event + num_events
    start = max(first_event, end - window)
    if start == 0:
        return 0
    step = max(1, window // 4)
    while step > max(1, (end - start) // 4):
        step = 1 if step % 2 else step // 2  # every step divides the larger ones: anchors never move back
    return -(-start // step) * step


@numba.njit(cache=True)
def gap_bucket(gap: int, num_buckets: int) -> int:
    """Return the bucket of a non-negative time gap: 0, then two per octave; the last bucket is open-ended."""
    if gap == 0:
        return 0
    octave, rest = 0, np.uint64(gap) >> np.uint64(1)
    while rest:  # in this form the compiler uses one instruction that counts leading zeros
        octave, rest = octave + 1, rest >> np.uint64(1)
    half = (gap >> (octave - 1)) & 1 if octave else 0
    return min(1 + 2 * octave + half, num_buckets - 1)
