"""The pipeline of running steps: launched one after the other, finished in the same order, at most two at once.

While one step computes, the rows of the next are read. Where steps do not overlap, each is finished before `push`
returns.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.clock import Clock
from helmrec.costs.reload import NO_WORK, StepWork
from helmrec.engine.runner import Runner, Running, StepOutput
from helmrec.engine.scheduler import Batch, Scheduler
from helmrec.errors import NonFiniteScores
from helmrec.pauses import GapMonitor, StepStart
from helmrec.steps import StepLog
from helmrec.types import RankResult, Timing, UserId


class Ended(NamedTuple):
    """A step that has ended, with its output or its error."""

    batch: Batch
    outcome: StepOutput | BaseException
    planned_s: float
    ended_s: float
    took_s: float  # as `Scheduler.commit` returns it; 0 if the step failed
    work: StepWork = NO_WORK  # of a step that did not fail

    def hand_out(self) -> None:
        """Complete the future of every request with its result or its error."""
        output = self.outcome
        if not isinstance(output, StepOutput):
            for member in self.batch.members:
                member.waiting.future.set_exception(output)
            return
        for i, (future, result) in enumerate(self._results(output)):
            if i in output.non_finite:
                request = self.batch.members[i].request
                future.set_exception(_non_finite(result.scores, request.history.user_id))
            else:
                future.set_result(result)

    def _results(self, output: StepOutput) -> "Iterator[tuple[Future[RankResult], RankResult]]":
        """Generate the future and the result of every request, each when the one before has been handed out."""
        started_s, row_position = self.batch.started_s, output.running.row_position
        plan_ms, compute_ms = (self.planned_s - started_s) * 1e3, (self.ended_s - self.planned_s) * 1e3
        of_requests = zip(self.batch.members, output.scores, output.row_hits, output.row_misses, strict=True)
        for (waiting, plan, num_tokens, _), scores, hits, misses in of_requests:
            start, truncated = waiting.request.window_start, waiting.request.truncated_events
            timing = Timing((started_s - waiting.arrived_s) * 1e3, plan_ms, compute_ms)
            # Fields in their order, since names take as long again.
            result = RankResult(
                scores, plan.num_resident, num_tokens, hits, misses, start, truncated, timing, row_position
            )
            yield waiting.future, result


def _non_finite(scores: NDArray[np.float32], user_id: UserId) -> NonFiniteScores:
    wrong = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    return NonFiniteScores(
        f"the model gave non-finite scores to {wrong.size} of {len(scores)} candidates of user {user_id}, "
        f"the first at candidates[{wrong[0]}]: an embedding row it reads is not finite, or too large for the model"
    )


class _Launched(NamedTuple):
    batch: Batch
    running: Running
    planned_s: float
    start: StepStart


def _record(batch: Batch, work: StepWork, output: StepOutput, ended_s: float) -> tuple[float, ...]:
    """A row of the step log, in the columns of `steps.Step`."""
    running = output.running
    return (
        batch.started_s,
        ended_s - output.ended_ago_s,
        0 if batch.is_ahead else len(batch.members),
        work.tokens,
        work.pairs,
        running.step.total_rows,
        output.num_missed,
        running.num_loads,
        *output.times,
    )


class Pipeline:
    """Runs batches and commits their pages. Not thread-safe: the engine calls it with its lock held."""

    def __init__(self, runner: Runner, scheduler: Scheduler, clock: Clock, gaps: GapMonitor, *, overlaps: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._gaps = gaps
        self.overlaps = overlaps
        self._in_flight: _Launched | None = None
        self.busy_s = 0.0  # time that all steps took together
        self.num_launched = self.num_ended = 0
        self.num_served = self.num_non_finite = 0  # rank requests
        self.unknown_ids = Counter[str]()  # of rank requests, by table
        self.steps = StepLog()

    @property
    def is_empty(self) -> bool:
        return self._in_flight is None

    @property
    def num_running(self) -> int:
        """Number of rank requests in the running step."""
        return 0 if self._in_flight is None or self.is_ahead else len(self._in_flight.batch.members)

    @property
    def is_ahead(self) -> bool:
        """Whether the running step computes ahead of rank requests."""
        return self._in_flight is not None and self._in_flight.batch.is_ahead

    def push(self, batch: Batch | None) -> list[Ended]:
        """Launch a batch, if there is one; return the steps that have ended since the last call, in order."""
        before, self._in_flight = self._in_flight, None
        planned_s = self._clock.now()
        failed: list[Ended] = []
        if batch is not None:
            self.num_launched += 1
            try:
                running = self._runner.launch(batch)
                self._in_flight = _Launched(batch, running, planned_s, self._started(batch, planned_s))
            except BaseException as error:  # the engine fails the requests, and raises it again if it is no Exception
                failed = [self._fail(batch, planned_s, error)]
        ended = [] if before is None else self._finish(before)
        return [*ended, *failed, *([] if self.overlaps else self.flush())]

    def _started(self, batch: Batch, planned_s: float) -> StepStart:
        """Record the start of a step. No request waits for a step that computes ahead, so no gap precedes it."""
        start_s = self._clock.now() if self._runner.is_asynchronous else planned_s
        oldest_s = start_s if batch.is_ahead else min([member.waiting.arrived_s for member in batch.members])
        return self._gaps.starting(start_s, oldest_s)

    def flush(self) -> list[Ended]:
        """Finish the running step, if there is one."""
        before, self._in_flight = self._in_flight, None
        return [] if before is None else self._finish(before)

    def _finish(self, launched: _Launched) -> list[Ended]:
        batch = launched.batch
        try:
            output = self._runner.finish(launched.running)
            ended_s = self._clock.now()
            following = None if self._in_flight is None else self._in_flight.start
            self._gaps.ended(ended_s - output.ended_ago_s, following)
            took_s = self._scheduler.commit(batch, ended_s, output.non_finite)
        except BaseException as error:  # as above; the step launched on top of it fails with it
            after, self._in_flight = self._in_flight, None
            followers = [] if after is None else [after]
            return [self._fail(each.batch, each.planned_s, error) for each in (launched, *followers)]
        self.busy_s += took_s
        self.num_ended += 1
        if not batch.is_ahead:
            self.num_served += len(batch.members) - len(output.non_finite)
            self.num_non_finite += len(output.non_finite)
            for member in batch.members:
                if unknown := member.waiting.request.unknown_ids:
                    self.unknown_ids.update(unknown)
        work = batch.work()
        self.steps.add(_record(batch, work, output, ended_s))
        return [Ended(batch, output, launched.planned_s, ended_s, took_s, work)]

    def _fail(self, batch: Batch, planned_s: float, error: BaseException) -> Ended:
        with suppress(Exception):  # a step that failed may still write to its pages
            self._runner.synchronize()
        self._scheduler.abort(batch)
        self.num_ended += 1
        return Ended(batch, error, planned_s, self._clock.now(), took_s=0.0)
