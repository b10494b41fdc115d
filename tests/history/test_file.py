import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from helmrec.errors import HistoryError, HistoryFull, HistoryUnavailable
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema
from helmrec.history.pages import PAGE_EVENTS
from helmrec.model.config import TableConfig
from tests.history.helpers import SCHEMA, events_of, same

FAST = HistoryConfig(sync="os")


def fill(path: Path, users: int, num: int = 300) -> None:
    with EmbeddedHistory(path, SCHEMA, FAST) as store:
        for user in range(users):
            store.append(user, 0, events_of(user, 0, num))


def a_file(path: Path) -> None:
    path.write_text("something")


def other_files(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("something")


def noise(path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").write_bytes(os.urandom(16_384))


def someone_elses_database(path: Path) -> None:
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")


@pytest.mark.parametrize("make", [a_file, other_files, noise, someone_elses_database])
def test_what_is_foreign_is_refused_and_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "place"
    make(path)
    before = {p.name: p.read_bytes() for p in path.iterdir() if "lock" not in p.name} if path.is_dir() else None
    with pytest.raises(HistoryError, match="place"):
        EmbeddedHistory(path, SCHEMA)
    if before is not None:
        assert {p.name: p.read_bytes() for p in path.iterdir() if "lock" not in p.name} == before


def test_a_place_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="file"):
        EmbeddedHistory(tmp_path / "file" / "deeper", SCHEMA)


def test_a_store_of_other_fields_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    other = EventSchema(num_items=10, num_actions=2, features=(TableConfig(name="colour", num_rows=3),))
    with pytest.raises(HistoryError, match=r"category.*colour"):
        EmbeddedHistory(tmp_path, other)
    fill(tmp_path, 0)  # and the refused one holds no lock


def test_there_is_one_writer(tmp_path: Path) -> None:
    with EmbeddedHistory(tmp_path, SCHEMA, FAST), pytest.raises(HistoryError, match="there can be one writer"):
        EmbeddedHistory(tmp_path, SCHEMA, FAST)
    with EmbeddedHistory(tmp_path, SCHEMA, FAST):
        pass


def test_changed_bytes_are_told_for_the_user_they_belong_to(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    items = np.asarray(events_of(7, PAGE_EVENTS + 4, 60).items)
    changed = items.copy()
    changed[30] ^= 4
    data = (tmp_path / "data.mdb").read_bytes()
    assert items.tobytes() in data
    (tmp_path / "data.mdb").write_bytes(data.replace(items.tobytes(), changed.tobytes()))  # in free pages, too
    with EmbeddedHistory(tmp_path, SCHEMA, FAST) as store:
        with pytest.raises(HistoryError, match=f"the history of user 7 is damaged from event {PAGE_EVENTS} on"):
            store.read_last(7, 300)
        with pytest.raises(HistoryError, match="user 7 is damaged"):
            store.check()
        for user in (6, 8):
            assert same(store.read_last(user, 300), events_of(user, 0, 300))
        assert store.delete(7)
        store.append(7, 0, events_of(7, 0, 5))
        store.check()


@pytest.mark.parametrize("missing_pages", [1, 2, 3, 5, 10, 30, 50])
def test_a_file_cut_short_is_told_and_nothing_false_is_read(tmp_path: Path, missing_pages: int) -> None:
    fill(tmp_path, 20)
    data = tmp_path / "data.mdb"
    os.truncate(data, data.stat().st_size - 4_096 * missing_pages)
    try:
        with EmbeddedHistory(tmp_path, SCHEMA, FAST) as store:
            num_damaged = 0
            for user in range(20):
                try:
                    assert same(store.read_last(user, 300), events_of(user, 0, 300))
                except HistoryError:
                    num_damaged += 1
            if num_damaged:
                with pytest.raises(HistoryError):
                    store.check()
            else:  # the last pages may be free ones
                assert missing_pages == 1
    except HistoryError:
        pass


def test_half_a_page_is_never_there_by_itself(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    data = tmp_path / "data.mdb"
    os.truncate(data, data.stat().st_size - 100)
    with pytest.raises(HistoryError, match="is cut short"):
        EmbeddedHistory(tmp_path, SCHEMA, FAST)


def test_the_map_grows_by_itself_while_readers_read(tmp_path: Path) -> None:
    small = HistoryConfig(sync="os", map_bytes=1 << 20, max_bytes=1 << 30)
    with EmbeddedHistory(tmp_path, SCHEMA, small) as store:
        waiting = [store.submit(user, 0, events_of(user, 0, 300)) for user in range(600)]
        for user, done in enumerate(waiting):
            done.result()
            assert same(store.read_last(user, 5), events_of(user, 295, 5))
        assert store._file.map_bytes >= 4 << 20
        store.check()


def test_a_full_store_refuses_events_but_still_forgets_users(tmp_path: Path) -> None:
    tiny = HistoryConfig(sync="os", map_bytes=1 << 20, max_bytes=1 << 20)
    with EmbeddedHistory(tmp_path, SCHEMA, tiny) as store:
        kept = 0
        with pytest.raises(HistoryFull, match="max_bytes, 1048576"):
            for user in range(1_000):
                store.append(user, 0, events_of(user, 0, 300))
                kept += 1
        assert 20 < kept < 1_000
        assert list(store.user_ids()) == list(range(kept))
        assert same(store.read_last(kept - 1, 300), events_of(kept - 1, 0, 300))
        mixed = [store.submit(kept + i, 0, events_of(kept + i, 0, 50_000)) for i in range(3)]
        assert all(isinstance(m.exception(), HistoryFull) for m in mixed)
        for user in range(10):
            assert store.delete(user)
        store.append(5, 0, events_of(5, 0, 300))
        store.check()


def test_a_store_that_is_filled_and_emptied_again_and_again_stays_within_its_bound(tmp_path: Path) -> None:
    bound = 1 << 20
    tiny = HistoryConfig(sync="os", map_bytes=bound, max_bytes=bound)
    sizes, first_user = [], 0
    with EmbeddedHistory(tmp_path, SCHEMA, tiny) as store:
        for _ in range(12):
            with pytest.raises(HistoryFull):
                for user in range(first_user, first_user + 1_000):
                    store.append(user, 0, events_of(user, 0, 300))
            sizes.append((tmp_path / "data.mdb").stat().st_size)
            some = list(store.user_ids())[::2]
            for kept in some:
                assert store.delete(kept)
            first_user += 1_000
        store.check()
    assert max(sizes) <= bound + (128 << 10), "what deletes need for a moment, and no more"


def test_a_store_that_was_removed_or_replaced_acknowledges_nothing(tmp_path: Path) -> None:
    data = tmp_path / "place" / "data.mdb"
    with EmbeddedHistory(tmp_path / "place", SCHEMA, FAST) as store:
        store.append(1, 0, events_of(1, 0, 3))
        data.rename(tmp_path / "aside")
        for call in (store.ping, lambda: store.append(1, 3, events_of(1, 3, 3))):
            with pytest.raises(HistoryUnavailable, match="cannot be found any more"):
                call()
        data.write_bytes(b"")
        with pytest.raises(HistoryUnavailable, match="was replaced"):
            store.ping()
        (tmp_path / "aside").rename(data)
        store.ping()
        assert store.append(1, 3, events_of(1, 3, 3)).version == 6, "it is where it was"
        store.check()
