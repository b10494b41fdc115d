"""Miss curves fed from the requests an engine serves: what each would have found at other splits of the pool.

Looking through the rows of a long history takes as long on the host as a good part of its step, so a thread of its own
does it, without the interpreter's lock, while the engine goes on.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from helmrec.engine.intake import Prepared
from helmrec.memory.miss_curves import JointCurves, JointMissCurves, MissCurveConfig, Whole

_ENOUGH = 32  # requests before curves say anything
_MOST_USERS = 1 << 16  # whose window is remembered
_MOST_WAITING = 512  # requests; who comes while so many wait is not looked at


class CurveFeed:
    """Hands served requests, in order, to the miss curves. A history whose window moved is a new one.

    One caller's: `observe` returns at once, `curves` tells of all that was observed before. Either raises what went
    wrong in the thread since the last call, once; the curves have started anew by then.
    """

    def __init__(self, config: MissCurveConfig, num_features: int) -> None:
        self._config = config
        self._curves = JointMissCurves(config)
        self._num_features = num_features
        self._window: dict[int, int] = {}  # start of each user's, at the last visit
        self._thread = ThreadPoolExecutor(1, "helmrec-curves")
        self._last: Future[None] | None = None
        self._failure: Exception | None = None  # of the thread, not raised yet
        self._num_asked = self._num_done = 0
        self.num_skipped = 0  # requests that were not looked at

    def observe(self, requests: Sequence[Prepared]) -> None:
        """Those of one step, handed over together."""
        if self._num_asked - self._num_done >= _MOST_WAITING:
            self.num_skipped += len(requests)
            return
        earlier = self._take_failure()
        self._num_asked += len(requests)
        self._last = self._thread.submit(self._look_at_all, requests)
        if earlier is not None:
            raise earlier

    def _look_at_all(self, requests: Sequence[Prepared]) -> None:
        try:
            for request in requests:
                self._look_at(request)
        except Exception as error:  # half a request may be in the curves: they start anew
            self._failure = error
            self._curves = JointMissCurves(self._config)
            self._window.clear()
        finally:
            self._num_done += len(requests)  # by this thread alone

    def _take_failure(self) -> Exception | None:
        failure, self._failure = self._failure, None
        return failure

    def _look_at(self, request: Prepared) -> None:
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
        if self._last is not None:
            self._last.result()
        failure = self._take_failure()
        if failure is not None:
            raise failure
        curves = self._curves.curves()
        return curves if curves.num_requests >= _ENOUGH else None

    def close(self) -> None:
        """Look at nothing more; curves stay what they are."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._last = None
