"""Compares an engine's scores with those of the plain module, on random requests and with cached prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ByteSize

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.precision import TOLERANCE
from helmrec.engine.setup import page_geometry
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.ranker import HstuRanker, Rows
from helmrec.model.weights import LoadedModel
from helmrec.types import RankRequest

_MAX_EVENTS = 256  # of a request: the module's memory grows with the square
_MAX_CANDIDATES = 16
_NUM_USERS = 6
_VISITS = (0.5, 0.75, 1.0)  # share of the history that each visit of a user sends


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The largest difference of scores, and the largest that rounding explains."""

    num_requests: int
    reused_tokens: int
    largest_difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.largest_difference <= self.tolerance


def check_model(model: LoadedModel, seed: int = 0) -> ModelCheck:
    """Rank random requests with an engine on the CPU and with the module in double precision.

    The users return with longer histories, so that the engine reuses their KV, if the model allows it.
    """
    config = model.config
    requests = _random_visits(config, np.random.default_rng(seed))
    with Engine(model, _engine_config(config)) as engine:
        results = [engine.rank([request])[0] for request in requests]
    expected = _scores_of_module(model, requests)
    served = np.concatenate([result.scores for result in results])
    return ModelCheck(
        num_requests=len(requests),
        reused_tokens=sum(result.reused_tokens for result in results),
        largest_difference=float(np.abs(served - expected).max()),  # NaN if one is: then scores are not equal
        tolerance=TOLERANCE[config.dtype] * max(1.0, float(np.abs(served).max())),
    )


def _scores_of_module(model: LoadedModel, requests: Sequence[RankRequest]) -> NDArray[np.float64]:
    def rows(ids: Rows) -> Rows:  # without a copy of the tables, which may be larger than memory
        return {table: model.tables[table][each] for table, each in ids.items()}

    ranker = HstuRanker(model.config, tables=rows)
    ranker.load_state_dict(model.dense)
    ranker.double()
    with torch.no_grad():
        return np.concatenate([ranker([request]).numpy() for request in requests])


def _engine_config(model: ModelConfig) -> EngineConfig:
    """Make a pool that holds the prefixes of all users."""
    config = EngineConfig(device="cpu", pool_bytes=ByteSize(1), alpha=0.2, kv_admission="always")
    geometry = page_geometry(model, config)
    longest, checked = model.max_prefix_tokens, len(model.user_context) + _MAX_EVENTS
    num_pages = 2 * (geometry.pages_for(longest) + _NUM_USERS * geometry.pages_for(checked))
    return config.model_copy(update={"pool_bytes": ByteSize(num_pages * geometry.page_bytes)})


def _random_visits(model: ModelConfig, rng: np.random.Generator) -> list[RankRequest]:
    """Return the requests, visit by visit: users with no event or one, with many, and beyond a small window."""
    longest = min(3 * model.window // 2, _MAX_EVENTS)
    fewest = 0 if model.retrieval is None else 1
    lengths = [fewest, 1, *rng.integers(2, longest + 1, _NUM_USERS - 3).tolist(), longest]
    num_items = model.features[0].num_rows
    complete = []
    for user, length in enumerate(lengths):
        items, candidates = (rng.integers(num_items, size=size) for size in (length, model.max_candidates))
        times = 10**9 + np.cumsum(2 ** rng.integers(0, 20, length))
        request = make_request(model, user, items, candidates[:_MAX_CANDIDATES])
        complete.append(replace(request, timestamps=times, request_time=int(times[-1]) + 60 if length else None))
    return [_first_events(request, share, fewest) for share in _VISITS for request in complete]


def _first_events(request: RankRequest, share: float, fewest: int) -> RankRequest:
    end = max(fewest, int(len(request.items) * share))
    return replace(
        request,
        items=request.items[:end],
        actions=request.actions[:end],
        timestamps=request.timestamps[:end],
        features={table: ids[:end] for table, ids in request.features.items()},
    )
