"""Miss curves fed from the requests an engine serves: what each would have found at other splits of the pool."""

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared
from helmrec.memory.miss_curves import JointCurves, JointMissCurves, MissCurveConfig, Observed
from helmrec.memory.sampling import is_sampled, sampling_threshold
from helmrec.types import IntArray

_ENOUGH = 32  # requests before curves say anything
_MOST_USERS = 1 << 16  # whose window is remembered


class CurveFeed:
    """Hands served requests, in order, to the miss curves. A history whose window moved is a new one."""

    def __init__(self, config: MissCurveConfig, num_features: int) -> None:
        self._curves = JointMissCurves(config)
        self._threshold = sampling_threshold(config.sampling_rate)
        self._num_features = num_features
        self._window: dict[int, int] = {}  # start of each user's, at the last visit

    def observe(self, request: Prepared) -> None:
        history, num_features = request.history, self._num_features
        user, num_context = history.user_id, history.context_rows.size
        is_same = self._window.pop(user, request.window_start) == request.window_start
        self._window[user] = request.window_start  # last in line
        if len(self._window) > _MOST_USERS:
            del self._window[next(iter(self._window))]
        first = min(history.num_tokens, self._curves.needed_from(user)) if is_same else 0
        context = history.context_rows[first:]
        events = request.columns[:num_features, max(0, first - num_context) :]
        self._curves.observe(
            Observed(
                user_id=user,
                num_tokens=history.num_tokens,
                num_history_rows=num_context + request.num_events * num_features,
                num_candidate_rows=request.candidate_rows.size + request.request_rows.size,
                candidate_rows=_sample(request.request_rows, request.candidate_rows, self._threshold),
                history_rows=_sample(context, events, self._threshold),
                first_token=first,
                unchanged_tokens=None if is_same else 0,
            )
        )

    def curves(self) -> JointCurves | None:
        """None while too few requests were seen."""
        curves = self._curves.curves()
        return curves if curves.num_requests >= _ENOUGH else None


@numba.njit(cache=True)
def _sample(single: IntArray, columns: IntArray, threshold: np.uint64) -> NDArray[np.int64]:
    """Those in the sample: of the single rows, then of (features, tokens), token by token."""
    kept = np.empty(single.size + columns.size, np.int64)
    num = 0
    for row in single:
        if is_sampled(row, threshold):
            kept[num] = row
            num += 1
    for token in range(columns.shape[1]):
        for feature in range(columns.shape[0]):
            if is_sampled(columns[feature, token], threshold):
                kept[num] = columns[feature, token]
                num += 1
    return kept[:num].copy()
