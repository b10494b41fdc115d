"""Values of a simulated node: settings, the requests of a trace, and the arrays that its compiled loop works on.

Defines types and constructors only; `plan`, `step` and `loop` hold the behaviour.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.costs.calibrated import CostTerms
from helmrec.memory.prefix_book import KVRules, PrefixBook
from helmrec.sim.node.host import HostState
from helmrec.sim.node.relay import RelayRules, RelayState
from helmrec.sim.node.rows import RowState
from helmrec.sim.node.visits import Visits
from helmrec.traffic.rows import RowReads
from helmrec.types import FloatArray, IntArray

NEVER_RELOAD, ALWAYS_RELOAD, MEASURED_RELOAD = 0, 1, 2


class Status(IntEnum):
    """The outcome of a request."""

    WAITING = 0  # not yet arrived, queued, or running
    SERVED = 1
    QUEUE_FULL = 2
    HOPELESS = 3  # refused on arrival: its deadline could not be met
    EXPIRED = 4  # its deadline passed in the queue
    LOST = 5  # its node failed, and no other node served it


class Setup(NamedTuple):
    """Settings of a node as plain numbers, for compiled code."""

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
    num_pages: int  # of the pool
    request_pages: int
    batch_pages: int
    reload: int
    overlaps: bool
    relay: RelayRules
    disk_rows_per_s: float  # infinite: all rows are in host memory


class Requests(NamedTuple):
    """The history window and the row reads of every request of a trace."""

    reads: RowReads
    window: IntArray  # (requests,) number of the window of the user's history
    anchor: IntArray  # (requests,) first event of the window
    num_tokens: IntArray  # (requests,) cacheable tokens of the history
    item: IntArray  # (events,) own events of all users


class Outcomes(NamedTuple):
    """The outcome of every request, filled in by the nodes that serve them."""

    status: NDArray[np.int8]
    latency_ms: FloatArray  # from arrival to answer
    queue_ms: FloatArray
    history_tokens: NDArray[np.int32]  # cacheable tokens
    reused_tokens: NDArray[np.int32]  # of those
    computed_tokens: NDArray[np.int32]  # candidates included
    missed_rows: FloatArray  # scaled up from the sample


class Faults(NamedTuple):
    """Injected faults and their times, with row updates among them."""

    slow_bus: FloatArray  # (n, 3) start, end, speed as a share of the normal one
    stall: FloatArray  # (n, 2) start, end
    update_s: FloatArray  # (n,) rising
    update_share: FloatArray  # (n,) of all items
    update_salt: IntArray  # (n,) selects which items


class N(IntEnum):
    """Indices into `NodeState.counts`."""

    INBOX_NEXT = 0
    INBOX_END = 1
    QUEUE_BEGIN = 2
    QUEUED = 3
    IN_FLIGHT = 4  # index of the step that computes, or -1
    ENDING = 5  # index of the step that the node waits for, or -1
    LAUNCHED = 6
    ENDED = 7
    SERVED = 8
    REFUSED = 9
    LOGGED = 10
    TARGET = 11  # pages
    DRAIN_BEGIN = 12
    DRAINS = 13
    MISS_BYTES = 14
    REFILL_BYTES = 15
    SAVE_BYTES = 16
    RELOAD_BYTES = 17
    GROW_BYTES = 18
    UPDATE_BYTES = 19
    ROWS_READ = 20  # sampled or not


class C(IntEnum):
    """Indices into `NodeState.clocks`."""

    NOW_S = 0
    BUS_FREE_S = 1
    COMPUTE_FREE_S = 2
    MS_PER_REQUEST = 3
    COMPUTE_BUSY_MS = 4
    REFILL_CREDIT = 5  # fraction of a sampled row carried over
    MISSED_ROWS = 6  # scaled up
    LAST_ENDED_S = 7
    RELOAD_PAGE_S = 8  # learned delay of a step per page loaded from the host
    STEP_S = 9  # moving average of the time of a step
    STEP_DEVIATION_S = 10  # moving average of its absolute error
    PLANNED_COMPUTE_S = 11  # of the step being planned
    PLANNED_LOAD_S = 12
    DISK_FREE_S = 13
    MOVED_S = 14  # when the boundary was looked at last


class Member(IntEnum):
    """Fields of a request in a step."""

    REQUEST = 0
    PREFIX = 1
    RESIDENT = 2
    TOKENS = 3  # of its history
    LOADED = 4  # pages from the host
    BEFORE = 5  # tokens of its prefix before this step
    ASKED = 6  # candidates; 0 if the step computes ahead of a request


class NodeState(NamedTuple):
    """Everything about a node that changes while it runs."""

    counts: IntArray
    clocks: FloatArray
    queue: IntArray  # ring of inbox indices
    size: IntArray  # (2,) number of members of each step
    members: IntArray  # (2, members, fields)
    arrived_s: FloatArray  # (2, members)
    step: FloatArray  # (2, 4) started_s, end_s, bytes that missed, delay_s caused by pages from the host
    log: FloatArray  # (2, columns of `steps.Step`) log lines of the two steps
    ended: FloatArray  # (CAPACITY, columns) ring of the log lines of ended steps; N.ENDED were written so far
    drains: IntArray  # ring of (epoch, pages)
    scratch: IntArray  # room for the rows of one request
    kv: PrefixBook
    visits: Visits
    rows: RowState
    memory: RowState  # rows in host memory, where others are on disk
    host: HostState
    relay: RelayState


class Inbox(NamedTuple):
    """Requests sent to a node, in order of time."""

    request: IntArray
    time_s: FloatArray
    log: IntArray  # filled with requests in the order they were answered


class Environment(NamedTuple):
    """What a node runs with besides its own state."""

    setup: Setup
    requests: Requests
    inbox: Inbox
    out: Outcomes
    faults: Faults


def make_outcomes(num_requests: int) -> Outcomes:
    """Outcomes of requests that no node has served yet."""
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
    """Faults of a node on which nothing goes wrong."""
    return Faults(np.empty((0, 3)), np.empty((0, 2)), np.empty(0), np.empty(0), np.empty(0, np.int64))
