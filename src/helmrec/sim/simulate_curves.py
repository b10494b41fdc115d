"""Joint miss curves fed from a simulated node: what each request would have found at other splits."""

import numpy as np

from helmrec.memory.miss_curves import JointCurves, JointMissCurves, MissCurveConfig, Observed
from helmrec.sim.node import Node
from helmrec.sim.node_state import Status
from helmrec.sim.rows import candidate_rows, context_rows, history_rows
from helmrec.types import IntArray

_ENOUGH = 32  # requests before curves say anything


class CurveFeed:
    """Hands served requests, in order, to the miss curves. The rows of a trace are a sample already: all are kept."""

    def __init__(self, node: Node) -> None:
        config, setup = node.config, node.setup
        engine = config.engine
        self._node = node
        self._curves = JointMissCurves(
            MissCurveConfig(
                num_pages=config.num_pages,
                page_tokens=setup.rules.page_tokens,
                rows_per_page=setup.rows_per_page,
                batch_pages=setup.batch_pages,
                sampling_rate=setup.rate,
                kv_admission="always" if engine.kv_admission == "always" else "second-visit",
                row_admission=engine.row_admission,
            )
        )
        self._window: dict[int, int] = {}  # of each user's last request
        self._scratch = np.empty(node.requests.reads.max_rows, np.int64)

    def observe(self, requests: IntArray) -> None:
        status = self._node.outcomes.status
        for request in requests[status[requests] == Status.SERVED].tolist():
            self._observe(request)

    def _observe(self, request: int) -> None:
        asked, setup = self._node.requests, self._node.setup
        reads, scratch = asked.reads, self._scratch
        user, window = int(reads.user[request]), int(asked.window[request])
        num_tokens, num_candidates = int(asked.num_tokens[request]), int(reads.num_candidates[request])
        unchanged = None if self._window.get(user, window) == window else 0
        self._window[user] = window
        first = min(num_tokens, self._curves.needed_from(user)) if unchanged is None else 0
        rows = scratch[: candidate_rows(reads, request, scratch)].copy()
        past = [] if first else [scratch[: context_rows(reads, request, scratch)].copy()]
        event = int(asked.anchor[request]) + max(0, first - setup.num_context)
        past.append(scratch[: history_rows(reads, request, event, scratch)].copy())
        self._curves.observe(
            Observed(
                user_id=user,
                num_tokens=num_tokens,
                num_history_rows=setup.num_context + (num_tokens - setup.num_context) * setup.rows_per_event,
                num_candidate_rows=num_candidates * setup.rows_per_event,
                candidate_rows=rows,
                history_rows=np.concatenate(past),
                first_token=first,
                unchanged_tokens=unchanged,
            )
        )

    def curves(self) -> JointCurves | None:
        """None while too few requests were seen."""
        curves = self._curves.curves()
        return curves if curves.num_requests >= _ENOUGH else None
