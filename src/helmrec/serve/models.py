"""`/v1/admin/model`: swap the served model for another one in the operator's folder of models."""

import asyncio
import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helmrec.model.folder import read_manifest
from helmrec.serve.front import Front
from helmrec.serve.port import SwapsModels
from helmrec.serve.routes import Endpoint, json_answer

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"  # a folder directly below `models_path`


class ModelBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The model to serve from now on."""

    name: Annotated[str, Meta(pattern=f"^{_NAME}$", description="of a folder in the server's models_path")]


class ModelAnswer(Struct, frozen=True):
    name: str
    model_version: Annotated[
        str, Meta(description="fingerprint of shape and weights; as `helmrec model info` shows it")
    ]


class ModelRoutes:
    """Handler of model swaps."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._body = msgspec.json.Decoder(ModelBody)
        self._is_busy = False

    async def swap(self, request: Request) -> Response:
        asked = await self._front.admin_body(request, self._body)
        port, models = self._front.port, self._front.config.models_path
        if models is None or not isinstance(port, SwapsModels):
            raise HTTPException(403, "models cannot be swapped: the server was given no models_path")
        folder = Path(models) / asked.name
        if not re.fullmatch(_NAME, asked.name) or not await asyncio.to_thread(folder.is_dir):
            raise HTTPException(404, f"there is no model {asked.name!r} in the server's models_path")
        if self._is_busy:
            raise HTTPException(409, "another model swap is running")
        self._is_busy = True
        try:
            manifest = await asyncio.to_thread(read_manifest, folder)
            if self._front.histories is not None:
                await self._front.histories.check_swap(manifest.model, port.model)
            await port.swap(str(folder))
        finally:
            self._is_busy = False
        return json_answer(ModelAnswer(asked.name, f"{manifest.version:016x}"))

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST", "/v1/admin/model", "Serve another model, without a pause", self.swap, ModelBody, ModelAnswer,
                statuses=(400, 401, 403, 404, 409, 413, 415, 503), is_admin=True,
            )
        ]  # fmt: skip
