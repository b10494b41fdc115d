"""Signals of a simulated node, and prefixes computed in chunks while no request waits.

A compiled version of `engine/relay/pre_inference.py`.
"""

from helmrec.costs.calibrated import ComputeWork, compute_ms
from helmrec.engine.relay.trigger import LEAST_IDLE
from helmrec.jit import inner
from helmrec.memory.prefix_book import Kv, pages_for
from helmrec.sim.node.plan import is_ahead_step, plan_tokens, resident_tokens
from helmrec.sim.node.relay import (
    J,
    R,
    SimulatedSignal,
    T,
    compute_share,
    decide,
    expire,
    grant,
    lose_lease,
    promise,
    share,
)
from helmrec.sim.node.state import C, Environment, Member, N, NodeState
from helmrec.types import IntArray


@inner
def take_signals(node: NodeState, env: Environment) -> None:
    """End leases, then decide about the signals that have arrived."""
    relay, counts, kv, now_s = node.relay, node.relay.counts, node.kv, node.clocks[C.NOW_S]
    expire(relay, kv, now_s)
    while counts[R.SIGNAL_NEXT] < counts[R.SIGNAL_END] and relay.time_s[counts[R.SIGNAL_NEXT]] <= now_s:
        request = relay.request[counts[R.SIGNAL_NEXT]]
        counts[R.SIGNAL_NEXT] += 1
        user = env.requests.reads.user[request]
        signal = _signal(node, env, request, now_s)
        verdict = decide(relay, env.setup.relay, user, signal, now_s)
        counts[verdict] += 1
        if verdict in (R.ADMITTED, R.RESIDENT):
            grant(relay, kv, user, signal.num_pages, now_s + env.setup.relay.hold_s)
        if verdict == R.ADMITTED:
            job = relay.job[counts[R.JOB_END]]
            job[J.REQUEST], job[J.LEASE], job[J.REACHED] = request, relay.lease[user], 0
            counts[R.JOB_END] += 1
            promise(relay, user, signal.ahead_s)
            relay.clocks[T.MOST_SHARE] = max(relay.clocks[T.MOST_SHARE], compute_share(relay, now_s))


@inner
def _signal(node: NodeState, env: Environment, request: int, now_s: float) -> SimulatedSignal:
    """The trigger's inputs for a signal, with the costs of the calibration."""
    setup, requests, pages = env.setup, env.requests, node.kv.counts
    total, asked = requests.num_tokens[request], requests.reads.num_candidates[request]
    missing = max(0, _num_ahead(env, request) - resident_tokens(node, requests, request))
    pairs, tokens = missing * (total - missing / 2), missing + asked
    rank = ComputeWork(tokens, pairs + asked * total, float(tokens * setup.rows_per_event))
    ahead = ComputeWork(missing, pairs, float(missing * setup.rows_per_event))
    num_steps = -(-missing // setup.relay.chunk_tokens)
    ahead_ms = compute_ms(setup.terms, ahead) + (num_steps - 1) * setup.terms.compute_floor_ms
    idle = max(LEAST_IDLE, 1 - share(node.relay, T.LATE_BUSY_S, now_s))
    wait_ms = node.clocks[C.MS_PER_REQUEST] * node.counts[N.QUEUED]
    return SimulatedSignal(
        wait_ms + compute_ms(setup.terms, rank) / idle,
        ahead_ms / 1e3,
        missing,
        pages_for(setup.rules, total),
        pages[Kv.FREE] + pages[Kv.HELD] + pages[Kv.DRAINING],
    )


@inner
def _num_ahead(env: Environment, request: int) -> int:
    """Tokens of a history to compute ahead; never a whole number of pages."""
    total = env.requests.num_tokens[request]
    num_tokens = total - (total % env.setup.rules.page_tokens == 0)
    return num_tokens if num_tokens > env.setup.num_context else 0


@inner
def next_chunks(node: NodeState, env: Environment, which: int) -> int:
    """Plan chunks of the oldest jobs as step `which`; return how many."""
    setup, counts, in_flight = env.setup, node.relay.counts, node.counts[N.IN_FLIGHT]
    if counts[R.JOB_NEXT] == counts[R.JOB_END] or node.counts[N.QUEUED]:
        return 0
    if in_flight >= 0 and is_ahead_step(node, in_flight):
        return 0  # a request that arrives now waits for one chunk at most
    left, num, num_looked_at = setup.relay.chunk_tokens, 0, 0
    room, place = setup.max_batch_tokens, counts[R.JOB_NEXT]
    while place < counts[R.JOB_END] and left > 0 and num < setup.max_batch_requests:
        job = node.relay.job[place]
        place += 1
        if not _is_wanted(node, env, job):
            continue
        request, member = job[J.REQUEST], node.members[which, num]
        member[Member.REQUEST], member[Member.ASKED] = request, 0
        member[Member.TOKENS] = _chunk_end(node, env, request, left)
        _copy_job(node.relay.job[counts[R.JOB_NEXT] + num_looked_at], job)  # jobs in use move to the front
        num_looked_at += 1
        if num and member[Member.TOKENS] + setup.num_request_context > room:
            break
        if not plan_tokens(node, env, member):
            break
        computed = member[Member.TOKENS] - member[Member.RESIDENT] + setup.num_request_context
        left -= computed
        room -= computed
        node.arrived_s[which, num] = node.clocks[C.NOW_S]
        num += 1
    _put_back(node, place, num_looked_at)
    node.size[which] = num
    node.step[which, 0] = node.clocks[C.NOW_S]
    return num


@inner
def _put_back(node: NodeState, place: int, num: int) -> None:
    """Move the first `num` jobs back to just before `place`, where the queue of jobs begins from now on."""
    counts, job = node.relay.counts, node.relay.job
    for i in range(num - 1, -1, -1):
        _copy_job(job[place - num + i], job[counts[R.JOB_NEXT] + i])
    counts[R.JOB_NEXT] = place - num


@inner
def _copy_job(target: IntArray, source: IntArray) -> None:
    for column in range(source.size):
        target[column] = source[column]


@inner
def _is_wanted(node: NodeState, env: Environment, job: IntArray) -> bool:
    """Whether a job has a lease and tokens left to compute."""
    request = job[J.REQUEST]
    user = env.requests.reads.user[request]
    if node.relay.lease[user] != job[J.LEASE]:
        return False
    resident = resident_tokens(node, env.requests, request)
    if resident < job[J.REACHED]:
        lose_lease(node.relay, node.kv, user)
        return False
    if resident >= _num_ahead(env, request):
        promise(node.relay, user, 0.0)
        return False
    return True


@inner
def _chunk_end(node: NodeState, env: Environment, request: int, num_tokens: int) -> int:
    """The token at which the next chunk of `num_tokens` ends."""
    end = max(resident_tokens(node, env.requests, request), env.setup.num_context) + num_tokens
    end += end % env.setup.rules.page_tokens == 0
    return min(end, _num_ahead(env, request))
