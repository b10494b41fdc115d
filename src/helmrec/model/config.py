"""The shape of an HSTU ranking model, as stored in a model folder's config.json."""

from collections import Counter
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from helmrec.config import FixedKVDtype, FixedRowDtype, Frozen
from helmrec.memory.geometry import PageGeometry
from helmrec.types import AttentionWindow

ITEM = "item"
Dtype = Literal["float32", "bfloat16", "float16"]
_ITEMSIZE: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class TableConfig(Frozen):
    """One embedding table. Rows of all tables share one id space, in the order the model lists them.

    An id of `num_rows` or more is unknown. With `unknown="row"` it is read as `unknown_row`, from the check of a
    request on: caches and their hashes see the row that is read, so prefixes are reused if and only if the model would
    compute the same, whatever the unknown ids are. Stored histories keep the ids as they came, so that a later model
    with rows for them reads those rows. That model has another version, under which no prefix of the old one is found.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", description="also a file name")
    num_rows: int = Field(ge=1)
    unknown: Literal["refuse", "row"] = Field("refuse", description="what happens to ids of num_rows or more")
    unknown_row: int | None = Field(None, ge=0, description="the row read for them; needed with unknown='row'")

    @model_validator(mode="after")
    def _has_a_row_for_unknown_ids(self) -> Self:
        if (self.unknown == "row") != (self.unknown_row is not None):
            raise ValueError(
                f"unknown={self.unknown!r} {'needs an' if self.unknown == 'row' else 'has no'} unknown_row"
            )
        if self.unknown_row is not None and self.unknown_row >= self.num_rows:
            raise ValueError(f"unknown_row must be below num_rows, {self.num_rows}, got {self.unknown_row}")
        return self


class EncoderConfig(Frozen):
    """An input MLP or a linear map over the rows of one or more event tables, side by side or summed."""

    name: str = Field(min_length=1)
    tables: tuple[str, ...] = Field(min_length=1)
    pooling: Literal["concat", "sum"] = "concat"
    kind: Literal["mlp", "linear"] = Field("mlp", description="two layers with a norm of their output, or one without")


class Cycle(Frozen):
    """A periodic time feature of the output: the units of time that have passed in the current period."""

    unit_s: int = Field(ge=1)
    num_units: int = Field(ge=1)


class QueryFrame(Frozen):
    """Tokens relative to the query, as in Meta's DLRMv3.

    Positions count back from the candidates, times are ages at the query, attention is divided by the length of the
    request, and the time of the query is an input of the output layers. K/V then depend on the whole request and are
    not reused.
    """

    num_positions: int = Field(ge=1, description="entries of the position table; positions farther back share the last")
    bucket_s: int = Field(60, ge=1, description="time bucket b begins at an age of b * b of these seconds")
    min_context_events: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        0, description="with fewer events and candidates in all, user context rows are zero; one, or one per table"
    )
    cycles: tuple[Cycle, ...] = Field((), description="periodic time features of the output")


class RetrievalHead(Frozen):
    """Scores a candidate by the dot product of its encoding and the state of the request's last token.

    Candidates are no tokens then. The state of the last event is computed for every request, so its K/V are not kept.
    """

    state_norm: Literal["none", "l2", "layer"] = Field("none", description="of the state; layer: with learned weights")
    item_norm: Literal["none", "l2"] = Field("none", description="of the candidate's encoding")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="divides the product")


class StateHead(Frozen):
    """Computes logits from the state of a candidate's token alone: brought to length 1, then a plain MLP."""

    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="of the layers before the last")
    activation: Literal["relu", "gelu"] = "relu"


class AttentionBias(Frozen):
    """A learned bias of attention, by distance in events and by time, the same for all heads.

    The time is that from the key's event to the event after the row's, or to the request after the last event.
    K/V of an event thus depend on the time of the next one.
    """

    time_buckets: int = Field(128, ge=1, description="buckets after the first; the last is open-ended")
    bucket_width: float = Field(0.301, gt=0, description="bucket b begins where the logarithm of a time is b of these")


class ModelConfig(Frozen):
    """The shape and arithmetic of a model.

    An event token is the sum of its encoders' outputs, its action, its position (forward from the window's
    anchor) and the bucket of its time gap. User-context tokens come first and are cached with the history;
    request-context tokens come after it and are not. A model with a `query_frame` has other positions and times.
    """

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    form: Literal["gated", "concat"] = Field("concat", description="published layer form of the weights")
    num_layers: int = Field(ge=1, le=1_000)
    num_heads: int = Field(ge=1)
    qk_dim: int = Field(ge=1, description="per head")
    v_dim: int = Field(ge=1, description="per head")
    dim: int = Field(ge=1)
    hidden_dim: int = Field(512, ge=1, description="width inside the input and head MLPs")
    input_hidden_dim: int | None = Field(None, ge=1, description="width inside the input MLPs, if different")
    output_bias: bool = Field(False, description="whether the output projection of a layer has a bias")
    qk_scale: float | None = Field(None, gt=0, description="factor of q.k; by default 1 / sqrt(qk_dim)")
    attention_bias: AttentionBias | None = Field(None, description="added to q.k, for models with a retrieval head")
    max_attn_len: int | None = Field(
        None, ge=1, description="a token sees so many tokens before it; by default all of them"
    )
    full_attn_tail: int = Field(
        0, ge=0, description="with max_attn_len: so many last tokens before the candidates, and these, see everything"
    )
    layer_norm_eps: float = Field(1e-6, gt=0, description="of the norms inside layers")
    normaliser: int = Field(ge=1, description="the constant N that divides attention; never a batch's length")
    dtype: Dtype = Field("float32", description="of dense weights, activations and KV")

    window: int = Field(ge=4, description="most events the model looks at")
    max_candidates: int = Field(ge=1)
    num_actions: int = Field(ge=1)
    num_tasks: int = Field(1, ge=1)
    time_buckets: int = Field(64, ge=2)

    row_dim: int = Field(ge=1)
    row_dtype: Dtype = "float32"
    features: tuple[TableConfig, ...] = Field(min_length=1, description="tables read per event and per candidate")
    user_context: tuple[TableConfig, ...] = Field((), description="one token each, before the history")
    request_context: tuple[TableConfig, ...] = Field((), description="one token each, after the history")
    encoders: tuple[EncoderConfig, ...] = Field(min_length=1)
    candidate_encoder: EncoderConfig = Field(description="the item side of the head")
    retrieval: RetrievalHead | None = Field(None, description="scores by a dot product instead of the head's MLP")
    state_head: StateHead | None = Field(None, description="scores without the item side of the head")
    query_frame: QueryFrame | None = Field(None, description="set if K/V depend on the query, as in imported models")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        names = Counter(table.name for table in self.tables)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"table names must be distinct, {repeated} repeat")
        if self.features[0].name != ITEM:
            raise ValueError(f"the first feature table must be named {ITEM!r}, not {self.features[0].name!r}")
        known = {table.name for table in self.features}
        for encoder in (*self.encoders, self.candidate_encoder):
            if unknown := set(encoder.tables) - known:
                raise ValueError(f"encoder {encoder.name!r} names unknown feature tables {sorted(unknown)}")
        if self.query_frame is not None and self.request_context:
            raise ValueError("a model with a query_frame has no request_context")
        fewest = () if self.query_frame is None else self.query_frame.min_context_events
        if isinstance(fewest, tuple) and fewest and len(fewest) != len(self.user_context):
            raise ValueError(f"min_context_events has {len(fewest)} entries for {len(self.user_context)} tables")
        self._check_head()
        self._check_window()
        return self

    def _check_head(self) -> None:
        if self.retrieval is not None and self.query_frame is not None:
            raise ValueError("a model with a query_frame has no retrieval head")
        if self.retrieval is not None and self.num_tasks != 1:
            raise ValueError(f"a retrieval head has one task, got num_tasks {self.num_tasks}")
        if self.state_head is not None and (self.retrieval is not None or self.query_frame is not None):
            raise ValueError("a model with a state_head has neither a retrieval head nor a query_frame")

    def _check_window(self) -> None:
        if self.attention_bias is not None and (self.retrieval is None or self.user_context or self.request_context):
            raise ValueError("a model with an attention_bias has a retrieval head, and no context tables")
        if self.max_attn_len is None and self.full_attn_tail:
            raise ValueError(f"full_attn_tail needs a max_attn_len, got {self.full_attn_tail}")
        if self.max_attn_len is not None and self.max_attn_len < len(self.user_context):
            raise ValueError(f"max_attn_len must reach over the {len(self.user_context)} user_context tokens")

    @property
    def is_append_stable(self) -> bool:
        """Whether K/V of a token depend on nothing after it, so that later requests may reuse them."""
        return self.query_frame is None

    @property
    def unkept_events(self) -> int:
        """The number of last events whose K/V are never kept, since a request needs or changes their states."""
        in_tail = max(0, self.full_attn_tail - len(self.request_context))  # they see all; once they leave it, less
        return max(in_tail, 0 if self.retrieval is None else 1)

    @property
    def attention_window(self) -> AttentionWindow | None:
        return None if self.max_attn_len is None else AttentionWindow(self.max_attn_len, self.full_attn_tail)

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of a row in the model's files."""
        return self.row_dim * _ITEMSIZE[self.row_dtype]

    @property
    def row_stride(self) -> int:
        """Bytes from one row of the model's dtype to the next, in a pool and in host memory."""
        return self.page_geometry(1).row_stride

    def record_bytes(self, row_dtype: FixedRowDtype) -> int:
        """Bytes of a row that is stored in this type: of its values, or of a record of codes with its padding."""
        return self.row_bytes if row_dtype == "model" else self.page_geometry(1, row_dtype=row_dtype).row_stride

    @property
    def score_scale(self) -> float:
        """The factor of q.k."""
        return self.qk_dim**-0.5 if self.qk_scale is None else self.qk_scale

    def page_geometry(
        self,
        page_tokens: int,
        kv_dtype: FixedKVDtype = "model",
        row_dtype: FixedRowDtype = "model",
        host_row_dtype: FixedRowDtype = "model",
    ) -> PageGeometry:
        """Pages of a pool for this model."""
        is_rounded, is_coded = kv_dtype != "model", row_dtype != "model"
        return PageGeometry(
            page_tokens=page_tokens,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            kv_itemsize=1 if is_rounded else _ITEMSIZE[self.dtype],
            kv_scale_bytes=int(is_rounded),
            row_dim=self.row_dim,
            row_itemsize=1 if is_coded else _ITEMSIZE[self.row_dtype],
            row_scale_bytes=int(is_coded),
            host_row_bytes=self.row_bytes if host_row_dtype == "model" else self.row_dim + 1,
        )

    @cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        """All tables, in id-space order."""
        return (*self.features, *self.user_context, *self.request_context)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First row id of each table."""
        offsets, start = {}, 0
        for table in self.tables:
            offsets[table.name] = start
            start += table.num_rows
        return offsets

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables)

    @property
    def max_prefix_tokens(self) -> int:
        """Cacheable tokens of the longest request."""
        return len(self.user_context) + self.window

    @property
    def max_request_tokens(self) -> int:
        return self.max_prefix_tokens + len(self.request_context) + self.max_candidates
