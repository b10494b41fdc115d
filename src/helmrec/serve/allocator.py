"""Settings of the C library's allocator for processes that serve.

By default glibc gives blocks of more than 128 KiB back to the system when they are freed. The next request of that size
then costs a page fault for every 4 KiB, which takes longer than to copy it.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_KEPT_BYTES = 512 << 20  # free memory that stays with the process
_LARGEST_BYTES = 32 << 20  # blocks above are given back; the largest value that glibc takes


def keep_freed_memory() -> bool:
    """Keep freed memory for later requests; return whether that is so. The allocator's variables take precedence.

    Other C libraries are left as they are.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
