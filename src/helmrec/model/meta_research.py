"""Imports the research HSTU of Meta's generative-recommenders from a checkpoint of its trainer.

SiLU on all four parts, an output bias, a relative attention bias by position and time, and scores by the dot product
of a candidate's row and the last state. Weights that such a model does not have are errors that name them.
"""

import math
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from helmrec.config import Frozen
from helmrec.errors import ConfigError, ModelError
from helmrec.model.checkpoint import read_checkpoint
from helmrec.model.config import ITEM, AttentionBias, Dtype, EncoderConfig, ModelConfig, RetrievalHead, TableConfig
from helmrec.model.folder import Progress
from helmrec.model.hstu import dense_shapes
from helmrec.model.weights import parts_of, stream_model

ITEMS = "_embedding_module._item_emb.weight"
POSITIONS = "_input_features_preproc._pos_emb.weight"
LAYERS = "_hstu._attention_layers."
_MASK = "_attn_mask"
_WRAPPER = "module."  # where names begin that distributed training saved
_RESERVED = 11  # positions that the trainer adds for outputs by default
_BUCKET_WIDTH = 0.301
_LAYER = ("_uvqk", "_o.weight", "_o.bias", "_rel_attn_bias._ts_w", "_rel_attn_bias._pos_w")


class ResearchOptions(Frozen):
    """Settings that a checkpoint does not contain."""

    num_heads: int = Field(ge=1)
    keys: tuple[str, ...] = ("model_state_dict",)
    window: int | None = Field(None, ge=4, description="by default all positions but the 11 that training reserves")
    max_candidates: int = Field(1_000, ge=1)
    item_l2_norm: bool = True
    temperature: float = Field(1.0, gt=0)
    dtype: Dtype = "float32"


def import_research(
    checkpoint: Path, out: Path, options: ResearchOptions, progress: Progress = lambda _: None
) -> ModelConfig:
    """Write a model folder from a checkpoint of the research trainer."""
    keys = () if checkpoint.is_dir() or checkpoint.suffix == ".safetensors" else options.keys
    weights = _unwrapped(read_checkpoint(checkpoint, keys))
    num_layers = _check_names(weights, str(checkpoint))
    try:
        config = _config(weights, num_layers, options)
    except ConfigError as error:
        raise ModelError(f"{checkpoint}: with these options it makes no model: {error}") from None
    dense = {name: value.to(getattr(torch, config.dtype)).contiguous() for name, value in _convert(weights, config)}
    _check_shapes(weights, dense, config, str(checkpoint))
    stream_model(out, config, dense, {ITEM: parts_of(weights[ITEMS].to(getattr(torch, config.row_dtype)))}, progress)
    return config


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    is_wrapped = bool(weights) and all(name.startswith(_WRAPPER) for name in weights)
    return {name.removeprefix(_WRAPPER): value for name, value in weights.items()} if is_wrapped else weights


def _check_names(weights: dict[str, Tensor], source: str) -> int:
    """Check that the weights are exactly those of such a model, and return the number of layers."""
    numbers = {name.removeprefix(LAYERS).split(".")[0] for name in weights if name.startswith(LAYERS)}
    num_layers = max(1, len(numbers))
    expected = {ITEMS, POSITIONS, *(f"{LAYERS}{i}.{name}" for i in range(num_layers) for name in _LAYER)}
    problems = [f"weight {name!r} is missing" for name in sorted(expected - weights.keys())]
    surplus = sorted(weights.keys() - expected - {_MASK})
    problems += [f"weight {name[:200]!r} is no weight of a research HSTU with dot products" for name in surplus]
    if problems:
        raise ModelError(f"{source}: {len(problems)} weights do not fit:\n  " + "\n  ".join(problems))
    return num_layers


def _config(weights: dict[str, Tensor], num_layers: int, options: ResearchOptions) -> ModelConfig:
    heads, (num_rows, dim) = options.num_heads, _matrix(weights, ITEMS)
    columns, width = _matrix(weights, f"{LAYERS}0._uvqk")[1], _matrix(weights, f"{LAYERS}0._o.weight")[1]
    qk_width = columns // 2 - width
    if width % heads or qk_width <= 0 or qk_width % heads:
        raise ModelError(f"{heads} heads do not divide widths of {width} (v) and {qk_width} (qk)")
    length = (weights[f"{LAYERS}0._rel_attn_bias._pos_w"].numel() + 1) // 2
    window = options.window or max(4, length - _RESERVED)
    if window >= length:
        raise ModelError(f"a window of {window} events needs more than the {length} positions of the checkpoint")
    return ModelConfig(
        name="hstu-research",
        form="gated",
        num_layers=num_layers,
        num_heads=heads,
        qk_dim=qk_width // heads,
        v_dim=width // heads,
        dim=dim,
        output_bias=True,
        qk_scale=1.0,
        attention_bias=AttentionBias(
            time_buckets=max(1, weights[f"{LAYERS}0._rel_attn_bias._ts_w"].numel() - 1), bucket_width=_BUCKET_WIDTH
        ),
        normaliser=length,
        dtype=options.dtype,
        window=window,
        max_candidates=options.max_candidates,
        num_actions=1,
        time_buckets=2,
        row_dim=dim,
        row_dtype="float32",
        features=(TableConfig(name=ITEM, num_rows=num_rows),),
        encoders=(EncoderConfig(name="item", tables=(ITEM,), kind="linear"),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,), kind="linear"),
        retrieval=RetrievalHead(
            state_norm="l2", item_norm="l2" if options.item_l2_norm else "none", temperature=options.temperature
        ),
    )


def _matrix(weights: dict[str, Tensor], name: str) -> tuple[int, int]:
    if weights[name].ndim != 2:
        raise ModelError(f"weight {name!r} must have two dimensions, got {tuple(weights[name].shape)}")
    return weights[name].shape[0], weights[name].shape[1]


def _convert(weights: dict[str, Tensor], config: ModelConfig) -> list[tuple[str, Tensor]]:
    """Return the dense weights by the names of this package. Rows are scaled by the root of their width as tokens."""
    dim, window, width = config.dim, config.window, config.num_heads * config.v_dim
    none = torch.zeros(dim)
    dense = [
        ("action_embedding.weight", torch.zeros(2, dim)),
        ("time_embedding.weight", torch.zeros(2, dim)),
        ("position_embedding.weight", weights[POSITIONS][: window + 1]),
        ("encoders.item.0.weight", math.sqrt(dim) * torch.eye(dim)),
        ("encoders.item.0.bias", none),
        ("candidate_encoder.0.weight", torch.eye(dim)),
        ("candidate_encoder.0.bias", none),
    ]
    for i in range(config.num_layers):
        uvqk, out, out_bias, by_time, by_position = (weights[f"{LAYERS}{i}.{name}"] for name in _LAYER)
        layer = {
            "uvqk_weight": uvqk,
            "uvqk_beta": torch.zeros(uvqk.shape[-1]),
            "input_norm_weight": torch.ones(dim),
            "input_norm_bias": none,
            "output_weight": out.T,
            "output_norm_weight": torch.ones(width),
            "output_norm_bias": torch.zeros(width),
            "output_bias": out_bias,
            # Their entry n - 1 + key - row: from the middle back, by distance.
            "position_bias": by_position[: config.normaliser].flip(0)[:window],
            "time_bias": by_time,
        }
        dense += [(f"layers.{i}.{name}", value) for name, value in layer.items()]
    return dense


def _check_shapes(weights: dict[str, Tensor], dense: dict[str, Tensor], config: ModelConfig, source: str) -> None:
    """Name every weight whose shape differs from what the sizes of the first layer and the items' width imply."""
    wanted = dense_shapes(config)
    problems = [
        f"the weight that becomes {name!r} must be {wanted[name]}, got {tuple(value.shape)}"
        for name, value in dense.items()
        if tuple(value.shape) != wanted[name]
    ]
    length = (2 * config.normaliser - 1,)
    for i in range(config.num_layers):
        name = f"{LAYERS}{i}._rel_attn_bias._pos_w"
        if tuple(weights[name].shape) != length:
            problems.append(f"weight {name!r} must be {length}, got {tuple(weights[name].shape)}")
    if problems:
        raise ModelError(f"{source}: {len(problems)} weights do not fit:\n  " + "\n  ".join(problems))
