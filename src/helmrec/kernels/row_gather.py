"""Read embedding rows from where they are, the arena or the host, in plain torch: the twin of `triton_row_gather.py`.

Where a row is, is one number: a slot of the arena, `~row` of the master for a row the arena lacks, or SKIP for an
entry that is padding. Nothing here knows tables or who owns a slot.
"""

from torch import Tensor

SKIP = -(2**31)  # nothing is read or written for such an entry
MAX_ROWS = 2**31 - 1  # ~row of every row, and SKIP, fit an int32


def gather_rows(
    arena_rows: Tensor,
    master: Tensor,
    sources: Tensor,
    out: Tensor,
    places: Tensor | None = None,
    count: Tensor | None = None,
) -> None:
    """out[i] = arena_rows[s] if s >= 0 else master[~s], where s = sources[i] is not SKIP.

    arena_rows: (slots, row_dim) and out: (entries, row_dim) on one device, master: (rows, row_dim) on the host,
    sources: (entries,) int32. With `places`, (entries,) int64, out[places[i]] takes the place of out[i]; with
    `count`, (1,) int32, only so many of the first sources are read.
    """
    if count is not None:
        sources = sources[: int(count)]
    hits = (sources >= 0).nonzero().flatten()
    misses = ((sources < 0) & (sources != SKIP)).nonzero().flatten()
    at_hits, at_misses = (hits, misses) if places is None else (places[hits], places[misses])
    out[at_hits] = arena_rows[sources[hits].long()]
    out[at_misses] = master[(~sources[misses]).long().to(master.device)].to(out.device)
