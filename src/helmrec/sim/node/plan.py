"""Planning and committing steps of a simulated node: compiled versions of `Scheduler` and `Pool`."""

import numba
import numpy as np

from helmrec.costs.calibrated import reload_ms, tokens_ms
from helmrec.costs.reload import DOUBT, can_overlap, is_cheaper, with_delay
from helmrec.jit import NONE, inner
from helmrec.memory.boundary import moves_between_steps
from helmrec.memory.kv_admission import NO_VISIT
from helmrec.memory.prefix_book import (
    SHORT,
    Kv,
    P,
    PinnedPrefix,
    commit,
    evict,
    find_prefix,
    note_lookup,
    plan,
    truncate,
    unpin,
)
from helmrec.queueing import ADMITTED_SHARE, StepTimes, expected_ms, may_fit, needed_s, with_step
from helmrec.sim.node.host import Host, find, note_sealed, page_key, save, touch
from helmrec.sim.node.relay import J, R, T, add_share, end_lease
from helmrec.sim.node.rows import resize
from helmrec.sim.node.state import (
    ALWAYS_RELOAD,
    NEVER_RELOAD,
    C,
    Environment,
    Member,
    N,
    NodeState,
    Requests,
    Setup,
    Status,
)
from helmrec.sim.node.visits import record_visit
from helmrec.traffic.popularity import Index, draw_event, mix, rules_at, user_word
from helmrec.types import FloatArray, IntArray

_NO_LIMIT = 1 << 62  # tokens of the first request of a step


@inner
def take_arrivals(node: NodeState, env: Environment) -> None:
    """Queue the requests that have arrived; refuse those that cannot meet their deadline."""
    counts, inbox, now_s = node.counts, env.inbox, node.clocks[C.NOW_S]
    while counts[N.INBOX_NEXT] < counts[N.INBOX_END] and inbox.time_s[counts[N.INBOX_NEXT]] <= now_s:
        place = counts[N.INBOX_NEXT]
        counts[N.INBOX_NEXT] += 1
        num = counts[N.QUEUED]
        if num >= env.setup.queue_limit:
            _refuse(node, env, place, Status.QUEUE_FULL)
        elif _is_hopeless(node, env.setup, num, inbox.time_s[place]):
            _refuse(node, env, place, Status.HOPELESS)
        else:
            node.queue[(counts[N.QUEUE_BEGIN] + num) % node.queue.size] = place
            counts[N.QUEUED] += 1


@inner
def _is_hopeless(node: NodeState, setup: Setup, num: int, now_s: float) -> bool:
    """Whether a request that arrives now would miss its deadline. An idle node accepts every request."""
    oldest, newest = node.counts[N.ENDING], node.counts[N.IN_FLIGHT]
    num_running = (node.size[oldest] if oldest >= 0 else 0) + (node.size[newest] if newest >= 0 else 0)
    if not num and not num_running:
        return False
    spent_s = 0.0
    if num_running:
        spent_s = now_s - max(node.step[oldest if oldest >= 0 else newest, 0], node.clocks[C.LAST_ENDED_S])
    return expected_ms(_times(node.clocks), num, num_running, spent_s) > ADMITTED_SHARE * setup.deadline_ms


@inner
def _times(clocks: FloatArray) -> StepTimes:
    return StepTimes(clocks[C.STEP_S], clocks[C.STEP_DEVIATION_S], clocks[C.MS_PER_REQUEST])


@inner
def _refuse(node: NodeState, env: Environment, place: int, status: int) -> None:
    request = env.inbox.request[place]
    env.out.status[request] = status
    node.counts[N.REFUSED] += 1
    env.inbox.log[node.counts[N.LOGGED]] = request
    node.counts[N.LOGGED] += 1


@inner
def next_batch(node: NodeState, env: Environment, which: int) -> int:
    """Plan the oldest requests that fit one step as step `which`; return how many."""
    setup, inbox, now_s = env.setup, env.inbox, node.clocks[C.NOW_S]
    counts, budget, num = node.counts, setup.max_batch_tokens, 0
    node.clocks[C.PLANNED_COMPUTE_S] = node.clocks[C.PLANNED_LOAD_S] = 0.0
    while counts[N.QUEUED] and num < setup.max_batch_requests:
        place = node.queue[counts[N.QUEUE_BEGIN]]
        step_s = needed_s(_times(node.clocks), counts[N.QUEUED])
        is_late = now_s + step_s > inbox.time_s[place] + setup.deadline_ms / 1e3
        if is_late:
            _refuse(node, env, place, Status.EXPIRED)
        elif not _plan_member(node, env, node.members[which, num], inbox.request[place], budget if num else _NO_LIMIT):
            break
        else:
            node.arrived_s[which, num] = inbox.time_s[place]
            budget -= _num_computed(setup, node.members[which, num])
            num += 1
        counts[N.QUEUE_BEGIN] = (counts[N.QUEUE_BEGIN] + 1) % node.queue.size
        counts[N.QUEUED] -= 1
    node.size[which] = num
    node.step[which, 0] = now_s
    return num


@inner
def _num_computed(setup: Setup, member: IntArray) -> int:
    """Tokens that a member computes."""
    others = member[Member.ASKED] + setup.num_request_context
    return member[Member.TOKENS] - member[Member.RESIDENT] + others


@inner
def _plan_member(node: NodeState, env: Environment, member: IntArray, request: int, budget: int) -> bool:
    """Pin pages for a request if it computes at most `budget` tokens."""
    kv, setup, requests = node.kv, env.setup, env.requests
    tokens, num_candidates = requests.num_tokens[request], requests.reads.num_candidates[request]
    most = tokens + num_candidates + setup.num_request_context
    if most > budget and not may_fit(budget, most, resident_tokens(node, requests, request)):
        return False
    member[Member.REQUEST], member[Member.TOKENS], member[Member.ASKED] = request, tokens, num_candidates
    if not plan_tokens(node, env, member):
        return False
    if _num_computed(setup, member) > budget:  # fewer tokens were fresh than resident
        truncate(kv, setup.rules, member[Member.PREFIX], member[Member.BEFORE])
        unpin(kv, setup.rules, member[Member.PREFIX])
        return False
    return True


@inner
def resident_tokens(node: NodeState, requests: Requests, request: int) -> int:
    """Tokens of a history that are resident, fresh or not."""
    slot = find_prefix(node.kv, requests.reads.user[request], requests.window[request])
    return min(node.kv.prefix[slot, P.TOKENS], requests.num_tokens[request]) if slot != NONE else 0


@inner
def plan_tokens(node: NodeState, env: Environment, member: IntArray) -> bool:
    """Pin pages for the tokens of a member whose request is set; return False if too few pages can be freed."""
    kv, setup, requests = node.kv, env.setup, env.requests
    request, tokens = member[Member.REQUEST], member[Member.TOKENS]
    user, window = requests.reads.user[request], requests.window[request]
    member[Member.PREFIX] = NONE
    member[Member.RESIDENT] = member[Member.LOADED] = 0
    if tokens == 0:
        return True
    slot = find_prefix(kv, user, window)
    note_lookup(kv, user, slot)
    if slot != NONE and kv.prefix[slot, P.VERIFIED] != kv.counts[Kv.EPOCH]:
        _cut_stale(node, env, slot, request, tokens)
    pinned = plan(kv, setup.rules, user, window, tokens)
    if pinned.slot == SHORT:
        return False
    member[Member.PREFIX], member[Member.RESIDENT], member[Member.BEFORE] = pinned
    if node.host.counts[Host.PAGES]:
        _reload(node, env, member)
        resident = member[Member.RESIDENT]
        node.clocks[C.PLANNED_COMPUTE_S] += tokens_ms(setup.terms, resident, tokens, setup.rows_per_event) / 1e3
        node.clocks[C.PLANNED_LOAD_S] += member[Member.LOADED] * _page_s(setup)
    return True


@inner
def _cut_stale(node: NodeState, env: Environment, slot: int, request: int, num_tokens: int) -> None:
    """Cut a prefix at its first token whose row changed since the prefix was last compared with updates."""
    kv = node.kv
    shared = min(kv.prefix[slot, P.TOKENS], num_tokens)
    fresh = fresh_tokens(env, request, shared, kv.prefix[slot, P.VERIFIED], kv.counts[Kv.EPOCH])
    kv.prefix[slot, P.VERIFIED] = kv.counts[Kv.EPOCH]
    if fresh < shared:
        kv.counts[Kv.STALE] += 1
        truncate(kv, env.setup.rules, slot, fresh)


@inner
def fresh_tokens(env: Environment, request: int, num_tokens: int, since: int, until: int) -> int:
    """Leading tokens, of the first `num_tokens`, without an item that changed in the row epochs [since, until)."""
    setup, requests, faults, reads = env.setup, env.requests, env.faults, env.requests.reads
    user = reads.user[request]
    backlog, own = np.int64(reads.backlog[user]), reads.own_start[user]
    word, draws = user_word(reads.draws, user), reads.draws
    alias, rules = draws.alias[draws.law[0]], rules_at(draws, 0)
    for token in range(setup.num_context, num_tokens):
        index = requests.anchor[request] + token - setup.num_context
        item = draw_event(alias, rules, word, index) if index < backlog else requests.item[own + index - backlog]
        for update in range(since, until):
            if has_changed(item, faults.update_salt[update], faults.update_share[update]):
                return token
    return num_tokens


@numba.njit(cache=True)
def has_changed(item: Index, salt: int, share: float) -> bool:
    """Whether an update of `share` of all items changes this one."""
    return bool((mix(item, salt) >> np.uint64(11)) * 2.0**-53 < share)


@inner
def _reload(node: NodeState, env: Environment, member: IntArray) -> None:
    """Load fresh pages from the host instead of computing them, if that takes less time."""
    setup, requests, host, page_tokens = env.setup, env.requests, node.host, env.setup.rules.page_tokens
    request, resident = member[Member.REQUEST], member[Member.RESIDENT]
    user, window = requests.reads.user[request], requests.window[request]
    if resident % page_tokens and node.kv.prefix[member[Member.PREFIX], P.PINS] > 1:
        return  # another step still writes or reads this page
    first = resident // page_tokens
    page, oldest = first, 1 << 62
    while (page + 1) * page_tokens <= member[Member.TOKENS]:
        slot = find(host, page_key(user, window, page))
        if slot == NONE:
            break
        touch(host, slot)
        oldest = min(oldest, host.epoch[slot])
        page += 1
    end = page * page_tokens
    current = node.kv.counts[Kv.EPOCH]
    if page > first and oldest < current:
        end = fresh_tokens(env, request, end, oldest, current) // page_tokens * page_tokens
    num_pages = end // page_tokens - first
    if page == first or end <= resident or setup.reload == NEVER_RELOAD:
        return
    if setup.reload == ALWAYS_RELOAD or _prefers_reload(node, setup, resident, end, num_pages):
        host.counts[Host.RELOADED] += num_pages
        member[Member.RESIDENT], member[Member.LOADED] = end, num_pages


@inner
def _prefers_reload(node: NodeState, setup: Setup, start: int, end: int, num_pages: int) -> bool:
    """Whether loading pages takes less time than computing tokens [start, end). A refusal lowers the learned cost."""
    clocks, computing_s = node.clocks, tokens_ms(setup.terms, start, end, setup.rows_per_event) / 1e3
    if not is_cheaper(num_pages, clocks[C.RELOAD_PAGE_S], computing_s):
        clocks[C.RELOAD_PAGE_S] *= DOUBT
        return False
    return can_overlap(clocks[C.PLANNED_LOAD_S] + num_pages * _page_s(setup), clocks[C.PLANNED_COMPUTE_S] + computing_s)


@inner
def _page_s(setup: Setup) -> float:
    """Time to load a page from the host on an idle bus."""
    return reload_ms(setup.terms, float(setup.page_bytes), 1.0) / 1e3


@inner
def learn_reload_cost(node: NodeState, which: int) -> None:
    """Learn how long loaded pages delayed their step."""
    num_pages = 0
    for index in range(node.size[which]):
        num_pages += node.members[which, index, Member.LOADED]
    if num_pages:
        node.clocks[C.RELOAD_PAGE_S] = with_delay(node.clocks[C.RELOAD_PAGE_S], num_pages, node.step[which, 3])


@inner
def commit_step(node: NodeState, env: Environment, which: int, now_s: float) -> None:
    """Commit the prefixes of a step that has ended, then evict until the reserve for the next step is free."""
    kv, setup, page_tokens = node.kv, env.setup, env.setup.rules.page_tokens
    for index in range(node.size[which]):
        member = node.members[which, index]
        slot, tokens = member[Member.PREFIX], member[Member.TOKENS]
        if slot == NONE:
            continue
        generation = kv.prefix[slot, P.GENERATION]
        served = PinnedPrefix(slot, member[Member.RESIDENT], member[Member.BEFORE])
        user = kv.prefix[slot, P.USER]
        visit = record_visit(node.visits, user, now_s) if member[Member.ASKED] else NO_VISIT
        first = commit(kv, setup.rules, served, tokens, now_s, visit)
        if first != NONE and node.host.key.size:
            note_sealed(node.host, slot, generation, first // page_tokens, tokens // page_tokens)
    evict(kv, setup.rules, kv.counts[Kv.RESERVE] - kv.counts[Kv.FREE])
    _learn_step_time(node, env.requests, which, now_s)


@inner
def _learn_step_time(node: NodeState, requests: Requests, which: int, now_s: float) -> None:
    """Update the moving averages of step times, and the leases of the users that the step served."""
    took_s = now_s - max(node.step[which, 0], node.clocks[C.LAST_ENDED_S])
    node.clocks[C.LAST_ENDED_S] = now_s
    num_requests = 0 if is_ahead_step(node, which) else node.size[which]
    times = with_step(_times(node.clocks), took_s, num_requests)
    node.clocks[C.STEP_S], node.clocks[C.STEP_DEVIATION_S], node.clocks[C.MS_PER_REQUEST] = times
    add_share(node.relay, T.LATE_BUSY_S, now_s, took_s)
    node.relay.clocks[T.STEPS_S] += took_s
    if not num_requests:
        node.relay.counts[R.STEPS] += 1
        for index in range(node.size[which]):  # the jobs of its chunks are still the next ones
            job = node.relay.job[node.relay.counts[R.JOB_NEXT] + index]
            job[J.REACHED] = node.members[which, index, Member.TOKENS]
        node.relay.clocks[T.BUSY_S] += took_s
        add_share(node.relay, T.AHEAD_BUSY_S, now_s, took_s)
        return
    for index in range(node.size[which]):
        end_lease(node.relay, requests.reads.user[node.members[which, index, Member.REQUEST]], R.USED)


@inner
def is_ahead_step(node: NodeState, which: int) -> bool:
    """Whether a step computes prefixes ahead of their requests."""
    return node.members[which, 0, Member.ASKED] == 0


@inner
def save_sealed(node: NodeState, setup: Setup) -> None:
    """Copy sealed pages to the host, oldest first, up to the limit of a step."""
    host, kv, waiting = node.host, node.kv, node.host.waiting
    saved = 0
    while saved < setup.save_pages and host.counts[Host.WAITING]:
        place = host.counts[Host.WAITING_BEGIN]
        slot, page = waiting[place, 0], waiting[place, 2]
        prefix = kv.prefix[slot]
        is_there = prefix[P.GENERATION] == waiting[place, 1]
        if is_there and (page + 1) * setup.rules.page_tokens <= prefix[P.SETTLED]:
            saved += save(host, page_key(prefix[P.USER], prefix[P.WINDOW], page), prefix[P.MADE])
        waiting[place, 2] += 1
        if waiting[place, 2] == waiting[place, 3] or not is_there:
            host.counts[Host.WAITING_BEGIN] = (place + 1) % waiting.shape[0]
            host.counts[Host.WAITING] -= 1
    node.counts[N.SAVE_BYTES] += saved * setup.page_bytes


@inner
def advance_boundary(node: NodeState, setup: Setup) -> None:
    """Free drained pages that no step reads any more, then move the boundary towards its target by bounded moves."""
    counts, pages = node.counts, node.kv.counts
    while counts[N.DRAINS] and node.drains[counts[N.DRAIN_BEGIN], 0] <= counts[N.ENDED] - 1:
        drained = node.drains[counts[N.DRAIN_BEGIN], 1]
        pages[Kv.DRAINING] -= drained
        pages[Kv.FREE] += drained
        counts[N.DRAIN_BEGIN] = (counts[N.DRAIN_BEGIN] + 1) % node.drains.shape[0]
        counts[N.DRAINS] -= 1
    gap = counts[N.TARGET] - pages[Kv.EMB]
    since_s, node.clocks[C.MOVED_S] = node.clocks[C.NOW_S] - node.clocks[C.MOVED_S], node.clocks[C.NOW_S]
    step = min(abs(gap), setup.move_pages * moves_between_steps(setup.num_pages, setup.move_pages, since_s))
    if gap > 0:
        _grow_rows(node, setup, step)
    elif gap < 0:
        pages[Kv.EMB] -= step
        pages[Kv.DRAINING] += step
        place = (counts[N.DRAIN_BEGIN] + counts[N.DRAINS]) % node.drains.shape[0]
        node.drains[place, 0], node.drains[place, 1] = counts[N.LAUNCHED], step
        counts[N.DRAINS] += 1
        resize(node.rows, row_capacity(setup, pages[Kv.EMB]))


@inner
def _grow_rows(node: NodeState, setup: Setup, num: int) -> None:
    pages = node.kv.counts
    num = min(num, pages[Kv.FREE] + pages[Kv.HELD] - setup.request_pages)
    if num <= 0:
        return
    if num > pages[Kv.FREE]:
        evict(node.kv, setup.rules, num - pages[Kv.FREE])
    num = min(num, pages[Kv.FREE])
    pages[Kv.FREE] -= num
    pages[Kv.EMB] += num
    node.counts[N.GROW_BYTES] += num * setup.page_bytes
    resize(node.rows, row_capacity(setup, pages[Kv.EMB]))


@numba.njit(cache=True)
def row_capacity(setup: Setup, num_pages: int) -> int:
    """Sampled rows that fit into so many pages."""
    return int(num_pages * setup.rows_per_page * setup.rate + 1e-9)
