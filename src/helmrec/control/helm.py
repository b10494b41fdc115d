"""HelmRec's own policy: a frozen base, a residual learned online, burst recovery, and a guardrail against constants.

Each layer speaks in turn and what it said is kept, so every decision can be explained. One compiled call a window; the
arrays of all layers live here. Knows windows, not nodes.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.burst import (
    CALM,
    RETURN,
    WAIT,
    B,
    BurstSettings,
    BurstTerms,
    answer,
    begin_burst,
    burst_terms,
    move_cost,
    watch,
)
from helmrec.control.compiled import inner
from helmrec.control.explain import Explanation, cause
from helmrec.control.features import NUM_FEATURES, STEPS, fill_features
from helmrec.control.guardrail import G, GuardSettings, GuardTerms, Paths, begin_guard, guard_terms, judge
from helmrec.control.measured import NUM_ROWS, correct_by_measured
from helmrec.control.network import NUM_HIDDEN, BasePolicy, Layers, as_layers, forward, shipped_base
from helmrec.control.outlook import (
    NUM_SPLITS,
    Floats,
    Knot,
    O,
    Outlook,
    Split,
    Terms,
    at_split,
    begin_outlook,
    count_arrivals,
    look,
)
from helmrec.control.policy import Move, WindowStats
from helmrec.control.readiness import Q, note_burst, wait_alpha
from helmrec.control.residual import R, ResidualSettings, ResidualTerms, correction, learn, residual_terms
from helmrec.control.service_cost import ServiceCost
from helmrec.control.window import Seen, seen


class HelmSettings(Frozen):
    """Which layers take part, and how."""

    has_residual: bool = Field(True, description="correct the base by what is learned online")
    has_burst: bool = Field(True, description="hold, hedge or chase in bursts, and lead back after them")
    has_guardrail: bool = Field(True, description="put adapting aside where the best constant does better")
    min_move: float = Field(0.01, ge=0, le=1, description="change of alpha below which the boundary stays")
    max_step: float = Field(0.10, gt=0, le=1, description="largest change of alpha in one window")
    curves_half_life: float | None = Field(
        4_096, gt=0, description="requests after which one counts half in the miss curves; None: never"
    )
    residual: ResidualSettings = ResidualSettings()
    burst: BurstSettings = BurstSettings()
    guardrail: GuardSettings = GuardSettings()


class T(IntEnum):
    """Places of what was said, in the order of an `Explanation`."""

    TIME_S = 0
    ALPHA = 1
    BASE_STEP = 2
    BASE_ALPHA = 3
    RESIDUAL = 4
    VERDICT = 5
    BURST_ALPHA = 6
    BURST_LEFT_S = 7
    IS_ASIDE = 8
    STATIC_ALPHA = 9
    WANTED = 10
    EXPECTED_MS = 11
    EXPECTED_GAIN_MS = 12
    EXPECTED_COST_MS = 13
    MEASURED_MS = 14
    FRESH_BEST = 15
    LASTING_BEST = 16
    RATE = 17


class Kept(NamedTuple):
    """Views into the memory of all layers; `path` is where the base alone would be, NaN before the first window."""

    told: Floats
    path: Floats
    features: Floats
    hidden: Floats
    scores: Floats
    residual: Floats
    burst: Floats
    guard: Floats
    constants: Floats
    ready: Floats
    measured: Floats
    outlook: Outlook


_SIZES = (
    *(len(T), 1, NUM_FEATURES, 2 * NUM_HIDDEN, len(STEPS), len(R), int(B.SIZE), int(G.SIZE), NUM_SPLITS, len(Q)),
    *(NUM_ROWS * NUM_SPLITS, len(O), len(Split) * NUM_SPLITS),
)
_ENDS = tuple(int(end) for end in np.cumsum(_SIZES))
_NUM_ROWS, _NUM_KNOTS = len(Split), len(Knot)


def new_memory(num_alphas: int) -> Floats:
    return np.zeros(_ENDS[-1] + (_NUM_KNOTS + NUM_SPLITS) * num_alphas)


@inner
def views(memory: Floats, num_alphas: int) -> Kept:
    """One array holds all that is kept: what compiled code is handed costs by the piece."""
    knots = _ENDS[12] + _NUM_KNOTS * num_alphas
    outlook = Outlook(
        memory[_ENDS[10] : _ENDS[11]],
        memory[_ENDS[12] : knots].reshape(_NUM_KNOTS, num_alphas),
        memory[_ENDS[11] : _ENDS[12]].reshape(_NUM_ROWS, NUM_SPLITS),
        memory[knots:].reshape(num_alphas, NUM_SPLITS),
    )
    return Kept(
        memory[: _ENDS[0]],
        memory[_ENDS[0] : _ENDS[1]],
        memory[_ENDS[1] : _ENDS[2]],
        memory[_ENDS[2] : _ENDS[3]].reshape(2, NUM_HIDDEN),
        memory[_ENDS[3] : _ENDS[4]],
        memory[_ENDS[4] : _ENDS[5]],
        memory[_ENDS[5] : _ENDS[6]],
        memory[_ENDS[6] : _ENDS[7]],
        memory[_ENDS[7] : _ENDS[8]],
        memory[_ENDS[8] : _ENDS[9]],
        memory[_ENDS[9] : _ENDS[10]].reshape(NUM_ROWS, NUM_SPLITS),
        outlook,
    )


_NUM_TOLD = len(T)


class _Flags(NamedTuple):
    """Settings of all layers as compiled code takes them; a layer takes part where its number is not zero."""

    has_residual: float
    has_burst: float
    has_guardrail: float
    min_move: float
    max_step: float


class _Fixed(NamedTuple):
    """What does not change from window to window."""

    cost: Terms
    residual: ResidualTerms
    burst: BurstTerms
    guard: GuardTerms
    flags: _Flags


_NUM_FIXED = sum(len(part._fields) for part in (Terms, ResidualTerms, BurstTerms, GuardTerms, _Flags))


@inner
def _fixed_of(a: Floats) -> _Fixed:
    """From one array: handing each number over by itself takes longer than all that is done with them."""
    return _Fixed(
        Terms(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16]
        ),
        ResidualTerms(a[17], a[18], a[19]),
        BurstTerms(a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]),
        GuardTerms(a[32], a[33], a[34]),
        _Flags(a[35], a[36], a[37], a[38], a[39]),
    )


class HelmPolicy:
    """Asked once a window. `explanation` tells of the last one; `None` while too little is known to say anything."""

    def __init__(self, cost: ServiceCost, settings: HelmSettings | None = None, base: BasePolicy | None = None) -> None:
        self.cost = cost
        self.settings = settings = settings or HelmSettings()
        self.base = base or shipped_base()
        fixed = (
            *Terms.of(cost, self.base.crowding, settings.curves_half_life),
            *residual_terms(settings.residual),
            *burst_terms(settings.burst),
            *guard_terms(settings.guardrail),
            *(settings.has_residual, settings.has_burst, settings.has_guardrail, settings.min_move, settings.max_step),
        )
        assert len(fixed) == _NUM_FIXED
        self._fixed: Floats = np.concatenate((np.array(fixed, np.float64), self.base.weights))
        self._learned = np.zeros(len(R))
        self.reset()

    def reset(self) -> None:
        """Forget the traffic, and what was learned from it."""
        self._learned[:] = 0
        self._alphas: Floats | None = None
        self._memory = new_memory(0)
        self._has_told = False

    @property
    def explanation(self) -> Explanation | None:
        return Explanation(*self._memory[:_NUM_TOLD].tolist()) if self._has_told else None

    @property
    def kept(self) -> Kept:
        """What the layers keep, to be looked at."""
        assert self._alphas is not None, "no window was seen"
        return Kept(*views.py_func(self._memory, self._alphas.size))

    @property
    def learned(self) -> Floats:
        """Weights of the residual; may be set, as after a restart."""
        return self._learned.copy() if self._alphas is None else self.kept.residual.copy()

    @learned.setter
    def learned(self, weights: Floats) -> None:
        self._learned[:] = weights
        if self._alphas is not None:
            self.kept.residual[:] = weights

    def decide(self, stats: WindowStats) -> Move | None:
        curves = stats.curves
        if curves is None or not stats.traffic.num_served:
            self._has_told = False
            return None
        if curves.alphas is not self._alphas:
            self._begin(curves.alphas)
        wanted, gain_ms, verdict, is_aside = _decide(
            seen(stats),
            curves.computed_tokens_per_request,
            curves.missed_rows_per_request,
            self._fixed,
            self._memory,
        )
        self._has_told = True
        if wanted == stats.alpha_target:
            return None
        return Move(wanted, cause(is_aside, verdict), gain_ms)

    def _begin(self, alphas: Floats) -> None:
        """Curves over other splits than before: all that was seen of the traffic is void, what was learned is not."""
        if self._alphas is not None and np.array_equal(alphas, self._alphas):
            self._alphas = alphas  # the same splits in another array
            return
        learned = self.learned
        self._memory, self._alphas = new_memory(alphas.size), alphas
        kept = self.kept
        begin_outlook(kept.outlook, alphas)
        begin_burst(kept.burst, self.settings.burst)
        begin_guard(kept.guard)
        kept.path[0] = np.nan
        kept.residual[:] = learned


@inner
def _decide(
    values: tuple[float, ...], computed: Floats, missed: Floats, fixed: Floats, memory: Floats
) -> tuple[float, float, float, float]:
    """The split wanted now, the gain expected, and who had the last word. `values`: of `Seen`, as a plain tuple."""
    window, kept = Seen(*values), views(memory, computed.size)
    cost, residual, burst, guard, flags = _fixed_of(fixed)
    count_arrivals(kept.outlook, window)
    watch(kept.burst, burst, window, kept.outlook.numbers[O.RATE])
    look(kept.outlook, cost, window, computed, missed)
    note_burst(kept.ready, kept.burst, kept.outlook, window)
    correct_by_measured(kept.measured, kept.outlook, window)
    adaptive = _base_and_residual(kept, as_layers(fixed[_NUM_FIXED:]), cost, (residual, guard), flags, window)
    bursting = answer(kept.burst, burst, cost, kept.outlook, window)
    if not flags.has_guardrail:
        kept.guard[G.IS_ASIDE] = 0.0
    is_aside = kept.guard[G.IS_ASIDE] != 0
    calm = kept.guard[G.STATIC_ALPHA] if is_aside else adaptive
    if not flags.has_burst:
        kept.burst[B.VERDICT] = CALM
    elif kept.burst[B.VERDICT] in (CALM, RETURN):
        bursting = _wait(kept, (burst, cost), window, calm, bursting)
    verdict = kept.burst[B.VERDICT]
    wanted = calm if verdict == CALM or (is_aside and verdict != WAIT) else bursting
    wanted = _bounded(wanted, window, kept.outlook.splits, flags)
    if verdict not in (CALM, WAIT):
        kept.path[0] = wanted - kept.told[T.RESIDUAL]  # the base goes on from where the burst left it
    _tell(kept, cost, window, bursting, wanted)
    return wanted, kept.told[T.EXPECTED_GAIN_MS], kept.told[T.VERDICT], kept.told[T.IS_ASIDE]


@inner
def _wait(kept: Kept, terms: tuple[BurstTerms, Terms], window: Seen, adaptive: float, returning: float) -> float:
    """In calm, and on the way back to it: no farther from the next burst than pays."""
    here, is_back = window.alpha_target, kept.burst[B.VERDICT] == CALM
    goal = adaptive if is_back else kept.burst[B.SAVED_ALPHA]
    ready = wait_alpha(kept.ready, terms[0], terms[1], kept.outlook, window, goal)
    if is_back:
        if abs(ready - adaptive) < 0.01:
            return adaptive
        kept.burst[B.VERDICT] = WAIT
        return ready
    return max(returning, min(ready, here)) if returning < here else min(returning, max(ready, here))


@inner
def _bounded(wanted: float, window: Seen, splits: Floats, flags: _Flags) -> float:
    """Within reach, within what the curves know, and not for a trifle."""
    here = window.alpha_target
    low, high = min(splits[0, 0], here), max(min(splits[0, -1], window.alpha_max), here)
    inside = min(max(wanted, low), high)
    inside = min(max(inside, here - flags.max_step), here + flags.max_step)
    return here if abs(inside - here) < flags.min_move else inside


@inner
def _base_and_residual(
    kept: Kept, layers: Layers, cost: Terms, terms: tuple[ResidualTerms, GuardTerms], flags: _Flags, window: Seen
) -> float:
    """One step of the base's own path, the correction on top, and both before the guardrail's court."""
    outlook, path, (residual_t, guard_t) = kept.outlook, kept.path, terms
    offset = correction(kept.residual, residual_t, outlook, window) if flags.has_residual else 0.0
    is_elsewhere = abs(kept.told[T.WANTED] - window.alpha_target) > 0.02 and not kept.guard[G.IS_ASIDE]
    if np.isnan(path[0]) or is_elsewhere:
        path[0] = window.alpha_target - offset  # someone else has moved the boundary, or limits held it
    before = path[0]
    fill_features(kept.features, outlook, kept.burst, window, before)
    forward(layers, kept.features, kept.hidden, kept.scores)
    chosen = int(kept.scores.argmax())
    low, high = outlook.splits[0, 0], min(outlook.splits[0, -1], window.alpha_max)
    path[0] = min(max(before + STEPS[chosen], low), max(low, high))
    kept.told[T.BASE_STEP], kept.told[T.BASE_ALPHA], kept.told[T.RESIDUAL] = STEPS[chosen], path[0], offset
    adaptive = path[0] + offset
    last = kept.guard[G.WANTED]
    moved = 0.0 if np.isnan(last) else adaptive - last
    paid = move_cost(cost, outlook, window.pool_bytes, moved)
    is_waiting = flags.has_burst != 0 and kept.burst[B.VERDICT] == WAIT  # a price that is paid on purpose
    judge(kept.guard, kept.constants, guard_t, outlook, window, Paths(before, before + offset, paid, is_waiting))
    kept.guard[G.WANTED] = adaptive
    if flags.has_residual:
        learn(kept.residual, residual_t, outlook, window, adaptive)
        if flags.has_guardrail and kept.guard[G.RESIDUAL_LOSING] >= guard_t.patience_s:
            kept.residual[:] = 0.0
            kept.guard[G.WITH_RESIDUAL] = kept.guard[G.BASE]
    return adaptive


@inner
def _tell(kept: Kept, cost: Terms, window: Seen, bursting: float, wanted: float) -> None:
    """Write down what each layer said, for the explanation."""
    told, outlook, level = kept.told, kept.outlook, kept.outlook.numbers[O.LEVEL]
    here_ms = at_split(outlook.splits, Split.FRESH, window.alpha_target) * level
    told[T.TIME_S], told[T.ALPHA] = window.end_s, window.alpha_target
    told[T.VERDICT], told[T.BURST_ALPHA], told[T.BURST_LEFT_S] = kept.burst[B.VERDICT], bursting, kept.burst[B.LEFT_S]
    told[T.IS_ASIDE], told[T.STATIC_ALPHA] = kept.guard[G.IS_ASIDE], kept.guard[G.STATIC_ALPHA]
    told[T.WANTED] = wanted
    told[T.EXPECTED_MS] = at_split(outlook.splits, Split.FRESH, wanted) * level
    told[T.EXPECTED_GAIN_MS] = here_ms - told[T.EXPECTED_MS]
    told[T.EXPECTED_COST_MS] = move_cost(cost, outlook, window.pool_bytes, wanted - window.alpha_target)
    told[T.MEASURED_MS] = window.mean_ms
    told[T.FRESH_BEST] = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    told[T.LASTING_BEST] = outlook.splits[Split.ALPHA, int(outlook.numbers[O.LASTING_BEST])]
    told[T.RATE] = outlook.numbers[O.FRESH_RATE]
