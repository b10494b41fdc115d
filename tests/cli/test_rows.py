"""`helmrec rows`: what an operator and a trainer without Python do with a stream."""

import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from helmrec.cli.rows import rows_app
from helmrec.deltas.folder import DeltaFolder
from helmrec.deltas.producer import DeltaProducer
from helmrec.model.weights import load_model, save_model
from helmrec.serve.app import make_app
from helmrec.serve.node import make_port
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_model
from tests.serve.asgi import on_loopback, wait_for
from tests.serve.test_process_port import engine_config

IDS, VALUES = np.array([3, 5]), np.arange(32, dtype=np.float32).reshape(2, 16)


def call(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(rows_app, [str(each) for each in arguments])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".csv"])
def test_rows_of_a_file_are_pushed(tmp_path: Path, suffix: str) -> None:
    file, place = tmp_path / f"rows{suffix}", tmp_path / "deltas"
    if suffix == ".npz":
        np.savez(file, ids=IDS, values=VALUES)
    elif suffix == ".safetensors":
        save_file({"ids": IDS, "values": VALUES}, file)
    else:
        file.write_text("".join(f"{i},{','.join(map(str, row))}\n" for i, row in zip(IDS, VALUES, strict=True)))
    assert "2 rows of 'item' pushed, up to delta 1" in call("push", file, place, "--step", 7)
    assert "up to delta 2" in call("push", file, place, "--add", "--step", 8)
    first, second = DeltaFolder(place).read(0)
    assert np.array_equal(first.parts[0].ids, IDS)
    assert np.array_equal(first.parts[0].values, VALUES)
    assert (first.step, first.parts[0].is_difference, second.parts[0].is_difference) == (7, False, True)
    shown = call("tail", place)
    assert "1: step 7," in shown
    assert "2 differences of item" in shown


def test_a_model_is_pushed_and_shown(tmp_path: Path) -> None:
    made = tiny_model()
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    assert "pushed as delta 1" in call("push-model", tmp_path / "tiny", tmp_path / "deltas", "--step", 9)
    assert f"1: step 9, {time.strftime('%Y')}" in (shown := call("tail", tmp_path / "deltas"))
    assert "model /" in shown
    assert "error" in call("push-model", tmp_path / "none", tmp_path / "deltas", code=2)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", b"1,2\nx,3\n", "line 2: an id and numbers are needed, got 'x,3'"),
        ("a.csv", b"1,2\n2,3,4\n", "line 2: 1 values are needed, as in line 1, got 2"),
        ("a.npz", b"PK", "it cannot be read"),
        ("a.safetensors", b"\x80\x04", "it cannot be read"),
        ("a.txt", b"", "a name that ends in .safetensors, .npz or .csv is needed"),
    ],
)
def test_a_file_that_is_none_is_named_and_nothing_is_pushed(
    tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert named in call("push", tmp_path / name, tmp_path / "deltas", code=2)
    assert not (tmp_path / "deltas").exists()
    assert "there is no such file" in call("push", tmp_path / "none.csv", tmp_path / "deltas", code=2)


def test_a_gap_is_shown_and_skipped(tmp_path: Path) -> None:
    with DeltaProducer(str(tmp_path)) as producer:
        for step in range(4):
            producer.push("item", IDS, VALUES, step=step)
    (tmp_path / DeltaFolder(tmp_path)._file(2)).unlink()
    assert "delta 2 is missing: the next one is delta 3" in call("tail", tmp_path, code=2)
    assert "1 deltas skipped: 2" in call("skip", tmp_path, "--after", 1, "--to", 3)
    assert "2: skipped" in call("tail", tmp_path)
    assert "got 9" in call("skip", tmp_path, "--after", 1, "--to", 9, code=2)


def test_snapshots_and_status(tmp_path: Path) -> None:
    made, place, snapshots = tiny_model(), tmp_path / "deltas", tmp_path / "snapshots"
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    with DeltaProducer(str(place)) as producer:
        producer.push("item", IDS, VALUES, step=1)
        assert "the rows at delta 1" in call("snapshot", tmp_path / "tiny", place, snapshots)
        producer.push("item", IDS + 1, VALUES, step=2)
        assert "the rows at delta 2" in call("snapshot", tmp_path / "tiny", place, snapshots)
    assert "no delta is newer" in call("snapshot", tmp_path / "tiny", place, snapshots)
    rows = load_model(max(snapshots.iterdir())).tables["item"]
    assert np.array_equal(rows[IDS + 1].numpy(), VALUES)
    config = ServeConfig(row_deltas=str(place), row_snapshots=str(snapshots), policy="none")
    port = make_port(tmp_path / "tiny", engine_config(), config)
    with on_loopback(make_app(port, config)) as number:
        url = f"http://127.0.0.1:{number}"
        wait_for(lambda: port.health.value == "ready")
        assert "2 / 2" in call("status", "--url", url)
        (place / DeltaFolder(place)._file(4)).write_bytes(b"half")
        wait_for(lambda: "DeltaCorrupt" in CliRunner().invoke(rows_app, ["status", "--url", url]).output)
        assert "stopped by" in call("status", "--url", url, code=1)
