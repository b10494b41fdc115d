"""Gathers embedding rows from the arena or the host in plain torch. Twin: `triton_row_gather.py`.

The source of a row is one number: a slot of the arena, `~row` for a row of the master that is not in the arena, or
SKIP for padding. Nothing here knows tables or owners of slots.
"""

from torch import Tensor

from helmrec.kernels.row_codec import Recoding

SKIP = -(2**31)  # nothing is read or written for such an entry
MAX_ROWS = 2**31 - 1  # ~row of every row, and SKIP, fit an int32


def gather_rows(  # noqa: PLR0913 - as its twins
    arena_rows: Tensor,
    master: Tensor,
    sources: Tensor,
    out: Tensor,
    places: Tensor | None = None,
    count: Tensor | None = None,
    *,
    recoding: Recoding | None = None,
) -> None:
    """out[i] = arena_rows[s] if s >= 0 else master[~s], where s = sources[i] is not SKIP.

    arena_rows: (slots, width) and out: (entries, width) on one device, master: (rows, width) on the host,
    sources: (entries,) int32. With `places`, (entries,) int64, out[places[i]] takes the place of out[i]; with
    `count`, (1,) int32, only the first `count` sources are read. With `recoding`, from the master's form of rows to the
    arena's, sources name rows of the master only.
    """
    if count is not None:
        sources = sources[: int(count)]
    hits = (sources >= 0).nonzero().flatten()
    misses = ((sources < 0) & (sources != SKIP)).nonzero().flatten()
    at_hits, at_misses = (hits, misses) if places is None else (places[hits], places[misses])
    out[at_hits] = arena_rows[sources[hits].long()]
    missed = master[(~sources[misses]).long().to(master.device)].to(out.device)
    out[at_misses] = missed if recoding is None else recoding.source.recode(missed, recoding.target)
