"""What all handlers share: the port, the limits, the metrics, the stored histories."""

from starlette.exceptions import HTTPException
from starlette.requests import Request

from helmrec.serve.bodies import read_body
from helmrec.serve.histories import Histories
from helmrec.serve.metrics import Metrics
from helmrec.serve.port import EnginePort, Health
from helmrec.serve.settings import ServeConfig


class Front:
    """One server in front of one engine."""

    def __init__(self, port: EnginePort, config: ServeConfig, histories: Histories | None = None) -> None:
        self.port = port
        self.config = config
        self.histories = histories  # None: clients send them
        self.metrics = Metrics()

    async def body(self, request: Request) -> bytes:
        return await read_body(request, self.config.max_body_bytes)

    @property
    def is_ready(self) -> bool:
        return self.port.health is Health.READY

    def need_ready(self) -> None:
        if not self.is_ready:
            raise HTTPException(503, f"the engine is {self.port.health.value}", {"retry-after": "1"})
