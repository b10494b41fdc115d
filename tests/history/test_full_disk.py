"""A disk without room: what does not fit is refused as such, nothing acknowledged is lost, and it goes on after."""

import errno
import os
from pathlib import Path
from typing import Literal

import lmdb
import pytest

from helmrec.errors import DiskFull, HistoryError
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.file import HistoryFile
from tests.history.helpers import SCHEMA, events_of, same
from tests.history.limits import full_disk

NUM = 2_000


@pytest.mark.parametrize("sync", ["commit", "os"])
@pytest.mark.parametrize("spare_bytes", [0, 4_096, 100_000], ids=["none", "a page", "some"])
def test_what_does_not_fit_is_refused_and_fits_when_there_is_room(
    tmp_path: Path, sync: Literal["commit", "os"], spare_bytes: int
) -> None:
    with EmbeddedHistory(tmp_path, SCHEMA, HistoryConfig(sync=sync)) as store:
        store.append(0, 0, events_of(0, 0, NUM))
        kept = [0]
        with full_disk((tmp_path / "data.mdb").stat().st_size + spare_bytes):
            outcomes = {user: store.submit(user, 0, events_of(user, 0, NUM)).exception() for user in range(1, 8)}
            kept += [user for user, error in outcomes.items() if error is None]
            assert isinstance(outcomes[7], DiskFull), outcomes
            together = [store.submit(user, 0, events_of(user, 0, NUM)) for user in range(20, 30)]
            assert {type(done.exception()) for done in together} == {DiskFull}
            store.check()
        for user in (7, 60):
            store.append(user, 0, events_of(user, 0, NUM))
            kept.append(user)
        store.check()
        assert list(store.user_ids()) == kept
        assert all(same(store.read_last(user, NUM), events_of(user, 0, NUM)) for user in kept)


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), True),
        (lmdb.Error(f"mdb_put: {os.strerror(errno.EDQUOT)}"), True),
        (OSError(errno.ENOSPC, "no space"), True),
        (OSError(errno.EIO, "the disk is gone"), False),
        (lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EIO)}"), False),
        (lmdb.CorruptedError("mdb_get"), False),
    ],
    ids=str,
)
def test_a_disk_that_fails_is_not_taken_for_a_full_one(tmp_path: Path, error: Exception, is_full: bool) -> None:
    file = HistoryFile(tmp_path, SCHEMA, HistoryConfig())
    size = (tmp_path / "data.mdb").stat().st_size

    def fail(_: object) -> None:
        raise error

    with pytest.raises(HistoryError) as caught:
        file.write(fail)
    assert isinstance(caught.value, DiskFull) == is_full
    assert (tmp_path / "data.mdb").stat().st_size == size, "trying for room leaves the file as it was"
    file.close()
