"""Memory without a name that several processes map. The system frees it with its last descriptor and mapping."""

import contextlib
import mmap
import os

from helmrec.errors import ConfigError


def create_shared(name: str, num_bytes: int) -> int:
    """Return the descriptor of zeroed shared memory; `name` is what /proc/PID/maps shows. Pages are taken when used."""
    descriptor = os.memfd_create(f"helmrec-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(1, num_bytes))
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"no room in host memory for {num_bytes} bytes of {name}: {error}") from error
    return descriptor


def map_shared(descriptor: int) -> mmap.mmap:
    """Map shared memory, in huge pages where the system gives them. The descriptor may be closed afterwards."""
    try:
        memory = mmap.mmap(descriptor, 0)
    except (OSError, ValueError) as error:
        raise ConfigError(f"shared memory of {os.fstat(descriptor).st_size} bytes cannot be mapped: {error}") from error
    with contextlib.suppress(OSError):  # transparent_hugepage/shmem_enabled may not allow it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
