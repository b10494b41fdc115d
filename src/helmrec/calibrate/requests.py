"""Make requests whose rows are resident or not, as chosen, and users whose histories grow. Knows the tables only."""

import numpy as np

from helmrec.model.config import ModelConfig
from helmrec.types import IntArray, RankRequest


class Rows:
    """Draws row ids: from the hot rows at the start of each table, which stay resident, or from the others."""

    def __init__(self, model: ModelConfig, num_hot: int, seed: int) -> None:
        """`num_hot`: number of rows of all tables that can be resident."""
        self._rng = np.random.default_rng(seed)
        sizes = np.array([table.num_rows for table in model.features], np.int64)
        large = sizes >= sizes.max() // 64  # all rows of a smaller table are hot
        share = max(1, num_hot // max(1, int(large.sum())))
        self._sizes = sizes[:, None]
        self._num_hot = np.where(large, np.minimum(share, -(-sizes // 4)), sizes)[:, None]

    @property
    def num_hot_events(self) -> int:
        """Number of events that read every hot row once."""
        return int(self._num_hot.max())

    def hot(self, begin: int, end: int) -> IntArray:  # (features, events)
        """Return the hot rows `begin` to `end` of each table, in a cycle."""
        return np.arange(begin, end) % self._num_hot

    def draw(self, num: int, fresh: float) -> IntArray:  # (features, num)
        """Draw rows at random; a share `fresh` of them is not hot."""
        shape = (self._sizes.size, num)
        hot = self._rng.integers(0, self._num_hot, shape)
        if fresh == 0:
            return hot
        cold = self._rng.integers(np.minimum(self._num_hot, self._sizes - 1), self._sizes, shape)
        return np.where(self._rng.random(shape) < fresh, cold, hot)


class User:
    """A user with a history, of which each request sends the first events."""

    def __init__(self, model: ModelConfig, user_id: int, events: IntArray) -> None:
        self._model = model
        self._user_id = user_id
        self._events = events  # (features, events)

    def request(self, num_events: int, candidates: IntArray) -> RankRequest:
        model, events = self._model, self._events[:, :num_events]
        return RankRequest(
            user_id=self._user_id,
            items=events[0],
            actions=np.arange(num_events) % model.num_actions,
            timestamps=np.arange(num_events) * 60,
            candidates=candidates[0],
            features={table.name: events[i] for i, table in enumerate(model.features) if i},
            candidate_features={table.name: candidates[i] for i, table in enumerate(model.features) if i},
            context={t.name: self._user_id % t.num_rows for t in model.user_context}
            | {t.name: 0 for t in model.request_context},
        )
