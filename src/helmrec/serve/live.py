"""The dashboard at `/`, and the data it requests once a second."""

from collections.abc import Mapping
from importlib import resources
from typing import Annotated

from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from helmrec import __version__
from helmrec.engine.engine import EngineStats
from helmrec.errors import RequestError
from helmrec.serve.control import ControlView
from helmrec.serve.front import Front
from helmrec.serve.port import HasReplicas
from helmrec.serve.routes import Endpoint, Handler, json_answer
from helmrec.serve.samples import PageMap, Recent, Sample

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    ),
    "cache-control": "no-cache",
}


class ReplicaState(Struct, frozen=True):
    """State of one engine of a cluster."""

    alpha: float
    queue_length: int
    served: int
    refused: int
    row_hit_rate: float
    token_reuse_rate: float


class LiveAnswer(Struct, frozen=True):
    """Current state of the server, and the samples since the last one that the client has."""

    model: str
    status: str
    slo_ms: float
    samples: Annotated[list[Sample], Meta(description="oldest first")]
    recent: Recent
    version: Annotated[str, Meta(description="of HelmRec")]
    errors: Annotated[dict[str, int], Meta(description="since the start, by cause")]
    num_restarts: Annotated[int, Meta(description="of the engine's process")]
    device: str | None = None
    replicas: dict[str, ReplicaState] | None = None  # of a cluster, by name
    stats: EngineStats | None = None
    pages: PageMap | None = None
    control: ControlView | None = None


class LiveRoutes:
    """Handler of the dashboard's data."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def live(self, request: Request) -> Response:
        front, after, most = self._front, _number(request, "after", "0"), _number(request, "most", "600")
        answer = LiveAnswer(
            model=front.port.model.name,
            status=front.port.health.value,
            slo_ms=front.config.slo_ms,
            samples=front.samples.after(after, most),
            recent=front.samples.recent(),
            version=__version__,
            errors=dict(front.samples.errors),
            num_restarts=front.port.num_restarts,
        )
        if not front.is_ready:
            return json_answer(answer)
        view = await front.port.look()
        pages = PageMap.of(view.page_owners)
        replicas = _replicas(front.port.replica_stats) if isinstance(front.port, HasReplicas) else None
        now = {"stats": view.stats, "pages": pages, "control": view.control, "device": view.device}
        return json_answer(structs.replace(answer, **now, replicas=replicas))

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "GET", "/v1/live", "What the dashboard shows", self.live, gives=LiveAnswer, statuses=(400, 503),
                query={
                    "after": {"type": "integer", "minimum": 0, "description": "number of the last sample seen"},
                    "most": {"type": "integer", "minimum": 0, "description": "most samples; 600 if not given"},
                },
            )
        ]  # fmt: skip


def _replicas(stats: Mapping[str, EngineStats]) -> dict[str, ReplicaState]:
    return {name: _replica(of) for name, of in stats.items()}


def _replica(stats: EngineStats) -> ReplicaState:
    pool = stats.pool
    rates = (pool.row_hit_rate, pool.token_reuse_rate)
    return ReplicaState(pool.alpha, stats.queue_length, stats.served, stats.refused, *rates)


def _number(request: Request, name: str, default: str) -> int:
    text = request.query_params.get(name, default)
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    raise RequestError(name, text[:100], "a number of samples is needed, from 0")


def dashboard() -> Handler:
    """Return the handler of the page. The page is read once, and loads nothing from other servers."""
    page = (resources.files("helmrec.serve") / "dashboard.html").read_bytes()

    async def show(_: Request) -> Response:
        return Response(page, headers=_HEADERS, media_type="text/html; charset=utf-8")

    return show
