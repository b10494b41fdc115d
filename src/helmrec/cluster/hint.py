"""A short description of a request for the router, sent beside the packed request so that it need not be unpacked.

Used for routing only: what cannot be described is left out, and the request is still routed.
"""

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from helmrec.model.config import ModelConfig
from helmrec.router.nodes import RouteRequest
from helmrec.router.sketch import RowSample, no_sample, sample_rows
from helmrec.types import Ids, IntArray, PrefillRequest, RankRequest
from helmrec.user_ids import routing_number


class Hint(Struct, frozen=True, array_like=True):
    """Description of a request, and the replica that should be avoided, if any."""

    user: int
    num_tokens: int
    num_candidates: int
    rows_per_token: int
    threshold: int
    hashes: bytes
    position: bytes
    avoid: str = ""

    def route_request(self) -> RouteRequest:
        sample = RowSample(
            np.frombuffer(self.hashes, np.uint64), np.frombuffer(self.position, np.int64), np.uint64(self.threshold)
        )
        return RouteRequest(self.user, self.num_tokens, self.num_candidates, self.rows_per_token, sample)


_DECODER = msgspec.msgpack.Decoder(Hint)


def unpack_hint(value: object) -> Hint | None:
    """Unpack a hint; None for anything else."""
    if not isinstance(value, bytes):
        return None
    try:
        hint = _DECODER.decode(value)
    except msgspec.DecodeError:
        return None
    is_sampled_right = len(hint.hashes) == len(hint.position) and len(hint.hashes) % 8 == 0
    return hint if is_sampled_right and 0 <= hint.threshold < 1 << 64 else None


class Describer:
    """Makes hints for requests to one model."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._extra = [table.name for table in model.features[1:]]
        self._offsets = np.array([model.offsets[table.name] for table in model.features], np.int64)
        self._num_context = len(model.user_context)

    def hint(self, request: RankRequest | PrefillRequest, avoid: str = "") -> Hint:
        """Describe a request. Rows are sampled from the events in the model's window; wrong requests get no sample."""
        try:
            sample = self._sample(request)
        except (ValueError, TypeError, KeyError, OverflowError):
            sample = no_sample()
        return Hint(
            user=_number(request.user_id),
            num_tokens=self._num_context + min(len(request.items), self._model.window),
            num_candidates=len(request.candidates) if isinstance(request, RankRequest) else 0,
            rows_per_token=len(self._model.features),
            threshold=int(sample.threshold),
            hashes=sample.hashes.tobytes(),
            position=sample.position.tobytes(),
            avoid=avoid,
        )

    def _sample(self, request: RankRequest | PrefillRequest) -> RowSample:
        begin = max(0, len(request.items) - self._model.window)
        history = self._rows([request.items, *(request.features[name] for name in self._extra)], begin)
        candidates = history[:0]
        if isinstance(request, RankRequest):
            of_each = [request.candidates, *(request.candidate_features[name] for name in self._extra)]
            candidates = self._rows(of_each, 0)
        sample = sample_rows(history, candidates)
        return RowSample(sample.hashes, sample.position + self._num_context, sample.threshold)

    def _rows(self, lines: list[Ids], begin: int) -> IntArray:  # (tokens, features)
        columns: list[NDArray[np.int64]] = [np.asarray(line[begin:], np.int64) for line in lines]
        for i, table in enumerate(self._model.features):
            if table.unknown_row is not None:
                columns[i] = np.where(columns[i] < table.num_rows, columns[i], table.unknown_row)
        return np.stack(columns, axis=1) + self._offsets


def _number(user_id: object) -> int:
    """Return a number for any user id, a wrong one too: the replica refuses it."""
    if isinstance(user_id, np.integer):
        user_id = int(user_id)
    return routing_number(user_id) if isinstance(user_id, int | str) else 0
