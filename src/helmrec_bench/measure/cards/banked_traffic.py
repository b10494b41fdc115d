"""Prepared requests whose arrays are shared: a minute of distinct ones of a card's traffic would take 50 GB."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec_bench.measure.cards.traffic import PreparedTraffic
from helmrec_bench.measure.requests import VISITS, Crowd, Visitors

FIRST_NEW_USER = 1 << 41


class BankedTraffic:
    """Requests of a crowd; users who come once have histories of a bank, under a user id of their own."""

    def __init__(
        self,
        visitors: Visitors,
        prepare: Callable[[list[tuple[Any, ...]]], list[Prepared]],
        crowd: Crowd,
        num_bank: int,
        num_visits: int,
    ) -> None:
        """After `num_visits` visits a hot user begins again, with the history of the first one."""
        self._visitors, self._prepare = visitors, prepare
        self._num_hot, self._num_visits = crowd.num_hot, num_visits
        self._bank = prepare([visitors.new() for _ in range(num_bank)])
        self._visits = dict[tuple[int, int], Prepared]()
        self._next_user = itertools.count(FIRST_NEW_USER)

    def take(self, hot_shares: Sequence[float], seed: int) -> list[Prepared]:
        """One request for each share. Hot users are in the midst of their visits from the start."""
        rng = np.random.default_rng(seed)
        visits = rng.integers(self._num_visits, size=self._num_hot)
        asked: list[tuple[int, int] | None] = []
        for share in hot_shares:
            if rng.random() >= share:
                asked.append(None)
                continue
            user = int(rng.integers(self._num_hot))
            visits[user] += 1
            asked.append((user, int(visits[user]) % self._num_visits))
        new = sorted({visit for visit in asked if visit is not None} - self._visits.keys())
        self._visits |= zip(new, self._prepare([self._visitors.hot(*visit) for visit in new]), strict=True)
        return [self._new_user(rng) if visit is None else self._hot(visit, rng) for visit in asked]

    def _new_user(self, rng: np.random.Generator) -> Prepared:
        history, other = (self._bank[int(rng.integers(len(self._bank)))] for _ in range(2))
        named = replace(history.history, user_id=next(self._next_user))
        return replace(history, history=named, candidate_rows=other.candidate_rows)

    def _hot(self, visit: tuple[int, int], rng: np.random.Generator) -> Prepared:
        other = self._bank[int(rng.integers(len(self._bank)))]
        return replace(self._visits[visit], candidate_rows=other.candidate_rows)


def banked_for(engine: Engine, crowd: Crowd, num_bank: int, num_visits: int = VISITS) -> BankedTraffic:
    """Requests that this engine's intake prepares."""
    traffic = PreparedTraffic(EngineProbe(engine), crowd, seed=3)
    return BankedTraffic(traffic.visitors, traffic.prepare, crowd, num_bank, num_visits)
