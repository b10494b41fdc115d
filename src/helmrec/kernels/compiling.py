"""Counts the compilations of this process and reports them as pauses.

Numba compiles a loop, and Triton a kernel, at the first call with arguments of new types. Both hold the interpreter's
lock, so every thread waits. A serving process compiles everything before it is ready; `num_compiled` shows whether it
did.
"""

import sys
import threading
import time
from typing import Any

from numba.core import event

from helmrec.pauses import Operation, note_process

_running = threading.local()  # of each thread: depth of nested Numba compilations, and start of the outermost
_counts = {"numba": 0, "triton": 0}
_is_followed = {"numba": False, "triton": False}


def num_compiled() -> int:
    """Return the number of compilations since `follow_compilers`, without those loaded from a cache."""
    return sum(_counts.values())


def follow_compilers() -> None:
    """Report every later compilation. Call it again after Triton has been imported."""
    if not _is_followed["numba"]:
        event.register("numba:compile", _NumbaListener())  # type: ignore[no-untyped-call]
        _is_followed["numba"] = True
    if not _is_followed["triton"] and "triton" in sys.modules:
        runtime = sys.modules["triton"].knobs.runtime
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = _triton_starts, _triton_ended
        _is_followed["triton"] = True


class _NumbaListener(event.Listener):
    """Reports the outermost compilation as one pause: compiling a function compiles those it calls."""

    def on_start(self, event: Any) -> None:
        _running.depth = getattr(_running, "depth", 0) + 1
        if _running.depth == 1:
            _running.since_s = time.monotonic()

    def on_end(self, event: Any) -> None:
        _counts["numba"] += 1
        _running.depth -= 1
        if _running.depth == 0:
            note_process(Operation("compile", _running.since_s, time.monotonic()))


def _triton_starts(**_: Any) -> bool:
    _running.triton_since_s = time.monotonic()
    return False  # compile as usual


def _triton_ended(**_: Any) -> None:
    _counts["triton"] += 1
    note_process(Operation("compile", _running.triton_since_s, time.monotonic()))
