"""The consumer: follows a stream of deltas and applies it to an engine between steps.

A thread reads, checks and stages deltas ahead, on a card in its own memory, and cuts them into slices. The thread that
steps the engine only makes slices visible. After a fault of the stream no further delta is applied, while requests
are served on. The consumer reads the delta again until it is repaired or skipped.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from helmrec.config import Frozen
from helmrec.deltas.checks import check_delta, compile_checks
from helmrec.deltas.delta import Delta, NamedModel
from helmrec.deltas.slices import DeltaHead, RowSlice, TakesRows
from helmrec.deltas.source import DeltaSource, in_order
from helmrec.engine.intake import RowUpdate
from helmrec.engine.row_stream import RowStreamStats
from helmrec.errors import DeltaError, DeltaOutOfOrder, HelmRecError, RequestError, RowLogError
from helmrec.types import RowPosition

log = logging.getLogger("helmrec.deltas")
_POLL_S = 0.05
_STOPPED_POLL_S = 0.5
_LAG_ALARM_S = 10.0
_ALARM_EVERY_S = 60.0
_LOOK_EVERY_S = 1.0  # at the lag, to see whether it is one to warn of
_JOIN_S = 15.0
_EVEN_S = 0.05  # with a budget of rows per second, a slice has at most those of this time
_MOST_SLICES = 16  # of small deltas, between two steps
_AHEAD_BLOCKS = 4  # of the rows staged ahead, how many parts are staged at once
_ASK_AGAIN_S = 5.0  # for a model that could not be swapped in


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where the rows of a model folder stand in a stream."""

    stream: str | None = None  # None: of any stream, at its beginning
    sequence: int = 0
    offset: int = 0  # rows of the next delta that are applied already

    @property
    def position(self) -> RowPosition:
        return RowPosition(self.sequence, self.offset)


SwapModel = Callable[[NamedModel, StreamStart], None]


class ConsumerLimits(Frozen):
    """Bounds of applying deltas."""

    slice_rows: int = 16_384  # most rows written between two steps; each slice costs the host a launch
    rows_per_s: float | None = None  # None: as many as come
    ahead_rows: int = 65_536  # rows that are staged ahead; at least one slice


class RowConsumer:
    """Applies the deltas of one source to one engine. `apply` belongs to the thread that steps the engine."""

    def __init__(
        self,
        source: DeltaSource,
        engine: TakesRows,
        start: StreamStart | None = None,
        limits: ConsumerLimits | None = None,
    ) -> None:
        start = start or StreamStart()
        self._source, self._engine, self._limits = source, engine, limits or ConsumerLimits()
        self._changed = threading.Condition()
        self._ahead: deque[RowSlice] = deque()
        self._position = start.position
        self._read_to = start.sequence
        self._stream = self.stream = start.stream  # of deltas that are read; of rows that are visible or being written
        self._newest = start.sequence
        self._target, self._target_s = start.sequence, 0.0  # what the source held at that time, until it is visible
        self._stop: str | None = None
        self._fault = ""  # what tells one stop from another
        self._rejected: int | None = None  # the delta that the engine has refused, until it is passed
        self._stopped_s = 0.0  # when it stopped, by the wall clock, as deltas have it
        self._counts = dict.fromkeys(("deltas", "rows", "duplicates", "skipped", "stops"), 0)
        rate = self._limits.rows_per_s
        self._slice_rows = min(self._limits.slice_rows, math.ceil(rate * _EVEN_S)) if rate else self._limits.slice_rows
        self._allowance, self._allowed_s = float(self._slice_rows), time.monotonic()
        self._block_rows = self._slice_rows * max(1, self._limits.ahead_rows // _AHEAD_BLOCKS // self._slice_rows)
        self._look_s = -math.inf  # when to look at the lag again
        self._swap: SwapModel | None = None
        self._asked_s = -math.inf  # when it was last asked to
        self._is_writing = False  # whether the first slice ahead is being made visible
        self._turn = 0  # counts rejections, so that the reader sees one that came while it waited
        self._has_looked, self._over = False, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="helmrec-row-deltas", daemon=True)
        engine.start_at(self._position)

    def follow_models(self, swap: SwapModel) -> None:
        """Before the start: call `swap`, in the thread of `apply`, with a model that the stream names and its position.

        No later delta is applied here: the engine of that model has a consumer of its own. `reject_model` goes on.
        """
        self._swap = swap

    def reject_model(self, reason: str) -> None:
        """Stop at a model that could not be swapped in; after a while it is tried again."""
        with self._changed:
            if self._ahead and self._ahead[0].delta.model is not None:
                self._asked_s = time.monotonic()
                self._reject(self._ahead[0], f"names a model that cannot be swapped in: {reason}")

    def start(self) -> None:
        log.info("following row deltas", extra={"source": self._source.name, "after": self._position.sequence})
        compile_checks()
        self._thread.start()

    def catch_up(self) -> None:
        """Apply what the source holds now, before the engine serves; return early if something stops it."""
        started_s, first, target = time.monotonic(), self._position.sequence, None
        while not self._over.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._ahead or self._has_looked or self._over.is_set(), _POLL_S)
                target = self._newest if target is None and self._newest > first else target
                is_stopped = self._has_looked and self._stop is not None and not self._ahead
                is_stopped |= bool(self._ahead) and self._ahead[0].delta.model is not None  # swapped in while it serves
                is_there = self._has_looked and self._position.sequence >= (self._newest if target is None else target)
            if is_stopped or is_there:
                break
            self._apply_slice()
        at = self._position.sequence
        fields = {"position": at, "deltas": at - first, "seconds": round(time.monotonic() - started_s, 3)}
        log.info("row deltas applied before serving", extra=fields)

    def apply(self, now: float) -> bool:
        """Apply up to a slice of rows, of small deltas several; True if another slice is due at once."""
        self._alarm(now)
        if not self._ahead:  # between most steps
            return False
        self._ask_for_model(now)
        earned = math.inf if self._limits.rows_per_s is None else (now - self._allowed_s) * self._limits.rows_per_s
        self._allowance, self._allowed_s = min(float(self._slice_rows), self._allowance + earned), now
        left = self._slice_rows
        for _ in range(_MOST_SLICES):
            if not self._is_due(left):
                break
            num = self._apply_slice()
            left, self._allowance = left - num, self._allowance - num
        return self._is_due(self._slice_rows)

    def _is_due(self, most: int) -> bool:
        """Whether the next slice has at most so many rows and the budget allows it."""
        with self._changed:
            return (
                bool(self._ahead)
                and self._ahead[0].delta.model is None
                and self._ahead[0].num_rows <= min(most, self._allowance)
            )

    def _ask_for_model(self, now: float) -> None:
        """Have the next delta swapped in, if it is a model."""
        with self._changed:
            first = self._ahead[0] if self._ahead else None
            if first is None or first.delta.model is None or now - self._asked_s < _ASK_AGAIN_S:
                return
            self._asked_s = math.inf  # until it is rejected
        if self._swap is None:
            self.reject_model("this server cannot swap models")
        else:
            self._swap(first.delta.model, StreamStart(first.delta.stream, first.sequence))

    def wait(self, seconds: float) -> None:
        """Wait until rows are ahead, but not longer; for a thread that only applies them."""
        with self._changed:
            self._changed.wait_for(lambda: self._ahead or self._over.is_set(), seconds)

    def stats(self) -> RowStreamStats:
        with self._changed:
            at = self._position.sequence
            newest = max(self._newest, self._read_to)
            return RowStreamStats(
                self._source.name, at, newest, max(0, newest - at), self._lag_s(), **self._counts, stop=self._stop
            )

    def reader_cpu_s(self) -> float:
        """Return the CPU time of the thread that reads, while it runs."""
        assert self._thread.ident is not None and self._thread.is_alive(), "it follows"
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self) -> None:
        """Stop following. What was read ahead and not applied is read again by whoever follows next."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        with suppress(HelmRecError):
            self._source.close()

    def _lag_s(self) -> float:
        now, since = time.time(), []
        if self._ahead:
            since.append(self._ahead[0].delta.made_s)
        elif self._stop is not None:
            since.append(self._stopped_s)
        if self._position.sequence < self._target:  # perhaps not even read yet
            since.append(self._target_s)
        return max((now - each for each in since), default=0.0)

    def _apply_slice(self) -> int:
        """Make the first slice ahead visible, if there is one; return its rows."""
        with self._changed:
            if not self._ahead or self._ahead[0].delta.model is not None:
                return 0
            first, self._is_writing = self._ahead[0], True
            self.stream = first.delta.stream
        problem: str | None = None
        try:
            self._engine.apply_rows(first.staged, first.after)
        except RequestError as error:
            problem = f"does not fit: {error}"
        except RowLogError as error:
            problem = f"cannot be kept: {error}"
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            if problem is not None:
                self._reject(first, problem)
                return 0
            self._ahead.popleft()
            self._position = first.after
            self._counts["rows"] += first.num_rows
            if not first.after.offset:
                self._counts["skipped" if first.delta.is_skip else "deltas"] += 1
                if self._rejected == first.sequence:
                    self._rejected = None
                    self._go_on()
        return first.num_rows

    def _reject(self, first: RowSlice, reason: str) -> None:
        """Stop at a delta that the engine refuses, and read from there again."""
        with self._changed:
            self._ahead.clear()
            self._read_to, self._rejected = first.sequence - 1, first.sequence
            self._turn += 1
            self._changed.notify_all()
        self._note_stop(f"delta {first.sequence} {reason}")

    def _follow(self) -> None:
        """Read ahead until closed."""
        while not self._over.is_set():
            try:
                self._read()
            except DeltaError as error:
                name = type(error).__name__
                self._note_stop(f"{name}: {error}", f"{name} {error.sequence}" if error.sequence else None)
            except Exception as error:  # of a third party's source: serving must not end with it
                log.exception("row deltas cannot be read")
                self._note_stop(f"{type(error).__name__}: {error}")
            with self._changed:
                self._has_looked = True
                self._changed.notify_all()
            self._over.wait(_POLL_S if self._stop is None else _STOPPED_POLL_S)

    def _read(self) -> None:
        newest = self._source.newest()
        with self._changed:
            self._newest, after, turn = newest, self._read_to, self._turn
            if self._position.sequence >= self._target:
                self._target, self._target_s = newest, time.time()
        if newest < after:
            raise DeltaOutOfOrder(
                f"{self._source.name} ends at delta {newest}, but delta {after} was read before: it has lost deltas",
                after,
            )
        for delta in in_order(self._source.read(after), after, self._stream):
            if self._over.is_set():
                return
            if delta.sequence <= after:
                self._count_duplicate(delta)
                continue
            if not self._take(delta, turn):
                return
            after = delta.sequence
        if newest <= after and self._rejected is None:
            self._go_on()

    def _count_duplicate(self, delta: Delta) -> None:
        with self._changed:
            self._counts["duplicates"] += 1
        log.debug("a row delta came again", extra={"sequence": delta.sequence})

    def _take(self, delta: Delta, turn: int) -> bool:
        """Check a delta and stage its slices, each when there is room; False if reading must begin again."""
        try:
            update = check_delta(self._engine.model_config, delta)
        except RequestError as error:
            raise DeltaError(f"delta {delta.sequence} does not fit the model: {error}", delta.sequence) from None
        num_rows = update.rows.size
        first = self._first_row(delta)
        for start in range(first, max(first + 1, num_rows), self._block_rows):
            end = min(num_rows, start + self._block_rows)
            if not self._wait_for_room(end - start, turn):
                return False
            slices = self._stage(delta, update, start, end)
            with self._changed:
                if self._turn != turn:
                    return False
                self._ahead.extend(slices)
                if end == num_rows:
                    self._read_to, self._stream = delta.sequence, delta.stream
                self._changed.notify_all()
        return True

    def _stage(self, delta: Delta, update: RowUpdate, start: int, end: int) -> list[RowSlice]:
        """Stage rows [start, end) of a delta together, and cut them into slices; one without rows is one slice."""
        staged = self._engine.stage_rows(update.part(start, end))
        head = DeltaHead(delta.stream, delta.sequence, delta.made_s, delta.model, delta.is_skip)
        slices: list[RowSlice] = []
        for at in range(start, max(start + 1, end), self._slice_rows):
            to = min(end, at + self._slice_rows)
            is_last = to == update.rows.size
            after = RowPosition(delta.sequence) if is_last else RowPosition(delta.sequence - 1, to)
            slices.append(RowSlice(staged.part(at - start, to - start), after, head))
        return slices

    def _first_row(self, delta: Delta) -> int:
        """Return the row of a delta to go on from: not the first if it was applied in part before it was read again."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing or self._over.is_set())  # else it is staged again
            while self._ahead and self._ahead[-1].sequence == delta.sequence:  # staging it has failed half way
                self._ahead.pop()
            at = self._position
            return min(at.offset, delta.num_rows) if at.sequence == delta.sequence - 1 else 0

    def _wait_for_room(self, num_rows: int, turn: int) -> bool:
        """Wait until so many rows may be staged; False if it is over, or the engine has rejected an earlier one."""
        with self._changed:
            self._changed.wait_for(lambda: self._over.is_set() or self._turn != turn or self._has_room(num_rows))
            return not self._over.is_set() and self._turn == turn

    def _has_room(self, num_rows: int) -> bool:
        return not self._ahead or num_rows + sum(each.num_rows for each in self._ahead) <= self._limits.ahead_rows

    def _note_stop(self, reason: str, fault: str | None = None) -> None:
        """Note why nothing is applied. Reasons with the same `fault`, the reason itself if None, are told once."""
        fault = fault or reason
        with self._changed:
            is_new = self._stop is None or fault != self._fault
            self._stop, self._fault = reason, fault
            if is_new:
                self._counts["stops"] += 1
                self._stopped_s = time.time()
        if is_new:
            fields = {"reason": reason, "source": self._source.name, "position": self._position.sequence}
            log.error("row deltas stopped; serving goes on with the rows it has", extra=fields)

    def _go_on(self) -> None:
        with self._changed:
            was_stopped, self._stop = self._stop is not None, None
        if was_stopped:
            log.info("row deltas go on", extra={"position": self._position.sequence})

    def _alarm(self, now: float) -> None:
        """Log a lag at most once a minute."""
        if now < self._look_s:
            return
        self._look_s, stats = now + _LOOK_EVERY_S, self.stats()
        if stats.lag_s > _LAG_ALARM_S:
            self._look_s = now + _ALARM_EVERY_S
            fields = {"lag_s": round(stats.lag_s, 1), "lag_deltas": stats.lag_deltas, "reason": stats.stop or "rate"}
            log.warning("rows lag behind training", extra=fields)
