"""Settings of a history store, frozen and whole at birth."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr

from helmrec.config import Frozen


class HistoryConfig(Frozen):
    """How a store trades speed for power loss, and how large it may grow. Sizes take units: max_bytes="1TiB".

    Acknowledged events survive the death of the process under every `sync`; it is about power loss alone:
    commit     nothing acknowledged is lost
    interval   what was acknowledged in the last `sync_interval_s` may be lost
    os         what the operating system has not written yet may be lost
    Under the last two, a file system that writes out of order may leave a damaged file. Damaged events are told when
    they are read, and never served; a damaged index may hide a user, which `check()` finds.
    """

    sync: Literal["commit", "interval", "os"] = Field("commit", description="when events are forced to the disk")
    sync_interval_s: float = Field(1.0, gt=0, description="between two forced writes where sync is 'interval'")
    max_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(64 << 30), description="most the file may take; appends beyond it are refused"
    )
    map_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(64 << 20), description="address space at start; doubles by itself, up to max_bytes"
    )
    max_events_per_user: int = Field(
        100_000, ge=1, description="events kept of a user, at least; older ones leave by the page"
    )
    max_append_events: int = Field(100_000, ge=1, description="most events one append may bring")
    max_commit_appends: int = Field(1_024, ge=1, description="most appends that share a transaction")
    queue_limit: int = Field(8_192, ge=1, description="appends that may wait for the writer, and reads for a thread")
    read_threads: int = Field(8, ge=1, description="threads of a server that read")
    read_timeout_ms: float = Field(500.0, gt=0, description="most a read may take before the store counts as gone")
    write_timeout_ms: float = Field(5_000.0, gt=0, description="most an append may take before its client is refused")
    breaker_failures: int = Field(
        5, ge=1, description="reads that fail one after another before the store is left alone"
    )
    breaker_pause_s: float = Field(0.25, gt=0, description="until a store that was left alone is tried again")
    secret: SecretStr | None = Field(
        None,
        min_length=32,
        description="that pages are sealed with, the same for all who open the store; none, a key kept in the store",
    )
