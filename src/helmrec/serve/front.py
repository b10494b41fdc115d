"""State that all handlers share: the port, the settings, the metrics, the samples, the stored histories."""

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from helmrec.collector import PROCESS
from helmrec.engine.engine import EngineStats
from helmrec.errors import HelmRecError
from helmrec.failures import FailureLog
from helmrec.serve.bodies import Bodies, decode
from helmrec.serve.calls import CallLog, scored_at
from helmrec.serve.histories import StoredHistories
from helmrec.serve.metrics import Metrics
from helmrec.serve.port import EnginePort, Health
from helmrec.serve.samples import Samples
from helmrec.serve.settings import ServeConfig
from helmrec.serve.statistics import InferenceTally
from helmrec.types import RankRequest, RankResult

log = logging.getLogger("helmrec.serve")
GRPC_RANK = "/inference.GRPCInferenceService/ModelInfer"
RANK_ROUTES = frozenset({"/v1/rank", "/v2/models/{name}/infer", GRPC_RANK})
_SAMPLE_EVERY_S = 1.0
T = TypeVar("T")


class Front:
    """Shared state of the handlers of one server."""

    def __init__(self, port: EnginePort, config: ServeConfig, histories: StoredHistories | None = None) -> None:
        self.port = port
        self.config = config
        self.histories = histories  # None: no histories are stored
        self.metrics = Metrics(config.slo_ms)
        self.samples = Samples(config.slo_ms)
        self.bodies = Bodies(config.max_body_bytes, config.max_bodies_bytes, config.body_timeout_s)
        self.tally = InferenceTally()
        self.calls = CallLog(self.count_request)
        self._failures = FailureLog(log)

    async def admin_body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """Check the token of an admin call, then read and decode its body."""
        token = self.config.admin_token
        if token is None:
            raise HTTPException(403, "admin calls are off: the server was given no admin_token")
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token.get_secret_value()}".encode()):
            raise HTTPException(401, "the admin token is needed", {"www-authenticate": "Bearer"})
        self.need_ready()
        return decode(decoder, await self.bodies.read(request))

    def count_request(self, route: str, status: int, seconds: float, cause: str = "") -> None:
        """Count an answer; `cause` names the error, if it is one."""
        route = route.replace("/versions/{version}", "")  # the same call
        self.metrics.count_request(route, status, seconds)
        if cause:
            self.metrics.count_error(cause)
            self.samples.count_error(cause)
        if route in RANK_ROUTES:
            self.samples.count(status, seconds)

    async def watch(self) -> None:
        """Take a sample every second while the server runs. If the engine does not answer, one sample is missing."""
        while True:
            if self.is_ready:
                try:
                    self.samples.add(time.time(), await self.port.look())
                except HelmRecError:
                    pass  # the engine has ended since, or is too busy
                except Exception as error:
                    self._note_look(error)
            if not self.bodies.held_bytes:
                PROCESS.when_idle()
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def stats(self) -> EngineStats | None:
        """Return the engine's counters; None if it is not running or does not answer."""
        try:
            return await self.port.stats()
        except HelmRecError:
            return None
        except Exception as error:
            self._note_look(error)
            return None

    def _note_look(self, error: Exception) -> None:
        self.metrics.count_look_failure()
        self._failures.note("look at the engine", error)

    async def submit(self, ranks: Sequence[RankRequest], started_s: float) -> list[RankResult]:
        """Rank and count the results. Deadlines run since `started_s`, when the call arrived."""
        try:
            results = await self.port.submit(ranks, spent_ms(started_s))
        except Exception:
            self.tally.fail(spent_ms(started_s))
            raise
        self.tally.succeed(spent_ms(started_s), results)
        if results:
            scored_at.set(results[0].row_position)
        for result in results:
            self.metrics.count_result(result)
        return results

    @property
    def store_problem(self) -> str | None:
        """Why stored histories cannot be used now; None if they can, or if none are stored."""
        return None if self.histories is None else self.histories.problem

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests. Requests that carry their history need nothing else."""
        return self.port.health is Health.READY

    def need_ready(self) -> None:
        """Raise 503 if the engine is not ready."""
        if not self.is_ready:
            reason = f": {self.port.reason}" if self.port.reason else ""
            raise HTTPException(503, f"the engine is {self.port.health.value}{reason}", {"retry-after": "1"})


def started_s(request: Request) -> float:
    """Return when the request arrived, on the clock of `time.perf_counter`."""
    arrived_s: float = request.scope["state"]["started_s"]
    return arrived_s


def spent_ms(started_s: float) -> float:
    """Return the milliseconds since a call arrived."""
    return (time.perf_counter() - started_s) * 1e3
