"""The log of row updates: what was acknowledged is there after the end of a process, and damage is never served."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from helmrec.errors import ConfigError, ModelError, RowLogError
from helmrec.memory.row_log import FollowedLog, RowLog

ROW_BYTES, BEGIN = 12, 40
LAST_BYTES = 40 + 3 * (8 + ROW_BYTES)  # of the last update that `written` writes


def make(path: Path, version: int = 7) -> RowLog:
    return RowLog(path, version, ROW_BYTES, num_rows=100)


def values(*numbers: int) -> np.ndarray:
    return np.array([[number] * ROW_BYTES for number in numbers], np.uint8)


def replayed(path: Path, version: int = 7) -> dict[int, int]:
    """The value of each row after a replay, read at its offset."""
    log, found = make(path, version), dict[int, int]()
    log.replay(lambda rows, slots: found.update(zip(rows.tolist(), slots.tolist(), strict=True)))
    data = path.read_bytes() if path.exists() else b""
    offsets = {row: int(log.offsets(np.array([slot]))[0]) for row, slot in found.items()}
    log.close()
    assert all(len(set(data[at : at + ROW_BYTES])) == 1 for at in offsets.values())
    return {row: data[at] for row, at in offsets.items()}


def written(path: Path, *, is_synced: bool = False) -> None:
    log = make(path)
    assert log.append(np.array([5, 9]), values(1, 2)).tolist() == [0, 1]
    assert log.append(np.array([9, 3, 99]), values(4, 5, 6)).tolist() == [2, 3, 4]
    if is_synced:
        log.sync()
    log.close()


def test_no_log_is_made_before_the_first_update(tmp_path: Path) -> None:
    log = make(tmp_path / "log")
    log.replay(lambda rows, slots: pytest.fail("nothing was written"))
    log.close()
    assert not (tmp_path / "log").exists()


def test_the_latest_value_of_each_row_is_found_again(tmp_path: Path) -> None:
    written(tmp_path / "log")
    assert replayed(tmp_path / "log") == {5: 1, 9: 4, 3: 5, 99: 6}


def test_a_log_is_continued_after_a_replay(tmp_path: Path) -> None:
    written(tmp_path / "log")
    log = make(tmp_path / "log")
    log.replay(lambda rows, slots: None)
    log.append(np.array([5]), values(8))
    log.close()
    assert replayed(tmp_path / "log") == {5: 8, 9: 4, 3: 5, 99: 6}


def test_an_update_that_was_cut_short_is_as_if_it_never_came(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path)
    data = path.read_bytes()
    for end in range(len(data) - LAST_BYTES, len(data)):
        path.write_bytes(data[:end])
        assert replayed(path) == {5: 1, 9: 2}
    for end in range(BEGIN):  # the header
        path.write_bytes(data[:end])
        assert replayed(path) == {}


def test_a_torn_tail_of_several_updates_is_cut_off_where_it_begins(tmp_path: Path) -> None:
    """After a loss of power, any page that was not synced may be missing, also before pages that are there."""
    path = tmp_path / "log"
    log = make(path)
    log.append(np.array([5, 9]), values(1, 2))
    log.sync()
    whole = log.num_bytes
    for number in range(4):
        log.append(np.array([9, 3]), values(10 + number, 20 + number))
    log.close()
    data, one = path.read_bytes(), 40 + 2 * (8 + ROW_BYTES)
    for at in range(whole, len(data)):
        torn = bytearray(data)
        torn[at : at + 7] = bytes(len(torn[at : at + 7]))  # zeros, as a file system leaves them
        path.write_bytes(torn)
        last = (at - whole) // one - 1
        if torn != data:
            assert replayed(path) == ({5: 1, 9: 10 + last, 3: 20 + last} if last >= 0 else {5: 1, 9: 2})
            assert path.stat().st_size == whole + (last + 1) * one, "the log goes on behind what is whole"


def test_damage_of_a_synced_update_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, is_synced=True)
    data = bytearray(path.read_bytes())
    for at in [*range(BEGIN - 8), *range(BEGIN, len(data))]:
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(ModelError, match=str(path)):
            replayed(path)
        data[at] ^= 1
    for end in range(BEGIN, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(ModelError, match=f"cut short: {len(data)} bytes were acknowledged, and it has {end}"):
            replayed(path)


def test_updates_of_one_time_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, synced, gate = make(tmp_path / "log"), list[int](), threading.Event()

    def sync(_: int) -> None:
        synced.append(log.num_bytes)
        gate.wait(10)

    monkeypatch.setattr("os.fdatasync", sync)
    log.append(np.array([1]), values(1))
    threads = [threading.Thread(target=log.sync)]
    threads[0].start()
    while not synced:
        time.sleep(0.001)
    for number in range(5):  # while the first is under way
        log.append(np.array([number]), values(number))
        threads.append(threading.Thread(target=log.sync))
        threads[-1].start()
    gate.set()
    for thread in threads:
        thread.join()
    assert len(synced) <= 3
    assert synced[-1] == log.num_bytes
    log.close()


def test_after_a_failed_sync_nothing_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make(tmp_path / "log")
    log.append(np.array([1]), values(1))

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", fail)
        with pytest.raises(RowLogError, match="Input/output error; the update is visible"):
            log.sync()
    with pytest.raises(RowLogError, match="Input/output error; the update is visible"):
        log.sync()
    with pytest.raises(RowLogError, match="Input/output error; no row was changed"):
        log.append(np.array([2]), values(2))
    log.close()


def follow(log: FollowedLog) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows, first bytes and slots of all new updates."""
    found = []
    while (update := log.next_update()) is not None:
        slots = log.append(update.rows, update.values)
        found.append((update.rows.tolist(), update.values[:, 0].tolist(), slots.tolist()))
    return found


def test_a_log_is_followed_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log, early = make(path), FollowedLog(path, 7, ROW_BYTES, 100)
    early.replay(lambda rows, slots: pytest.fail("nothing was written"))
    assert follow(early) == []
    log.append(np.array([5, 9]), values(1, 2))
    assert follow(early) == [([5, 9], [1, 2], [0, 1])]
    late, found = FollowedLog(path, 7, ROW_BYTES, 100), list[tuple[list[int], list[int]]]()
    late.replay(lambda rows, slots: found.append((rows.tolist(), slots.tolist())))
    assert found == [([5, 9], [0, 1])]
    for value in (3, 4):
        log.append(np.array([9]), values(value))
        log.sync()
    for each in (early, late):
        assert follow(each) == [([9], [3], [2]), ([9], [4], [3])]
        assert each.offsets(np.arange(4)).tolist() == log.offsets(np.arange(4)).tolist()
        assert each.num_bytes == log.num_bytes
    log.close()


def test_an_update_that_is_being_written_is_followed_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path)
    data, log = path.read_bytes(), FollowedLog(path, 7, ROW_BYTES, 100)
    for end in range(len(data) - LAST_BYTES):
        path.write_bytes(data[:end])
        follow(log)
    for end in range(len(data) - LAST_BYTES, len(data)):
        path.write_bytes(data[:end])
        follow(log)
        assert log.num_rows == 2
        assert path.stat().st_size == end, "a follower changes nothing"
    path.write_bytes(data)
    assert follow(log) == [([9, 3, 99], [4, 5, 6], [2, 3, 4])]


def test_a_follower_does_not_pass_damage(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, is_synced=True)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    log = FollowedLog(path, 7, ROW_BYTES, 100)
    with pytest.raises(ModelError, match="corrupt"):
        follow(log)


def test_a_log_of_another_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "log")
    with pytest.raises(ModelError, match="version 7, not 8"):
        replayed(tmp_path / "log", version=8)


def test_two_engines_cannot_write_one_log(tmp_path: Path) -> None:
    log = make(tmp_path / "log")
    log.append(np.array([1]), values(1))
    with pytest.raises(ConfigError, match="in use by another engine"):
        make(tmp_path / "log").replay(lambda rows, slots: None)
    log.close()


def test_a_failed_append_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    log = make(path)
    log.append(np.array([1]), values(1))

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", fail)
        with pytest.raises(RowLogError, match="No space left"):
            log.append(np.array([2]), values(2))
    assert log.append(np.array([3]), values(3)).tolist() == [1]
    log.close()
    assert replayed(path) == {1: 1, 3: 3}


@pytest.mark.parametrize("has_updates", [False, True])
def test_a_log_whose_header_could_not_be_written_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_updates: bool
) -> None:
    path, log = tmp_path / "log", make(tmp_path / "log")
    if has_updates:
        log.append(np.array([5]), values(1))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.pwrite", full)
        if has_updates:
            with pytest.raises(OSError, match="No space"):
                log.discard()
        with pytest.raises(RowLogError, match="No space left"):
            log.append(np.array([7]), values(2))
    assert log.append(np.array([9]), values(3)).tolist() == [0]
    log.sync()
    log.close()
    assert replayed(path) == {9: 3}


def test_a_discarded_log_is_empty(tmp_path: Path) -> None:
    written(tmp_path / "log")
    log = make(tmp_path / "log")
    log.replay(lambda rows, slots: None)
    log.discard()
    log.close()
    assert replayed(tmp_path / "log") == {}
