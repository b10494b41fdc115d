"""What a simulated node is made of: settings, the requests of a trace, and the arrays its compiled loop works on.

Values only; `plan`, `step` and `loop` act on them.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.sim.cost import CostTerms
from helmrec.sim.node.host import HostState
from helmrec.sim.node.kv import KVRules, KVState
from helmrec.sim.node.relay import RelayRules, RelayState
from helmrec.sim.node.rows import RowState
from helmrec.traffic.rows import RowReads
from helmrec.types import IntArray

FloatArray = NDArray[np.float64]
NEVER_RELOAD, ALWAYS_RELOAD, MEASURED_RELOAD = 0, 1, 2


class Status(IntEnum):
    """What became of a request."""

    WAITING = 0  # has not come yet, queues, or runs
    SERVED = 1
    QUEUE_FULL = 2
    HOPELESS = 3  # refused on arrival: its deadline could not be met
    EXPIRED = 4  # its deadline passed in the queue
    LOST = 5  # its node died, and nobody served it again


class Setup(NamedTuple):
    """Settings in the form compiled code wants."""

    rules: KVRules
    terms: CostTerms
    num_context: int  # user-context tokens
    num_request_context: int
    rows_per_event: int  # of all event tables
    page_bytes: int
    row_bytes: int
    rows_per_page: int
    rate: float  # of row sampling
    max_batch_tokens: int
    max_batch_requests: int
    queue_limit: int
    deadline_ms: float  # infinite: none
    refill_bytes: int
    save_pages: int
    move_pages: int
    request_pages: int
    batch_pages: int
    reload: int
    overlaps: bool
    relay: RelayRules


class Requests(NamedTuple):
    """What every request of a trace asks of a node, and which rows it reads."""

    reads: RowReads
    window: IntArray  # (requests,) which window of the user's history it is
    anchor: IntArray  # (requests,) first event of the window
    num_tokens: IntArray  # (requests,) that can be cached
    item: IntArray  # (events,) own events of all users


class Outcomes(NamedTuple):
    """What became of every request; filled by the nodes that serve them."""

    status: NDArray[np.int8]
    latency_ms: FloatArray  # from arrival to answer
    queue_ms: FloatArray
    history_tokens: NDArray[np.int32]  # that can be cached
    reused_tokens: NDArray[np.int32]  # of those
    computed_tokens: NDArray[np.int32]  # candidates included
    missed_rows: FloatArray  # scaled up from the sample


class Faults(NamedTuple):
    """What goes wrong, when. Row updates are a storm if there are many."""

    slow_bus: FloatArray  # (n, 3) from, until, speed as a share of what it should be
    stall: FloatArray  # (n, 2) from, until
    update_s: FloatArray  # (n,) rising
    update_share: FloatArray  # (n,) of all items
    update_salt: IntArray  # (n,) which ones


class N(IntEnum):
    """Places in `NodeState.counts`."""

    INBOX_NEXT = 0
    INBOX_END = 1
    QUEUE_BEGIN = 2
    QUEUED = 3
    IN_FLIGHT = 4  # place of the step that computes, or -1
    ENDING = 5  # place of the step that is waited for, or -1
    LAUNCHED = 6
    ENDED = 7
    SERVED = 8
    REFUSED = 9
    EXPIRED = 10
    LOGGED = 11
    TARGET = 12  # pages
    DRAIN_BEGIN = 13
    DRAINS = 14
    MISS_BYTES = 15
    REFILL_BYTES = 16
    SAVE_BYTES = 17
    RELOAD_BYTES = 18
    GROW_BYTES = 19
    UPDATE_BYTES = 20
    ROWS_READ = 21  # sampled or not
    COMPUTED = 22  # tokens
    ARRIVED = 23


class C(IntEnum):
    """Places in `NodeState.clocks`."""

    NOW_S = 0
    BUS_FREE_S = 1
    COMPUTE_FREE_S = 2
    MS_PER_REQUEST = 3
    COMPUTE_BUSY_MS = 4
    REFILL_CREDIT = 5  # part of a sampled row
    MISSED_ROWS = 6  # scaled up
    LAST_ENDED_S = 7
    RELOAD_PAGE_S = 8  # that a page from the host delays a step, as learned
    STEP_S = 9  # that a step takes, of late
    STEP_DEVIATION_S = 10  # mean absolute error of that
    PLANNED_COMPUTE_S = 11  # of the step being planned
    PLANNED_LOAD_S = 12


class Member(IntEnum):
    """Fields of a request in a step."""

    REQUEST = 0
    PREFIX = 1
    RESIDENT = 2
    TOKENS = 3  # of its history
    LOADED = 4  # pages from the host
    BEFORE = 5  # tokens its prefix held
    ASKED = 6  # candidates; none of what is computed ahead


class NodeState(NamedTuple):
    counts: IntArray
    clocks: FloatArray
    queue: IntArray  # ring of inbox places
    size: IntArray  # (2,) members of the steps
    members: IntArray  # (2, members, fields)
    arrived_s: FloatArray  # (2, members)
    step: FloatArray  # (2, 4) started_s, end_s, bytes that missed, delay_s by pages from the host
    log: FloatArray  # (2, columns of `steps.Step`) of the same steps, for the log
    ended: FloatArray  # (CAPACITY, columns) ring: steps that ended, N.ENDED of them so far
    drains: IntArray  # ring of (epoch, pages)
    scratch: IntArray  # rows of one request
    kv: KVState
    rows: RowState
    host: HostState
    relay: RelayState


class Inbox(NamedTuple):
    """Requests sent to a node, in order of time."""

    request: IntArray
    time_s: FloatArray
    log: IntArray  # filled with requests in the order they were answered


def make_outcomes(num_requests: int) -> Outcomes:
    return Outcomes(
        status=np.zeros(num_requests, np.int8),
        latency_ms=np.full(num_requests, np.nan),
        queue_ms=np.full(num_requests, np.nan),
        history_tokens=np.zeros(num_requests, np.int32),
        reused_tokens=np.zeros(num_requests, np.int32),
        computed_tokens=np.zeros(num_requests, np.int32),
        missed_rows=np.zeros(num_requests),
    )


def no_faults() -> Faults:
    return Faults(np.empty((0, 3)), np.empty((0, 2)), np.empty(0), np.empty(0), np.empty(0, np.int64))
