"""Table sizes under which a store accepted its events: a model that serves them must not have smaller tables.

Sizes are keyed by the name of the event's field. It knows their encoding and comparison, not where they are kept.
"""

import json
from collections.abc import Mapping

from helmrec.errors import HistoryError, TablesTooSmall
from helmrec.history.events import MAX_ID, EventSchema

TableSizes = Mapping[str, int]


def sizes_of(schema: EventSchema) -> dict[str, int]:
    """Return the table sizes by field; timestamps have no table."""
    limits = schema.limits[:-1, 0].tolist()
    return dict(zip(schema.field_names[:-1], limits, strict=True))


def check_sizes(taken: TableSizes, schema: EventSchema, place: str) -> None:
    """Raise TablesTooSmall, which names table and both sizes, if stored events may have ids beyond a table."""
    for table, (field, num_rows) in zip(schema.table_names, sizes_of(schema).items(), strict=True):
        if num_rows < taken.get(field, 0) == MAX_ID:
            raise TablesTooSmall(
                f"table {table!r} refuses unknown ids, and the events kept in {place} may have some: set unknown='row'"
            )
        if num_rows < taken.get(field, 0):
            raise TablesTooSmall(
                f"table {table!r} has {num_rows} rows, the events kept in {place} were taken for {taken[field]}"
            )


def pack_sizes(sizes: TableSizes) -> bytes:
    return json.dumps(dict(sizes)).encode()


def unpack_sizes(value: bytes | memoryview, place: str) -> dict[str, int]:
    try:
        found = json.loads(bytes(value))
        return {str(field): int(num_rows) for field, num_rows in found.items()}
    except (ValueError, TypeError, AttributeError):
        raise HistoryError(f"{place}: the sizes of its tables are damaged, got {bytes(value)[:100]!r}") from None
