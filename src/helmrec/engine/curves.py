"""Miss curves fed from the requests an engine serves: what each would have found at other splits of the pool."""

from helmrec.engine.intake import Prepared
from helmrec.memory.miss_curves import JointCurves, JointMissCurves, MissCurveConfig, Whole

_ENOUGH = 32  # requests before curves say anything
_MOST_USERS = 1 << 16  # whose window is remembered


class CurveFeed:
    """Hands served requests, in order, to the miss curves. A history whose window moved is a new one."""

    def __init__(self, config: MissCurveConfig, num_features: int) -> None:
        self._curves = JointMissCurves(config)
        self._num_features = num_features
        self._window: dict[int, int] = {}  # start of each user's, at the last visit

    def observe(self, request: Prepared) -> None:
        history, user = request.history, request.history.user_id
        is_same = self._window.pop(user, request.window_start) == request.window_start
        self._window[user] = request.window_start  # last in line
        if len(self._window) > _MOST_USERS:
            del self._window[next(iter(self._window))]
        self._curves.sample(
            Whole(
                user_id=user,
                num_tokens=history.num_tokens,
                context_rows=history.context_rows,
                event_rows=request.columns[: self._num_features],
                request_rows=request.request_rows,
                candidate_rows=request.candidate_rows,
                unchanged_tokens=None if is_same else 0,
            )
        )

    def curves(self) -> JointCurves | None:
        """None while too few requests were seen."""
        curves = self._curves.curves()
        return curves if curves.num_requests >= _ENOUGH else None
