"""Builds the parts of an engine on one device from a model and a configuration."""

from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ByteSize

from helmrec.config import EngineConfig
from helmrec.engine.capture import GraphMaker
from helmrec.engine.choose import choose_device, choose_pool
from helmrec.engine.dense import Dense, EagerDense, Memory, Progress
from helmrec.engine.fast_paths import slower_paths
from helmrec.engine.graphs import GraphedDense, GraphLimits
from helmrec.engine.precision import ChosenPrecision, choose_precision
from helmrec.engine.row_stage import DeviceRowStage, HostRowStage, RowStage
from helmrec.engine.start_up import StartUp
from helmrec.errors import ConfigError, PoolTooSmall
from helmrec.kernels import model_kernels
from helmrec.kernels.kv_rounding import CODE_DTYPES, LANE_TOKENS
from helmrec.kernels.row_codec import Recoding
from helmrec.kernels.row_kernels import RowKernels, row_kernels
from helmrec.kernels.row_table import Admission, RowTable
from helmrec.memory.arena import Arena
from helmrec.memory.device_rows import Capture, DeviceRows, RowPolicy
from helmrec.memory.embedding_cache import EmbeddingCache
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.pool import Demand, Pool, make_host_rows
from helmrec.memory.row_master import HostRows, RowMaster, check_host_room
from helmrec.memory.tiered_rows import RowFile, TierConfig, TieredRows
from helmrec.model.config import ModelConfig
from helmrec.model.folder import find_rows
from helmrec.model.hstu import HstuModel
from helmrec.model.shared_tables import row_codec
from helmrec.model.table_memory import read_tables
from helmrec.model.weights import LoadedModel

_ADMISSIONS = {"always": Admission.ALWAYS, "second-touch": Admission.SECOND_TOUCH, "frequency": Admission.FREQUENCY}
_WIDE, _WIDE_CODES_FROM = 128, 9  # values of a head in codes that every card reads; who reads more
_PAGE_TOKENS = {"cpu": 32, "cuda": 128}  # on a card, a key tile is one page


class Parts(NamedTuple):
    """The parts of an engine that live on its device, ready to serve."""

    model: HstuModel
    master: HostRows
    arena: Arena
    pool: Pool
    dense: Dense
    row_kernels: RowKernels
    capture: Capture | None  # captures graphs, where steps run as graphs
    start_up: StartUp  # times of the start
    config: EngineConfig  # with the device and the pool that were chosen
    choices: tuple[str, ...]  # what was chosen, and why


def build(model: LoadedModel, config: EngineConfig, progress: Progress) -> Parts:
    """Build the parts and warm them up.

    A card reads a locked copy of the tables; a CPU, and engines that share them, use the tables themselves.
    """
    start_up = StartUp()

    def follow(done: int, total: int) -> None:
        progress(done, total)
        start_up.progress(done, total)

    config, device_reason = choose_device(config)
    _check_device(config)
    shape = model.config
    generation = torch.cuda.get_device_capability()[0] if config.device == "cuda" else None
    config, precision_reasons = choose_readable_precision(config, model, generation)
    chosen = config
    if not shape.is_append_stable:
        config = _without_kept_kv(config)
    start_up.begin("weights")
    dense_weights = {name: tensor.to(config.device) for name, tensor in model.dense.items()}
    in_fp8 = config.compute_dtype == "fp8_e4m3"
    codec = row_codec(shape, config.fixed_row_dtype)
    hstu = HstuModel(shape, dense_weights, model_kernels(_kernels(config)), codec, in_fp8=in_fp8)
    start_up.begin("tables")
    master = _master(model, config, follow)
    start_up.begin("pool")
    geometry = page_geometry(shape, config)
    config, pool_reason = choose_pool(config, shape, geometry)
    chosen = chosen.model_copy(update={"pool_bytes": config.pool_bytes})
    config = without_row_index(config, geometry, shape.num_rows)
    kept_as = CODE_DTYPES.get(config.kv_dtype, hstu.dtype)
    num_pages, transposed = config.sized_pool_bytes // geometry.page_bytes, has_transposed_values(config, geometry)
    arena = Arena(num_pages, geometry, kept_as, codec.stored_dtype, config.device, transposed)
    recoding = None if master.codec == codec else Recoding(master.codec, codec)
    kernels = row_kernels(_kernels(config), recoding)
    rows = _make_rows(shape, config, geometry, arena, kernels)
    demand = Demand(shape.num_rows, shape.max_prefix_tokens, config.max_batch_tokens)
    check_host_room(config.host_kv_bytes)  # before the index of its pages is made
    pool = Pool(config, geometry, demand, arena, rows)
    stage = (
        HostRowStage(rows, arena, master, codec)
        if isinstance(rows, EmbeddingCache)
        else DeviceRowStage(rows, arena, master, kernels)
    )
    dense = _make_dense(hstu, arena, geometry, stage, config)
    start_up.begin("kernels and graphs")
    dense.warm_up(follow)
    start_up.end()
    capture = GraphMaker().capture if isinstance(dense, GraphedDense) else None
    choices = (device_reason, pool_reason, *precision_reasons, *slower_paths(shape, config, geometry, arena))
    return Parts(hstu, master, arena, pool, dense, kernels, capture, start_up, chosen, choices)


def has_transposed_values(config: EngineConfig, geometry: PageGeometry) -> bool:
    """Whether values lie with tokens side by side, as matrix units for products of eight-bit floats read them.

    This depends on settings alone, not on the device, so that every device can read what another has kept.
    """
    in_fp8 = config.kv_dtype == config.compute_dtype == "fp8_e4m3"
    return in_fp8 and geometry.page_tokens % LANE_TOKENS == 0


def choose_readable_precision(config: EngineConfig, model: LoadedModel, generation: int | None) -> ChosenPrecision:
    """Choose a precision that the device reads; ConfigError if it cannot read codes that the settings name.

    generation: the major compute capability of the card; None: the device is the CPU.
    """
    no_codes = None if generation is None else _why_no_codes(model.config, generation)
    if no_codes is not None and config.kv_dtype in CODE_DTYPES:
        raise ConfigError(f"kv_dtype: {no_codes}, got {config.kv_dtype!r}")
    return choose_precision(config, model, no_codes)


def _why_no_codes(shape: ModelConfig, generation: int) -> str | None:
    """Return why a card cannot read K/V in codes: decoded blocks of keys do not fit it. None if it can."""
    widest = max(shape.qk_dim, shape.v_dim)
    if generation >= _WIDE_CODES_FROM or widest <= _WIDE:
        return None
    return f"heads of {widest} values need 'model' on a card before compute capability {_WIDE_CODES_FROM}.0"


def _without_kept_kv(config: EngineConfig) -> EngineConfig:
    """Settings for a model whose K/V depend on the query: none are kept."""
    if config.miss_curves:
        raise ConfigError("miss_curves: K/V of this model depend on the query and are never kept, got True")
    return config.model_copy(update={"kv_admission": "never"})


def without_row_index(config: EngineConfig, geometry: PageGeometry, num_rows: int) -> EngineConfig:
    """Subtract the row index from `pool_bytes`, where it is on the card: the rest is for pages."""
    if config.device != "cuda" or _row_index(config) != "device":
        return config
    pool_bytes = config.sized_pool_bytes
    index_bytes = RowTable.bytes_for(num_rows, pool_bytes // geometry.row_stride, _ADMISSIONS[config.row_admission])
    if index_bytes >= pool_bytes:
        raise PoolTooSmall(
            f"pool_bytes must be more than {index_bytes}, the index of {num_rows} rows, got {pool_bytes}"
        )
    return config.model_copy(update={"pool_bytes": ByteSize(pool_bytes - index_bytes)})


def _make_dense(hstu: HstuModel, arena: Arena, geometry: PageGeometry, rows: RowStage, config: EngineConfig) -> Dense:
    memory = Memory(arena.k, arena.v)
    if config.device == "cuda" and config.cuda_graphs and isinstance(rows, DeviceRowStage):
        return GraphedDense(hstu, memory, rows, graph_limits(hstu.config, geometry, config))
    return EagerDense(hstu, memory, rows)


def tier_config(folder: Path, version: int, shape: ModelConfig, config: EngineConfig) -> TierConfig:
    """Return the sizes and files of rows on disk, for an engine that writes its own log."""
    spans = [find_rows(folder, table, shape) for table in shape.tables]
    context = len(shape.user_context) + len(shape.request_context)
    assert config.host_rows_bytes is not None
    return TierConfig(
        files=[RowFile(span.path, span.start, span.num_rows) for span in spans],
        codec=row_codec(shape, "model"),
        num_bytes=int(config.host_rows_bytes),
        least_rows=len(shape.features) * (shape.window + shape.max_candidates) + context,
        log=Path(config.row_log) if config.row_log else row_log_of(folder),
        version=version,
        disk_reads=config.disk_reads,
        num_threads=config.disk_threads,
    )


def row_log_of(folder: Path) -> Path:
    """Return where the row updates of a model are logged, unless a setting says so."""
    return folder.resolve().with_name(folder.resolve().name + ".rows.log")


def _master(model: LoadedModel, config: EngineConfig, progress: Progress) -> HostRows:
    if config.host_rows_bytes is not None:
        if model.folder is None:
            raise ConfigError(
                f"host_rows_bytes is not possible with a model that is not in a folder, got {config.host_rows_bytes}"
            )
        assert model.shared is None, "shared tables are in memory"
        tier = tier_config(model.folder, model.version, model.config, config)
        tiered = TieredRows(tier._replace(follows_log=model.follows_log))
        if config.device == "cuda":
            tiered.lock()
        return tiered
    code = None if config.host_row_dtype == "model" else config.host_row_dtype
    if model.shared is not None:
        assert model.shared.master.codec.code == code, "the keeper of the tables has other settings"
        if config.device == "cuda":
            model.shared.master.lock()
        return model.shared.master
    if config.device == "cpu" and _row_index(config) == "host" and code is None:
        return RowMaster(model.tables)
    if model.folder is None:
        master = RowMaster.copied(model.tables, progress, code)
    else:
        master = read_master(model.folder, model.config, config, progress)
    if config.device == "cuda":
        master.lock()
    return master


def read_master(folder: Path, shape: ModelConfig, config: EngineConfig, progress: Progress) -> RowMaster:
    """Read the tables from their files to one buffer, without keeping pages of the files."""
    spans = {table.name: find_rows(folder, table, shape) for table in shape.tables}
    sizes, row_dtype = {table.name: table.num_rows for table in shape.tables}, config.host_row_dtype
    master = RowMaster.empty(sizes, row_codec(shape, row_dtype))
    read_tables(shape, spans, master.row_bytes, progress, row_dtype)
    return master


def _make_rows(
    shape: ModelConfig, config: EngineConfig, geometry: PageGeometry, arena: Arena, kernels: RowKernels
) -> EmbeddingCache | DeviceRows:
    if _row_index(config) == "host":
        return make_host_rows(config, geometry, shape.num_rows)
    policy = RowPolicy(is_lru=config.row_order == "lru", admission=_ADMISSIONS[config.row_admission])
    return DeviceRows(shape.num_rows, arena.rows, geometry.rows_per_page, policy, kernels)


def _row_index(config: EngineConfig) -> str:
    """Resolve `row_index`: graphs, compiled kernels and admission by frequency need the index on the device."""
    on_card = config.device == "cuda" and _kernels(config) == "triton"
    on_device = on_card or config.row_admission == "frequency"
    return config.row_index if config.row_index != "auto" else "device" if on_device else "host"


def _check_device(config: EngineConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: no CUDA device is available, got 'cuda'")
    if config.device == "cpu" and config.kernels == "triton":
        raise ConfigError("kernels: triton needs device 'cuda', got 'triton' with device 'cpu'")
    if config.device == "cuda" and config.kernels == "torch" and _row_index(config) == "device":
        raise ConfigError("row_index: on 'cuda', 'device' needs compiled kernels, got kernels 'torch'")


def _kernels(config: EngineConfig) -> str:
    return config.kernels if config.kernels != "auto" else "triton" if config.device == "cuda" else "torch"


def graph_limits(shape: ModelConfig, geometry: PageGeometry, config: EngineConfig) -> GraphLimits:
    """Return the largest step to capture. One request may exceed the token budget of a batch, so limits cover it."""
    most_candidates = min(config.max_batch_requests * shape.max_candidates, config.max_batch_tokens)
    return GraphLimits(
        num_events=max(config.max_batch_tokens, shape.max_request_tokens),
        num_sequences=config.max_batch_requests,
        num_candidates=max(shape.max_candidates, most_candidates),
        num_pages=geometry.pages_for(shape.max_prefix_tokens),
        pages_per_move=max(1, config.move_bytes_per_step // geometry.page_bytes),
        refill_bytes=config.refill_bytes_per_step,
    )


def page_geometry(shape: ModelConfig, config: EngineConfig) -> PageGeometry:
    """Return the page geometry of this model's pool."""
    page_tokens = config.page_tokens or _PAGE_TOKENS[config.device]
    return shape.page_geometry(page_tokens, config.fixed_kv_dtype, config.fixed_row_dtype, config.host_row_dtype)
