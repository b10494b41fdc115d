"""A disk that is full, for as long as a test needs it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """No file of this process may reach beyond `max_bytes`: writes stop half way, then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))  # Python ignores the signal, so writes just fail
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
