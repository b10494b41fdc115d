"""Scores requests in full and in low precision, and compares scores, order and quality."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import ByteSize

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.ranking_quality import Values, auc, kendall_tau, ndcg, top_overlap
from helmrec.engine.setup import page_geometry
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, Precision, PrecisionFigures
from helmrec.model.weights import LoadedModel
from helmrec.types import LabelledRequest

NUM_RANDOM = 128
_MAX_EVENTS = 512  # of a random request
_MAX_CANDIDATES = 256
_POOL_REQUESTS = 4  # of the longest kind, that the pool holds


@dataclass(slots=True)
class _Sums:
    """What the requests so far add up to."""

    largest: float = 0.0
    differences: list[Values] = field(default_factory=list)
    scores: list[Values] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    aucs: list[tuple[float, float]] = field(default_factory=list)  # in low and in full precision
    ndcgs: list[tuple[float, float]] = field(default_factory=list)
    num_labelled: int = 0

    def add(self, full: Values, low: Values, labels: Values | None) -> None:
        """full, low: (candidates, tasks)."""
        difference = np.abs(full - low)
        self.largest = max(self.largest, float(difference.max()))
        self.differences.append(difference.ravel())
        self.scores.append(full.ravel())
        for one, other in zip(full.T, low.T, strict=True):
            self.overlaps.append(top_overlap(one, other))
            if (tau := kendall_tau(np.ascontiguousarray(one), np.ascontiguousarray(other))) is not None:
                self.taus.append(tau)
        if labels is not None:
            self.num_labelled += 1
            for measure, kept in ((auc, self.aucs), (ndcg, self.ndcgs)):
                pair = measure(low[:, 0], labels), measure(full[:, 0], labels)
                if pair[0] is not None and pair[1] is not None:
                    kept.append((pair[0], pair[1]))

    def figures(self, source: str) -> PrecisionFigures:
        low_auc, full_auc = np.mean(self.aucs, axis=0).tolist() if self.aucs else (None, None)
        low_ndcg, full_ndcg = np.mean(self.ndcgs, axis=0).tolist() if self.ndcgs else (None, None)
        return PrecisionFigures(
            requests=len(self.scores),
            source=source,
            largest_difference=self.largest,
            mean_difference=float(np.concatenate(self.differences).mean()),
            spread=float(np.concatenate(self.scores).std()),
            top_overlap=float(np.mean(self.overlaps)),
            kendall_tau=float(np.mean(self.taus)) if self.taus else 1.0,
            labelled=self.num_labelled,
            auc=low_auc,
            full_auc=full_auc,
            ndcg=low_ndcg,
            full_ndcg=full_ndcg,
        )


def check_precision(
    model: LoadedModel, precision: Precision, requests: Iterable[LabelledRequest], source: str, device: str = "cpu"
) -> PrecisionFigures:
    """Rank every request in full precision and in this one, one after the other, caches on."""
    sums = _Sums()
    full_config, low_config = (_engine_config(model.config, each, device) for each in (FULL_PRECISION, precision))
    with Engine(model, full_config) as full, Engine(model, low_config) as low:
        for each in requests:
            scores = [engine.rank([each.request])[0].scores.astype(np.float64) for engine in (full, low)]
            sums.add(scores[0], scores[1], each.labels)
    return sums.figures(source)


def _engine_config(model: ModelConfig, precision: Precision, device: str) -> EngineConfig:
    settings = {"alpha": 0.2, "kv_admission": "always", **precision._asdict()}
    config = EngineConfig(device=device, pool_bytes=ByteSize(1), **settings)
    geometry = page_geometry(model, config)
    num_pages = 2 * _POOL_REQUESTS * (1 + geometry.pages_for(model.max_prefix_tokens))
    return config.model_copy(update={"pool_bytes": ByteSize(num_pages * geometry.page_bytes)})


def random_requests(model: ModelConfig, num: int, seed: int) -> Iterator[LabelledRequest]:
    """Requests of different users with histories of any length up to 512 events, and up to 256 candidates."""
    rng = np.random.default_rng(seed)
    num_items = model.features[0].num_rows
    for user in range(num):
        length = int(rng.integers(1, min(model.window, _MAX_EVENTS) + 1))
        items, candidates = (rng.integers(num_items, size=size) for size in (length, model.max_candidates))
        times = 10**9 + np.cumsum(2 ** rng.integers(0, 20, length))
        request = make_request(model, user, items, candidates[:_MAX_CANDIDATES])
        yield LabelledRequest(replace(request, timestamps=times, request_time=int(times[-1]) + 60))
