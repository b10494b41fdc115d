"""A snapshot is the model with the rows of a position, and says which."""

import fcntl
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.deltas.consumer import StreamStart
from helmrec.deltas.folder import DeltaFolder
from helmrec.deltas.producer import DeltaProducer
from helmrec.deltas.schedule import SnapshotPlan, is_due, make_snapshot, scheduled
from helmrec.deltas.snapshot import POSITION, newest_snapshot, read_start, snapshot_name, snapshots, write_snapshot
from helmrec.errors import ConfigError, DeltaGap, ModelError
from helmrec.model.weights import load_model, save_model
from tests.helpers import tiny_model
from tests.serve.asgi import wait_for

NUM = 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tiny_model()
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    return tmp_path / "tiny"


@pytest.fixture
def deltas(tmp_path: Path) -> DeltaFolder:
    rng = np.random.default_rng(0)
    with DeltaProducer(str(tmp_path / "deltas")) as producer:
        for step in range(NUM):
            table, size = ("item", 300) if step % 2 else ("category", 20)
            ids = rng.choice(size, 5, replace=False)
            producer.push(table, ids, rng.standard_normal((5, 16)), step=step, add=step % 3 == 0)
    return DeltaFolder(tmp_path / "deltas")


def expected(deltas: DeltaFolder, to: int) -> dict[str, torch.Tensor]:
    tables = {name: rows.clone() for name, rows in tiny_model().tables.items()}
    for delta in deltas.read(0):
        for part in delta.parts if delta.sequence <= to else ():
            for row, value in zip(part.ids, torch.from_numpy(np.array(part.values)), strict=True):
                old = tables[part.table][row]
                tables[part.table][row] = old + value if part.is_difference else value
    return tables


def test_a_snapshot_has_the_rows_of_its_position(model: Path, deltas: DeltaFolder, tmp_path: Path) -> None:
    before, seen = (model / "tables/item.safetensors").read_bytes(), []
    for to in (7, NUM):
        out = tmp_path / "snapshots" / snapshot_name(to)
        write_snapshot(model, deltas, out, to, lambda done, total: seen.append((done, total)))
        made, rows = load_model(out, verify=True), expected(deltas, to)
        assert all(torch.equal(made.tables[name], rows[name]) for name in rows)
        assert read_start(out) == StreamStart(deltas.stream(), to)
        assert seen[-1] == (to, to)
    assert (model / "tables/item.safetensors").read_bytes() == before, "the model stays as it was"
    assert newest_snapshot(tmp_path / "snapshots", model) == out
    assert read_start(model) == StreamStart()


def test_a_snapshot_goes_on_from_an_earlier_one(model: Path, deltas: DeltaFolder, tmp_path: Path) -> None:
    write_snapshot(model, deltas, tmp_path / "a", 9)
    deltas.trim(9)
    write_snapshot(tmp_path / "a", deltas, tmp_path / "b")
    with pytest.raises(DeltaGap, match="delta 1 is missing"):
        write_snapshot(model, deltas, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert newest_snapshot(tmp_path, model) == tmp_path / "b"


def test_snapshots_of_other_models_and_unfinished_ones_are_ignored(
    model: Path, deltas: DeltaFolder, tmp_path: Path
) -> None:
    other = tiny_model(seed=1)
    save_model(tmp_path / "other", other.config, other.dense, other.tables)
    folder = tmp_path / "snapshots"
    write_snapshot(model, deltas, folder / "old", 3)
    write_snapshot(tmp_path / "other", deltas, folder / "other", 8)
    write_snapshot(model, deltas, folder / "new", 5)
    (folder / "new").rename(folder / ".new.partial")  # as a run that was killed leaves it
    assert newest_snapshot(folder, model) == folder / "old"
    assert newest_snapshot(tmp_path / "deltas", model) is None


def test_what_cannot_be_done_is_named(model: Path, deltas: DeltaFolder, tmp_path: Path) -> None:
    with pytest.raises(DeltaGap, match=f"from delta 0 of the model to {NUM}, got {NUM + 1}"):
        write_snapshot(model, deltas, tmp_path / "a", NUM + 1)
    with pytest.raises(ConfigError, match="a new folder"):
        write_snapshot(model, deltas, tmp_path / "deltas")
    with pytest.raises(ConfigError, match="row_snapshots must be a folder"):
        newest_snapshot(tmp_path / "none", model)
    empty = DeltaFolder(tmp_path / "empty", is_made=True)
    with pytest.raises(DeltaGap, match="holds no delta"):
        write_snapshot(model, empty, tmp_path / "a")
    (model / POSITION).write_text('{"sequence": -1}')
    with pytest.raises(ModelError, match=f"{POSITION} is damaged"):
        read_start(model)


def plan_of(model: Path, **more: Any) -> SnapshotPlan:
    return SnapshotPlan(model=model, deltas=str(model.parent / "deltas"), folder=model.parent / "snapshots", **more)


def push_one(deltas: DeltaFolder) -> None:
    with DeltaProducer(deltas.name) as producer:
        producer.push("item", [1], np.ones((1, 16)), step=producer.newest)


def positions(plan: SnapshotPlan) -> list[int]:
    return [position.sequence for position, _ in snapshots(plan.folder, plan.model)]


@pytest.mark.parametrize("trims", [False, True])
def test_old_snapshots_go_and_with_them_only_deltas_that_no_start_needs(
    model: Path, deltas: DeltaFolder, trims: bool
) -> None:
    plan = plan_of(model, keep=2, trims=trims)
    for newest in range(NUM, NUM + 4):
        made = make_snapshot(plan)
        assert made is not None
        assert made.sequence == newest
        assert make_snapshot(plan) is None, "no delta is newer"
        kept = positions(plan)
        assert kept == [at for at in (newest - 1, newest) if at >= NUM]
        first = next(deltas.read(0)).sequence
        assert first == (kept[0] + 1 if trims and len(kept) == 2 else 1), "what a kept snapshot needs is there"
        for at in kept:
            write_snapshot(plan.folder / snapshot_name(at), deltas, model.parent / "x")  # a start from it works
            shutil.rmtree(model.parent / "x")
        push_one(deltas)


def test_what_a_killed_process_left_is_cleared_up_and_two_never_write_at_once(model: Path, deltas: DeltaFolder) -> None:
    plan = plan_of(model)
    for left in (".00001.partial", ".00002.removed"):
        (plan.folder / left / "tables").mkdir(parents=True)
    with (plan.folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process writes a snapshot"):
            make_snapshot(plan)
    assert make_snapshot(plan) is not None
    assert sorted(each.name for each in plan.folder.iterdir()) == [".lock", snapshot_name(deltas.newest())]


def test_snapshots_are_written_by_schedule(model: Path, deltas: DeltaFolder) -> None:
    plan = plan_of(model, every_s=0.5)
    assert is_due(plan, time.time())
    with scheduled(plan, _nothing):
        wait_for(lambda: plan.folder.is_dir() and positions(plan) == [NUM])
        push_one(deltas)
        wait_for(lambda: positions(plan) == [NUM, NUM + 1])
    assert not is_due(plan_of(model, every_s=3_600), time.time()), "also after a restart"


def _nothing() -> None:
    """A process of its own must be able to import it."""
