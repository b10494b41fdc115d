"""One step of a simulated node: which rows it reads, and when its two stages end."""

from helmrec.sim.cost import BusLoad, Work, compute_ms, host_ms, reload_ms, rows_ms
from helmrec.sim.node.jit import inner
from helmrec.sim.node.plan import is_ahead_step
from helmrec.sim.node.rows import admit, begin_step, look_up, refill
from helmrec.sim.node.state import C, Faults, Member, N, NodeState, Outcomes, Requests, Setup
from helmrec.steps import Step
from helmrec.traffic.rows import candidate_rows, context_rows, history_rows


@inner
def launch(node: NodeState, setup: Setup, requests: Requests, out: Outcomes, at: tuple[int, float, float]) -> float:
    """Start a planned step; returns the seconds the host took. `at`: step, now, bus speed."""
    which, now_s, bus_speed = at
    clocks, terms = node.clocks, setup.terms
    num_read, num_missed = _read_rows(node, setup, requests, out, which)
    tokens, pairs, loaded = _work(node, setup, requests, out, which)
    host_s = host_ms(terms, node.size[which], tokens, num_read) / 1e3
    busy_s = clocks[C.COMPUTE_FREE_S]
    bus_s = max(now_s + host_s, clocks[C.BUS_FREE_S])
    load = BusLoad((num_read - num_missed) * setup.row_bytes, num_missed * setup.row_bytes, num_missed)
    row_s = rows_ms(terms, load, max(0.0, busy_s - bus_s) * 1e3, bus_speed) / 1e3
    load_s = reload_ms(terms, float(loaded * setup.page_bytes), bus_speed) / 1e3
    bus_end_s = bus_s + row_s + load_s
    delay_s = max(0.0, min(bus_end_s, busy_s) - bus_s) * terms.beside_slowdown  # of the step that computes
    if node.counts[N.IN_FLIGHT] >= 0:
        node.step[node.counts[N.IN_FLIGHT], 1] += delay_s
        node.log[node.counts[N.IN_FLIGHT], Step.COMPUTE_MS] += delay_s * 1e3
        busy_s += delay_s
    compute_s = compute_ms(terms, Work(tokens, pairs, num_read)) / 1e3
    computed_s = max(bus_s + row_s, busy_s) + compute_s  # if no page had to come
    end_s = max(max(bus_s + row_s + terms.reload_exposed * load_s, busy_s) + compute_s, bus_end_s)
    clocks[C.BUS_FREE_S], clocks[C.COMPUTE_FREE_S] = bus_end_s, end_s
    clocks[C.COMPUTE_BUSY_MS] += (compute_s + delay_s) * 1e3
    node.step[which, 1], node.step[which, 2], node.step[which, 3] = end_s, load.miss_bytes, end_s - computed_s
    host_all_s = host_s + terms.background_ms / 1e3
    _note(node, which, (tokens, pairs, loaded, num_read, num_missed), (host_all_s, row_s + load_s, compute_s))
    node.counts[N.MISS_BYTES] += int(load.miss_bytes)
    node.counts[N.RELOAD_BYTES] += loaded * setup.page_bytes
    node.counts[N.COMPUTED] += tokens
    node.counts[N.LAUNCHED] += 1
    return host_s


@inner
def _note(
    node: NodeState, which: int, work: tuple[int, float, int, float, float], times_s: tuple[float, float, float]
) -> None:
    """Begin the line of a step in the log. `times_s`: of the host, the bus, the device."""
    line, (tokens, pairs, loaded, num_read, num_missed), (host_s, bus_s, compute_s) = node.log[which], work, times_s
    line[Step.BEGIN_S] = node.step[which, 0]
    line[Step.REQUESTS] = 0 if is_ahead_step(node, which) else node.size[which]
    line[Step.TOKENS], line[Step.PAIRS], line[Step.PAGES_RELOADED] = tokens, pairs, loaded
    line[Step.ROWS_READ], line[Step.ROWS_MISSED] = num_read, num_missed
    line[Step.HOST_MS], line[Step.ROWS_MS], line[Step.COMPUTE_MS] = host_s * 1e3, bus_s * 1e3, compute_s * 1e3


@inner
def log_step(node: NodeState, which: int, now_s: float) -> None:
    """A step has ended, the last that N.ENDED counts."""
    node.log[which, Step.END_S] = now_s
    place = (node.counts[N.ENDED] - 1) % node.ended.shape[0]
    for column in range(node.log.shape[1]):
        node.ended[place, column] = node.log[which, column]


@inner
def _work(node: NodeState, setup: Setup, requests: Requests, out: Outcomes, which: int) -> tuple[int, float, int]:
    """Tokens computed, pairs looked at and pages loaded by a step."""
    tokens, pairs, loaded = 0, 0.0, 0
    for index in range(node.size[which]):
        member = node.members[which, index]
        request, total, resident = member[Member.REQUEST], member[Member.TOKENS], member[Member.RESIDENT]
        others = member[Member.ASKED] + setup.num_request_context
        new = total - resident
        tokens += new + others
        pairs += new * (resident + new / 2) + others * total
        loaded += member[Member.LOADED]
        if member[Member.ASKED]:
            out.history_tokens[request] = total
            out.reused_tokens[request], out.computed_tokens[request] = resident, new + others
    return tokens, pairs, loaded


@inner
def _read_rows(node: NodeState, setup: Setup, requests: Requests, out: Outcomes, which: int) -> tuple[float, float]:
    """Look every member's rows up, then admit what was missed; returns rows read and missed, scaled up.

    As on the device: a step's rows are looked up before any of them is admitted.
    """
    reads, rows, scratch = requests.reads, node.rows, node.scratch
    num_read, num_missed = 0, 0.0
    begin_step(rows)
    for index in range(node.size[which]):
        member = node.members[which, index]
        request, resident = member[Member.REQUEST], member[Member.RESIDENT]
        missed = 0
        if resident < setup.num_context:
            missed += look_up(rows, scratch, context_rows(reads, request, scratch))
        num_old = max(0, resident - setup.num_context)
        first = requests.anchor[request] + num_old
        num_later = 0  # rows of events behind those of a chunk that is computed ahead
        if member[Member.TOKENS] < requests.num_tokens[request]:
            end = requests.anchor[request] + member[Member.TOKENS] - setup.num_context
            num_later = history_rows(reads, request, end, scratch)
        missed += look_up(rows, scratch, history_rows(reads, request, first, scratch) - num_later)
        if member[Member.ASKED]:
            missed += look_up(rows, scratch, candidate_rows(reads, request, scratch))
            out.missed_rows[request] = missed / setup.rate
        num_missed += missed / setup.rate
        num_new = max(0, member[Member.TOKENS] - setup.num_context - num_old)
        num_read += (num_new + member[Member.ASKED]) * setup.rows_per_event + setup.num_request_context
        num_read += max(0, setup.num_context - resident)
    admit(rows)
    node.counts[N.ROWS_READ] += num_read
    node.clocks[C.MISSED_ROWS] += num_missed
    return float(num_read), min(num_missed, float(num_read))


@inner
def read_ahead(node: NodeState, setup: Setup, which: int, at: tuple[float, float]) -> None:
    """Refill empty slots with what demand has left of the budget; the bus is busy with it. `at`: now, bus speed."""
    now_s, bus_speed = at
    clocks = node.clocks
    limit = int(setup.refill_bytes - node.step[which, 2]) // setup.row_bytes
    if limit <= 0:
        return
    credit = limit * setup.rate + clocks[C.REFILL_CREDIT]
    num = refill(node.rows, int(credit))
    clocks[C.REFILL_CREDIT] = credit - int(credit)
    if not num:
        return
    num_bytes = num / setup.rate * setup.row_bytes
    took_ms = rows_ms(setup.terms, BusLoad(0.0, num_bytes, num / setup.rate), 1e9, bus_speed)
    clocks[C.BUS_FREE_S] = max(clocks[C.BUS_FREE_S], now_s) + took_ms / 1e3
    node.counts[N.REFILL_BYTES] += int(num_bytes)


@inner
def bus_speed_at(faults: Faults, now_s: float) -> float:
    speed = 1.0
    for i in range(faults.slow_bus.shape[0]):
        if faults.slow_bus[i, 0] <= now_s < faults.slow_bus[i, 1]:
            speed *= faults.slow_bus[i, 2]
    return speed
