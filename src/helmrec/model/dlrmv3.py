"""Imports Meta's production HSTU, such as DLRMv3, from its dense checkpoint and its tables into a model folder.

The published model has tokens relative to the query (`QueryFrame`). Its action encoding, the scale of its tokens, and
the positions of context tokens do not depend on a request, so they are folded into the weights here, in double
precision. Weights that the published model does not have are errors that name them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from helmrec.config import Frozen
from helmrec.errors import ConfigError, ModelError
from helmrec.model import dlrmv3_names as theirs
from helmrec.model.config import ITEM, Cycle, Dtype, EncoderConfig, ModelConfig, QueryFrame, TableConfig
from helmrec.model.dlrmv3_names import CheckpointSizes, Weights, check_names, check_shapes
from helmrec.model.folder import Progress
from helmrec.model.sharded_tables import ShardedTable, read_index
from helmrec.model.torch_zip import StoredTensor, TorchZip
from helmrec.model.weights import stream_model

CHECKPOINT = "non_sparse.ckpt"
_OUR_NAMES = {"item_category_id": "category", "user_id": "user"}  # of tables of the published model
_NORM_EPS = 1e-5
_MOST_ACTIONS = 1 << 16
_MOST_BITS = 16  # kinds of action whose combinations stay below that
_MOST_ACTION_NUMBERS = 1 << 26  # values of all actions in one layer of their encoder


class ImportOptions(Frozen):
    """Settings that a checkpoint does not contain; defaults are those of the published model."""

    num_heads: int = Field(4, ge=1)
    window: int = Field(16_384 - 2_048 - 1, ge=4)
    max_candidates: int = Field(2_048, ge=1)
    min_context_events: int = Field(20, ge=0)
    item: str = Field("item_id", min_length=1, description="table of the items, as the checkpoint names it")
    extra: tuple[str, ...] = Field(("item_category_id",), description="tables of an event's other features, in order")
    context: tuple[str, ...] = Field(
        ("user_id",), description="tables of contextual features, in order; NAME:EVENTS instead of min_context_events"
    )
    dtype: Dtype | None = Field(None, description="of dense weights and K/V; by default the checkpoint's own")


def import_dlrmv3(
    checkpoint: Path, tables: Path, out: Path, options: ImportOptions, progress: Progress = lambda _: None
) -> ModelConfig:
    """Write a model folder from a dense checkpoint (or the folder it lies in) and a folder of sharded tables."""
    path = checkpoint / CHECKPOINT if checkpoint.is_dir() else checkpoint
    weights = read_dense(path)
    sizes = CheckpointSizes.of(weights, check_names(weights, str(path)))
    check_shapes(weights, sizes, str(path))
    names = table_names(options)
    _check_features(sizes, options, str(path))
    found = find_tables(tables, sizes.row_dim, names)
    try:
        config = _config(weights, sizes, found, options)
    except ConfigError as error:
        raise ModelError(f"{path}: with these options it makes no model: {error}") from None
    dense = {name: value.to(getattr(torch, config.dtype)) for name, value in convert(weights, sizes).items()}
    if wrong := [name for name, value in dense.items() if not bool(torch.isfinite(value).all())]:
        raise ModelError(f"{path}: weight {wrong[0]!r} holds values that are not finite in {config.dtype}")
    stream_model(out, config, dense, {name: table.parts() for name, table in found.items()}, progress)
    return config


def read_dense(path: Path) -> dict[str, Tensor]:
    """Read the dense weights of a checkpoint, by published name. Nothing pickled in it is executed."""
    with TorchZip.open(path) as archive:
        saved = archive.saved("dense_dict")
        if not isinstance(saved, dict):
            raise ModelError(f"{path}: 'dense_dict' is no dictionary of weights")
        if not all(isinstance(name, str) for name in saved):
            raise ModelError(f"{path}: 'dense_dict' has a key that is no name of a weight")
        stored = {name: value for name, value in saved.items() if "embedding_collection" not in name}
        if wrong := sorted(name for name, value in stored.items() if not isinstance(value, StoredTensor)):
            raise ModelError(f"{path}: weight {wrong[0][:200]!r} is no tensor")
        return archive.read_all(stored)


def table_names(options: ImportOptions) -> dict[str, str]:
    """Return the names of the tables in the checkpoint by their names here, in id-space order."""
    theirs_in_order = [*options.extra, *(name for name, _ in context_features(options))]
    return {ITEM: options.item} | {_OUR_NAMES.get(name, name): name for name in theirs_in_order}


def context_features(options: ImportOptions) -> list[tuple[str, int]]:
    """Return table and fewest events of each contextual feature."""
    features = []
    for given in options.context:
        name, colon, events = given.partition(":")
        if not name or (colon and not events.isdecimal()):
            raise ConfigError(f"context must be NAME or NAME:EVENTS, got {given!r}")
        features.append((name, int(events) if colon else options.min_context_events))
    return features


def _check_features(sizes: CheckpointSizes, options: ImportOptions, source: str) -> None:
    """Check that the options name as many features as the checkpoint has weights for, each with a table of its own."""
    for kind, num, given in (
        ("contextual features", sizes.num_context, options.context),
        ("features besides the item", sizes.num_extra, options.extra),
    ):
        if num != len(given):
            raise ModelError(f"{source}: the checkpoint has {num} {kind}, but {len(given)} are named: {list(given)}")
    if sizes.num_item_features not in {1, 1 + sizes.num_extra}:
        problem = f"reads {sizes.num_item_features} features; 1 or {1 + sizes.num_extra} are supported"
        raise ModelError(f"{source}: the item side of the head {problem}")
    names = [options.item, *options.extra, *(name for name, _ in context_features(options))]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"{source}: each feature needs a table of its own, {repeated[0]!r} is named twice")


def find_tables(folder: Path, row_dim: int, names: Mapping[str, str]) -> dict[str, ShardedTable]:
    """Find the tables and return them by the names of this package; no row is read."""
    index = read_index(folder)
    found = {}
    for ours, name in names.items():
        keys = [key for key in index if key.endswith(f"embeddings.{name}.weight")]
        if len(keys) != 1:
            raise ModelError(f"{folder}: one table {name!r} is needed, found {keys or sorted(index)}")
        found[ours] = index[keys[0]]
    if unexpected := sorted(index.keys() - {table.name for table in found.values()}):
        raise ModelError(f"{folder}: {unexpected[0]!r} is no table of a DLRMv3 with tables {list(names.values())}")
    kinds = {(table.shape[1], table.dtype) for table in found.values()}
    if len(kinds) != 1 or next(iter(kinds))[0] != row_dim:
        raise ModelError(
            f"{folder}: all tables must have rows of {row_dim} and one type, got {sorted(map(str, kinds))}"
        )
    return found


def _config(
    weights: Weights, sizes: CheckpointSizes, tables: Mapping[str, ShardedTable], options: ImportOptions
) -> ModelConfig:
    heads = options.num_heads
    if sizes.width % heads or sizes.qk_width <= 0 or sizes.qk_width % heads:
        raise ModelError(f"{heads} heads do not divide widths of {sizes.width} (v) and {sizes.qk_width} (qk)")
    unit_s, num_units = (
        _whole_numbers(weights[name], name) if sizes.parts.has_clock else []
        for name in (theirs.UNIT_S, theirs.NUM_UNITS)
    )
    extra = tuple(_OUR_NAMES.get(name, name) for name in options.extra)
    context = context_features(options)
    own = weights[f"{theirs.LAYERS}0._uvqk_weight"].dtype
    configs = {name: TableConfig(name=name, num_rows=table.shape[0]) for name, table in tables.items()}
    return ModelConfig(
        name="dlrmv3-imported",
        form="concat",
        num_layers=sizes.num_layers,
        num_heads=heads,
        qk_dim=sizes.qk_width // heads,
        v_dim=sizes.width // heads,
        dim=sizes.dim,
        hidden_dim=sizes.hidden,
        input_hidden_dim=sizes.input_hidden,
        normaliser=1,  # each request divides by its own length instead
        dtype=options.dtype or _name_of(own),
        window=options.window,
        max_candidates=options.max_candidates,
        num_actions=_num_actions(weights[theirs.BITS]) if sizes.parts.has_actions else 1,
        num_tasks=sizes.num_tasks,
        time_buckets=sizes.num_times,
        row_dim=sizes.row_dim,
        row_dtype=_name_of(tables[ITEM].dtype),
        features=(configs[ITEM], *(configs[name] for name in extra)),
        user_context=tuple(configs[_OUR_NAMES.get(name, name)] for name, _ in context),
        encoders=(
            EncoderConfig(name="item", tables=(ITEM,)),
            *([EncoderConfig(name="extra", tables=extra)] if extra else []),
        ),
        candidate_encoder=EncoderConfig(
            name="candidate", tables=(ITEM, *(extra if sizes.num_item_features > 1 else ()))
        ),
        query_frame=QueryFrame(
            num_positions=sizes.num_positions,
            min_context_events=tuple(events for _, events in context) if len(context) > 1 else _only(context),
            cycles=tuple(Cycle(unit_s=s, num_units=n) for s, n in zip(unit_s, num_units, strict=True)),
        ),
    )


def _only(context: Sequence[tuple[str, int]]) -> int:
    """Return the fewest events of the single contextual feature, 0 without one."""
    return context[0][1] if context else 0


def _whole_numbers(tensor: Tensor, name: str) -> list[int]:
    values = tensor.flatten().tolist()
    if not all(math.isfinite(value) for value in values):
        raise ModelError(f"weight {name!r} must be finite, got {values[:8]}")
    return [int(value) for value in values]


def _name_of(dtype: torch.dtype) -> Dtype:
    names: dict[torch.dtype, Dtype] = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
    }
    if dtype not in names:
        raise ModelError(f"weights must be float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}")
    return names[dtype]


def _num_actions(bits: Tensor) -> int:
    """Return the number of actions: an action is a set of bits, and each combination gets a row at import."""
    if bits.numel() > _MOST_BITS:
        raise ModelError(f"actions must be sets of at most {_MOST_BITS} bits, got {bits.numel()}")
    most = 0
    for bit in _whole_numbers(bits, theirs.BITS):
        most |= bit
    if not 0 < most < _MOST_ACTIONS:
        raise ModelError(f"actions must fit {_MOST_ACTIONS - 1}, the checkpoint's weights {bits.tolist()} do not")
    return most + 1


def convert(weights: Weights, sizes: CheckpointSizes) -> dict[str, Tensor]:
    """Convert the published dense weights to those of this package, in float64."""
    w = {name: value.double() for name, value in weights.items() if value.is_floating_point()}
    scale = math.sqrt(sizes.dim)  # factor of tokens before position and time are added
    parts, dim = sizes.parts, sizes.dim
    no_actions, no_clock = torch.zeros((2, dim), dtype=torch.float64), torch.eye(dim, dtype=torch.float64)
    combiner = f"{theirs.POST}_time_feature_combiner"
    dense = {
        "action_embedding.weight": scale * _actions(w, weights[theirs.BITS]) if parts.has_actions else no_actions,
        "position_embedding.weight": w[theirs.POSITIONS],
        "time_embedding.weight": w[theirs.TIMES],
        "output_mix.weight": w[f"{combiner}.weight"] if parts.has_clock else no_clock,
        "output_mix.bias": w[f"{combiner}.bias"] if parts.has_clock else no_actions[0],
        "output_norm.weight": w[f"{theirs.POST}_layer_norm.weight"],
        "output_norm.bias": w[f"{theirs.POST}_layer_norm.bias"],
    }
    if num := sizes.num_context:
        dense["context.weight"] = scale * w[theirs.CONTEXT_WEIGHT]
        dense["context.bias"] = scale * w[theirs.CONTEXT_BIAS] + w[theirs.POSITIONS][:num]
    mlps = {"encoders.item": theirs.CONTENT} | ({"encoders.extra": theirs.EXTRA} if sizes.num_extra else {})
    encoders = list(mlps)
    mlps |= {"candidate_encoder": theirs.ITEM_MLP, "head": theirs.HEAD}
    for ours, name in mlps.items():
        dense |= {f"{ours}{key.removeprefix(name)}": value for key, value in w.items() if key.startswith(f"{name}.")}
    for encoder in encoders:
        for part in ("weight", "bias"):
            dense[f"{encoder}.3.{part}"] = scale * dense[f"{encoder}.3.{part}"]
    for name, value in w.items():
        if name.startswith(theirs.LAYERS):
            layer, field = name.removeprefix(theirs.LAYERS).split("._")
            dense[f"layers.{layer}.{field}"] = value
    return dense


def _actions(w: Weights, bits: Tensor) -> Tensor:  # (actions + 1, dim)
    """Compute the published model's embedding of every set of bits, and of the placeholder for an unknown action."""
    actions = torch.arange(_num_actions(bits))
    widest = max(*w[f"{theirs.ACTION}.0.weight"].shape, *w[f"{theirs.ACTION}.2.weight"].shape)
    if len(actions) * widest > _MOST_ACTION_NUMBERS:
        raise ModelError(f"{len(actions)} actions in layers of {widest} are more than {_MOST_ACTION_NUMBERS} numbers")
    has = (actions[:, None] & bits.long()[None, :]) > 0
    known = (has[:, :, None] * w[theirs.BIT_ROWS][None]).flatten(1)
    x = torch.cat([known, w[theirs.NO_ACTION]])
    mlp = theirs.ACTION
    hidden = F.linear(x, w[f"{mlp}.0.weight"], w[f"{mlp}.0.bias"])
    gate = F.layer_norm(hidden, hidden.shape[-1:], w[f"{mlp}.1.weight"], w[f"{mlp}.1.bias"], _NORM_EPS).sigmoid()
    out = F.linear(hidden * gate, w[f"{mlp}.2.weight"], w[f"{mlp}.2.bias"])
    return F.layer_norm(out, out.shape[-1:], w[f"{mlp}.3.weight"], w[f"{mlp}.3.bias"], _NORM_EPS)
