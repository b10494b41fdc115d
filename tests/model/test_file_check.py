"""Checksums of model files that are checked beside serving."""

from pathlib import Path

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.errors import EngineClosed, ModelError
from helmrec.model.file_check import FileCheck
from helmrec.model.folder import table_file
from helmrec.model.weights import save_model
from tests.helpers import random_request, tiny_model


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    model = tiny_model()
    save_model(tmp_path / "model", model.config, model.dense, model.tables)
    return tmp_path / "model"


def spoil(folder: Path) -> Path:
    path = folder / table_file("item")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_right_files_pass(folder: Path) -> None:
    found: list[ModelError] = []
    check = FileCheck(folder, found.append, larger_than=0)
    check.join()
    stats = check.stats()
    check.close()
    assert not found
    assert not stats.is_corrupt
    assert stats.done_bytes == stats.total_bytes > 0


def test_a_corrupt_file_is_named(folder: Path) -> None:
    path, found = spoil(folder), list[ModelError]()
    check = FileCheck(folder, found.append, larger_than=0)
    check.join()
    assert check.stats().is_corrupt
    assert str(path) in str(found[0])


def test_small_files_are_left_to_the_start(folder: Path) -> None:
    spoil(folder)
    check = FileCheck(folder, lambda error: pytest.fail(str(error)))
    check.close()
    assert check.stats().total_bytes == 0


def test_an_engine_on_a_corrupt_file_serves_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmrec.model.weights.VERIFY_BYTES", 0)
    monkeypatch.setattr(FileCheck.__init__, "__defaults__", (0,))
    path, config = spoil(folder), EngineConfig(device="cpu", pool_bytes="4MiB")
    with pytest.raises(ModelError, match="is corrupt"):
        Engine.from_model(folder, config.model_copy(update={"verify": "start"}))
    with Engine.from_model(folder, config.model_copy(update={"verify": "never"})) as engine:
        assert engine.stats().file_check is None
    with Engine.from_model(folder, config) as engine:
        assert engine._file_check is not None
        engine._file_check.join()
        with pytest.raises(EngineClosed, match=path.name):
            engine.rank([random_request(np.random.default_rng(0), engine.model_config)])
