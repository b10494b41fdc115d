"""Requests as JSON lines, and held-out requests with labels from JSON lines or a trace."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np

from helmrec.errors import ConfigError, RequestError
from helmrec.model.config import ModelConfig
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace_file import read_trace
from helmrec.types import LabelledRequest, RankRequest

_LINES = {".jsonl", ".json", ".ndjson"}


def request_of(values: object) -> RankRequest:
    """Make a request of a JSON object; RequestError names what is missing or unknown."""
    known = {field.name: field for field in fields(RankRequest)}
    if not isinstance(values, dict):
        raise RequestError("line", values, "a JSON object is needed")
    if unknown := values.keys() - known.keys():
        raise RequestError("line", sorted(unknown)[0], f"fields are {', '.join(sorted(known))}")
    needed = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    if missing := needed - values.keys():
        raise RequestError("line", sorted(values), f"{', '.join(sorted(missing))} missing")
    return RankRequest(**values)


def read_held_out(path: Path, model: ModelConfig) -> Iterator[LabelledRequest]:
    """Read held-out requests: JSON lines, with labels of the candidates where they are known, or a trace."""
    if not path.is_file():
        raise ConfigError(f"--requests: no such file, got {str(path)!r}")
    if path.suffix not in _LINES:
        return (LabelledRequest(request) for request in rank_requests(read_trace(path), model))
    return _read_lines(path)


def _read_lines(path: Path) -> Iterator[LabelledRequest]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield _labelled(line)
            except RequestError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None


def _labelled(line: bytes) -> LabelledRequest:
    values = json.loads(line)
    labels = values.pop("labels", None) if isinstance(values, dict) else None
    request = request_of(values)
    if labels is None:
        return LabelledRequest(request)
    given = np.asarray(labels, np.float64)
    if given.shape != (len(request.candidates),) or not np.isfinite(given).all():
        raise RequestError("labels", labels, "one number per candidate is needed")
    return LabelledRequest(request, given)
