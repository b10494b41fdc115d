"""Tables grow under a store, and never shrink while it holds events."""

from pathlib import Path

import pytest

from helmrec.errors import HistoryError, RequestError, TablesTooSmall
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema, NewEvents
from helmrec.history.sizes import check_sizes, pack_sizes, sizes_of, unpack_sizes
from helmrec.history.store import HistoryStore
from helmrec.model.config import TableConfig
from tests.history.helpers import SCHEMA, events_of
from tests.history.places import Open


def of(num_items: int = 1_000, num_categories: int = 20, num_actions: int = 4) -> EventSchema:
    category = TableConfig(name="category", num_rows=num_categories)
    return EventSchema(num_items=num_items, num_actions=num_actions, features=(category,))


def item(number: int) -> NewEvents:
    return NewEvents([number], [0], [5_000], {"category": [0]})


def test_a_store_follows_tables_that_grew(store: HistoryStore) -> None:
    store.append(1, 0, events_of(1, 0, 3))
    with pytest.raises(RequestError, match=r"items\[0\]: values run from 0 to 999, got 1500"):
        store.append(1, 3, item(1_500))
    store.follow(of(2_000))
    assert store.append(1, 3, item(1_500)).version == 4
    assert store.sizes() == {"items": 2_000, "features['category']": 20, "actions": 4}
    with pytest.raises(RequestError, match="values run from 0 to 1999"):
        store.append(1, 4, item(2_000))


@pytest.mark.parametrize(
    ("smaller", "told"),
    [
        (of(num_items=999), "table 'item' has 999 rows, .* were taken for 1000"),
        (of(num_items=5_000, num_categories=19), "table 'category' has 19 rows, .* were taken for 20"),
        (of(num_actions=3), "table 'actions' has 3 rows, .* were taken for 4"),
    ],
    ids=["items", "a feature", "actions"],
)
def test_tables_that_shrank_are_refused_while_there_are_events(opened: Open, smaller: EventSchema, told: str) -> None:
    with opened() as store:
        store.append(1, 0, events_of(1, 0, 3))
        with pytest.raises(TablesTooSmall, match=told):
            store.follow(smaller)
        assert store.append(1, 3, item(999)).version == 4, "nothing has changed"
    with pytest.raises(TablesTooSmall, match=told):
        opened(schema=smaller)
    with opened() as again:
        assert again.state(1) is not None
        assert again.delete(1)
    with opened(schema=smaller) as without_users:
        assert without_users.sizes() == sizes_of(smaller)


def test_other_fields_cannot_be_followed(store: HistoryStore) -> None:
    with pytest.raises(HistoryError, match="keeps"):
        store.follow(EventSchema(num_items=5_000, num_actions=4))


def test_appends_on_their_way_are_kept_when_tables_grow(store: HistoryStore) -> None:
    waiting = [store.submit(user, 0, events_of(user, 0, 40)) for user in range(50)]
    store.follow(of(3_000))
    waiting += [store.submit(user, 40, item(2_999)) for user in range(50)]
    assert [done.result().version for done in waiting] == [40] * 50 + [41] * 50


def test_a_store_of_before_sizes_were_noted_takes_those_it_is_opened_with(tmp_path: Path) -> None:
    with EmbeddedHistory(tmp_path, SCHEMA) as store:
        store.append(1, 0, events_of(1, 0, 3))
        store._file.write(lambda txn: txn.delete(b"helmrec-history-sizes"))
        assert store.sizes() == sizes_of(SCHEMA)
    with EmbeddedHistory(tmp_path, of(700)) as store:
        assert store.sizes()["items"] == 700
    with pytest.raises(TablesTooSmall):
        EmbeddedHistory(tmp_path, of(600))
    EmbeddedHistory(tmp_path, of(700)).close()


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"items": "many"}', b"\xff"])
def test_damaged_sizes_are_told(damaged: bytes) -> None:
    assert unpack_sizes(pack_sizes({"items": 4}), "here") == {"items": 4}
    with pytest.raises(HistoryError, match="here: the sizes of its tables are damaged"):
        unpack_sizes(damaged, "here")


def test_fields_that_were_not_noted_do_not_matter() -> None:
    check_sizes({}, SCHEMA, "here")
    check_sizes({"shoes": 9}, SCHEMA, "here")
