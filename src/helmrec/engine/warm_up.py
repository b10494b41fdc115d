"""Compiles every function that serving may call, before the first client waits for it.

Numba compiles a function at its first call. A scratch engine with the same settings and a tiny model on the CPU takes
every code path of requests, updates and boundary moves; then the engine itself ranks generated requests. Functions
that were compiled before are loaded from the compilers' caches.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pydantic import ByteSize

from helmrec.clock import MonotonicClock
from helmrec.config import EngineConfig, FixedRowDtype, RelayConfig
from helmrec.engine.engine import Engine
from helmrec.engine.layout import NO_CONTEXT, NO_PAGES, NO_REQUESTS, LayoutShape, StepArrays, lay_out, place_of
from helmrec.engine.probe import EngineProbe
from helmrec.engine.row_values import compile_updates
from helmrec.engine.setup import page_geometry
from helmrec.engine.start_up import COMPILED
from helmrec.kernels.attention_plan import AttentionPlan
from helmrec.model.config import ModelConfig, TableConfig
from helmrec.model.precision import ROUNDED
from helmrec.model.shared_tables import row_codec
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import IntArray, PrefillRequest, RankRequest

log = logging.getLogger("helmrec.engine")

_SCRATCH_ITEMS = 4_096
_SCRATCH_WINDOW = 1_100  # one request of this length has more rows than the initial capacity of miss curves
_SCRATCH_EVENTS = 64  # length of all other requests, about
_SCRATCH_PAGE_TOKENS = 4
_SCRATCH_USERS = 24
_CURVE_REQUESTS = 40  # enough for miss curves to be returned


def compile_ahead(model: ModelConfig) -> int:
    """Compile the host functions for every kind of engine that could serve a model of this form; return their number.

    Needs no device: compilers keep the code in their caches, and a later start loads it from there.
    """
    kinds = [
        EngineConfig(
            pool_bytes=ByteSize(1 << 30), device=device, row_order=order, host_kv_bytes=tier, miss_curves=curves
        )
        for device in ("cpu", "cuda")
        for order in ("lru", "frequency")
        for tier in (ByteSize(0), ByteSize(1 << 30))
        for curves in ((True, False) if model.is_append_stable else (False,))
    ]
    for config in kinds:
        _use_scratch_engine(model, config)
    forms: tuple[FixedRowDtype, ...] = ("model", *ROUNDED)
    for form in forms:
        compile_updates(model, row_codec(model, form))
    _compile_places()
    _compile_loops_of_graphs()
    return len(kinds)


def warm_up(engine: Engine) -> None:
    """Compile every host function that this engine may call while serving."""
    engine.start_up.begin("loops of the host", COMPILED)
    _use_scratch_engine(engine.model_config, engine.config)
    # The rows of the scratch engine are float32, as they are.
    compile_updates(engine.model_config, row_codec(engine.model_config, engine.config.host_row_dtype))
    _compile_places()
    engine.start_up.begin("first requests")
    for num_events in (2, 3, *[3] * (_CURVE_REQUESTS if engine.config.miss_curves else 1)):
        # The same user with one more event: extending a prefix takes another code path than starting one.
        engine.rank([made_up_request(engine.model_config, num_events)])
    if engine.config.audit_every:
        probe = EngineProbe(engine)  # an audit takes other ways than steps do
        probe.score_without_caches(probe.prepare(made_up_request(engine.model_config, 3)))
    engine.start_up.end()
    engine.reset_pauses()
    engine.drop_steps()  # slower than the steps of traffic


def made_up_request(model: ModelConfig, num_events: int) -> RankRequest:
    """Return a valid request of the user with the largest id, a minute after events of the first item."""
    first = np.zeros(num_events, np.int64)
    request = make_request(model, int(np.iinfo(np.int64).max), first, first[:1])
    return replace(request, request_time=num_events * 60)


def make_request(model: ModelConfig, user_id: int, items: IntArray, candidates: IntArray) -> RankRequest:
    """Return a request whose other features are functions of the item, its context of the user; an event a minute."""
    others = model.features[1:]
    return RankRequest(
        user_id=user_id,
        items=items,
        actions=items % model.num_actions,
        timestamps=np.arange(items.size) * 60,
        candidates=candidates,
        features={table.name: items * (2 * i + 3) % table.num_rows for i, table in enumerate(others)},
        candidate_features={table.name: candidates * (2 * i + 3) % table.num_rows for i, table in enumerate(others)},
        context={table.name: user_id % table.num_rows for table in (*model.user_context, *model.request_context)},
    )


def scratch_model(model: ModelConfig) -> LoadedModel:
    """Return a minimal model with the same tables and form."""

    def small(tables: tuple[TableConfig, ...], num_rows: int) -> tuple[TableConfig, ...]:
        return tuple(TableConfig(name=table.name, num_rows=num_rows) for table in tables)

    sizes = dict.fromkeys(("num_layers", "num_heads", "num_tasks"), 1) | dict.fromkeys(("qk_dim", "v_dim"), 4)
    config = ModelConfig(
        **model.model_dump()
        | sizes
        | {"dim": 8, "hidden_dim": 8, "input_hidden_dim": None, "row_dim": 8, "dtype": "float32"}
        | {"row_dtype": "float32", "normaliser": _SCRATCH_WINDOW, "window": _SCRATCH_WINDOW, "max_candidates": 8}
        | {"features": small(model.features, _SCRATCH_ITEMS)}
        | {name: small(getattr(model, name), 4) for name in ("user_context", "request_context")}
    )
    generator = torch.Generator().manual_seed(0)
    tables = {table.name: torch.zeros(table.num_rows, config.row_dim) for table in config.tables}
    return LoadedModel(config, 1, random_dense(config, generator), tables)


def scratch_engine(model: ModelConfig, config: EngineConfig) -> Engine:
    """Return an engine with the same settings on the CPU, whose pool is too small for all scratch users."""
    small = scratch_model(model)
    on_cpu = config.model_copy(
        update={
            "device": "cpu",
            "kernels": "torch",
            "row_index": "device" if config.device == "cuda" else config.row_index,
            "page_tokens": _SCRATCH_PAGE_TOKENS,
            "host_rows_bytes": None,  # the first requests compile what reads rows from disk
            "alpha": 0.3,
            "max_batch_requests": 4,
            "max_batch_tokens": 4 * small.config.max_request_tokens,
            "kv_reload": "always",
            "relay": RelayConfig(chunk_tokens=_SCRATCH_EVENTS // 4),
            "kv_freshness": "exact",
            "queue_limit": 1_024,
            "deadline_ms": None,
            "audit_every": 0,
            "log_gaps_ms": 1e9,
        }
    )
    geometry = page_geometry(small.config, on_cpu)
    num_pages = 3 * geometry.pages_for(small.config.max_prefix_tokens) // 2
    host_pages = num_pages if config.host_kv_bytes else 0
    sizes = {"pool_bytes": num_pages * geometry.page_bytes, "host_kv_bytes": host_pages * geometry.page_bytes}
    return Engine(small, EngineConfig(**on_cpu.model_dump() | sizes), MonotonicClock())


_COMPILED: set[tuple[object, ...]] = set()  # kinds of engines whose functions this process has compiled


def _kind(model: ModelConfig, config: EngineConfig) -> tuple[object, ...]:
    """Return the settings that decide which functions an engine calls, and with which types."""
    tables = tuple(bool(each) for each in (model.features[1:], model.user_context, model.request_context))
    rows = (config.device, config.row_index, config.row_order, config.row_admission)
    form = (model.is_append_stable, model.unkept_events, model.attention_bias is not None)
    return (*tables, *form, *rows, config.kv_admission, config.miss_curves, bool(config.host_kv_bytes))


def _use_scratch_engine(model: ModelConfig, config: EngineConfig) -> None:
    if (kind := _kind(model, config)) in _COMPILED:
        return
    level = log.level
    log.setLevel(logging.ERROR)  # else log lines of the scratch engine would look like the engine's own
    try:
        with scratch_engine(model, config) as engine:
            for request in scratch_requests(engine.model_config):
                engine.rank([request])
            _change_everything(engine)
            engine.check()
    finally:
        log.setLevel(level)
    _COMPILED.add(kind)


def scratch_requests(model: ModelConfig) -> Iterator[RankRequest]:
    """Generate new, extended, shortened and changed histories of more users than fit, with rows of whole tables."""
    rng = np.random.default_rng(0)
    histories = [rng.integers(_SCRATCH_ITEMS, size=2 * _SCRATCH_EVENTS) for _ in range(_SCRATCH_USERS)]
    for turn in range(4):
        for user, items in enumerate(histories):
            end = _SCRATCH_EVENTS + 5 * turn - user % 3
            if turn == 2 and user % 2:
                items[end - 7 :] = rng.integers(_SCRATCH_ITEMS, size=items.size - end + 7)
            if turn == 3 and user % 4 == 0:
                end //= 2
            yield make_request(model, user, items[:end], items[:3])
    items = rng.integers(_SCRATCH_ITEMS, size=_SCRATCH_WINDOW)
    yield make_request(model, _SCRATCH_USERS, items, items[:3])


def _change_everything(engine: Engine) -> None:
    """Update rows, move the boundary both ways, compute a history ahead, and forget a user."""
    model = engine.model_config
    requests = list(scratch_requests(model))[-1 - _SCRATCH_USERS : -1]
    for num_rows in (1, 7):
        rows = np.arange(num_rows)
        engine.update_rows(model.features[0].name, rows, np.zeros((num_rows, model.row_dim), np.float32))
        engine.rank(requests[:2])
    for alpha in (0.1, 0.3, 0.2):
        engine.move_alpha(alpha)
        engine.settle()
        engine.rank(requests[2:6])
    if model.is_append_stable:
        engine.prefill(_ahead(model, requests[7]))
    while engine.step():
        pass
    engine.warm(engine.hot_rows())
    engine.forget(requests[3].user_id)
    engine.settled_curves()


def _ahead(model: ModelConfig, request: RankRequest) -> PrefillRequest:
    return PrefillRequest(
        user_id=request.user_id,
        items=request.items,
        actions=request.actions,
        timestamps=request.timestamps,
        features=request.features,
        context={table.name: request.context[table.name] for table in model.user_context},
        budget_ms=1e-6,
    )


def _compile_places() -> None:
    """Compile what finds the arrays of a request, for whole arrays and parts, which may be read-only."""
    lines = np.zeros((2, 3), np.int64)
    for _ in range(2):
        place_of(lines)
        place_of(lines[:, 1:])
        lines.flags.writeable = False


def _compile_loops_of_graphs() -> None:
    """Compile the functions that only steps on a card call: padding to graph sizes, and attention plans."""
    events, lengths = np.zeros(8, np.int64), np.zeros(2, np.int32)
    rows, table = np.zeros((1, 8), np.int32), np.zeros((2, 4), np.int32)
    of_events = [events.copy() for _ in range(9)]  # and of candidates, context tokens, tokens and requests
    out = StepArrays(rows, rows[0], *of_events, np.zeros(3, np.int32), lengths, lengths, table)  # type: ignore[call-arg, arg-type]
    shape = LayoutShape(0, 0, 0, 1, _SCRATCH_PAGE_TOKENS, context_places=2, is_retrieval=False)
    lay_out(NO_REQUESTS, NO_PAGES, NO_CONTEXT, shape, out)
    q = torch.zeros(16, 1, 4)
    AttentionPlan(q, q, _SCRATCH_PAGE_TOKENS, 2).load(np.array([0, 3], np.int32), lengths[:1], lengths[:1] + 2, 1)
