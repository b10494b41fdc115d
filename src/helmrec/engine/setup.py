"""From a model and a configuration to the parts of an engine on one device."""

from typing import NamedTuple

import torch

from helmrec.config import EngineConfig
from helmrec.engine.dense import Dense, EagerDense, Memory, Progress
from helmrec.engine.graphs import GraphedDense, Limits
from helmrec.errors import ConfigError
from helmrec.kernels import layer_for
from helmrec.memory.arena import Arena
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.host_tier import RowMaster
from helmrec.memory.pool import Demand, Pool
from helmrec.model.config import ModelConfig
from helmrec.model.hstu import HstuModel
from helmrec.model.weights import LoadedModel

_PAGE_TOKENS = {"cpu": 32, "cuda": 128}  # on a card, a key tile is one page


class Parts(NamedTuple):
    """Everything an engine is made of that lives on its device, ready to serve."""

    model: HstuModel
    master: RowMaster
    arena: Arena
    pool: Pool
    dense: Dense


def build(model: LoadedModel, config: EngineConfig, progress: Progress) -> Parts:
    """The parts, warmed up. A card gets a locked copy of the tables; a CPU uses and updates the tables themselves."""
    _check_device(config)
    shape, on_card = model.config, config.device == "cuda"
    dense_weights = {name: tensor.to(config.device) for name, tensor in model.dense.items()}
    hstu = HstuModel(shape, dense_weights, layer_for(_kernels(config)))
    master = RowMaster.locked(model.tables, progress) if on_card else RowMaster(model.tables)
    geometry = _geometry(shape, config)
    arena = Arena(config.pool_bytes // geometry.page_bytes, geometry, hstu.dtype, master.dtype, config.device)
    pool = Pool(config, geometry, Demand(shape.num_rows, shape.max_prefix_tokens, config.max_batch_tokens), arena)
    memory = Memory(arena.k_pages, arena.v_pages, arena.rows, master)
    if on_card and config.cuda_graphs and _kernels(config) == "triton":
        dense: Dense = GraphedDense(hstu, memory, _limits(shape, geometry, config))
    else:
        dense = EagerDense(hstu, memory)
    dense.warm_up(progress)
    return Parts(hstu, master, arena, pool, dense)


def _check_device(config: EngineConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: no CUDA device is available, got 'cuda'")
    if config.device == "cpu" and config.kernels == "triton":
        raise ConfigError("kernels: triton needs device 'cuda', got 'triton' with device 'cpu'")


def _kernels(config: EngineConfig) -> str:
    return config.kernels if config.kernels != "auto" else "triton" if config.device == "cuda" else "torch"


def _limits(shape: ModelConfig, geometry: PageGeometry, config: EngineConfig) -> Limits:
    """A lone request may exceed the token budget of a batch, so each limit also holds for one."""
    most_candidates = min(config.max_batch_requests * shape.max_candidates, config.max_batch_tokens)
    return Limits(
        num_events=max(config.max_batch_tokens, shape.max_request_tokens),
        num_sequences=config.max_batch_requests,
        num_candidates=max(shape.max_candidates, most_candidates),
        num_pages=geometry.pages_for(shape.max_prefix_tokens),
    )


def _geometry(shape: ModelConfig, config: EngineConfig) -> PageGeometry:
    return PageGeometry(
        page_tokens=config.page_tokens or _PAGE_TOKENS[config.device],
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        kv_itemsize=getattr(torch, shape.dtype).itemsize,
        row_dim=shape.row_dim,
        row_itemsize=getattr(torch, shape.row_dtype).itemsize,
    )
