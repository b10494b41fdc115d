"""Tables in shared memory: what is read is what the model's files hold, and wrong files are named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.config import FixedRowDtype
from helmrec.errors import ConfigError, ModelError
from helmrec.model import table_memory
from helmrec.model.folder import find_rows, read_manifest, table_file
from helmrec.model.shared_tables import SharedTables, row_bytes_of, values_of_bytes
from helmrec.model.table_memory import TableFiles, TableMemory
from helmrec.model.weights import init_model, load_dense, load_model
from helmrec.types import RowPosition
from tests.helpers import tiny_config

START = RowPosition(3)


def make(tmp_path: Path, **options: Any) -> Path:
    init_model(tmp_path / "model", tiny_config(**options))
    return tmp_path / "model"


@pytest.fixture(params=["float32", "bfloat16", "float16", "odd"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "odd":  # rows of 22 bytes at a stride of 32
        return make(tmp_path, row_dtype="float16", row_dim=11)
    return make(tmp_path, row_dtype=request.param)


@pytest.fixture
def files(folder: Path) -> Iterator[TableFiles]:
    files = TableFiles.create(load_model(folder).config)
    yield files
    files.close()


def load(folder: Path, files: TableFiles, seen: list[tuple[int, int]] | None = None) -> TableMemory:
    config = read_manifest(folder).model
    memory = TableMemory(config, files)
    spans = {table.name: find_rows(folder, table, config) for table in config.tables}
    memory.load(spans, START, lambda done, total: None if seen is None else seen.append((done, total)))
    return memory


def test_engines_read_what_the_files_hold(folder: Path, files: TableFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_memory, "_CHUNK_BYTES", 300)
    seen: list[tuple[int, int]] = []
    load(folder, files, seen)
    shared, model = SharedTables(load_model(folder).config, files), load_model(folder)
    for name, rows in model.tables.items():
        assert torch.equal(shared.master.tables[name], rows)
    total = model.config.num_rows * model.config.row_bytes
    assert seen[-1] == (total, total)
    assert len(seen) > len(model.tables), "in parts"
    assert shared.journal.position == START
    loaded = load_dense(folder, shared)
    assert loaded.version == model.version
    assert loaded.dense.keys() == model.dense.keys()
    assert loaded.tables["item"].data_ptr() == shared.master.tables["item"].data_ptr(), "no copy"


@pytest.mark.parametrize("code", ["fp8_e4m3", "int8"])
def test_rows_are_rounded_as_they_are_read(folder: Path, code: FixedRowDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch rounds them, in less memory; an update and a value of it survive the journal."""
    monkeypatch.setattr(table_memory, "_CHUNK_BYTES", 300)
    config, model = read_manifest(folder).model, load_model(folder)
    files = TableFiles.create(config, code)
    memory = TableMemory(config, files, code)
    spans = {table.name: find_rows(folder, table, config) for table in config.tables}
    memory.load(spans, START, lambda done, total: None)
    shared = SharedTables(config, files, code)
    codec = shared.master.codec
    assert codec.code == code
    assert memory.num_bytes == config.num_rows * config.record_bytes(code)
    for name, rows in model.tables.items():
        assert torch.equal(shared.master.tables[name], codec.encode(rows))
    new = codec.encode(torch.randn(2, config.row_dim).to(codec.dtype))
    memory.journal.enter(np.array([4, 1]), row_bytes_of(new), START)
    entered = values_of_bytes(memory.journal.entry().values, codec)
    assert np.array_equal(entered, codec.decode(new, torch.float32).numpy())
    memory.journal.write(memory.write)
    assert torch.equal(shared.master.gather(np.array([4, 1])), new)
    loaded = load_dense(folder, shared)
    assert loaded.tables["item"].data_ptr() == shared.master.tables["item"].data_ptr(), "no copy"
    files.close()


def test_a_second_keeper_reads_nothing_and_completes_what_was_begun(folder: Path, files: TableFiles) -> None:
    first = load(folder, files)
    config = load_model(folder).config
    rows, values = np.array([4, 1]), np.full((2, config.row_bytes), 60, np.uint8)
    first.journal.enter(rows, values, RowPosition(9))
    with pytest.raises(InterruptedError):
        first.journal.write(lambda rows, values: _raise(InterruptedError()))
    second = TableMemory(config, files)
    second.load({}, START, lambda done, total: None)
    assert second.journal.position == RowPosition(9)
    assert (SharedTables(config, files).master.gather(rows).view(torch.uint8) == 60).all()


def _raise(error: Exception) -> None:
    raise error


def test_an_update_is_seen_by_all_and_does_not_reach_the_file(folder: Path, files: TableFiles) -> None:
    before = (folder / table_file("item")).read_bytes()
    keeper = load(folder, files)
    config = load_model(folder).config
    engines = [SharedTables(config, files).master for _ in range(2)]
    old = engines[0].gather(np.array([0, 2]))
    keeper.journal.enter(np.array([1]), np.full((1, config.row_bytes), 60, np.uint8), START)
    keeper.journal.write(keeper.write)
    for master in engines:
        assert (master.gather(np.array([1])).view(torch.uint8) == 60).all()
        assert torch.equal(master.gather(np.array([0, 2])), old)
        assert master.is_shared
    assert (folder / table_file("item")).read_bytes() == before


@pytest.mark.parametrize("row", [0, 17, 49])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_that_is_not_finite_is_named(
    tmp_path: Path, row: int, value: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_memory, "_CHUNK_BYTES", 100)
    folder = make(tmp_path, row_dtype=dtype)
    config = load_model(folder).config
    span = find_rows(folder, config.tables[0], config)
    number = torch.tensor([value], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    with span.path.open("r+b") as file:
        file.seek(span.start + (row + 1) * span.row_bytes - len(number))
        file.write(number)
    files = TableFiles.create(config)
    with pytest.raises(ModelError, match=f"table 'item': row {row} holds values that are not finite"):
        load(folder, files)
    files.close()


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path)
    config = load_model(folder).config
    span = find_rows(folder, config.tables[0], config)
    spans, memory = {"item": span}, TableMemory(config, files := TableFiles.create(config))
    with span.path.open("r+b") as file:
        file.truncate(span.start + 10)
    with pytest.raises(ModelError, match=r"ends .* bytes early"):
        memory.load(spans, START, lambda done, total: None)
    files.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"\xff" * 8 + data[8:], "header has"),
        (lambda data: data[:8] + b"?" + data[9:], "not a valid safetensors file"),
        (lambda data: data.replace(b'"F32"', b'"F16"'), "one tensor `rows` of F32"),
        (lambda data: data.replace(b'"rows"', b'"cols"'), "not a valid safetensors file"),
        (lambda data: data[:-1], "one tensor `rows`"),
    ],
)
def test_a_file_of_other_rows_is_named(tmp_path: Path, change: Any, message: str) -> None:
    folder = make(tmp_path)
    config, path = load_model(folder).config, folder / table_file("item")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        find_rows(folder, config.tables[0], config)


def test_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    files = TableFiles.create(tiny_config())
    with pytest.raises(ConfigError, match="shared tables must have"):
        TableMemory(tiny_config(row_dim=64), files)
    files.close()
