"""Settings of a history store."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr

from helmrec.config import Frozen


class HistoryConfig(Frozen):
    """Durability, size and timeouts of a store. Sizes take units: max_bytes="1TiB".

    Acknowledged events survive the end of the process under every `sync`, which only concerns power loss:
    commit     nothing acknowledged is lost
    interval   what was acknowledged in the last `sync_interval_s` may be lost
    os         what the operating system has not written yet may be lost
    Under the last two, a file system that writes out of order may leave a damaged file. Reading damaged events raises
    HistoryError; a damaged index may hide a user, which `check()` finds.
    """

    sync: Literal["commit", "interval", "os"] = Field("commit", description="when events are forced to the disk")
    sync_interval_s: float = Field(1.0, gt=0, description="time between two forced writes where sync is 'interval'")
    max_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(64 << 30), description="most the file may take; appends beyond it are refused"
    )
    map_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(64 << 20), description="address space at start; doubles automatically, up to max_bytes"
    )
    max_events_per_user: int = Field(
        100_000, ge=1, description="events of a user that are always kept; older ones are dropped by whole pages"
    )
    max_append_events: int = Field(100_000, ge=1, description="most events of one append")
    max_commit_appends: int = Field(1_024, ge=1, description="most appends that share a transaction")
    queue_limit: int = Field(8_192, ge=1, description="appends that may wait for the writer, and reads for a thread")
    read_threads: int = Field(8, ge=1, description="threads of a server that read")
    read_timeout_ms: float = Field(
        500.0, gt=0, description="timeout of a read, after which the store counts as unavailable"
    )
    write_timeout_ms: float = Field(5_000.0, gt=0, description="most an append may take before its client is refused")
    breaker_failures: int = Field(5, ge=1, description="consecutive failed reads after which no more are tried")
    breaker_pause_s: float = Field(0.25, gt=0, description="pause before reads are tried again")
    secret: SecretStr | None = Field(
        None,
        min_length=32,
        description="seals pages; the same for all processes that open the store; unset: a key kept in the store",
    )
