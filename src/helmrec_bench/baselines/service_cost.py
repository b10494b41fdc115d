"""What a request costs at another split, in milliseconds, as policies with a model predict it.

A few coefficients over the miss curves' means; the simulator's calibrated costs know batches, pages and copies.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import WindowStats
from helmrec.costs.calibrated import CostModel
from helmrec.sim.node.config import NodeConfig
from helmrec.traffic.trace import Trace

Curve = NDArray[np.float64]  # (alphas,)

_LINEAR_FROM = 0.95  # load at which the queue's wait goes on as its tangent, so that overload still has a slope


class ServiceCost(Frozen):
    """Coefficients of one device and one model."""

    token_ms: float = Field(gt=0, description="ms of compute per history token computed")
    pair_ms: float = Field(0.0, ge=0, description="ms of compute per pair of tokens in attention")
    floor_ms: float = Field(0.0, ge=0, description="ms of compute per request whatever is cached, candidates included")
    missed_row_ms: float = Field(gt=0, description="ms of the host bus per missed row")
    host_token_ms: float = Field(0.0, ge=0, description="ms of the host per history token, before rows are read")
    host_floor_ms: float = Field(0.0, ge=0, description="ms of the host per request whatever is cached")
    host_kv_bytes: float = Field(0.0, ge=0, description="bytes of the host tier for KV; 0: there is none")
    reload_token_ms: float = Field(0.0, ge=0, description="ms of the host bus per history token taken back from it")
    is_overlapping: bool = Field(True, description="whether a step is prepared and its rows read while one computes")


@dataclass(frozen=True, slots=True, eq=False)
class SplitCosts:
    """A window predicted at every alpha of a grid; ms per request."""

    alphas: Curve
    compute_ms: Curve
    lead_ms: Curve  # before compute can start: the host, then the bus
    latency_ms: Curve  # both, and the wait in the queue at the window's arrival rate

    def latency_at(self, alpha: float) -> float:
        return float(np.interp(alpha, self.alphas, self.latency_ms))


def compute_ms(cost: ServiceCost, computed_tokens: Curve | float, total_tokens: float) -> Curve:
    """Per request; each is taken as wholly resident or wholly computed, so pairs grow with the computed share."""
    computed = np.asarray(computed_tokens, np.float64)
    return cost.floor_ms + computed * (cost.token_ms + cost.pair_ms * total_tokens / 2)


def wait_ms(service_ms: Curve, arrival_rate: float) -> Curve:
    """Mean wait of Poisson arrivals at one server of fixed service time (M/D/1), made linear close to saturation."""
    load = service_ms * arrival_rate / 1_000
    below = np.minimum(load, _LINEAR_FROM)
    slope = 1 / (1 - _LINEAR_FROM) ** 2
    return service_ms / 2 * (below / (1 - below) + np.maximum(0, load - _LINEAR_FROM) * slope)


def smooth(at: Curve, known_at: Curve, known: Curve) -> Curve:
    """A curve between its known points that bends but never overshoots them (monotone cubic, Fritsch and Butland).

    Straight lines would put every optimum on a known point.
    """
    if known.size < 3:
        return np.interp(at, known_at, known)
    widths, rises = np.diff(known_at), np.diff(known) / np.diff(known_at)
    before, after, left, right = rises[:-1], rises[1:], widths[:-1], widths[1:]
    is_turn = before * after <= 0
    weighted = (2 * right + left) / np.where(is_turn, 1, before) + (right + 2 * left) / np.where(is_turn, 1, after)
    inner = np.where(is_turn, 0, 3 * (left + right) / weighted)
    slopes = np.concatenate((rises[:1], inner, rises[-1:]))
    piece = np.clip(np.searchsorted(known_at, at, side="right") - 1, 0, widths.size - 1)
    t = (at - known_at[piece]) / widths[piece]
    value = known[piece] * (1 + 2 * t) * (1 - t) ** 2 + known[piece + 1] * t**2 * (3 - 2 * t)
    return value + widths[piece] * (slopes[piece] * t * (1 - t) ** 2 + slopes[piece + 1] * t**2 * (t - 1))


def with_host_tier(alphas: Curve, computed: Curve, host_share: float) -> tuple[Curve, Curve]:
    """Tokens computed and taken back where a tier of that share of the pool keeps what the pool evicts.

    What either holds is what a pool larger by the tier would; the curves know none larger than their lowest split's.
    """
    with_it = np.interp(alphas - host_share, alphas, computed)
    return with_it, computed - with_it


def predict(stats: WindowStats, cost: ServiceCost, num_alphas: int = 81) -> SplitCosts | None:
    """The window at evenly spaced splits within its miss curves; None as long as there are none."""
    curves, traffic = stats.curves, stats.traffic
    if curves is None or not traffic.num_served:
        return None
    alphas = np.linspace(curves.alphas[0], curves.alphas[-1], num_alphas)
    computed = smooth(alphas, curves.alphas, curves.computed_tokens_per_request)
    missed = smooth(alphas, curves.alphas, curves.missed_rows_per_request)
    computed, reloaded = with_host_tier(alphas, computed, cost.host_kv_bytes / max(1, stats.pool_bytes))
    compute = compute_ms(cost, computed, stats.new_tokens_per_request + stats.resident_tokens_per_request)
    lead = cost.host_floor_ms + cost.host_token_ms * computed + cost.missed_row_ms * missed
    lead += cost.reload_token_ms * reloaded
    service = np.maximum(compute, lead) if cost.is_overlapping else compute + lead
    return SplitCosts(alphas, compute, lead, compute + lead + wait_ms(service, traffic.arrival_rate))


def service_cost(cost: CostModel, config: NodeConfig, trace: Trace) -> ServiceCost:
    """A calibration in the few coefficients that these policies use, for the mean request of a trace."""
    history = float((trace.backlog.mean() if trace.num_users else 0.0) + 1)
    candidates = float(trace.num_candidates.mean()) if trace.num_requests else 0.0
    token_ms = cost.compute_token_us / 1e3 + len(config.model.features) * cost.compute_row_ns / 1e6
    pair_ms = cost.compute_pair_ns / 1e6
    host_token_ms = cost.host_token_us / 1e3 + len(config.model.features) * cost.host_row_ns / 1e6
    return ServiceCost(
        token_ms=token_ms,
        pair_ms=pair_ms,
        floor_ms=candidates * (token_ms + min(history, config.model.window) * pair_ms),
        missed_row_ms=config.geometry.row_stride / (cost.sorted_beside_gb_per_s * 1e6),
        host_token_ms=host_token_ms,
        host_floor_ms=cost.host_request_ms + candidates * host_token_ms,
        host_kv_bytes=config.engine.host_kv_bytes,
        reload_token_ms=config.geometry.page_bytes / config.geometry.page_tokens / (cost.reload_gb_per_s * 1e6),
        is_overlapping=config.engine.overlap is not False,
    )
