"""Statistics of inference, in the form of the Open Inference Protocol's statistics extension."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from helmrec.types import RankResult


class Duration(Struct, frozen=True):
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def plus(self, milliseconds: float) -> "Duration":
        return Duration(self.count + 1, self.ns + int(milliseconds * 1e6))


class InferenceStatistics(Struct, frozen=True):
    """Durations of requests and of their stages. Results are not cached: prefixes and rows are."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class ModelStatistics(Struct, frozen=True):
    name: str
    version: str
    last_inference: int  # milliseconds since 1970; 0: none yet
    inference_count: int  # users ranked
    execution_count: int  # steps of the engine
    inference_stats: InferenceStatistics
    batch_stats: list[int] = []


class StatisticsAnswer(Struct, frozen=True):
    model_stats: list[ModelStatistics]


@dataclass(slots=True)
class InferenceTally:
    """Counts ranking calls of any route."""

    num_ranked: int = 0
    last_ms: int = 0
    _durations: dict[str, Duration] = field(default_factory=dict)

    def succeed(self, milliseconds: float, results: Sequence[RankResult]) -> None:
        """Count a call that was answered after these milliseconds."""
        self.num_ranked += len(results)
        self.last_ms = int(time.time() * 1e3)
        self._add("success", milliseconds)
        self._add("queue", max((result.timing.queue_ms for result in results), default=0.0))
        self._add("compute_input", sum(result.timing.plan_ms for result in results))
        self._add("compute_infer", max((result.timing.compute_ms for result in results), default=0.0))

    def fail(self, milliseconds: float) -> None:
        """Count a call that was refused or failed."""
        self._add("fail", milliseconds)

    def of_model(self, name: str, version: str, num_steps: int) -> ModelStatistics:
        stats = InferenceStatistics(**self._durations)
        return ModelStatistics(name, version, self.last_ms, self.num_ranked, num_steps, stats)

    def _add(self, stage: str, milliseconds: float) -> None:
        self._durations[stage] = self._durations.get(stage, Duration()).plus(milliseconds)
