"""Which key a store's pages are sealed with: kept by the store, or configured; never mixed up in silence."""

import logging
from pathlib import Path

import lmdb
import pytest
from pydantic import SecretStr

from helmrec.errors import ConfigError, HistoryError
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.identity import Found, check_identity
from tests.history.helpers import SCHEMA, events_of, same
from tests.history.places import Open

SECRET = "correct horse battery staple, thrice"
SEALED = HistoryConfig(sync="os", secret=SecretStr(SECRET))
OTHER = HistoryConfig(sync="os", secret=SecretStr(SECRET[::-1]))
OWN = HistoryConfig(sync="os")


@pytest.mark.parametrize("config", [OWN, SEALED], ids=["own key", "secret"])
def test_a_store_is_read_again_with_the_key_it_was_made_with(opened: Open, config: HistoryConfig) -> None:
    with opened(config) as store:
        store.append(1, 0, events_of(1, 0, 200))
        state = store.state(1)
    with opened(config) as store:
        assert store.state(1) == state
        assert store.append(1, 200, events_of(1, 200, 3)).version == 203
        assert same(store.read_last(1, 999), events_of(1, 0, 203))
        store.check()


@pytest.mark.parametrize(
    ("made_with", "opened_with", "reason"),
    [
        (OWN, SEALED, "was made without history_secret"),
        (SEALED, OWN, "was made with history_secret"),
        (SEALED, OTHER, "was made with another history_secret"),
    ],
)
def test_a_store_of_another_key_is_refused_and_stays_as_it_is(
    opened: Open, made_with: HistoryConfig, opened_with: HistoryConfig, reason: str
) -> None:
    with opened(made_with) as store:
        store.append(1, 0, events_of(1, 0, 5))
    with pytest.raises(HistoryError, match=reason) as refused:
        opened(opened_with)
    assert SECRET not in str(refused.value)
    with opened(made_with) as store:
        assert same(store.read_last(1, 9), events_of(1, 0, 5))


def test_stores_with_one_secret_agree_on_seals_and_others_do_not(tmp_path: Path) -> None:
    seals = []
    for name, config in (("a", SEALED), ("b", SEALED), ("c", OTHER), ("d", OWN), ("e", OWN)):
        with EmbeddedHistory(tmp_path / name, SCHEMA, config) as store:
            store.append(1, 0, events_of(1, 0, 5))
            state = store.state(1)
            assert state is not None
            seals.append(state.seal)
    assert seals[0] == seals[1]
    assert len(set(seals)) == 4


def test_a_later_process_needs_the_secret_of_the_first(tmp_path: Path) -> None:
    with EmbeddedHistory(tmp_path, SCHEMA, SEALED) as store:
        store.append(1, 0, events_of(1, 0, 5))
        state = store.state(1)
    with EmbeddedHistory(tmp_path, SCHEMA, SEALED) as reader:
        assert reader.state(1) == state
        assert same(reader.read_last(1, 9), events_of(1, 0, 5))
    with pytest.raises(HistoryError, match="was made with history_secret"):
        EmbeddedHistory(tmp_path, SCHEMA)


@pytest.mark.parametrize(
    "garbage", [b"", b"nonsense", b"[1]", b"\xff\xfe", b'{"format": 1, "features": ["category"]}', b'{"format": 3}']
)
def test_a_description_that_is_none_is_refused(garbage: bytes) -> None:
    with pytest.raises(HistoryError, match="was made for"):
        check_identity("place", Found(garbage, bytes(32)), SCHEMA, None)


@pytest.mark.parametrize(("key", "reason"), [(None, "is missing"), (b"short", "is missing"), (bytes(32), "is another")])
def test_a_store_whose_own_key_is_lost_or_changed_says_so(tmp_path: Path, key: bytes | None, reason: str) -> None:
    EmbeddedHistory(tmp_path, SCHEMA, OWN).close()
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True) as txn:
        txn.delete(b"helmrec-history-key")
        if key is not None:
            txn.put(b"helmrec-history-key", key)
    with pytest.raises(HistoryError, match=f"is damaged: .*{reason}"):
        EmbeddedHistory(tmp_path, SCHEMA, OWN)


def test_the_secret_is_in_no_file_message_or_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), EmbeddedHistory(tmp_path, SCHEMA, SEALED) as store:
        store.append(1, 0, events_of(1, 0, 5))
    assert SECRET not in caplog.text
    assert all(SECRET.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert SECRET not in repr(SEALED)


def test_a_short_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match=r"secret: .*at least 32") as refused:
        HistoryConfig(secret="too short a secret")
    assert "too short" not in str(refused.value)
