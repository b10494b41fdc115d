"""Imports any HSTU checkpoint whose weights are those of a model folder under other names and in other layouts.

A map in TOML describes the model and names the source of every weight. Transposes, slices, joined parts and other
orders of U, V, Q and K are done here; arithmetic that differs is not.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from helmrec.config import Frozen
from helmrec.errors import ConfigError, ModelError
from helmrec.model.checkpoint import read_checkpoint
from helmrec.model.config import ModelConfig
from helmrec.model.folder import Progress
from helmrec.model.hstu import dense_shapes
from helmrec.model.weights import parts_of, stream_model

_PARTS = "uvqk"
_TABLES = "tables."


class Source(Frozen):
    """Where a weight comes from, and the steps that make it: join, slice, transpose, reorder."""

    name: str | None = Field(None, alias="from", description="a weight of the checkpoint; * is the number of the layer")
    concat: tuple[str, ...] = Field((), description="weights of the checkpoint, joined along `axis`")
    stack: tuple[str, ...] = Field((), description="weights of the checkpoint, side by side in a new first dimension")
    fill: float | None = Field(None, description="a constant, for a weight that the checkpoint does not have")
    eye: bool | float = Field(False, description="this number on the diagonal, true for ones, and zeros elsewhere")
    axis: int = Field(0, ge=0, description="of `concat` and `slice`")
    slice: tuple[int, int] | None = Field(None, description="first and end index that are taken")
    transpose: bool = Field(False, description="swap the last two dimensions; the checkpoint stores out x in")
    parts: str = Field(_PARTS, description="order of U, V, Q and K in the columns of the checkpoint's projection")
    per_head: bool = Field(False, description="whether each head has its own U, V, Q and K side by side")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        joined = (self.name is not None, bool(self.concat), bool(self.stack))
        if sum((*joined, self.fill is not None, self.eye is not False)) != 1:
            raise ValueError("one of from, concat, stack, fill and eye is needed")
        if sorted(self.parts) != sorted(_PARTS):
            raise ValueError(f"parts must be an order of {_PARTS!r}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.concat, *self.stack) if self.name is None else (self.name,)


class WeightMap(NamedTuple):
    """A parsed map."""

    config: ModelConfig
    sources: dict[str, Source]  # by our name, layer by layer
    ignored: tuple[str, ...]  # patterns of names that need no use
    keys: tuple[str, ...]  # that lead to the weights in an archive
    text: "MapText"


class MapText(NamedTuple):
    """The text of a map, to name lines in messages."""

    path: Path
    lines: list[str]

    def at(self, key: str) -> str:
        """Return the place of a key: the file and, if the key is in it, the line."""
        wanted = re.compile(rf"""^\s*\[*\s*(model\.|weights\.)?["']?{re.escape(key)}["']?\s*[=\].]""")
        line = next((i for i, line in enumerate(self.lines, 1) if wanted.match(line)), None)
        return str(self.path) if line is None else f"{self.path}, line {line}"


def import_mapped(checkpoint: Path, out: Path, map_file: Path, progress: Progress = lambda _: None) -> ModelConfig:
    """Write a model folder from a checkpoint as a map describes; ModelError names every weight that does not fit."""
    parsed = read_map(map_file)
    found = read_checkpoint(checkpoint, parsed.keys)
    weights = _mapped(found, parsed, str(checkpoint))
    config = parsed.config
    dense = {name: _cast(value, config.dtype) for name, value in weights.items() if not name.startswith(_TABLES)}
    tables = {
        table.name: parts_of(_cast(weights[f"{_TABLES}{table.name}.rows"], config.row_dtype)) for table in config.tables
    }
    stream_model(out, config, dense, tables, progress)
    return config


def read_map(path: Path) -> WeightMap:
    """Parse a map. Errors name the key and its line."""
    try:
        content = path.read_text()
        values = tomllib.loads(content)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    text = MapText(path, content.splitlines())
    if unknown := sorted(values.keys() - {"model", "weights", "ignore", "keys"}):
        raise ConfigError(f"{text.at(unknown[0])}: {unknown[0]} is not a known key, only model, weights, ignore, keys")
    for name, kind in (("model", dict), ("weights", dict), ("ignore", list), ("keys", list)):
        if not isinstance(values.get(name, kind()), kind):
            raise ConfigError(f"{text.at(name)}: {name} must be a {kind.__name__}, got {values[name]!r}")
    try:
        config = ModelConfig(**values.get("model", {}))
    except ConfigError as error:
        first = str(error).split("; ", 1)[0]
        field = re.split(r"[ .:]", first, maxsplit=1)[0]
        raise ConfigError(f"{text.at(field)}: model.{error}") from None
    sources = dict(_sources(values.get("weights", {}), config, text))
    texts = {name: _strings(values.get(name, []), name, text) for name in ("ignore", "keys")}
    return WeightMap(config, sources, texts["ignore"], texts["keys"], text)


def _strings(values: list[Any], name: str, text: MapText) -> tuple[str, ...]:
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise ConfigError(f"{text.at(name)}: {name} must be a list of texts, got {wrong[0]!r}")
    return tuple(values)


def _sources(weights: Mapping[str, Any], config: ModelConfig, text: MapText) -> Iterator[tuple[str, Source]]:
    wanted = _shapes(config)
    for name, value in weights.items():
        place = f"{text.at(name)}: weights.{name}"
        try:
            source = Source(**({"from": value} if isinstance(value, str) else value))
        except (ConfigError, TypeError) as error:
            problem = error if isinstance(error, ConfigError) else f"a text or a table is needed, got {value!r}"
            raise ConfigError(f"{place}: {problem}") from None
        if not (names := list(_layers(name, config.num_layers))):
            raise ConfigError(f"{place}: * stands for the number of a layer, as in 'layers.*.uvqk_weight'")
        if source.eye is not False and any(len(wanted.get(each, (0, 0))) != 2 for each in names):
            raise ConfigError(f"{place}: only a matrix has a diagonal")
        if (source.parts != _PARTS or source.per_head) and "uvqk" not in name:
            raise ConfigError(f"{place}: only a projection has parts")
        for i, ours in enumerate(names):
            if ours not in wanted:
                raise ConfigError(f"{place}: the model has no weight {ours!r}")
            yield ours, _numbered(source, i)


def _layers(name: str, num_layers: int) -> Iterator[str]:
    if "*" not in name:
        yield name
    elif name.startswith("layers.*."):
        yield from (name.replace("*", str(i)) for i in range(num_layers))


def _numbered(source: Source, layer: int) -> Source:
    number = str(layer)
    return source.model_copy(
        update={
            "name": None if source.name is None else source.name.replace("*", number),
            "concat": tuple(name.replace("*", number) for name in source.concat),
            "stack": tuple(name.replace("*", number) for name in source.stack),
        }
    )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    tables = {f"{_TABLES}{table.name}.rows": (table.num_rows, config.row_dim) for table in config.tables}
    return dense_shapes(config) | tables


def _mapped(found: Mapping[str, Tensor], parsed: WeightMap, source: str) -> dict[str, Tensor]:
    """Make every weight of the model; ModelError lists all that are missing, surplus or of another shape."""
    problems, weights = [], {}
    for ours, shape in _shapes(parsed.config).items():
        if ours not in parsed.sources:
            problems.append(f"weight {ours!r} {shape} has no source in {parsed.text.path}")
            continue
        place = f"weight {ours!r} ({parsed.text.at(_pattern(ours, parsed))})"
        if missing := [name for name in parsed.sources[ours].names if name not in found]:
            problems.append(f"{place}: the checkpoint has no {missing[0]!r}")
            continue
        try:
            weights[ours] = value = _make(found, parsed.sources[ours], shape, parsed.config)
        except (RuntimeError, IndexError) as error:
            problems.append(f"{place}: {str(error).splitlines()[0]}")
            continue
        if tuple(value.shape) != shape:
            hint = "; stack adds a first dimension" if value.dim() == len(shape) - 1 else ""
            problems.append(f"{place} must be {shape}, got {tuple(value.shape)}{hint}")
    used = {name for each in parsed.sources.values() for name in each.names}
    problems += [
        f"weight {name[:200]!r} {tuple(value.shape)} of the checkpoint is neither used nor named under ignore"
        for name, value in found.items()
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in parsed.ignored)
    ]
    if problems:
        raise ModelError(f"{source}: {len(problems)} weights do not fit:\n  " + "\n  ".join(problems))
    return weights


def _pattern(ours: str, parsed: WeightMap) -> str:
    """Return the key of the map that gives this weight."""
    starred = re.sub(r"^layers\.\d+\.", "layers.*.", ours)
    return starred if any(starred in line for line in parsed.text.lines) else ours


def _make(found: Mapping[str, Tensor], source: Source, shape: tuple[int, ...], config: ModelConfig) -> Tensor:
    if source.fill is not None:
        return torch.full(shape, source.fill)
    if source.eye is not False:
        return torch.eye(*shape) * source.eye
    value = _joined([found[name] for name in source.names], source)
    if source.slice is not None:
        first, end = source.slice
        value = value.narrow(source.axis, first, end - first)
    if source.transpose:
        value = value.transpose(-2, -1)
    if source.parts != _PARTS or source.per_head:
        value = reorder_parts(value, source.parts, source.per_head, config)
    return value


def _joined(parts: list[Tensor], source: Source) -> Tensor:
    if source.stack:
        return torch.stack(parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=source.axis)


def reorder_parts(value: Tensor, parts: str, per_head: bool, config: ModelConfig) -> Tensor:
    """Return the columns of a projection in the order U, V, Q, K, each head after head. value: (..., columns)."""
    num_heads = config.num_heads
    widths = [config.v_dim if part in "uv" else config.qk_dim for part in parts]
    if per_head:
        split = value.unflatten(-1, (num_heads, -1)).split(widths, dim=-1)
        split = tuple(part.flatten(-2) for part in split)
    else:
        split = value.split([width * num_heads for width in widths], dim=-1)
    return torch.cat([split[parts.index(part)] for part in _PARTS], dim=-1)


def _cast(value: Tensor, dtype: str) -> Tensor:
    return value.to(getattr(torch, dtype)).contiguous()
