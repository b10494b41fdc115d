"""Weights in model folders: written, and loaded with every check. Tables are memory-mapped on load."""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from helmrec.errors import ModelError
from helmrec.memory.row_master import first_non_finite, non_finite_row
from helmrec.model.config import ModelConfig
from helmrec.model.folder import (
    DENSE,
    SAFETENSORS_DTYPE,
    VERIFY_BYTES,
    FileRecord,
    Manifest,
    Progress,
    check_file,
    checksum,
    read_manifest,
    table_file,
)
from helmrec.model.hstu import dense_shapes
from helmrec.model.precision import PrecisionVerdicts, read_verdicts
from helmrec.model.shared_tables import SharedTables

if TYPE_CHECKING:
    from helmrec.model.ranker import HstuRanker

_CHUNK_BYTES = 16 << 20
_LENGTH = struct.Struct("<Q")
_BLOCK_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory."""

    config: ModelConfig
    version: int
    dense: dict[str, Tensor]
    tables: dict[str, Tensor]  # (num_rows, row_dim), private memory maps; shared ones as they are stored
    shared: SharedTables | None = None  # the memory that they are in, if other engines read it too
    precision: PrecisionVerdicts | None = None  # of these weights
    folder: Path | None = None  # that it was loaded from
    follows_log: bool = False  # whether another process writes the log of row updates, if rows are on disk

    def __post_init__(self) -> None:
        """Raise ModelError if a table differs from the configuration, which defines the layout of the caches."""
        for table in self.config.tables if self.shared is None else ():
            rows, shape = self.tables[table.name], (table.num_rows, self.config.row_dim)
            if tuple(rows.shape) != shape or rows.dtype != getattr(torch, self.config.row_dtype):
                seen = f"{tuple(rows.shape)} of {str(rows.dtype).removeprefix('torch.')}"
                raise ModelError(f"table {table.name!r} must be {shape} of {self.config.row_dtype}, got {seen}")


@overload
def save_model(folder: Path, model: "HstuRanker") -> None: ...
@overload
def save_model(folder: Path, model: ModelConfig, dense: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> None: ...
def save_model(
    folder: Path,
    model: "ModelConfig | HstuRanker",
    dense: Mapping[str, Tensor] | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a whole model: a module, or a configuration with its weights.

    First check every weight; ModelError names all that are missing, surplus, of another shape or dtype, or not finite.
    Weights of a module are rounded to the dtypes of its configuration. config.json is written last, so an interrupted
    save is not a valid model.
    """
    if isinstance(model, ModelConfig):
        config, dense, tables = model, dense or {}, tables or {}
    else:
        config, dense, tables = model.config, model.dense(), model.table_rows()
    shapes = {table.name: (table.num_rows, config.row_dim) for table in config.tables}
    problems = [*_dense_problems(dense, config), *_misfits("table", tables, shapes, config.row_dtype)]
    for name, rows in tables.items():
        if rows.is_floating_point() and (row := first_non_finite(rows)) is not None:
            problems.append(str(non_finite_row(f"table {name!r}", row)))
    _raise_all(problems)
    _make_empty(folder)
    _save_dense(folder, dense)
    for name, rows in tables.items():
        write_table(folder / table_file(name), shapes[name], config.row_dtype, parts_of(rows), lambda _: None)
    _write_manifest(folder, config, lambda _: None)


def stream_model(
    folder: Path,
    config: ModelConfig,
    dense: Mapping[str, Tensor],
    tables: Mapping[str, Iterable[bytes]],
    progress: Progress = lambda _: None,
) -> None:
    """Write a model from the bytes of its tables' rows, in parts, since tables may be larger than memory."""
    _raise_all(_dense_problems(dense, config))
    _make_empty(folder)
    _save_dense(folder, dense)
    for table in config.tables:
        shape = (table.num_rows, config.row_dim)
        write_table(folder / table_file(table.name), shape, config.row_dtype, tables[table.name], progress)
    _write_manifest(folder, config, progress)


def init_model(folder: Path, config: ModelConfig, seed: int = 0, progress: Progress = lambda _: None) -> None:
    """Write a model with random weights in chunks, so that only the disk bounds its size."""
    generator = torch.Generator().manual_seed(seed)
    dense = random_dense(config, generator)  # drawn before the tables, which are drawn as they are written
    shapes = {table.name: (table.num_rows, config.row_dim) for table in config.tables}
    rows = {name: _random_rows(shape, config.row_dtype, generator) for name, shape in shapes.items()}
    stream_model(folder, config, dense, rows, progress)


def total_table_bytes(config: ModelConfig) -> int:
    return config.num_rows * config.row_dim * getattr(torch, config.row_dtype).itemsize


def random_dense(config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights that keep activations near unit size; norms start at identity, biases small but not zero."""
    dense = {}
    for name, shape in dense_shapes(config).items():
        is_norm = "norm" in name or (not name.startswith("layers.") and name.split(".")[-2] in {"1", "3"})
        if is_norm:
            values = 0.1 * torch.randn(shape, generator=generator) + (1.0 if name.endswith("weight") else 0.0)
        elif len(shape) == 1 or name.endswith("bias"):
            values = 0.1 * torch.randn(shape, generator=generator)
        else:
            is_in_out = name.startswith(("layers.", "context."))
            fan_in = 1 if "embedding" in name else shape[-2 if is_in_out else -1]
            depth = 2 * config.num_layers if name.endswith("output_weight") else 1  # the residual stream stays near 1
            values = torch.randn(shape, generator=generator) / math.sqrt(fan_in * depth)
        dense[name] = values.to(getattr(torch, config.dtype))
    return dense


def load_dense(folder: Path, shared: SharedTables) -> LoadedModel:
    """Load and check the dense weights of a model whose tables are in shared memory."""
    manifest = read_manifest(folder)
    check_file(folder / DENSE, manifest.files[DENSE], verify=True, progress=lambda _: None)
    dense = _read_dense(folder, manifest.model)
    verdicts = read_verdicts(folder, manifest.version)
    return LoadedModel(manifest.model, manifest.version, dense, shared.master.tables, shared, verdicts)


def _read_dense(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    dense = read_tensors(folder / DENSE)
    _raise_all(_dense_problems(dense, config), f"{folder / DENSE}: ")
    return dense


def load_model(folder: Path, *, verify: bool = False, progress: Progress = lambda _: None) -> LoadedModel:
    """Load and check a model folder. `verify` also checks checksums and values of tables over 256 MiB.

    Without it, their values are checked when they are copied for a card. On a CPU, where rows are read from the file
    on demand, a request that reads a non-finite row fails.
    """
    manifest = read_manifest(folder)
    config = manifest.model
    for name, record in manifest.files.items():
        check_file(folder / name, record, verify=verify or record.bytes <= VERIFY_BYTES, progress=progress)
    dense = _read_dense(folder, config)
    tables = {}
    for table in config.tables:
        path, shapes = folder / table_file(table.name), {"rows": (table.num_rows, config.row_dim)}
        found = read_tensors(path)
        _raise_all(_misfits("weight", found, shapes, config.row_dtype), f"{path}: ")
        tables[table.name] = found["rows"]
    for name, rows in tables.items():
        if verify or manifest.files[table_file(name)].bytes <= VERIFY_BYTES:
            _check_finite(str(folder / table_file(name)), rows)
    verdicts = read_verdicts(folder, manifest.version)
    return LoadedModel(config, manifest.version, dense, tables, precision=verdicts, folder=folder)


def _make_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} exists and is not empty")
    (folder / "tables").mkdir(parents=True)


def _write_manifest(folder: Path, config: ModelConfig, progress: Progress) -> None:
    names = [DENSE, *(table_file(table.name) for table in config.tables)]
    files = {
        name: FileRecord(bytes=(folder / name).stat().st_size, blake2b=checksum(folder / name, progress))
        for name in names
    }
    manifest = Manifest(model=config, files=files)
    (folder / "config.json").write_text(manifest.model_dump_json(indent=2) + "\n")


def parts_of(rows: Tensor) -> Iterator[bytes]:
    """Yield the bytes of a table's rows in parts."""
    for part in rows.detach().split(max(1, _CHUNK_BYTES // (rows.shape[1] * rows.itemsize))):
        yield part.contiguous().view(torch.uint8).numpy().tobytes()


def _random_rows(shape: tuple[int, int], dtype: str, generator: torch.Generator) -> Iterator[bytes]:
    torch_dtype = getattr(torch, dtype)
    chunk_rows = max(1, _CHUNK_BYTES // (shape[1] * torch_dtype.itemsize))
    for start in range(0, shape[0], chunk_rows):
        rows = torch.randn((min(chunk_rows, shape[0] - start), shape[1]), generator=generator).to(torch_dtype)
        yield rows.view(torch.uint8).numpy().tobytes()


def write_table(path: Path, shape: tuple[int, int], dtype: str, parts: Iterable[bytes], progress: Progress) -> None:
    """Write a safetensors file in chunks; the library's writer needs the whole table in memory."""
    row_bytes = shape[1] * getattr(torch, dtype).itemsize
    with path.open("wb") as file:
        file.write(table_head(shape, dtype))
        rest, done = b"", 0  # the incomplete last value of a part, and the bytes before it
        for part in parts:
            rest, done = _check_part(path, rest + part, done, row_bytes, getattr(torch, dtype))
            file.write(part)
            progress(len(part))


def table_head(shape: tuple[int, int], dtype: str) -> bytes:
    """Return the head of a table's file. It fills whole blocks of a disk, so that few rows are in two blocks."""
    num_bytes = shape[0] * shape[1] * getattr(torch, dtype).itemsize
    entry = {"dtype": SAFETENSORS_DTYPE[dtype], "shape": list(shape), "data_offsets": [0, num_bytes]}
    header = json.dumps({"rows": entry}).encode()
    header += b" " * (-(len(header) + _LENGTH.size) % _BLOCK_BYTES)
    return _LENGTH.pack(len(header)) + header


def _check_part(path: Path, part: bytes, start: int, row_bytes: int, dtype: torch.dtype) -> tuple[bytes, int]:
    """Raise ModelError if a value is not finite; return the incomplete last value and where it begins.

    start: bytes of the table before this part.
    """
    num_bytes = len(part) - len(part) % dtype.itemsize
    if num_bytes:
        values = torch.frombuffer(bytearray(part[:num_bytes]), dtype=dtype)  # a copy, since torch needs writable memory
        if (at := first_non_finite(values)) is not None:
            raise non_finite_row(str(path), (start + at * dtype.itemsize) // row_bytes)
    return part[num_bytes:], start + num_bytes


def _check_finite(table: str, rows: Tensor) -> None:
    if (row := first_non_finite(rows)) is not None:
        raise non_finite_row(table, row)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a file, memory-mapped privately: writes do not change the file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ModelError(f"{path} is not a valid safetensors file: {error}") from error


def _dense_problems(dense: Mapping[str, Tensor], config: ModelConfig) -> list[str]:
    """Describe every dense weight that does not fit the configuration or is not finite."""
    wrong = [name for name, each in dense.items() if each.is_floating_point() and not bool(each.isfinite().all())]
    return [
        *_misfits("weight", dense, dense_shapes(config), config.dtype),
        *(f"weight {name!r} holds values that are not finite" for name in wrong),
    ]


def _misfits(
    kind: str, found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> Iterator[str]:
    """Describe every tensor that is missing, surplus, or of another shape or dtype."""
    yield from (f"{kind} {name!r} is missing" for name in shapes if name not in found)
    yield from (f"{kind} {name!r} is not part of this model" for name in found if name not in shapes)
    for name in (name for name in shapes if name in found):
        shape, seen = tuple(shapes[name]), found[name]
        if tuple(seen.shape) != shape or seen.dtype != getattr(torch, dtype):
            got = f"{str(seen.dtype).removeprefix('torch.')} {tuple(seen.shape)}"
            yield f"{kind} {name!r} must be {dtype} {shape}, got {got}"


def _raise_all(problems: Iterable[str], where: str = "") -> None:
    """Raise one ModelError with all problems, if there are any."""
    if listed := list(problems):
        many = f"{len(listed)} weights and tables are wrong:\n  " if len(listed) > 1 else ""
        raise ModelError(where + many + "\n  ".join(listed))


def _save_dense(folder: Path, dense: Mapping[str, Tensor]) -> None:
    """Write copies, since the library refuses tensors that share memory, as tied weights do."""
    copies = {name: each.detach().clone(memory_format=torch.contiguous_format) for name, each in dense.items()}
    (folder / DENSE).write_bytes(save(copies))  # `save_file` would write a file that only its owner may read
