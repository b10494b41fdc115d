"""Routes as values, from which the application and its OpenAPI document are both made."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from helmrec.user_ids import MAX_NUMBER, MAX_USER_BYTES

Handler = Callable[[Request], Awaitable[Response]]
_REF = "#/components/schemas/{name}"
MODEL_VERSION = "1"  # of the one model a server has, in the paths of the Open Inference Protocol
_BODY_STATUSES = (408, 413, 415, 503)  # that reading a body may end with
_USER_ID = {
    "description": 'digits are a number; "7" in quotes is the string 7; anything else is the string itself',
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER},
        {"type": "string", "minLength": 1, "maxLength": MAX_USER_BYTES},
    ],
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method, with the types of its body and its answer."""

    method: str
    path: str
    summary: str
    handler: Handler
    takes: Any = None
    gives: Any = None
    gives_media_type: str = "application/json"
    takes_media_types: tuple[str, ...] = ("application/json",)
    statuses: tuple[int, ...] = ()  # of errors, in addition to 500 and those of reading a body
    is_admin: bool = False
    needs_body: bool = True  # where it takes one
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # optional parameters and their schemas


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def openapi(endpoints: Sequence[Endpoint], problem: type, version: str, model_name: str) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of the endpoints. Schemas come from the types of bodies and answers."""
    in_paths: dict[str, dict[str, Any]] = {"user_id": _USER_ID, "name": {"type": "string", "enum": [model_name]}}
    in_paths["version"] = {"type": "string", "enum": [MODEL_VERSION]}
    types = [kind for each in endpoints for kind in (each.takes, each.gives) if kind is not None]
    distinct = list(dict.fromkeys([*types, problem]))
    schemas, components = msgspec.json.schema_components(distinct, ref_template=_REF)
    by_type = dict(zip(distinct, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, by_type, by_type[problem])
        paths[each.path][each.method.lower()]["parameters"] = _parameters(each, in_paths)
    return {
        "openapi": "3.1.0",
        "info": {"title": "HelmRec", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"admin": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, by_type: dict[Any, Any], problem: dict[str, Any]) -> dict[str, Any]:
    has_content = endpoint.gives is not None or endpoint.gives_media_type != "application/json"
    content = {endpoint.gives_media_type: {"schema": by_type.get(endpoint.gives, {})}} if has_content else {}
    bad = {"application/problem+json": {"schema": problem}}
    statuses = sorted({*endpoint.statuses, *(() if endpoint.takes is None else _BODY_STATUSES), 500})
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "done", "content": content},
            **{str(status): {"description": "a problem", "content": bad} for status in statuses},
        },
    }
    if endpoint.takes is not None:
        body = {kind: {"schema": by_type[endpoint.takes]} for kind in endpoint.takes_media_types}
        operation["requestBody"] = {"required": endpoint.needs_body, "content": body}
    if endpoint.is_admin:
        operation["security"] = [{"admin": []}]
    return operation


def _parameters(endpoint: Endpoint, in_paths: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    of_path = [{"name": name, "in": "path", "required": True, "schema": in_paths[name]} for name in names]
    return of_path + [{"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()]
