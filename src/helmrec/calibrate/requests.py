"""Requests whose rows are resident or not, as asked, and users whose histories grow. Knows the model's tables only."""

from collections.abc import Iterator

import numpy as np

from helmrec.model.config import ModelConfig
from helmrec.types import IntArray, RankRequest


class Rows:
    """Draws row ids: from the first of each table, which are kept resident, or from the others."""

    def __init__(self, model: ModelConfig, num_hot: int, seed: int) -> None:
        """`num_hot`: rows that may be resident over all tables."""
        self._rng = np.random.default_rng(seed)
        sizes = np.array([table.num_rows for table in model.features], np.int64)
        large = sizes >= sizes.max() // 64  # a smaller one is hot as a whole
        share = max(1, num_hot // max(1, int(large.sum())))
        self._sizes = sizes[:, None]
        self._num_hot = np.where(large, np.minimum(share, -(-sizes // 4)), sizes)[:, None]

    @property
    def num_hot_events(self) -> int:
        """Events that read every hot row once."""
        return int(self._num_hot.max())

    def hot(self, begin: int, end: int) -> IntArray:  # (features, events)
        """Hot rows in turn."""
        return np.arange(begin, end) % self._num_hot

    def draw(self, num: int, fresh: float) -> IntArray:  # (features, num)
        """A share `fresh` of the reads goes to rows that are not kept resident."""
        shape = (self._sizes.size, num)
        hot = self._rng.integers(0, self._num_hot, shape)
        if fresh == 0:
            return hot
        cold = self._rng.integers(np.minimum(self._num_hot, self._sizes - 1), self._sizes, shape)
        return np.where(self._rng.random(shape) < fresh, cold, hot)


class User:
    """A history, of which a request shows the first events."""

    def __init__(self, model: ModelConfig, user_id: int, events: IntArray) -> None:
        self._model = model
        self._user_id = user_id
        self._events = events  # (features, events)

    @property
    def num_events(self) -> int:
        return self._events.shape[1]

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


def new_users(model: ModelConfig) -> Iterator[int]:
    """Ids nobody has used."""
    user_id = 1 << 32
    while True:
        yield user_id
        user_id += 1
