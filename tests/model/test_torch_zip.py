"""Archives and pickles from outside: read right, or refused; never run."""

import io
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.errors import ModelError
from helmrec.model.inert_pickle import Named, PickledCall, read_pickle
from helmrec.model.sharded_tables import read_index
from helmrec.model.torch_zip import StoredTensor, TorchZip
from tests.model.published import SMALL, tables, write_tables

ANY_TENSORS = {
    "plain": torch.randn(3, 4),
    "half": torch.randn(5).half(),
    "brain": torch.randn(2, 2).bfloat16(),
    "whole numbers": torch.arange(7),
    "turned": torch.randn(3, 4).T,
    "part": torch.randn(10)[2:9:3],
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


def saved(path: Path, value: Any) -> TorchZip:
    torch.save(value, path)
    return TorchZip.open(path)


def test_tensors_of_every_kind_are_as_torch_reads_them(tmp_path: Path) -> None:
    with saved(tmp_path / "a.pt", {"weights": ANY_TENSORS, "others": [1, "x", None, (2.5, True)]}) as archive:
        read = archive.read_all(archive.saved("weights"))
        for name, tensor in ANY_TENSORS.items():
            assert torch.equal(read[name], tensor.detach()), name
        assert archive.saved("others") == [1, "x", None, (2.5, True)]


def test_what_was_not_saved_is_told(tmp_path: Path) -> None:
    with saved(tmp_path / "a.pt", {"a": {}}) as archive, pytest.raises(ModelError, match="nothing was saved under 'b'"):
        archive.saved("b")


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self._called = function, args

    def __reduce__(self) -> Any:
        return self._called


@pytest.mark.parametrize("function", [os.system, eval, exec, __import__, getattr, open, Path.touch])
def test_a_pickle_that_names_anything_else_is_refused(function: Any) -> None:
    data = pickle.dumps({"a": Calls(function, "x")})
    with pytest.raises(ModelError, match="here: refused: the pickle inside names"):
        read_pickle(data, "here", lambda named: named.module == "torch")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_in_every_protocol(protocol: int) -> None:
    value = {"a": [1, -5, 2**40, 2.5, None, True, "text"], "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))}
    assert read_pickle(pickle.dumps(value, protocol), "here", lambda _: False) == value


def test_calls_are_written_down_and_not_made() -> None:
    made = read_pickle(pickle.dumps(Calls(os.getenv, "HOME")), "here", lambda _: True)
    assert isinstance(made, PickledCall)
    assert (made.maker, made.args) == (Named("os", "getenv"), ("HOME",))


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"\x80\x04)\x85\x85R.", b"no pickle", b"\x80\x04]h\x09.", b"\x80\x02u."]
)
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match="here: "):
        read_pickle(data, "here", lambda _: True)


def archive_of(pickled: bytes, **members: bytes) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        for name, data in members.items():
            archive.writestr(f"a/{name}", data)
    file.seek(0)
    return file


def test_other_byte_orders_and_archives_without_a_pickle_are_refused() -> None:
    with pytest.raises(ModelError, match="little-endian"):
        TorchZip(archive_of(pickle.dumps({}), byteorder=b"big"), "here")
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    empty.seek(0)
    with pytest.raises(ModelError, match="0 pickles in it"):
        TorchZip(empty, "here")


@pytest.mark.parametrize(
    "wrong",
    [
        StoredTensor("0", torch.float32, 12, 0, (3, 5), (5, 1)),  # as the archive would never describe it
        StoredTensor("9", torch.float32, 12, 0, (3, 4), (4, 1)),
        StoredTensor("0", torch.float64, 12, 0, (3, 4), (4, 1)),
    ],
)
def test_a_storage_that_is_missing_or_of_another_size_is_refused(tmp_path: Path, wrong: StoredTensor) -> None:
    with saved(tmp_path / "a.pt", {"x": torch.randn(3, 4)}) as archive, pytest.raises((ModelError, RuntimeError)):
        archive.read_all({"wrong": wrong})


def test_damaged_archives_are_refused_and_never_read_wrong(tmp_path: Path) -> None:
    """Any byte may be another: what is then read is what was saved, or an error of ours."""
    weights = {"x": torch.randn(8, 8), "y": torch.arange(5)}
    torch.save({"weights": weights}, tmp_path / "a.pt")
    whole, rng = (tmp_path / "a.pt").read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
        refused += not is_read_right(bytes(data), weights)
    assert refused > 50
    for length in rng.integers(0, len(whole), 50):
        assert not is_read_right(whole[:length], weights)


def is_read_right(data: bytes, weights: dict[str, torch.Tensor]) -> bool:
    """False: refused, or something else was saved by the look of it. An error that is not ours is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zipfile's, of names that occur twice
            with TorchZip(io.BytesIO(data), "here") as archive:
                stored = archive.saved("weights")
                if not isinstance(stored, dict) or any(not isinstance(stored.get(k), StoredTensor) for k in weights):
                    return False
                read = archive.read_all({name: stored[name] for name in weights})
                return all(torch.equal(read[name], value) for name, value in weights.items())
    except ModelError:
        return False


def test_an_archive_may_be_a_range_of_a_file() -> None:
    saved, weights = io.BytesIO(), {"a": torch.arange(7.0), "b": torch.ones(3, 2)}
    torch.save(weights, saved)
    whole = saved.getvalue()
    inside = whole[:1_000] + whole + whole[-1_000:]
    with TorchZip(io.BytesIO(inside), "here", 1_000, len(whole)) as archive:
        found = archive.read_all(archive.saved())
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    with pytest.raises(ModelError, match="is not an archive"):
        TorchZip(io.BytesIO(inside), "here", 1_000, len(whole) - 50)


def test_tables_in_shards_are_read_in_order_of_rows(tmp_path: Path) -> None:
    values = tables(SMALL)
    write_tables(tmp_path / "sparse", values)
    index = read_index(tmp_path / "sparse")
    for name, value in values.items():
        table = index[f"sparse_dict._embedding_collection.embeddings.{name}.weight"]
        assert (table.shape, table.dtype, len(table.shards)) == (tuple(value.shape), torch.float16, 2)
        assert b"".join(table.parts()) == value.numpy().tobytes()


def test_a_folder_whose_index_would_run_code_or_leads_outside_is_refused(tmp_path: Path) -> None:
    write_tables(tmp_path / "sparse", tables(SMALL))
    index = tmp_path / "sparse" / ".metadata"
    whole = index.read_bytes()
    index.write_bytes(whole.replace(b"__0_0.distcp", b"../a/b.distc"))
    with pytest.raises(ModelError, match=r"shard file '\.\./a/b\.distc' is missing"):
        read_index(tmp_path / "sparse")
    index.write_bytes(pickle.dumps(Calls(os.system, "true")))
    with pytest.raises(ModelError, match="refused"):
        read_index(tmp_path / "sparse")
    index.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelError, match="not understood"):
        read_index(tmp_path / "sparse")
    index.unlink()
    with pytest.raises(ModelError, match=r"no \.metadata"):
        read_index(tmp_path / "sparse")


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    write_tables(tmp_path / "sparse", tables(SMALL))
    shard = tmp_path / "sparse" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-2_000])
    with pytest.raises(ModelError, match=r"rows \d+ on of"):
        for table in read_index(tmp_path / "sparse").values():
            for _ in table.parts():
                pass
