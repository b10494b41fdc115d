"""The dashboard at `/`, and the data it requests once a second."""

from importlib import resources
from typing import Annotated

from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from helmrec.engine.engine import EngineStats
from helmrec.errors import RequestError
from helmrec.serve.control import ControlView
from helmrec.serve.front import Front
from helmrec.serve.routes import Endpoint, Handler, json_answer
from helmrec.serve.samples import PageMap, Recent, Sample

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    ),
    "cache-control": "no-cache",
}


class LiveAnswer(Struct, frozen=True):
    """Current state of the server, and the samples since the last one that the client has."""

    model: str
    status: str
    slo_ms: float
    samples: Annotated[list[Sample], Meta(description="oldest first")]
    recent: Recent
    stats: EngineStats | None = None
    pages: PageMap | None = None
    control: ControlView | None = None


class LiveRoutes:
    """Handler of the dashboard's data."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def live(self, request: Request) -> Response:
        front, after = self._front, _after(request)
        answer = LiveAnswer(
            model=front.port.model.name,
            status=front.port.health.value,
            slo_ms=front.config.slo_ms,
            samples=front.samples.after(after),
            recent=front.samples.recent(),
        )
        if not front.is_ready:
            return json_answer(answer)
        view = await front.port.look()
        pages = PageMap.of(view.page_owners)
        return json_answer(structs.replace(answer, stats=view.stats, pages=pages, control=view.control))

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "GET", "/v1/live", "What the dashboard shows", self.live, gives=LiveAnswer, statuses=(400, 503),
                query={"after": {"type": "integer", "minimum": 0, "description": "number of the last sample seen"}},
            )
        ]  # fmt: skip


def _after(request: Request) -> int:
    text = request.query_params.get("after", "0")
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    raise RequestError("after", text[:100], "the number of a sample is needed")


def dashboard() -> Handler:
    """Return the handler of the page. The page is read once, and loads nothing from other servers."""
    page = (resources.files("helmrec.serve") / "dashboard.html").read_bytes()

    async def show(_: Request) -> Response:
        return Response(page, headers=_HEADERS, media_type="text/html; charset=utf-8")

    return show
