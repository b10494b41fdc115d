"""What the last windows say each split would cost: joint miss curves through a node's figures, over a grid of splits.

Two views of the same requests. The lasting one is the miss curves as they come, which remember thousands of requests;
the fresh one is their newest seconds, taken out of the difference between two looks. Compiled; knows no policy.
"""

from enum import IntEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.compiled import inner
from helmrec.control.service_cost import ServiceCost
from helmrec.control.window import Seen

Floats = NDArray[np.float64]

NUM_SPLITS = 33
_FRESH_HALF_LIFE_S = 2.0
_LASTING_HALF_LIFE_S = 10.0  # of the arrival rate; the curves bring their own
_CORRECTION_HALF_LIFE_S = 30.0
_MIN_CORRECTION, _MAX_CORRECTION = 0.5, 2.0
_SHADOW_HALF_LIFE_S = 15.0
_TOKENS = 6_700  # of a history a candidate looks at: tells candidates from what they cost, roughly
_TELLING = 1.4  # factor within which measured stages tell of overlap and floors, not of another device
_SETTLED = 0.02  # distance of alpha from its target within which caches are what their shadows stand for


class Crowding(Frozen):
    """How latency grows with load: a lone request's time by (1 + first * pressure + second * pressure^2)^4.

    Pressure is the arrival rate times the length of both stages: their sum where they do not overlap; where they do,
    taken at right angles, which lies between the longer and the sum. Fitted to simulated nodes that overlap them
    (`helmrec.train.crowding`).
    """

    first: float = Field(0.14, ge=0)
    second: float = Field(0.6, ge=0)


class Terms(NamedTuple):
    """A node's figures as compiled code takes them."""

    token_ms: float
    pair_ms: float
    floor_ms: float
    row_ms: float
    host_token_ms: float
    host_floor_ms: float
    step_ms: float
    kv_token_bytes: float
    row_bytes: float
    first: float
    second: float
    other_tokens: float  # of a request beside its history: candidates
    half_life: float  # requests after which one counts half in the curves; 0 if none ever does
    in_flight: float  # requests whose KV must be held at once
    host_bytes: float  # of KV that the host keeps
    reload_ms: float  # of a token taken back from it
    in_turn: float  # 2 where stages do not overlap, else 0: of their product, what counts in the square of both

    @classmethod
    def of(cls, cost: ServiceCost, crowding: Crowding, half_life_requests: float | None) -> Self:
        return cls(
            token_ms=cost.token_ms,
            pair_ms=cost.pair_ms,
            floor_ms=cost.floor_ms,
            row_ms=cost.missed_row_ms,
            host_token_ms=cost.host_token_ms,
            host_floor_ms=cost.host_floor_ms,
            step_ms=cost.step_ms,
            kv_token_bytes=cost.kv_token_bytes,
            row_bytes=cost.row_bytes,
            first=crowding.first,
            second=crowding.second,
            other_tokens=cost.floor_ms / (cost.token_ms + cost.pair_ms * _TOKENS),
            half_life=half_life_requests or 0.0,
            in_flight=cost.in_flight_requests,
            host_bytes=cost.host_kv_bytes,
            reload_ms=cost.reload_token_ms,
            in_turn=0.0 if cost.is_overlapping else 2.0,
        )


class O(IntEnum):  # noqa: E742 - as short as its uses are many
    """Places among the numbers of an outlook."""

    WINDOWS = 0
    QUEUED = 1
    WEIGHT = 2
    FRESH_WEIGHT = 3
    FRESH_RATE = 4
    LASTING_RATE = 5
    TOKENS = 6  # of a history
    COMPUTE_CORRECTION = 7
    BUS_CORRECTION = 8
    LEVEL = 9  # measured over reckoned latency
    LASTING_BEST = 10  # place among the splits
    FRESH_BEST = 11
    DRIFT = 12  # of the lasting best, per second
    KV_CORRECTION = 13  # tokens reused over what shadows promised at this split
    ROW_CORRECTION = 14  # rows missed over what shadows promised
    RATE = 15  # of the window's arrivals alone, per second
    IN_FLIGHT = 16  # share of the pool that the KV of steps under way takes


class Split(IntEnum):
    """Rows of the table over splits."""

    ALPHA = 0
    COMPUTE = 1  # ms of the lasting view, as the next
    LEAD = 2
    LASTING = 3  # latency, ms
    FRESH = 4
    FRESH_COMPUTE = 5
    FRESH_LEAD = 6
    CORRECTED = 7  # the fresh latency by what was measured (`control.measured`)
    RELOADED = 8  # tokens that the host tier gives back, of the lasting view
    FRESH_RELOADED = 9
    FEARED = 10  # latency in a burst that is feared (`control.readiness`)


class Knot(IntEnum):
    """Rows of the table over the curves' own splits."""

    LAST_COMPUTED = 0
    LAST_MISSED = 1
    FRESH_COMPUTED = 2
    FRESH_MISSED = 3


class Outlook(NamedTuple):
    """Arrays for one grid of miss curves."""

    numbers: Floats  # (O,)
    knots: Floats  # (Knot, curves' splits)
    splits: Floats  # (Split, NUM_SPLITS)
    blend: Floats  # (curves' splits, NUM_SPLITS) how much of each goes into a split's value


def begin_outlook(outlook: Outlook, alphas: Floats) -> None:
    """Set arrays of zeros up for the curves' splits."""
    corrections = (O.COMPUTE_CORRECTION, O.BUS_CORRECTION, O.LEVEL, O.KV_CORRECTION, O.ROW_CORRECTION)
    outlook.numbers[list(corrections)] = 1.0
    outlook.splits[Split.ALPHA] = np.linspace(alphas[0], alphas[-1], NUM_SPLITS)
    outlook.blend[:] = blend_weights(outlook.splits[Split.ALPHA], alphas).T


def blend_weights(at: Floats, known_at: Floats) -> Floats:
    """(at, known): weights of a cubic through known points with the slopes of their neighbours (Catmull and Rom).

    Linear in the known values, so it is made once; unlike a monotone curve it can have its least between two points.
    """
    size = known_at.size
    if size < 3:
        return np.column_stack([np.interp(at, known_at, one) for one in np.eye(size)])
    slopes = np.zeros((size, size))
    for i in range(size):
        low, high = max(0, i - 1), min(size - 1, i + 1)
        slopes[i, high] += 1 / (known_at[high] - known_at[low])
        slopes[i, low] -= 1 / (known_at[high] - known_at[low])
    piece = np.clip(np.searchsorted(known_at, at, side="right") - 1, 0, size - 2)
    width = known_at[piece + 1] - known_at[piece]
    t = ((at - known_at[piece]) / width)[:, None]
    unit = np.eye(size)
    value = unit[piece] * (1 + 2 * t) * (1 - t) ** 2 + unit[piece + 1] * t**2 * (3 - 2 * t)
    return value + width[:, None] * (slopes[piece] * t * (1 - t) ** 2 + slopes[piece + 1] * t**2 * (t - 1))


@inner
def keep_of(passed: float, half_life: float) -> float:
    """What is left of a moving average's past."""
    return np.exp(-0.6931471805599453 * passed / half_life)


@inner
def latency_ms(terms: Terms, compute_ms: float, lead_ms: float, rate: float) -> float:
    """Of a request, the queue included; `rate` is in requests per second."""
    both = compute_ms * compute_ms + lead_ms * lead_ms + terms.in_turn * compute_ms * lead_ms
    pressure = rate / 1e3 * np.sqrt(both)
    growth = 1 + pressure * (terms.first + terms.second * pressure)
    return (terms.step_ms + compute_ms + lead_ms) * growth * growth * growth * growth


@inner
def at_split(splits: Floats, row: int, alpha: float) -> float:
    """A row of the table between its splits; beyond them as at the ends."""
    first, last = splits[0, 0], splits[0, -1]
    place = (alpha - first) / (last - first) * (splits.shape[1] - 1)
    if not place > 0:
        return splits[row, 0]
    if place >= splits.shape[1] - 1:
        return splits[row, -1]
    low = int(place)
    share = place - low
    return splits[row, low] * (1 - share) + splits[row, low + 1] * share


@inner
def count_arrivals(outlook: Outlook, window: Seen) -> None:
    """What came in this window: who was answered, and by how many the queue grew."""
    numbers = outlook.numbers
    arrived = max(0.0, window.num_requests + window.num_queued - numbers[O.QUEUED])
    numbers[O.RATE] = arrived / max(1e-6, window.end_s - window.start_s)
    numbers[O.QUEUED] = window.num_queued


@inner
def look(outlook: Outlook, terms: Terms, window: Seen, computed: Floats, missed: Floats) -> None:
    """Take a window in, its arrivals counted: the curves' newest part, corrections, every split reckoned anew."""
    numbers, dt_s = outlook.numbers, max(1e-6, window.end_s - window.start_s)
    rate, tokens = numbers[O.RATE], window.new_tokens + window.resident_tokens
    is_first = numbers[O.WINDOWS] == 0
    fresh = 0.0 if is_first else keep_of(dt_s, _FRESH_HALF_LIFE_S)
    lasting = 0.0 if is_first else keep_of(dt_s, _LASTING_HALF_LIFE_S)
    numbers[O.FRESH_RATE] = fresh * numbers[O.FRESH_RATE] + (1 - fresh) * rate
    numbers[O.LASTING_RATE] = lasting * numbers[O.LASTING_RATE] + (1 - lasting) * rate
    numbers[O.TOKENS] = fresh * numbers[O.TOKENS] + (1 - fresh) * tokens
    numbers[O.IN_FLIGHT] = terms.in_flight * numbers[O.TOKENS] * terms.kv_token_bytes / max(1.0, window.pool_bytes)
    _take_newest(outlook, terms, window, computed, missed)
    before = outlook.splits[0, int(numbers[O.LASTING_BEST])]
    _reckon(outlook, terms, window, computed, missed)
    after = outlook.splits[0, int(numbers[O.LASTING_BEST])]
    moved = 0.0 if is_first else (after - before) / dt_s
    numbers[O.DRIFT] = lasting * numbers[O.DRIFT] + (1 - lasting) * moved
    _correct(outlook, terms, window, dt_s)
    numbers[O.WINDOWS] += 1


@inner
def _take_newest(outlook: Outlook, terms: Terms, window: Seen, computed: Floats, missed: Floats) -> None:
    """The curves are moving averages: take the old one, faded, off the new one, and the window's own is left."""
    numbers, knots = outlook.numbers, outlook.knots
    faded = 1.0 if terms.half_life == 0 else keep_of(window.num_served, terms.half_life)
    old = faded * numbers[O.WEIGHT]
    new = window.weight - old
    is_told = numbers[O.WEIGHT] > 0 and new >= 1
    keep = keep_of(window.end_s - window.start_s, _FRESH_HALF_LIFE_S) * numbers[O.FRESH_WEIGHT]
    for i in range(computed.size):
        if not is_told and numbers[O.FRESH_WEIGHT] == 0:
            knots[Knot.FRESH_COMPUTED, i], knots[Knot.FRESH_MISSED, i] = computed[i], missed[i]
        elif is_told:
            newest = max(0.0, (computed[i] * window.weight - knots[Knot.LAST_COMPUTED, i] * old) / new)
            reads = max(0.0, (missed[i] * window.weight - knots[Knot.LAST_MISSED, i] * old) / new)
            both = keep + new
            knots[Knot.FRESH_COMPUTED, i] = (knots[Knot.FRESH_COMPUTED, i] * keep + newest * new) / both
            knots[Knot.FRESH_MISSED, i] = (knots[Knot.FRESH_MISSED, i] * keep + reads * new) / both
        knots[Knot.LAST_COMPUTED, i], knots[Knot.LAST_MISSED, i] = computed[i], missed[i]
    if is_told:
        numbers[O.FRESH_WEIGHT] = keep + new
    numbers[O.WEIGHT] = window.weight


@inner
def _mix(curve: Floats, blend: Floats, out: Floats) -> None:
    """A curve at every split of the table, never below zero."""
    out[:] = 0.0
    for i in range(curve.size):
        for split in range(out.size):
            out[split] += curve[i] * blend[i, split]
    for split in range(out.size):
        out[split] = max(out[split], 0.0)


@inner
def _compare(numbers: Floats, splits: Floats, window: Seen, others: float) -> None:
    """Learn what caches do against their shadows. Hit rates differ by much the same factor at every split.

    Shadows know no batches: a prefix that is being written, and pages that are pinned, cost the real cache hits.
    """
    if window.num_served == 0 or abs(window.alpha - window.alpha_target) > _SETTLED:
        return
    keep = keep_of(window.end_s - window.start_s, _SHADOW_HALF_LIFE_S)
    computed = at_split(splits, Split.FRESH_COMPUTE, window.alpha)
    promised = window.new_tokens + window.resident_tokens - computed
    reading = computed + at_split(splits, Split.FRESH_RELOADED, window.alpha) + others
    missed = at_split(splits, Split.FRESH_LEAD, window.alpha) * (window.new_tokens + others) / reading
    if promised > 0.02 * numbers[O.TOKENS]:
        ratio = min(max(window.resident_tokens / promised, _MIN_CORRECTION), _MAX_CORRECTION)
        numbers[O.KV_CORRECTION] = keep * numbers[O.KV_CORRECTION] + (1 - keep) * ratio
    if missed > 1:
        ratio = min(max(window.missed_rows / missed, _MIN_CORRECTION), _MAX_CORRECTION)
        numbers[O.ROW_CORRECTION] = keep * numbers[O.ROW_CORRECTION] + (1 - keep) * ratio


@inner
def _telling(correction: float) -> float:
    """What a correction says of a stage's cost. Up to a point it is how stages slow each other: not a cost."""
    return max(correction / _TELLING, 1.0) if correction > 1 else min(correction * _TELLING, 1.0)


@inner
def _take_back(splits: Floats, compute_row: int, reloaded_row: int, host_share: float) -> None:
    """Of the tokens that the pool alone would compute, those that the host gives back go to a row of their own.

    What either holds is what a pool larger by the tier would. From the highest split down: each looks at lower ones.
    """
    for split in range(splits.shape[1] - 1, -1, -1):
        lower = at_split(splits, compute_row, splits[Split.ALPHA, split] - host_share)
        splits[reloaded_row, split] = max(0.0, splits[compute_row, split] - lower)
        splits[compute_row, split] -= splits[reloaded_row, split]


@inner
def _fill_view(splits: Floats, rows: tuple[int, int, int, int], terms: Terms, numbers: Floats, rate: float) -> None:
    """From tokens, missed rows and reloaded tokens, in the first three rows, to stages in two and latency in the last.

    All that does not change from split to split is read before the loop, so that it compiles to wide instructions.
    Where KV cannot hold the steps under way, batches shrink and pressure grows by the root of what is lacking, as it
    did on a card.
    """
    compute, lead, reloaded, latency = splits[rows[0]], splits[rows[1]], splits[rows[2]], splits[rows[3]]
    compute_by, bus_by = _telling(numbers[O.COMPUTE_CORRECTION]), _telling(numbers[O.BUS_CORRECTION])
    whole, kv, others = numbers[O.TOKENS], numbers[O.KV_CORRECTION], max(1.0, terms.other_tokens)
    per_row = terms.row_ms * numbers[O.ROW_CORRECTION] * bus_by
    per_token = compute_by * (terms.token_ms + terms.pair_ms * whole / 2)
    floor, host_floor, host_token = (
        compute_by * terms.floor_ms,
        terms.host_floor_ms,
        terms.host_token_ms,
    )
    step, first, second, in_flight = terms.step_ms, terms.first, terms.second, numbers[O.IN_FLIGHT]
    alphas, per_reload, in_turn = splits[Split.ALPHA], terms.reload_ms * kv * bus_by, terms.in_turn
    for split in range(latency.size):
        shadow, taken = compute[split], reloaded[split]
        tokens = whole - kv * max(0.0, whole - shadow)
        missed = lead[split] * (tokens + others) / (shadow + taken + others)  # more tokens read more rows
        a, b = floor + per_token * tokens, host_floor + host_token * tokens + per_row * missed + per_reload * taken
        lack = max(1.0, in_flight / max(1e-3, 1 - alphas[split]))
        pressure = rate / 1e3 * np.sqrt((a * a + b * b + in_turn * a * b) * lack)
        growth = 1 + pressure * (first + second * pressure)
        growth *= growth
        compute[split], lead[split], latency[split] = a, b, (step + a + b) * growth * growth


@inner
def _reckon(outlook: Outlook, terms: Terms, window: Seen, computed: Floats, missed: Floats) -> None:
    numbers, knots, splits, blend = outlook
    _mix(computed, blend, splits[Split.COMPUTE])
    _mix(missed, blend, splits[Split.LEAD])
    _mix(knots[Knot.FRESH_COMPUTED], blend, splits[Split.FRESH_COMPUTE])
    _mix(knots[Knot.FRESH_MISSED], blend, splits[Split.FRESH_LEAD])
    if terms.host_bytes > 0:
        host_share = terms.host_bytes / max(1.0, window.pool_bytes)
        _take_back(splits, Split.COMPUTE, Split.RELOADED, host_share)
        _take_back(splits, Split.FRESH_COMPUTE, Split.FRESH_RELOADED, host_share)
    _compare(numbers, splits, window, max(1.0, terms.other_tokens))
    lasting = (Split.COMPUTE, Split.LEAD, Split.RELOADED, Split.LASTING)
    fresh = (Split.FRESH_COMPUTE, Split.FRESH_LEAD, Split.FRESH_RELOADED, Split.FRESH)
    _fill_view(splits, lasting, terms, numbers, numbers[O.LASTING_RATE])
    _fill_view(splits, fresh, terms, numbers, numbers[O.FRESH_RATE])
    numbers[O.LASTING_BEST] = splits[Split.LASTING].argmin()
    numbers[O.FRESH_BEST] = splits[Split.FRESH].argmin()


@inner
def _correct(outlook: Outlook, terms: Terms, window: Seen, dt_s: float) -> None:
    """Learn how much longer stages and requests took than reckoned, from what the window really read and computed."""
    numbers = outlook.numbers
    if window.num_served == 0 or window.bus_busy <= 0:  # an engine does not know its bus: its stages are one to it
        return
    keep, served = keep_of(dt_s, _CORRECTION_HALF_LIFE_S), window.num_served / dt_s / 1e3
    per_token = terms.token_ms + terms.pair_ms * (window.new_tokens + window.resident_tokens) / 2
    compute = terms.floor_ms + per_token * window.new_tokens
    bus = terms.row_ms * window.missed_rows
    for place, busy, reckoned in (
        (O.COMPUTE_CORRECTION, window.compute_busy, served * compute),
        (O.BUS_CORRECTION, window.bus_busy, served * bus),
        (O.LEVEL, window.mean_ms, at_split(outlook.splits, Split.FRESH, window.alpha)),
    ):
        if busy > 0 and reckoned > 1e-9 and (place == O.LEVEL or busy < 0.98):  # a stage that never rested tells little
            ratio = min(max(busy / reckoned, _MIN_CORRECTION), _MAX_CORRECTION)
            numbers[place] = keep * numbers[place] + (1 - keep) * ratio
