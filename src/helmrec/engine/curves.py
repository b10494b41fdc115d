"""Miss curves fed with the requests that an engine serves.

Sampling the rows of a long history takes about as long on the host as a good part of its step. So a separate thread
does it, without the interpreter's lock, while the engine continues.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from helmrec.engine.intake import Prepared
from helmrec.memory.miss_curves import CurveRequest, JointCurves, JointMissCurves, MissCurveConfig
from helmrec.types import UserId

_MOST_USERS = 1 << 16  # users whose window is remembered
_MOST_WAITING = 512  # requests; further requests are skipped while so many wait
_PUBLISH_EVERY = 64  # requests: to estimate takes about half as long as to observe one


class CurveFeed:
    """Passes served requests to the miss curves, in order. A history whose window moved counts as a new one.

    For one calling thread. `observe` and `newest` return at once; `curves` waits for all requests observed before. Each
    raises an error of the thread since the last call, once; the curves have been reset by then.
    """

    def __init__(self, config: MissCurveConfig, num_features: int) -> None:
        self._config = config
        self._curves = JointMissCurves(config)
        self._num_features = num_features
        self._window: dict[UserId, int] = {}  # start of each user's window at its last visit
        self._thread = ThreadPoolExecutor(1, "helmrec-curves")
        self._last: Future[None] | None = None
        self._published: JointCurves | None = None  # estimates of the thread, at most `_PUBLISH_EVERY` requests old
        self._num_unpublished = 0
        self._failure: Exception | None = None  # error of the thread that was not raised yet
        self._num_asked = self._num_done = 0
        self.num_skipped = 0  # requests not passed to the curves

    def observe(self, requests: Sequence[Prepared]) -> None:
        """Pass on the requests of one step."""
        if self._num_asked - self._num_done >= _MOST_WAITING:
            self.num_skipped += len(requests)
            return
        earlier = self._take_failure()
        self._num_asked += len(requests)
        self._last = self._thread.submit(self._observe_all, requests)
        if earlier is not None:
            raise earlier

    def _observe_all(self, requests: Sequence[Prepared]) -> None:
        try:
            for request in requests:
                self._observe(request)
            self._num_unpublished += len(requests)
            if self._num_unpublished >= _PUBLISH_EVERY:
                self._published, self._num_unpublished = self._curves.curves_if_enough(), 0
        except Exception as error:  # the curves may hold half a request: reset them
            self._failure = error
            self._curves = JointMissCurves(self._config)
            self._published, self._num_unpublished = None, 0
            self._window.clear()
        finally:
            self._num_done += len(requests)  # written by this thread only

    def _take_failure(self) -> Exception | None:
        failure, self._failure = self._failure, None
        return failure

    def _observe(self, request: Prepared) -> None:
        history, user = request.history, request.history.user_id
        is_same = self._window.pop(user, request.window_start) == request.window_start
        self._window[user] = request.window_start  # most recent
        if len(self._window) > _MOST_USERS:
            del self._window[next(iter(self._window))]
        self._curves.observe(
            CurveRequest(
                user_id=user,
                num_tokens=history.num_tokens,
                context_rows=history.context_rows,
                event_rows=request.columns[: self._num_features],
                request_rows=request.request_rows,
                candidate_rows=request.candidate_rows,
                unchanged_tokens=None if is_same else 0,
            )
        )

    def newest(self) -> JointCurves | None:
        """The estimates; None while too few requests were observed.

        While requests wait for the thread, these are its last published estimates: a step loop that waited for all of
        them would stand still for hundreds of milliseconds.
        """
        if self._num_done == self._num_asked:
            return self.curves()
        failure = self._take_failure()
        if failure is not None:
            raise failure
        return self._published

    def curves(self) -> JointCurves | None:
        """The estimates of all requests observed before; None while there are too few."""
        if self._last is not None:
            self._last.result()
        failure = self._take_failure()
        if failure is not None:
            raise failure
        return self._curves.curves_if_enough()

    def close(self) -> None:
        """Stop the thread; observe nothing more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._last = None
