"""Names and shapes of the weights of Meta's production HSTU, DLRMv3 among them, and the sizes of such a model.

Facts of the format only; `dlrmv3.py` knows the meaning of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from helmrec.errors import ModelError
from helmrec.model.hstu import mlp_shapes

_PREPROCESSOR = "_hstu_transducer._input_preprocessor."
LAYERS = "_hstu_transducer._stu_module._stu_layers."
CONTENT = f"{_PREPROCESSOR}_content_embedding_mlp"
EXTRA = f"{_PREPROCESSOR}_additional_embedding_mlp"
ACTION = f"{_PREPROCESSOR}_action_embedding_mlp"
BITS = f"{_PREPROCESSOR}_action_encoder._combined_action_weights"
BIT_ROWS = f"{_PREPROCESSOR}_action_encoder._action_embedding_table"
NO_ACTION = f"{_PREPROCESSOR}_action_encoder._target_action_embedding_table"
_ACTIONS = f"{_PREPROCESSOR}_action_"
_CONTEXT = f"{_PREPROCESSOR}_batched_contextual_linear_"
CONTEXT_WEIGHT = f"{_CONTEXT}weights"
CONTEXT_BIAS = f"{_CONTEXT}bias"
POSITIONS = "_hstu_transducer._positional_encoder._position_embeddings_weight"
TIMES = "_hstu_transducer._positional_encoder._timestamp_embeddings_weight"
POST = "_hstu_transducer._output_postprocessor."
UNIT_S = f"{POST}_period_units"
NUM_UNITS = f"{POST}_units_per_period"
ITEM_MLP = "_item_embedding_mlp"
HEAD = "_multitask_module._prediction_module"

_MAX_LAYER_DIGITS = 6
Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """The sizes of a checkpoint, each read from one weight; the other weights are checked against them."""

    num_layers: int
    dim: int
    row_dim: int
    width: int  # heads * v
    qk_width: int  # heads * qk
    input_hidden: int
    hidden: int
    num_tasks: int
    num_bits: int  # kinds of action
    bit_dim: int
    num_positions: int
    num_times: int
    num_cycles: int  # 0: the output is not combined with the time of the query
    num_context: int = 1  # contextual features, one token each
    num_extra: int = 1  # features of an event besides the item
    num_item_features: int = 2  # that the item side of the head reads

    @property
    def parts(self) -> "Parts":
        return Parts(self.num_bits > 0, self.num_context > 0, self.num_cycles > 0)

    @classmethod
    def of(cls, weights: Weights, num_layers: int) -> "CheckpointSizes":
        width = weights[f"{LAYERS}0._output_norm_weight"].numel()
        parts, row_dim = Parts.of(weights), _width(weights, f"{CONTENT}.0.weight")
        return cls(
            num_layers=num_layers,
            dim=weights[f"{LAYERS}0._input_norm_weight"].numel(),
            row_dim=row_dim,
            width=width,
            qk_width=weights[f"{LAYERS}0._uvqk_beta"].numel() // 2 - width,
            input_hidden=weights[f"{CONTENT}.0.bias"].numel(),
            hidden=weights[f"{ITEM_MLP}.0.bias"].numel(),
            num_tasks=weights[f"{HEAD}.2.bias"].numel(),
            num_bits=weights[BITS].numel() if parts.has_actions else 0,
            bit_dim=_width(weights, BIT_ROWS) if parts.has_actions else 0,
            num_positions=weights[POSITIONS].numel() // max(1, _width(weights, POSITIONS)),
            num_times=weights[TIMES].numel() // max(1, _width(weights, TIMES)),
            num_cycles=weights[UNIT_S].numel() if parts.has_clock else 0,
            num_context=max(1, weights[CONTEXT_BIAS].shape[0]) if parts.has_context else 0,
            num_extra=_width(weights, f"{EXTRA}.0.weight") // max(1, row_dim),
            num_item_features=_width(weights, f"{ITEM_MLP}.0.weight") // max(1, row_dim),
        )


class Parts(NamedTuple):
    """Which of the optional parts of the model a checkpoint has."""

    has_actions: bool
    has_context: bool
    has_clock: bool

    @classmethod
    def of(cls, weights: Weights) -> "Parts":
        return cls(*(any(name.startswith(start) for name in weights) for start in (_ACTIONS, _CONTEXT, UNIT_S)))


def _width(weights: Weights, name: str) -> int:
    """Return the size of the last dimension."""
    if not weights[name].ndim:
        raise ModelError(f"{name!r} must have two dimensions, got a single number")
    return weights[name].shape[-1]


def published_shapes(s: CheckpointSizes) -> Shapes:
    """Return name and shape of every weight in a checkpoint of this size."""
    num_columns, action_dim = 2 * (s.width + s.qk_width), s.num_bits * s.bit_dim
    layer: Shapes = {
        "_uvqk_weight": (s.dim, num_columns),
        "_uvqk_beta": (num_columns,),
        "_input_norm_weight": (s.dim,),
        "_input_norm_bias": (s.dim,),
        "_output_weight": (3 * s.width, s.dim),
        "_output_norm_weight": (s.width,),
        "_output_norm_bias": (s.width,),
    }
    actions = mlp_shapes(ACTION, action_dim, s.input_hidden, s.dim, has_norm=True)
    encoder: Shapes = {BITS: (s.num_bits,), BIT_ROWS: (s.num_bits, s.bit_dim), NO_ACTION: (1, action_dim)}
    clock: Shapes = {
        f"{POST}_time_feature_combiner.weight": (s.dim, s.dim + 2 * s.num_cycles),
        f"{POST}_time_feature_combiner.bias": (s.dim,),
        UNIT_S: (1, s.num_cycles),
        NUM_UNITS: (1, s.num_cycles),
    }
    context: Shapes = {CONTEXT_WEIGHT: (s.num_context, s.row_dim, s.dim), CONTEXT_BIAS: (s.num_context, s.dim)}
    return {
        **{f"{LAYERS}{i}.{name}": shape for i in range(s.num_layers) for name, shape in layer.items()},
        **mlp_shapes(CONTENT, s.row_dim, s.input_hidden, s.dim, has_norm=True),
        **mlp_shapes(EXTRA, s.num_extra * s.row_dim, s.input_hidden, s.dim, has_norm=True),
        **(actions if s.parts.has_actions else {}),
        **mlp_shapes(ITEM_MLP, s.num_item_features * s.row_dim, s.hidden, s.dim, has_norm=True),
        **mlp_shapes(HEAD, s.dim, s.hidden, s.num_tasks, has_norm=False),
        f"{POST}_layer_norm.weight": (s.dim,),
        f"{POST}_layer_norm.bias": (s.dim,),
        **(clock if s.parts.has_clock else {}),
        **(encoder if s.parts.has_actions else {}),
        **(context if s.parts.has_context else {}),
        POSITIONS: (s.num_positions, s.dim),
        TIMES: (s.num_times, s.dim),
    }


def check_names(weights: Weights, source: str) -> int:
    """Check that the weights are exactly those of such a model, and return the number of layers."""
    layers = [name.removeprefix(LAYERS).split(".")[0] for name in weights if name.startswith(LAYERS)]
    numbers = {part for part in layers if part.isdecimal() and len(part) <= _MAX_LAYER_DIGITS}
    num_layers = max((int(part) + 1 for part in numbers), default=1)
    if num_layers > max(1, len(numbers)):
        raise ModelError(f"{source}: a layer {num_layers - 1} is there, but only {len(numbers)} layers in all")
    parts = Parts.of(weights)
    ones = CheckpointSizes(num_layers, *[1] * 12)
    ones = replace(ones, num_bits=int(parts.has_actions), num_cycles=int(parts.has_clock))
    expected = published_shapes(replace(ones, num_context=int(parts.has_context))).keys()
    if missing := sorted(expected - weights.keys()):
        raise ModelError(f"{source}: {_few(missing)} of {len(expected)} weights of a DLRMv3 checkpoint are missing")
    if unexpected := sorted(weights.keys() - expected):
        raise ModelError(f"{source}: {_few(unexpected)} are no weights of a DLRMv3 checkpoint")
    return num_layers


def check_shapes(weights: Weights, sizes: CheckpointSizes, source: str) -> None:
    for name, shape in published_shapes(sizes).items():
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"{source}: {name!r} must be {shape}, got {tuple(weights[name].shape)}")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name[:200]) for name in names[:3]) + more
