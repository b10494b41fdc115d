"""Where deltas may lie: a folder, or a Redis that is started for the tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from helmrec.deltas.delta import Delta, TablePart
from tests.history.places import running_redis

KINDS = ("folder", "redis")


@contextmanager
def place(kind: str, folder: Path) -> Iterator[str]:
    """The address of an empty place."""
    if kind == "folder":
        yield str(folder / "deltas")
    else:
        with running_redis(folder) as url:
            yield url


def part(seed: int, num_rows: int = 4, row_dim: int = 3, table: str = "item", *, add: bool = False) -> TablePart:
    rng = np.random.default_rng(seed)
    ids = rng.permutation(100)[:num_rows].astype(np.int64)
    return TablePart(table, ids, rng.standard_normal((num_rows, row_dim)).astype(np.float32), add)


def delta(sequence: int, *parts: TablePart, stream: str = "abc") -> Delta:
    return Delta(stream, sequence, sequence % 1_000, 1_000.0 + sequence, parts or (part(sequence),))


def same(a: Delta, b: Delta) -> bool:
    heads = [(d.stream, d.sequence, d.step, d.made_s) for d in (a, b)]
    return heads[0] == heads[1] and all(
        (x.table, x.is_difference) == (y.table, y.is_difference)
        and np.array_equal(x.ids, y.ids)
        and x.values.dtype == y.values.dtype
        and np.array_equal(x.values, y.values)
        for x, y in zip(a.parts, b.parts, strict=True)
    )
