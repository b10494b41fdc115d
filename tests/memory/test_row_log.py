"""The log of row updates: what was acknowledged is there after the end of a process, and damage is never served."""

from pathlib import Path

import numpy as np
import pytest

from helmrec.errors import ConfigError, ModelError, RowLogError
from helmrec.memory.row_log import RowLog

ROW_BYTES = 12


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


def written(path: Path) -> None:
    log = make(path)
    assert log.append(np.array([5, 9]), values(1, 2)).tolist() == [0, 1]
    assert log.append(np.array([9, 3, 99]), values(4, 5, 6)).tolist() == [2, 3, 4]
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
    first_end = len(data) - (40 + 3 * (8 + ROW_BYTES))
    for end in range(first_end, len(data)):
        path.write_bytes(data[:end])
        assert replayed(path) == {5: 1, 9: 2}
    for end in range(32):  # the header
        path.write_bytes(data[:end])
        assert replayed(path) == {}


def test_damage_before_the_last_update_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path)
    data = bytearray(path.read_bytes())
    for at in range(len(data) - 3 * (8 + ROW_BYTES) - 40):
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(ModelError, match=str(path)):
            replayed(path)
        data[at] ^= 1


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


def test_a_discarded_log_is_empty(tmp_path: Path) -> None:
    written(tmp_path / "log")
    log = make(tmp_path / "log")
    log.replay(lambda rows, slots: None)
    log.discard()
    log.close()
    assert replayed(tmp_path / "log") == {}
