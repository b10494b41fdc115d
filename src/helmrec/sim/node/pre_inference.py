"""Signals of a simulated node, and chunks of prefixes it computes while no rank waits.

`engine/relay/pre_inference.py`, compiled.
"""

from helmrec.sim.cost import Work, compute_ms
from helmrec.sim.node.jit import inner
from helmrec.sim.node.kv import Kv, pages_for
from helmrec.sim.node.plan import is_ahead_step, plan_tokens, resident_tokens
from helmrec.sim.node.relay import J, R, T, Wanted, compute_share, expire, grant, judge, lose_lease, promise, share
from helmrec.sim.node.state import C, Faults, Member, N, NodeState, Requests, Setup
from helmrec.types import IntArray

_LEAST_IDLE = 0.05  # as engine/relay/pre_inference.py


@inner
def take_signals(node: NodeState, setup: Setup, requests: Requests, now_s: float) -> None:
    """End leases, then decide about the signals that have come."""
    relay, counts, kv = node.relay, node.relay.counts, node.kv
    expire(relay, kv, now_s)
    while counts[R.SIGNAL_NEXT] < counts[R.SIGNAL_END] and relay.time_s[counts[R.SIGNAL_NEXT]] <= now_s:
        request = relay.request[counts[R.SIGNAL_NEXT]]
        counts[R.SIGNAL_NEXT] += 1
        user = requests.reads.user[request]
        wanted = _wanted(node, setup, requests, request, now_s)
        kv_pages = kv.counts[Kv.FREE] + kv.counts[Kv.HELD] + kv.counts[Kv.DRAINING]
        verdict = judge(relay, setup.relay, user, wanted, (now_s, kv_pages))
        counts[verdict] += 1
        if verdict in (R.ADMITTED, R.RESIDENT):
            grant(relay, kv, user, wanted.num_pages, now_s + setup.relay.hold_s)
        if verdict == R.ADMITTED:
            job = relay.job[counts[R.JOB_END]]
            job[J.REQUEST], job[J.LEASE], job[J.REACHED] = request, relay.lease[user], 0
            counts[R.JOB_END] += 1
            promise(relay, user, wanted.ahead_s)
            relay.clocks[T.MOST_SHARE] = max(relay.clocks[T.MOST_SHARE], compute_share(relay, now_s))


@inner
def _wanted(node: NodeState, setup: Setup, requests: Requests, request: int, now_s: float) -> Wanted:
    """What the trigger must know, costs as the calibration has them."""
    total, asked = requests.num_tokens[request], requests.reads.num_candidates[request]
    missing = max(0, _num_ahead(setup, requests, request) - resident_tokens(node, requests, request))
    pairs, tokens = missing * (total - missing / 2), missing + asked
    rank = Work(tokens, pairs + asked * total, float(tokens * setup.rows_per_event))
    ahead = Work(missing, pairs, float(missing * setup.rows_per_event))
    num_steps = -(-missing // setup.relay.chunk_tokens)
    ahead_ms = compute_ms(setup.terms, ahead) + (num_steps - 1) * setup.terms.compute_floor_ms
    idle = max(_LEAST_IDLE, 1 - share(node.relay, T.LATE_BUSY_S, now_s))
    wait_ms = node.clocks[C.MS_PER_REQUEST] * node.counts[N.QUEUED]
    return Wanted(
        wait_ms + compute_ms(setup.terms, rank) / idle,
        ahead_ms / 1e3,
        missing,
        pages_for(setup.rules, total),
    )


@inner
def _num_ahead(setup: Setup, requests: Requests, request: int) -> int:
    """Tokens of a history to compute ahead; none ends with a page."""
    total = requests.num_tokens[request]
    num_tokens = total - (total % setup.rules.page_tokens == 0)
    return num_tokens if num_tokens > setup.num_context else 0


@inner
def next_chunks(node: NodeState, setup: Setup, requests: Requests, faults: Faults, at: tuple[int, float]) -> int:
    """Plan chunks of the oldest prefixes wanted into step place at[0], at time at[1]; returns how many."""
    counts, (which, now_s), in_flight = node.relay.counts, at, node.counts[N.IN_FLIGHT]
    if counts[R.JOB_NEXT] == counts[R.JOB_END] or node.counts[N.QUEUED]:
        return 0
    if in_flight >= 0 and is_ahead_step(node, in_flight):
        return 0  # one chunk at most is ahead of a rank that comes now
    left, num, num_looked_at = setup.relay.chunk_tokens, 0, 0
    room, place = setup.max_batch_tokens, counts[R.JOB_NEXT]
    while place < counts[R.JOB_END] and left > 0 and num < setup.max_batch_requests:
        job = node.relay.job[place]
        place += 1
        if not _is_wanted(node, setup, requests, job):
            continue
        request, member = job[J.REQUEST], node.members[which, num]
        member[Member.REQUEST], member[Member.ASKED] = request, 0
        member[Member.TOKENS] = _chunk_end(node, setup, requests, request, left)
        _copy_job(node.relay.job[counts[R.JOB_NEXT] + num_looked_at], job)  # those looked at move together
        num_looked_at += 1
        if num and member[Member.TOKENS] + setup.num_request_context > room:
            break
        if not plan_tokens(node, setup, requests, faults, (which, num)):
            break
        computed = member[Member.TOKENS] - member[Member.RESIDENT] + setup.num_request_context
        left -= computed
        room -= computed
        node.arrived_s[which, num] = now_s
        num += 1
    _put_back(node, place, num_looked_at)
    node.size[which] = num
    node.step[which, 0] = now_s
    return num


@inner
def _put_back(node: NodeState, place: int, num: int) -> None:
    """Those looked at stand before `place` again, where the next to look at begins."""
    counts, job = node.relay.counts, node.relay.job
    for i in range(num - 1, -1, -1):
        _copy_job(job[place - num + i], job[counts[R.JOB_NEXT] + i])
    counts[R.JOB_NEXT] = place - num


@inner
def _copy_job(target: IntArray, source: IntArray) -> None:
    for column in range(source.size):
        target[column] = source[column]


@inner
def _is_wanted(node: NodeState, setup: Setup, requests: Requests, job: IntArray) -> bool:
    request = job[J.REQUEST]
    user = requests.reads.user[request]
    if node.relay.lease[user] != job[J.LEASE]:
        return False
    resident = resident_tokens(node, requests, request)
    if resident < job[J.REACHED]:
        lose_lease(node.relay, node.kv, user)
        return False
    if resident >= _num_ahead(setup, requests, request):
        promise(node.relay, user, 0.0)
        return False
    return True


@inner
def _chunk_end(node: NodeState, setup: Setup, requests: Requests, request: int, num_tokens: int) -> int:
    """Where a chunk of so many tokens ends."""
    end = max(resident_tokens(node, requests, request), setup.num_context) + num_tokens
    end += end % setup.rules.page_tokens == 0
    return min(end, _num_ahead(setup, requests, request))
