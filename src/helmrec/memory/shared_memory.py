"""Memory without a name that several processes map. The system frees it with its last descriptor and mapping."""

import contextlib
import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from helmrec.errors import ConfigError

log = logging.getLogger("helmrec.serve")
_NODES = Path("/sys/devices/system/node/has_memory")
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_INTERLEAVE = 3
_MAX_NODES = 1_024


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


def memory_nodes(path: Path = _NODES) -> list[int]:
    """Return the NUMA nodes of this machine that have memory."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        return [node for part in parts for node in range(int(part[0]), int(part[-1]) + 1)]
    except (OSError, ValueError):
        return [0]


def interleave(memory: mmap.mmap, nodes: Sequence[int]) -> bool:
    """Spread pages that are not taken yet over NUMA nodes, for all processes that map this memory.

    Returns whether it was possible: a container may not allow it. Then pages lie where they are first written.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = np.zeros(_MAX_NODES // 64, np.uint64)
    for node in nodes:
        mask[node // 64] |= np.uint64(1 << node % 64)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    arguments = (address, len(memory), _INTERLEAVE, mask.ctypes.data, _MAX_NODES + 1, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)):
        log.warning("memory is not spread over NUMA nodes %s: %s", list(nodes), os.strerror(ctypes.get_errno()))
        return False
    return True
