"""One step of a simulated node: the rows it reads, and the times at which its two stages end."""

import math
from typing import NamedTuple

from helmrec.costs.calibrated import BusLoad, ComputeWork, compute_ms, host_ms, reload_ms, rows_ms
from helmrec.jit import inner
from helmrec.sim.node.plan import is_ahead_step
from helmrec.sim.node.rows import admit, begin_step, look_up, refill
from helmrec.sim.node.state import C, Environment, Faults, Member, N, NodeState
from helmrec.steps import Step
from helmrec.traffic.rows import candidate_rows, context_rows, history_rows


class _Reads(NamedTuple):
    """Rows that a step reads and those that miss, scaled up from the sample."""

    num_read: float
    num_missed: float
    num_on_disk: float  # of those read


class _StepLoad(NamedTuple):
    """What a step computes and loads from the host."""

    num_tokens: int
    num_pairs: float
    num_pages: int


@inner
def launch(node: NodeState, env: Environment, which: int) -> float:
    """Start a planned step; return the seconds that the host spends on it."""
    clocks, setup, terms, now_s = node.clocks, env.setup, env.setup.terms, node.clocks[C.NOW_S]
    bus_speed = bus_speed_at(env.faults, now_s)
    num_read, num_missed, num_on_disk = _read_rows(node, env, which)
    work = _work(node, env, which)
    host_s = host_ms(terms, node.size[which], work.num_tokens, num_read) / 1e3
    busy_s = clocks[C.COMPUTE_FREE_S]
    # A row that is not in host memory costs a read of the disk, before the step; reads ahead in the queue are left out.
    clocks[C.DISK_FREE_S] = max(now_s, clocks[C.DISK_FREE_S]) + num_on_disk / setup.disk_rows_per_s
    bus_s = max(now_s + host_s, clocks[C.BUS_FREE_S], clocks[C.DISK_FREE_S])
    load = BusLoad((num_read - num_missed) * setup.row_bytes, num_missed * setup.row_bytes, num_missed)
    row_s = rows_ms(terms, load, max(0.0, busy_s - bus_s) * 1e3, bus_speed) / 1e3
    load_s = reload_ms(terms, float(work.num_pages * setup.page_bytes), bus_speed) / 1e3
    bus_end_s = bus_s + row_s + load_s
    delay_s = max(0.0, min(bus_end_s, busy_s) - bus_s) * terms.beside_slowdown  # of the step that computes now
    if node.counts[N.IN_FLIGHT] >= 0:
        node.step[node.counts[N.IN_FLIGHT], 1] += delay_s
        node.log[node.counts[N.IN_FLIGHT], Step.COMPUTE_MS] += delay_s * 1e3
        busy_s += delay_s
    compute_s = compute_ms(terms, ComputeWork(work.num_tokens, work.num_pairs, num_read)) / 1e3
    computed_s = max(bus_s + row_s, busy_s) + compute_s  # without pages from the host
    end_s = max(max(bus_s + row_s + terms.reload_exposed * load_s, busy_s) + compute_s, bus_end_s)
    clocks[C.BUS_FREE_S], clocks[C.COMPUTE_FREE_S] = bus_end_s, end_s
    clocks[C.COMPUTE_BUSY_MS] += (compute_s + delay_s) * 1e3
    node.step[which, 1], node.step[which, 2], node.step[which, 3] = end_s, load.miss_bytes, end_s - computed_s
    line = node.log[which]
    line[Step.BEGIN_S] = node.step[which, 0]
    line[Step.REQUESTS] = 0 if is_ahead_step(node, which) else node.size[which]
    line[Step.TOKENS], line[Step.PAIRS], line[Step.PAGES_RELOADED] = work
    line[Step.ROWS_READ], line[Step.ROWS_MISSED] = num_read, num_missed
    line[Step.HOST_MS] = (host_s + terms.background_ms / 1e3) * 1e3
    line[Step.ROWS_MS], line[Step.COMPUTE_MS] = (row_s + load_s) * 1e3, compute_s * 1e3
    node.counts[N.MISS_BYTES] += int(load.miss_bytes)
    node.counts[N.RELOAD_BYTES] += work.num_pages * setup.page_bytes
    node.counts[N.LAUNCHED] += 1
    return host_s


@inner
def log_step(node: NodeState, which: int, now_s: float) -> None:
    """Write the log line of the step that has just ended."""
    node.log[which, Step.END_S] = now_s
    place = (node.counts[N.ENDED] - 1) % node.ended.shape[0]
    for column in range(node.log.shape[1]):
        node.ended[place, column] = node.log[which, column]


@inner
def _work(node: NodeState, env: Environment, which: int) -> _StepLoad:
    """Sum the work of a step's members, and note in the outcomes what each request reuses and computes."""
    out = env.out
    tokens, pairs, loaded = 0, 0.0, 0
    for index in range(node.size[which]):
        member = node.members[which, index]
        request, total, resident = member[Member.REQUEST], member[Member.TOKENS], member[Member.RESIDENT]
        others = member[Member.ASKED] + env.setup.num_request_context
        new = total - resident
        tokens += new + others
        pairs += new * (resident + new / 2) + others * total
        loaded += member[Member.LOADED]
        if member[Member.ASKED]:
            out.history_tokens[request] = total
            out.reused_tokens[request], out.computed_tokens[request] = resident, new + others
    return _StepLoad(tokens, pairs, loaded)


@inner
def _read_rows(node: NodeState, env: Environment, which: int) -> _Reads:
    """Look up the rows of every member, then admit those that missed.

    All rows of a step are looked up before any is admitted, as on a device.
    """
    setup, requests = env.setup, env.requests
    reads, rows, scratch = requests.reads, node.rows, node.scratch
    num_read, num_missed, num_on_disk = 0, 0.0, 0
    begin_step(rows)
    begin_step(node.memory)
    for index in range(node.size[which]):
        member = node.members[which, index]
        request, resident = member[Member.REQUEST], member[Member.RESIDENT]
        missed = 0
        if resident < setup.num_context:
            count = context_rows(reads, request, scratch)
            missed += look_up(rows, scratch, count)
            num_on_disk += _from_disk(node, env, count)
        num_old = max(0, resident - setup.num_context)
        first = requests.anchor[request] + num_old
        num_later = 0  # rows of events after the end of a chunk that is computed ahead
        if member[Member.TOKENS] < requests.num_tokens[request]:
            end = requests.anchor[request] + member[Member.TOKENS] - setup.num_context
            num_later = history_rows(reads, request, end, scratch)
        count = history_rows(reads, request, first, scratch) - num_later
        missed += look_up(rows, scratch, count)
        num_on_disk += _from_disk(node, env, count)
        if member[Member.ASKED]:
            count = candidate_rows(reads, request, scratch)
            missed += look_up(rows, scratch, count)
            num_on_disk += _from_disk(node, env, count)
            env.out.missed_rows[request] = missed / setup.rate
        num_missed += missed / setup.rate
        num_new = max(0, member[Member.TOKENS] - setup.num_context - num_old)
        num_read += (num_new + member[Member.ASKED]) * setup.rows_per_event + setup.num_request_context
        num_read += max(0, setup.num_context - resident)
    admit(rows)
    admit(node.memory)
    node.counts[N.ROWS_READ] += num_read
    node.clocks[C.MISSED_ROWS] += num_missed
    return _Reads(float(num_read), min(num_missed, float(num_read)), num_on_disk / setup.rate)


@inner
def _from_disk(node: NodeState, env: Environment, count: int) -> int:
    """Look the first `count` rows of the scratch up in host memory; return how many are on disk."""
    return look_up(node.memory, node.scratch, count) if env.setup.disk_rows_per_s < math.inf else 0


@inner
def read_ahead(node: NodeState, env: Environment, which: int, now_s: float) -> None:
    """Refill empty row slots with the bytes of the budget that step `which` did not use; this occupies the bus."""
    clocks, setup = node.clocks, env.setup
    limit = int(setup.refill_bytes - node.step[which, 2]) // setup.row_bytes
    if limit <= 0:
        return
    credit = limit * setup.rate + clocks[C.REFILL_CREDIT]
    num = refill(node.rows, int(credit))
    clocks[C.REFILL_CREDIT] = credit - int(credit)
    if not num:
        return
    num_bytes = num / setup.rate * setup.row_bytes
    took_ms = rows_ms(setup.terms, BusLoad(0.0, num_bytes, num / setup.rate), 1e9, bus_speed_at(env.faults, now_s))
    clocks[C.BUS_FREE_S] = max(clocks[C.BUS_FREE_S], now_s) + took_ms / 1e3
    node.counts[N.REFILL_BYTES] += int(num_bytes)


@inner
def bus_speed_at(faults: Faults, now_s: float) -> float:
    """The speed of the bus as a share of the normal one."""
    speed = 1.0
    for i in range(faults.slow_bus.shape[0]):
        if faults.slow_bus[i, 0] <= now_s < faults.slow_bus[i, 1]:
            speed *= faults.slow_bus[i, 2]
    return speed
