"""The features of the base policy, window by window, seen from any alpha: what `HelmPolicy` sees before it answers."""

import numpy as np

from helmrec.control.burst import BurstSettings, begin_burst, burst_terms, watch
from helmrec.control.features import NUM_FEATURES, fill_features
from helmrec.control.helm import Kept, new_memory, views
from helmrec.control.outlook import Crowding, Floats, O, Terms, begin_outlook, count_arrivals, look
from helmrec.control.policy import WindowStats
from helmrec.control.service_cost import ServiceCost
from helmrec.control.window import Seen, seen


class Observer:
    """Windows go in in order; only those that have miss curves and requests can be seen."""

    def __init__(self, cost: ServiceCost, crowding: Crowding, half_life_requests: float | None = 4_096) -> None:
        self._terms = Terms.of(cost, crowding, half_life_requests)
        self._burst = BurstSettings()
        self._kept: Kept | None = None
        self._window: Seen | None = None

    def observe(self, stats: WindowStats) -> bool:
        """Take a window in; False if there is nothing to be seen in it."""
        curves = stats.curves
        if curves is None or not stats.traffic.num_served:
            return False
        if self._kept is None:
            self._kept = views.py_func(new_memory(curves.alphas.size), curves.alphas.size)
            begin_outlook(self._kept.outlook, curves.alphas)
            begin_burst(self._kept.burst, self._burst)
        kept, self._window = self._kept, Seen(*seen(stats))
        numbers, terms = kept.outlook.numbers, burst_terms(self._burst)
        count_arrivals(kept.outlook, self._window)
        watch(kept.burst, terms, self._window, numbers[O.RATE])
        look(
            kept.outlook, self._terms, self._window, curves.computed_tokens_per_request, curves.missed_rows_per_request
        )
        return True

    def features(self, alpha: float) -> Floats:
        """Of the last window, for a base whose path is at `alpha`."""
        assert self._kept is not None and self._window is not None, "no window was seen"
        out = np.zeros(NUM_FEATURES)
        fill_features(out, self._kept.outlook, self._kept.burst, self._window, alpha)
        return out
