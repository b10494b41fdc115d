"""A small schema, and events that are a function of user and index, so that any reader knows what must be there."""

import numpy as np

from helmrec.history.events import Events, EventSchema, NewEvents
from helmrec.model.config import TableConfig

SCHEMA = EventSchema(num_items=1_000, num_actions=4, features=(TableConfig(name="category", num_rows=20),))


def events_of(user_id: int, first: int, num: int) -> NewEvents:
    """Events [first, first + num) of a user."""
    index = np.arange(first, first + num)
    salt = user_id % 9_973 + 1
    mixed = (index * 7_919 + index * index * salt + salt * 1_047) % 1_009 % 1_000
    return NewEvents(
        items=mixed, actions=mixed % 4, timestamps=1_000 + 5 * (index // 3), features={"category": mixed % 20}
    )


def same(found: Events, wanted: NewEvents) -> bool:
    return (
        np.array_equal(found.items, wanted.items)
        and np.array_equal(found.actions, wanted.actions)
        and np.array_equal(found.timestamps, wanted.timestamps)
        and found.features.keys() == wanted.features.keys()
        and all(np.array_equal(found.features[name], wanted.features[name]) for name in wanted.features)
    )
