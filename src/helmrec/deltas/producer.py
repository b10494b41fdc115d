"""The producer: sends new rows from a training loop to a stream of deltas."""

import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from helmrec.deltas.delta import Delta, NamedModel, TablePart
from helmrec.deltas.source import DeltaSink, open_source
from helmrec.errors import DeltaCorrupt, DeltaGap, RequestError
from helmrec.types import Ids


class DeltaProducer:
    """Appends deltas to a folder or a Redis. One producer writes a stream at a time; a second one is refused.

    with DeltaProducer("deltas/") as producer:
        producer.push("item", ids, table.weight[ids], step=step)
    """

    def __init__(self, place: str | DeltaSink, keep: int | None = None) -> None:
        """Go on from the newest sequence number. `keep`: how many newest deltas stay; None: all of them.

        A node that starts needs every delta after its snapshot: keep more than come between two snapshots.
        """
        if keep is not None and keep < 1:
            raise RequestError("keep", keep, "at least 1 is needed")
        self._sink = open_source(place, is_made=True) if isinstance(place, str) else place
        self._keep = keep
        self.stream = self._sink.stream()
        self.newest = self._sink.newest()  # the sequence number of the last delta

    def push(self, table: str, ids: Ids | Any, values: ArrayLike | Any, *, step: int, add: bool = False) -> int:
        """Append new rows of one table and return their sequence number; they are durable when it returns.

        `ids` and `values` are arrays, or tensors on any device. `add`: the values are added to the rows instead.
        """
        return self.push_parts([make_part(table, ids, values, add=add)], step=step)

    def push_parts(self, parts: list[TablePart], *, step: int) -> int:
        """Append rows of several tables, which become visible together."""
        return self._append(step, tuple(parts))

    def _append(self, step: int, parts: tuple[TablePart, ...], model: NamedModel | None = None) -> int:
        delta = Delta(self.stream, self.newest + 1, step, time.time(), parts, model)
        self._sink.write(delta)
        self.newest = delta.sequence
        if self._keep is not None:
            self._sink.trim(self.newest - self._keep)
        return self.newest

    def push_model(self, folder: str | Path, *, step: int) -> int:
        """Append a whole model, weights and rows, in a folder that every server can read; return its number.

        Servers swap it in where it stands in the stream: later deltas change its rows. The folder must stay.
        """
        from helmrec.model.folder import read_manifest  # noqa: PLC0415 - a producer of rows does not need models

        whole = Path(folder).resolve()
        return self._append(step, (), NamedModel(str(whole), read_manifest(whole).version))

    def close(self) -> None:
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_part(table: str, ids: Ids | Any, values: ArrayLike | Any, *, add: bool = False) -> TablePart:
    """Convert arrays or tensors to a part of a delta; RequestError names what is wrong."""
    from helmrec.engine.id_checks import has_infinite  # noqa: PLC0415 - compiled code, which help does without

    rows = np.asarray(_on_host(ids))
    if rows.dtype.kind not in "iu" and rows.size:
        raise RequestError("ids", str(rows.dtype), "integers are needed")
    if rows.dtype == np.uint64 and rows.size and rows.max() >= 2**63:
        raise RequestError("ids", int(rows.max()), "integers of 64 bits are needed")
    try:
        new = np.asarray(_on_host(values))
        if new.dtype not in (np.float32, np.float16):
            if new.dtype.kind not in "fiu":
                raise RequestError("values", str(new.dtype), "numbers are needed")
            new = new.astype(np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError("values", type(values).__name__, f"an array of numbers is needed ({error})") from None
    if has_infinite(new, np.inf):
        at = tuple(np.argwhere(~np.isfinite(new))[0])
        raise RequestError(f"values{[int(i) for i in at]}", float(new[at]), "finite numbers are needed")
    return TablePart(table, np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(new), add)


def _on_host(values: Any) -> Any:
    """Copy a tensor to the host, as a type that NumPy has; leave everything else. Torch is not imported for it."""
    if not hasattr(values, "detach"):
        return values
    there = values.detach()
    return (there.float() if str(there.dtype) == "torch.bfloat16" else there).cpu().numpy()


def skip_to(sink: DeltaSink, after: int, to: int, *, also_readable: bool = False) -> list[int]:
    """Skip every delta from `after` + 1 up to `to` that is missing or corrupt; return their numbers.

    `also_readable`: skip the others as well, since they do not fit the model.

    Written to the stream itself: every node, also one that starts later, passes the same deltas. DeltaGap if nothing
    is behind `to`: what has not come yet cannot be skipped.
    """
    newest = sink.newest()
    if not after < to <= newest:
        raise DeltaGap(f"only deltas from {after + 1} to the newest, {newest}, can be skipped, got {to}", to)
    stream, skipped = sink.stream(), []
    for sequence in range(after + 1, to + 1):
        if also_readable or not is_readable(sink, sequence):
            sink.skip(Delta(stream, sequence, 0, time.time()))
            skipped.append(sequence)
    return skipped


def is_readable(source: DeltaSink, sequence: int) -> bool:
    """Whether a delta is there and whole."""
    try:
        found = next(source.read(sequence - 1), None)
    except DeltaCorrupt:  # this one, or a later one where this one is missing
        return False
    return found is not None and found.sequence == sequence
