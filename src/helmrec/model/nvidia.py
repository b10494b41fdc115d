"""Imports ranking models of NVIDIA's recsys-examples: dense weights by their names, tables as dynamicemb dumps them.

Its layers store U, V, Q and K head by head. Items and actions are tokens of their own; here they share one table.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from helmrec.config import Frozen
from helmrec.errors import ConfigError, ModelError
from helmrec.model.checkpoint import read_known
from helmrec.model.config import ITEM, Dtype, EncoderConfig, ModelConfig, StateHead, TableConfig
from helmrec.model.folder import Progress
from helmrec.model.hstu import dense_shapes
from helmrec.model.weight_map import reorder_parts
from helmrec.model.weights import parts_of, stream_model

LAYERS = "_hstu_block._attention_layers."
POSITIONS = "_hstu_block._preprocessor._positional_encoder._position_embeddings_weight"
HEAD = "_mlp._mlp."
_IGNORED = ("_embedding_collection.", "_loss_module.", "_metric_module.")
# Names of a layer's weights: ours, those of the native layer and those of the fused one; `.T` where it is out x in.
_NATIVE = {
    "input_norm_weight": "_input_layernorm_weight",
    "input_norm_bias": "_input_layernorm_bias",
    "uvqk_weight": "_linear_uvqk.weight",
    "uvqk_beta": "_linear_uvqk.bias",
    "output_norm_weight": "_output_ln_dropout_mul.weight",
    "output_norm_bias": "_output_ln_dropout_mul.bias",
    "output_weight": "_linear_proj.weight",
}
_FUSED = _NATIVE | {
    "uvqk_weight": "_linear_uvqk_weight",
    "uvqk_beta": "_linear_uvqk_bias",
    "output_norm_weight": "_output_layernorm_weight",
    "output_norm_bias": "_output_layernorm_bias",
    "output_weight": "_linear_proj_weight",
}
_NEEDED = ("uvqk_weight", "output_weight")  # others may be switched off, which is a norm of ones or a bias of zeros
_MAX_ROWS = 1 << 33


class NvidiaOptions(Frozen):
    """Settings that a checkpoint does not contain."""

    num_heads: int = Field(ge=1)
    scaling_seqlen: int = Field(ge=1, description="what attention is divided by, as configured; never a batch's length")
    item: str = Field("item", min_length=1, description="table of the items")
    action: str | None = Field(None, min_length=1, description="table of the actions, if they are tokens")
    context: tuple[str, ...] = Field((), description="tables of contextual features, in order")
    is_context_causal: bool = Field(False, description="whether it was trained with disable_contextual_mask")
    window: int | None = Field(None, ge=4, description="most tokens of items and actions; by default all positions")
    max_candidates: int = Field(1_000, ge=1)
    activation: Literal["relu", "gelu"] = "relu"
    norm_epsilon: float = Field(1e-5, gt=0)
    dtype: Dtype = "float32"


def import_nvidia(
    checkpoint: Path, tables: Path, out: Path, options: NvidiaOptions, progress: Progress = lambda _: None
) -> ModelConfig:
    """Write a model folder from a file of dense weights, such as torch_module/model.0.pth, and a folder of tables."""
    if options.context and not options.is_context_causal:
        raise ModelError(
            "contextual tokens that see later events (disable_contextual_mask off) have no append-stable K/V "
            "and no place here; a model trained with disable_contextual_mask is imported as such"
        )
    weights = read_known(checkpoint, ("model_state_dict",))
    layers = _layers(weights, str(checkpoint))
    rows = {ITEM: _with_actions(tables, options)} | {name: read_dump(tables, name) for name in options.context}
    try:
        config = _config(weights, layers, rows, options)
    except ConfigError as error:
        raise ModelError(f"{checkpoint}: with these options it makes no model: {error}") from None
    dense = _convert(weights, layers, config, is_per_head=f"{LAYERS}0._linear_uvqk.weight" in weights)
    wanted = dense_shapes(config)
    if problems := [
        f"the weight that becomes {name!r} must be {wanted[name]}, got {tuple(value.shape)}"
        for name, value in dense.items()
        if tuple(value.shape) != wanted[name]
    ]:
        raise ModelError(f"{checkpoint}: {len(problems)} weights do not fit:\n  " + "\n  ".join(problems))
    cast = {name: value.to(getattr(torch, config.dtype)).contiguous() for name, value in dense.items()}
    stream_model(out, config, cast, {name: parts_of(each) for name, each in rows.items()}, progress)
    return config


def read_dump(folder: Path, name: str) -> Tensor:  # (largest id + 1, dim) float32
    """Read a table from dynamicemb's files of 64-bit ids and float32 rows; ids that are not there have zeros."""
    files = sorted(folder.rglob(f"{name}_emb_keys.rank_*.world_size_*")) if folder.is_dir() else []
    if not files:
        raise ModelError(f"{folder}: no file {name}_emb_keys.rank_0.world_size_N lies in this folder")
    world_size = files[0].name.rsplit("_", 1)[1]
    if world_size != str(len(files)):
        raise ModelError(f"{folder}: of table {name!r}, {world_size} files of ids are needed, found {len(files)}")
    ids = [np.fromfile(file, "<i8") for file in files]
    values = [np.fromfile(file.with_name(file.name.replace("_emb_keys.", "_emb_values.")), "<f4") for file in files]
    num, size = sum(each.size for each in ids), sum(each.size for each in values)
    if not num or not size or size % num:
        raise ModelError(f"{folder}: table {name!r} has {num} ids and {size} numbers, which make no rows")
    joined = np.concatenate(ids)
    if joined.min() < 0 or joined.max() >= _MAX_ROWS or np.unique(joined).size != num:
        raise ModelError(f"{folder}: ids of table {name!r} must be distinct and from 0 to {_MAX_ROWS - 1}")
    rows = np.zeros((int(joined.max()) + 1, size // num), np.float32)
    for each, part in zip(ids, values, strict=True):
        rows[each] = part.reshape(each.size, -1)
    return torch.from_numpy(rows)


def _with_actions(folder: Path, options: NvidiaOptions) -> Tensor:
    items = read_dump(folder, options.item)
    if options.action is None:
        return items
    actions = read_dump(folder, options.action)
    if actions.shape[1] != items.shape[1]:
        raise ModelError(
            f"rows of {options.item!r} and {options.action!r} are {items.shape[1]} and {actions.shape[1]} wide"
        )
    return torch.cat([items, actions])


def _layers(weights: Mapping[str, Tensor], source: str) -> list[dict[str, Tensor]]:
    """Return the weights of each layer by our names; ModelError lists all that are missing or of no such model."""
    numbers = {name.removeprefix(LAYERS).split(".")[0] for name in weights if name.startswith(LAYERS)}
    names = _FUSED if f"{LAYERS}0._linear_uvqk_weight" in weights else _NATIVE
    layers = [
        {ours: weights[f"{LAYERS}{i}.{name}"] for ours, name in names.items() if f"{LAYERS}{i}.{name}" in weights}
        for i in range(max(1, len(numbers)))
    ]
    problems = [
        f"weight {f'{LAYERS}{i}.{names[needed]}'!r} is missing"
        for i, layer in enumerate(layers)
        for needed in _NEEDED
        if needed not in layer
    ]
    problems += [f"weight {name!r} is missing" for name in (POSITIONS, f"{HEAD}0.weight") if name not in weights]
    known = {POSITIONS, *(f"{LAYERS}{i}.{name}" for i in range(len(layers)) for name in names.values())}
    surplus = [name for name in weights if name not in known and not name.startswith((HEAD, *_IGNORED))]
    problems += [f"weight {name[:200]!r} is no weight of such a ranking model" for name in sorted(surplus)]
    if problems:
        raise ModelError(f"{source}: {len(problems)} weights do not fit:\n  " + "\n  ".join(problems))
    return layers


def _head(weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias of the head's layers, which stand at every second place."""
    places = sorted({int(place) for name in weights if (place := name.removeprefix(HEAD).split(".")[0]).isdecimal()})
    found = [(weights[f"{HEAD}{place}.weight"], weights.get(f"{HEAD}{place}.bias")) for place in places]
    return [(weight, torch.zeros(weight.shape[0]) if bias is None else bias) for weight, bias in found]


def _config(
    weights: Mapping[str, Tensor], layers: Sequence[Mapping[str, Tensor]], rows: Mapping[str, Tensor], o: NvidiaOptions
) -> ModelConfig:
    num_positions, dim = weights[POSITIONS].shape
    columns = layers[0]["uvqk_weight"].numel() // dim
    if columns % (4 * o.num_heads):
        raise ModelError(f"{o.num_heads} heads do not divide a projection of {columns} columns")
    widths = [weight.shape[0] for weight, _ in _head(weights)]
    room = num_positions - 1 - len(o.context)
    if o.window is not None and o.window > room:
        raise ModelError(
            f"a window of {o.window} tokens needs more than the {num_positions} positions of the checkpoint"
        )
    tables = {name: TableConfig(name=name, num_rows=each.shape[0]) for name, each in rows.items()}
    if wrong := [name for name, each in rows.items() if each.shape[1] != dim]:
        raise ModelError(f"rows of table {wrong[0]!r} must be {dim} wide, got {rows[wrong[0]].shape[1]}")
    return ModelConfig(
        name="hstu-nvidia",
        form="gated",
        num_layers=len(layers),
        num_heads=o.num_heads,
        qk_dim=columns // (4 * o.num_heads),
        v_dim=columns // (4 * o.num_heads),
        dim=dim,
        layer_norm_eps=o.norm_epsilon,
        normaliser=o.scaling_seqlen,
        dtype=o.dtype,
        window=o.window or room,
        max_candidates=o.max_candidates,
        num_actions=1,
        num_tasks=widths[-1],
        time_buckets=2,
        row_dim=dim,
        features=(tables[ITEM],),
        user_context=tuple(tables[name] for name in o.context),
        encoders=(EncoderConfig(name="item", tables=(ITEM,), kind="linear"),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,), kind="linear"),
        state_head=StateHead(widths=tuple(widths[:-1]), activation=o.activation),
    )


def _convert(
    weights: Mapping[str, Tensor], layers: Sequence[Mapping[str, Tensor]], config: ModelConfig, *, is_per_head: bool
) -> dict[str, Tensor]:
    """Return the dense weights by the names of this package. Tokens are rows times the root of their width."""
    dim, num_context, positions = config.dim, len(config.user_context), weights[POSITIONS]
    scaled = math.sqrt(dim) * torch.eye(dim)
    dense = {
        "action_embedding.weight": torch.zeros(2, dim),
        "time_embedding.weight": torch.zeros(2, dim),
        "position_embedding.weight": positions[num_context : num_context + config.window + 1],
        "encoders.item.0.weight": scaled,
        "encoders.item.0.bias": torch.zeros(dim),
    }
    if num_context:
        dense |= {"context.weight": scaled.repeat(num_context, 1, 1), "context.bias": positions[:num_context]}
    for i, (weight, bias) in enumerate(_head(weights)):
        dense |= {f"state_head.layer{i}.weight": weight, f"state_head.layer{i}.bias": bias}
    shapes = dense_shapes(config)
    for i, layer in enumerate(layers):
        for name in _NATIVE:
            shape, value = shapes[f"layers.{i}.{name}"], layer.get(name)
            if value is None:
                value = torch.full(shape, 1.0 if name.endswith("norm_weight") else 0.0)
            elif is_per_head and name in {"uvqk_weight", "output_weight"}:
                value = value.T
            if is_per_head and name.startswith("uvqk") and value.shape == shape:
                value = reorder_parts(value, "uvqk", per_head=True, config=config)
            dense[f"layers.{i}.{name}"] = value
    return dense
