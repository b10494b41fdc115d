"""Events of a history: their schema, and the checks of new events.

Columns have the order of the engine's intake: items, other feature tables, actions, timestamps. It knows the model's
ids, not how they are stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import RequestError
from helmrec.model.config import ITEM, ModelConfig, TableConfig
from helmrec.types import Ids, IntArray

MAX_ID = int(np.iinfo(np.int64).max)


class EventSchema(Frozen):
    """The fields of an event and the bounds of their ids.

    A store records the names, and the largest bounds under which it accepted events: tables may grow, never shrink.
    """

    num_items: int = Field(ge=1)
    num_actions: int = Field(ge=1)
    features: tuple[TableConfig, ...] = Field((), description="of events besides the item")
    takes_unknown_items: bool = Field(False, description="whether items without a row are kept, as they came")

    @classmethod
    def of_model(cls, model: ModelConfig) -> "EventSchema":
        items, *features = model.features
        return cls(
            num_items=items.num_rows,
            num_actions=model.num_actions,
            features=features,
            takes_unknown_items=items.unknown == "row",
        )

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.features)

    @cached_property
    def known_features(self) -> frozenset[str]:
        return frozenset(self.feature_names)

    @cached_property
    def field_names(self) -> tuple[str, ...]:
        """In the order of columns, as messages name them."""
        return ("items", *(f"features[{name!r}]" for name in self.feature_names), "actions", "timestamps")

    @cached_property
    def table_names(self) -> tuple[str, ...]:
        """In the order of columns; timestamps have no table."""
        return (ITEM, *self.feature_names, "actions")

    @cached_property
    def limits(self) -> NDArray[np.uint64]:  # (fields, 1) ids are smaller
        items = MAX_ID if self.takes_unknown_items else self.num_items
        features = (MAX_ID if table.unknown == "row" else table.num_rows for table in self.features)
        rows = (items, *features, self.num_actions, MAX_ID)
        return np.array(rows, np.uint64)[:, None]

    @property
    def num_fields(self) -> int:
        return 3 + len(self.features)


@dataclass(frozen=True, slots=True, eq=False)
class NewEvents:
    """Events a client sends, oldest first; every field has one value per event."""

    items: Ids
    actions: Ids
    timestamps: Ids
    features: Mapping[str, Ids] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """The latest events of a user, oldest first: the history fields of a `RankRequest`, by the same names."""

    first_event: int  # absolute index of the first one here
    items: IntArray
    actions: IntArray
    timestamps: IntArray
    features: Mapping[str, IntArray]

    @property
    def num_events(self) -> int:
        return self.items.size

    @property
    def version(self) -> int:
        """What the next append must name as its base."""
        return self.first_event + self.items.size


def find_beyond(schema: EventSchema, events: Events) -> tuple[str, int] | None:
    """Return the first field with an id beyond its table, and the largest id; None if all are within."""
    if not events.num_events:
        return None
    lines = (events.items, *(events.features[name] for name in schema.feature_names), events.actions)
    for name, line, limit in zip(schema.field_names, lines, schema.limits[:, 0].tolist(), strict=False):
        if (largest := int(line.max())) >= limit:
            return name, largest
    return None


def to_columns(schema: EventSchema, events: NewEvents, max_events: int) -> IntArray:  # (fields, events)
    """Check new events and copy them to columns; raise RequestError that names field and value."""
    given = events.features
    if not isinstance(given, Mapping) or given.keys() != schema.known_features:
        seen = sorted(given, key=str) if isinstance(given, Mapping) else given
        raise RequestError("features", seen, f"values by name are needed for exactly {list(schema.feature_names)}")
    values = (events.items, *(given[name] for name in schema.feature_names), events.actions, events.timestamps)
    lines = [_line(name, line) for name, line in zip(schema.field_names, values, strict=True)]
    num_events = lines[0].size
    if not 1 <= num_events <= max_events:
        raise RequestError("items", num_events, f"between 1 and {max_events} events are needed")
    columns = np.empty((len(lines), num_events), np.int64)
    for name, line, column in zip(schema.field_names, lines, columns, strict=True):
        if line.size != num_events:
            raise RequestError(name, line.size, f"one value per item is needed, {num_events} in all")
        column[:] = line
    outside = columns.view(np.uint64) >= schema.limits  # negative values become large
    if outside.any():
        field_at, at = np.argwhere(outside)[0].tolist()
        problem = f"values run from 0 to {int(schema.limits[field_at, 0]) - 1}"
        raise RequestError(f"{schema.field_names[field_at]}[{at}]", int(lines[field_at][at]), problem)
    _check_forward(columns[-1])
    return columns


def check_whole(field: str, value: object) -> None:
    """Raise RequestError unless the value is an integer from 0 to MAX_ID."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= MAX_ID:
        raise RequestError(field, value, f"an integer from 0 to {MAX_ID} is needed")


def _check_forward(times: IntArray) -> None:
    if (back := np.flatnonzero(times[1:] < times[:-1])).size:
        at = int(back[0]) + 1
        raise RequestError(f"timestamps[{at}]", int(times[at]), f"time runs backwards from {times[at - 1]}")


def to_events(schema: EventSchema, first_event: int, columns: IntArray) -> Events:
    items, *features, actions, timestamps = columns
    return Events(first_event, items, actions, timestamps, dict(zip(schema.feature_names, features, strict=True)))


def _line(name: str, values: Ids) -> NDArray[np.integer]:
    """Return the values as a flat array of integers."""
    try:
        line = np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # a ragged list, or no list
        raise RequestError(name, values, "a flat list of integers is needed") from None
    if line.ndim != 1:
        raise RequestError(name, line.shape, "a flat list of integers is needed")
    if line.size and line.dtype.kind not in "iu":
        at = next((i for i, value in enumerate(values) if not _is_narrow(value)), 0)
        raise RequestError(f"{name}[{at}]", values[at], "integers of 64 bits are needed")
    return line


def _is_narrow(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) <= MAX_ID
