"""The main loop of a simulated node: plan a step, launch it, wait for the previous one, commit it, do background work.

The order is that of `Engine.step` and `Pipeline`: at most two steps are in flight, and while one computes, the rows of
the next are read.
"""

import numba
import numpy as np

from helmrec.costs.calibrated import reload_ms
from helmrec.jit import inner
from helmrec.memory.prefix_book import Kv
from helmrec.sim.node.plan import (
    advance_boundary,
    commit_step,
    is_ahead_step,
    learn_reload_cost,
    next_batch,
    save_sealed,
    take_arrivals,
)
from helmrec.sim.node.pre_inference import next_chunks, take_signals
from helmrec.sim.node.relay import R
from helmrec.sim.node.state import C, Environment, Faults, Inbox, Member, N, NodeState, Status
from helmrec.sim.node.step import bus_speed_at, launch, log_step, read_ahead


@numba.njit(cache=True)
def run_until(node: NodeState, env: Environment, until_s: float) -> None:
    """Advance the node to `until_s`. The inbox must hold all requests that arrive before that time."""
    counts, clocks = node.counts, node.clocks
    while clocks[C.NOW_S] < until_s:
        stalled_until_s = _stall_end(env.faults, clocks[C.NOW_S])
        if stalled_until_s > clocks[C.NOW_S]:
            clocks[C.NOW_S] = stalled_until_s
            continue
        take_arrivals(node, env)
        if counts[N.ENDING] >= 0:
            _end_step(node, env)
            take_arrivals(node, env)
        if _update_is_due(node, env.faults):
            _update_rows(node, env)
            continue
        which = 1 - counts[N.IN_FLIGHT] if counts[N.IN_FLIGHT] >= 0 else 0
        take_signals(node, env)
        if next_batch(node, env, which) or next_chunks(node, env, which):
            _launch(node, env, which)
        elif counts[N.IN_FLIGHT] >= 0:
            _wait_for(node, counts[N.IN_FLIGHT])
            counts[N.IN_FLIGHT] = -1
        else:
            clocks[C.NOW_S] = min(until_s, _next_arrival_s(node, env.inbox))


@inner
def _next_arrival_s(node: NodeState, inbox: Inbox) -> float:
    """When the next request or signal arrives; infinite if none is left."""
    counts, relay, next_s = node.counts, node.relay, np.inf
    if counts[N.INBOX_NEXT] < counts[N.INBOX_END]:
        next_s = inbox.time_s[counts[N.INBOX_NEXT]]
    if relay.counts[R.SIGNAL_NEXT] < relay.counts[R.SIGNAL_END]:
        next_s = min(next_s, relay.time_s[relay.counts[R.SIGNAL_NEXT]])
    return next_s


@inner
def _launch(node: NodeState, env: Environment, which: int) -> None:
    """Launch a planned step, then wait for the previous one, or for this one if steps do not overlap."""
    counts, before = node.counts, node.counts[N.IN_FLIGHT]
    node.clocks[C.NOW_S] += launch(node, env, which)
    if not env.setup.overlaps:
        _wait_for(node, which)
        return
    counts[N.IN_FLIGHT] = which
    if before >= 0:
        _wait_for(node, before)


@inner
def _wait_for(node: NodeState, which: int) -> None:
    node.counts[N.ENDING] = which
    node.clocks[C.NOW_S] = max(node.clocks[C.NOW_S], node.step[which, 1])


@inner
def _end_step(node: NodeState, env: Environment) -> None:
    """Commit the step that has ended, record its results, then do background work."""
    counts, now_s, which, inbox, out = node.counts, node.clocks[C.NOW_S], node.counts[N.ENDING], env.inbox, env.out
    counts[N.ENDED] += 1
    log_step(node, which, now_s)
    commit_step(node, env, which, now_s)
    for index in range(0 if is_ahead_step(node, which) else node.size[which]):
        request = node.members[which, index, Member.REQUEST]
        out.status[request] = Status.SERVED
        out.latency_ms[request] = (now_s - node.arrived_s[which, index]) * 1e3 + env.setup.terms.intake_ms
        out.queue_ms[request] = (node.step[which, 0] - node.arrived_s[which, index]) * 1e3
        inbox.log[counts[N.LOGGED]] = request
        counts[N.LOGGED] += 1
        counts[N.SERVED] += 1
    counts[N.ENDING] = -1
    learn_reload_cost(node, which)
    save_sealed(node, env.setup)
    advance_boundary(node, env.setup)
    read_ahead(node, env, which, now_s)
    node.clocks[C.NOW_S] += env.setup.terms.background_ms / 1e3


@inner
def _stall_end(faults: Faults, now_s: float) -> float:
    """When the current stall ends; now, if there is none."""
    end_s = now_s
    for i in range(faults.stall.shape[0]):
        if faults.stall[i, 0] <= now_s < faults.stall[i, 1]:
            end_s = max(end_s, faults.stall[i, 1])
    return end_s


@inner
def _update_is_due(node: NodeState, faults: Faults) -> bool:
    epoch = node.kv.counts[Kv.EPOCH]
    return epoch < faults.update_s.size and faults.update_s[epoch] <= node.clocks[C.NOW_S]


@inner
def _update_rows(node: NodeState, env: Environment) -> None:
    """Wait for the running step, then change items: KV made from them is stale, and the new rows cross the bus."""
    counts, clocks, epoch, faults = node.counts, node.clocks, node.kv.counts[Kv.EPOCH], env.faults
    if counts[N.IN_FLIGHT] >= 0:
        _wait_for(node, counts[N.IN_FLIGHT])
        counts[N.IN_FLIGHT] = -1
        return
    draws = env.requests.reads.draws
    num_bytes = faults.update_share[epoch] * draws.num_lanes * draws.num_blocks * env.setup.row_bytes
    took_ms = reload_ms(env.setup.terms, num_bytes, bus_speed_at(faults, clocks[C.NOW_S]))
    node.kv.counts[Kv.EPOCH] += 1
    clocks[C.NOW_S] += took_ms / 1e3
    counts[N.UPDATE_BYTES] += int(num_bytes)
