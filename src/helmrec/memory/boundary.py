"""How far the boundary between the two caches may move between two steps."""

import math

from helmrec.jit import rule

SHARE_PER_S = 0.1  # of the pool: as much as a policy may ask for in a window of a second
_MOST_S = 0.25  # that is made up for at once, so that a step after an idle time does not wait for a large move


@rule
def moves_between_steps(num_pages: int, pages_per_move: int, since_s: float) -> int:
    """Moves of `pages_per_move` after a step that ended `since_s` after the one before.

    One, or as many as take a tenth of the pool from one cache to the other in a second: in a large pool under long
    steps, one move a step would trail its target for minutes.
    """
    return max(1, math.ceil(SHARE_PER_S * num_pages * min(since_s, _MOST_S) / pages_per_move))
