"""Reference pages as Markdown, generated from the code: settings from their classes, routes from the OpenAPI document.

Does not know Sphinx; `conf.py` puts the text on pages.
"""

import asyncio
import json
import types
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from helmrec.cluster.config import ClusterConfig, Scaling
from helmrec.config import EngineConfig, Frozen, RelayConfig
from helmrec.engine.engine import Engine
from helmrec.history.config import HistoryConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.router.settings import RouterSettings, StateSettings
from helmrec.serve.app import make_app
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig

GROUPS: dict[str, type[Frozen]] = {
    each.__name__: each
    for each in (
        EngineConfig,
        RelayConfig,
        ServeConfig,
        HistoryConfig,
        ClusterConfig,
        Scaling,
        RouterSettings,
        StateSettings,
    )
}
PREFIXES = {"HistoryConfig": "history_"}  # of the setting's name on a server
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", SecretStr: "text, secret"}
_UNITS = {"ms": "ms", "us": "µs", "s": "s", "bytes": "bytes", "tokens": "tokens", "events": "events", "bits": "bits"}
_UNITS |= {"cpus": "cores", "gpus": "GPUs", "requests": "requests", "threads": "threads"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def settings_table(name: str) -> str:
    """Return a Markdown table of the settings of a class: name, type, default, unit and meaning."""
    prefix = PREFIXES.get(name, "")
    rows = [_setting(prefix + field, info, name) for field, info in GROUPS[name].model_fields.items()]
    return _table(("setting", "type", "default", "unit", "meaning"), rows)


def _setting(name: str, info: FieldInfo, group: str) -> tuple[str, ...]:
    kind = _type(info.annotation)
    bounds = _bounds(info.metadata)
    named = f"[`{name}`]{{#{group.lower()}-{name.replace('_', '-')}}}"
    return named, kind + (f", {bounds}" if bounds else ""), _default(info), unit(name), info.description or ""


def _type(annotation: Any) -> str:
    """Say in words what values a setting takes."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = _bounds([part for each in metadata for part in getattr(each, "metadata", [each])])
        return _type(inner) + (f", {bounds}" if bounds else "")
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(each) for each in get_args(annotation) if each is not type(None))
    if annotation is ByteSize or origin is dict:
        return "size" if annotation is ByteSize else "group by table"
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return f"[group](#{annotation.__name__.lower()})"
    return _TYPES[annotation]


def _bounds(metadata: list[Any]) -> str:
    found = [(words, getattr(each, short, None)) for each in metadata for short, words in _BOUNDS.items()]
    lengths = [f"{each.min_length} characters or more" for each in metadata if getattr(each, "min_length", 0) > 1]
    return ", ".join([*(f"{words} {_number(value)}" for words, value in found if value is not None), *lengths])


def _default(info: FieldInfo) -> str:
    value = info.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, Frozen):
        changed = [f"`{name}` {each}" for name, each in value if each != getattr(type(value)(), name)]
        return ", ".join(["its defaults", *changed])
    if isinstance(value, ByteSize):
        return _size(value)
    return f"`{value}`" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else _number(value)


def _size(num_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return str(num_bytes)


def _number(value: float) -> str:
    if isinstance(value, int) and value and value % (1 << 20) == 0:
        return _size(value)
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:g}"


def unit(name: str) -> str:
    """Return the unit that a setting's name ends with, such as "bytes per step"; empty if it has none."""
    of, _, per = name.partition("_per_")
    word = _UNITS.get(of.rpartition("_")[2], "")
    return f"{word} per {per}" if word and per else word


def routes_table() -> str:
    """Return a Markdown table of all routes of a server: method, path, and what the call does."""
    rows = [
        (f"`{method.upper()} {path}`", operation["summary"] + (" (admin token)" if "security" in operation else ""))
        for path, operations in openapi_document()["paths"].items()
        for method, operation in operations.items()
    ]
    return _table(("call", "what it does"), rows)


def openapi_document() -> dict[str, Any]:
    """Return `/openapi.json` of a server with the demo model."""
    with TemporaryDirectory() as folder:
        init_model(Path(folder) / "demo", profile("demo", 500), 0)
        engine = Engine.from_model(Path(folder) / "demo", EngineConfig(pool_bytes=ByteSize(8 << 20)))
        app = make_app(InProcessPort(engine), ServeConfig())
        (show,) = (route for route in app.routes if getattr(route, "path", "") == "/openapi.json")
        answer = asyncio.run(show.endpoint(None))  # type: ignore[attr-defined]
        engine.close()
    document: dict[str, Any] = json.loads(answer.body)
    return document


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
