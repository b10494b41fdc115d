"""Checkpoints made to hang the importer or to fill memory: refused within a second, with an error of ours."""

import copy
import io
import pickle
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helmrec.errors import ModelError
from helmrec.model.dlrmv3 import ImportOptions, convert, import_dlrmv3, read_dense
from helmrec.model.dlrmv3_names import (
    ACTION,
    BIT_ROWS,
    BITS,
    LAYERS,
    NUM_UNITS,
    POSITIONS,
    CheckpointSizes,
    check_names,
)
from helmrec.model.inert_pickle import MAX_INSTRUCTIONS, read_pickle
from helmrec.model.sharded_tables import read_index
from tests.model.published import HEADS, SMALL, dense_weights, write_dense, write_published

MAX_S = 1.0  # of this process's time
BEGIN = b"\x80\x02}X\x0a\x00\x00\x00dense_dict"


@contextmanager
def refused_within_a_second(told: str = "") -> Iterator[None]:
    started_s = time.process_time()
    with pytest.raises(ModelError, match=told):
        yield
    assert time.process_time() - started_s < MAX_S


def write_archive(path: Path, pickled: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", "little")
        for key, data in storages.items():
            archive.writestr(f"a/data/{key.removeprefix('s')}", data)
    return path


def doubled(times: int) -> bytes:
    """A list of tuples, each of which has the one before it twice; the last is memo `times`."""
    pairs = b"".join(b"h%ch%c\x86q%ca" % (i, i, i + 1) for i in range(times))
    return b"])q\x00a" + pairs


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> bytes:
    """Instructions that describe a tensor of floats over storage 0."""
    kind = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    numbers = b"K\x00(" + b"".join(map(number, shape)) + b"t(" + b"".join(map(number, stride)) + b"t"
    rest = b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + kind + number(size) + b"tQ" + numbers + rest


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def named(values: dict[str, bytes]) -> bytes:
    items = (b"X" + struct.pack("<I", len(name)) + name.encode() + value + b"s" for name, value in values.items())
    return b"}" + b"".join(items)


BOMBS = {
    "a list that contains itself": BEGIN + b"]q\x00h\x00as.",
    "a dictionary that contains itself": BEGIN + b"}q\x00K\x01h\x00ss.",
    "a parameter that contains itself": BEGIN + b"ctorch._utils\n_rebuild_parameter\n(]q\x00tRq\x01h\x00h\x01a0s.",
    "lists 5,000 deep": BEGIN + b"]" * 5_000 + b"a" * 4_999 + b"s.",
    "shared tuples that unfold to a trillion": BEGIN + doubled(40) + b"s.",
    "such a tuple as a key": BEGIN + doubled(34) + b"s(h\x22Nu.",
    "such a tuple in a set": BEGIN + doubled(34) + b"s\x8f(h\x22\x90.",
    "such a tuple in a frozen set": BEGIN + doubled(34) + b"s(h\x22\x91.",
    "such a tuple in a set that is called": BEGIN + b"cbuiltins\nset\n(" + doubled(34) + b"tRs.",
    "such a tuple as the name of a class": BEGIN + doubled(34) + b"sh\x22h\x22\x93.",
    "such a tuple as a weight's name": BEGIN + b"}(" + doubled(34) + b"h\x22\x85Ru.",
    "a set of a number": BEGIN + b"cbuiltins\nset\n(K\x05tRs.",
    "a set of lists": BEGIN + b"cbuiltins\nset\n(](](eetRs.",
    "a class where a value should stand": BEGIN + named({"w": b"ctorch\nfloat32\n"}) + b"s.",
    "a parameter of nothing": BEGIN + named({"w": b"ctorch._utils\n_rebuild_parameter\n)R"}) + b"s.",
    "more instructions than any checkpoint has": BEGIN + b"]" + b"Na" * MAX_INSTRUCTIONS + b"s.",
    "a memo of more than any checkpoint has": BEGIN + b"]" + b"r\xff\xff\xff\xff" * MAX_INSTRUCTIONS + b"s.",
    "a number of a million digits": BEGIN + named({"w": tensor((1,), (1,), 1 << 3_400_000)}) + b"s.",
    "a text that claims to be longer than the file": BEGIN + b"\x8d" + struct.pack("<Q", 1 << 60) + b"xs.",
    "a name of a megabyte": BEGIN + b"c" + b"m" * (1 << 20) + b"\nf\ns.",
    "a tensor of 2^33 elements in four bytes": BEGIN + named({"w": tensor((1 << 33,), (0,), 1)}) + b"s.",
    "a tensor of 2^60 elements": BEGIN + named({"w": tensor((1 << 60,), (1,), 1 << 60)}) + b"s.",
    "a tensor of a thousand dimensions": BEGIN + named({"w": tensor((1,) * 1_000, (1,) * 1_000, 1)}) + b"s.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_checkpoint_made_to_hang_the_importer_is_refused(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "a.ckpt", BOMBS[name], s0=bytes(4))
    with refused_within_a_second(str(path)):
        read_dense(path)
    (tmp_path / ".metadata").write_bytes(BOMBS[name])
    with refused_within_a_second(str(tmp_path)):
        read_index(tmp_path)


def test_what_checkpoints_hold_stays_far_within_the_budgets() -> None:
    keys = {(name, i): [name, i] for name in ("a", "b") for i in range(5_000)}
    assert read_pickle(pickle.dumps(keys, 2), "here", lambda _: False) == keys
    nested: list[Any] = []
    for _ in range(90):
        nested = [nested]
    assert read_pickle(pickle.dumps(nested, 2), "here", lambda _: False) == nested


def test_a_pickle_larger_than_any_checkpoints_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that takes no room
    with refused_within_a_second("is more than a checkpoint's"):
        read_index(tmp_path)


def test_packed_members_are_refused_whatever_they_unpack_to(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(8 << 20))
    with refused_within_a_second(r"'a/data.pkl' must be plain bytes, got a packed member"):
        read_dense(path)


def with_copies(path: Path, names: list[str]) -> Path:
    """An archive whose directory has storage 0 under other names, too, all at the same place."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", BEGIN + b"}s.")
        archive.writestr("a/data/0", bytes(1 << 16))
        for name in names:
            again = copy.copy(archive.getinfo("a/data/0"))
            again.filename = name
            archive.filelist.append(again)
    return path


def test_members_that_lie_in_one_another_are_refused(tmp_path: Path) -> None:
    path = with_copies(tmp_path / "a.ckpt", [f"a/data/{i}" for i in range(1, 100)])
    with refused_within_a_second(r"a file of \d+ bytes claims to hold 65\d\d\d\d\d"):
        read_dense(path)


def test_a_directory_of_too_many_members_is_refused(tmp_path: Path) -> None:
    path = with_copies(tmp_path / "a.ckpt", [f"a/data/{i:0200}" for i in range(20_000)])
    with refused_within_a_second("directory is larger than"):
        read_dense(path)


def test_a_storage_that_many_weights_share_is_read_once_and_copied_a_few_times_at_most(tmp_path: Path) -> None:
    data = torch.arange(1 << 14, dtype=torch.float32)
    parts = {f"w{i}": tensor((8,), (1,), data.numel()) for i in range(500)}
    path = write_archive(tmp_path / "a.ckpt", BEGIN + named(parts) + b"s.", s0=data.numpy().tobytes())
    assert all(torch.equal(weight, data[:8]) for weight in read_dense(path).values())
    wholes = {f"w{i}": tensor((data.numel(),), (1,), data.numel()) for i in range(500)}
    path = write_archive(tmp_path / "b.ckpt", BEGIN + named(wholes) + b"s.", s0=data.numpy().tobytes())
    with refused_within_a_second(r"a file of \d+ bytes claims tensors of 32768000"):
        read_dense(path)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_published(folder)
    return folder


CHANGES: dict[str, tuple[dict[str, Tensor], str]] = {
    "a layer of a billion": ({f"{LAYERS}999999999._uvqk_beta": torch.zeros(1)}, "no weights of a DLRMv3"),
    "a layer of a hundred thousand": ({f"{LAYERS}99999._uvqk_beta": torch.zeros(1)}, "only 3 layers in all"),
    "a weight that is a single number": ({POSITIONS: torch.tensor(1.0)}, "must have two dimensions"),
    "action bits that are not finite": ({BITS: torch.tensor([1.0, torch.nan, 4.0, 8.0, 16.0])}, "must be finite"),
    "cycles that are not finite": ({NUM_UNITS: torch.tensor([[24.0, torch.inf]])}, "must be finite"),
    "cycles of no length": ({NUM_UNITS: torch.tensor([[24.0, 0.0]])}, "makes no model"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_would_make_a_huge_or_senseless_model_are_refused(
    published: Path, tmp_path: Path, name: str
) -> None:
    changed, told = CHANGES[name]
    write_dense(tmp_path / "a.ckpt", dense_weights(SMALL) | changed)
    with refused_within_a_second(told):
        import_dlrmv3(tmp_path / "a.ckpt", published / "sparse", tmp_path / "out", ImportOptions(num_heads=HEADS))
    assert not (tmp_path / "out").exists()


def test_actions_are_not_unfolded_beyond_bounds() -> None:
    weights = dense_weights(SMALL)
    sizes = CheckpointSizes.of(weights, check_names(weights, "here"))
    with refused_within_a_second("at most 16 bits, got 1000"):
        convert(weights | {BITS: torch.full((1_000,), 1 << 15)}, sizes)
    wide = {BIT_ROWS: torch.zeros(5, 500), f"{ACTION}.0.weight": torch.zeros(10, 2_500)}
    with refused_within_a_second("65504 actions in layers of 2500"):
        convert(weights | wide | {BITS: torch.tensor([1 << i for i in (5, 6, 7, 8, 15)]) * 0 + 65_503}, sizes)


def changed_index(folder: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> Path:
    """A copy of the folder of tables with another index."""
    for path in (folder / "sparse").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = tmp_path / ".metadata"
    before = index.read_bytes()
    index.write_bytes(change(before))
    assert index.read_bytes() != before
    return tmp_path


def test_shards_that_lie_in_one_another_or_beyond_their_file_are_refused(published: Path, tmp_path: Path) -> None:
    lengths = sorted(shard.length for table in read_index(published / "sparse").values() for shard in table.shards)
    longest = b"M" + struct.pack("<H", lengths[-1])

    def refuse(length: int, told: str) -> None:
        folder = changed_index(published, tmp_path, lambda data: data.replace(longest, number(length)))
        with refused_within_a_second(told):
            read_index(folder)

    refuse(1 << 50, "go beyond the end of the file")
    refuse(lengths[-1] + 64, "in part another shard's")


def test_more_rows_than_a_shard_has_bytes_for_are_refused(published: Path, tmp_path: Path) -> None:
    """67 of the 200 rows of a table are its second shard."""

    def more(data: bytes) -> bytes:
        return data.replace(b"K\xc8", number(133 + (1 << 40))).replace(b"KC", number(1 << 40))

    with refused_within_a_second(r"1099511627776 rows of 24 bytes do not fit \d+ bytes"):
        read_index(changed_index(published, tmp_path, more))


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes are others, more, fewer, or those of another place."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, source, num = (int(rng.integers(len(changed))) for _ in range(3))
        match rng.integers(4):
            case 0:
                changed[at] = int(rng.integers(256))
            case 1:
                changed[at:at] = changed[source : source + 1 + num % 30]
            case 2:
                del changed[at : at + 1 + num % 20]
            case _:
                changed[at : at + 1] = rng.bytes(1 + num % 5)
    return bytes(changed)


def is_imported(read: Callable[[], object]) -> bool:
    """Anything but success and ModelError is raised."""
    started_s = time.process_time()
    try:
        read()
    except ModelError:
        return False
    finally:
        assert time.process_time() - started_s < MAX_S
    return True


def test_mutated_checkpoints_are_imported_or_refused(published: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(published / "non_sparse.ckpt") as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    (pickled,) = [name for name in members if name.endswith("data.pkl")]
    path, num_imported = tmp_path / "a.ckpt", 0
    for _ in range(200):
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            for name, value in members.items():
                archive.writestr(name, mutated(value, rng) if name == pickled else value)
        path.write_bytes(data.getvalue())
        num_imported += is_imported(lambda: read_dense(path))
    assert 0 < num_imported < 100


def test_mutated_indices_of_tables_are_read_or_refused(published: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole = (published / "sparse" / ".metadata").read_bytes()
    folder = changed_index(published, tmp_path, lambda data: data[:-1])

    def read() -> None:
        for table in read_index(folder).values():
            for _ in table.parts():
                pass

    num_read = 0
    for _ in range(300):
        (folder / ".metadata").write_bytes(mutated(whole, rng))
        num_read += is_imported(read)
    assert 0 < num_read < 150
