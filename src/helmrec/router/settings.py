"""Settings of routing. They are read without Numba, so that commands can show them at once."""

from pydantic import Field

from helmrec.config import Frozen

DEFAULT_BITS = 1 << 16  # of a node's row sketch


class RouterSettings(Frozen):
    """Trade-off of `EmbKVAware` between affinity and load. Defaults suit latency targets of tens of milliseconds."""

    load_gap_ms: float = Field(
        10.0, ge=0, description="affinity ends where a queue exceeds the shortest by this and one mean queue"
    )
    load_factor: float = Field(1.0, ge=1, description="cold users go to queues of at most this times the mean")
    load_slack_ms: float = Field(0.0, ge=0, description="added to the bound of load_factor: fewer moves, longer queues")
    cold_scale_ms: float = Field(0.25, gt=0, description="a node slower by this gets 1/e of the cold users")
    cold_floor: float = Field(0.25, gt=0, le=1, description="least share of cold users, against the fastest node")
    cold_choices: int = Field(8, ge=1, description="nodes, by hash, of which a cold user takes the shortest queue")
    work_weight: float = Field(2.0, ge=0, description="weight of the delay that work causes for each waiting request")
    sketch_weight: float = Field(8.0, ge=0, description="weight of the reported hit rate, in samples of a sketch")
    hit_rate: float = Field(
        0.5, ge=0, le=1, description="hit rate of rows that is assumed where no node has reported one"
    )


class StateSettings(Frozen):
    """Limits on the time and memory of a router's estimates."""

    stale_s: float = Field(2.0, gt=0, description="age from which a report is ignored")
    prefix_ttl_s: float = Field(3600.0, gt=0, description="how long a prefix is assumed to stay without a new visit")
    open_ttl_s: float = Field(10.0, gt=0, description="how long a send counts as load if its end is not reported")
    kept_from_visit: int = Field(
        2, ge=1, description="visit from which nodes keep a prefix, as their KV admission does"
    )
    max_users: int = Field(200_000, ge=1, description="users remembered, newest first; 0.5 KB each")
    max_homes: int = Field(4, ge=1, description="nodes remembered per user; the least recently used one is dropped")
    sketch_bits: int = Field(
        DEFAULT_BITS, ge=64, description="size of a node's row sketch; sketches of other sizes are ignored"
    )
