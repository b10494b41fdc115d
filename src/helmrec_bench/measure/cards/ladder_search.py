"""The ladder's search: which courses are run at which loads, what is kept of them, and what follows from them.

Loads are steps of 2.5%: load 0 is the reference rate. A course is run once; the next call of the measurement finds it
in the file. Knows neither engines nor requests.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from helmrec_bench.judging.judge import interval, paired_change

RATIO = 1.025  # between two loads
LEAST, MOST = -90, 90  # loads below a tenth and above nine times the reference rate are not tried
SCREEN_SEED = 0
_STRIDE = 4  # of a search that begins with a guess

Course = dict[str, Any]  # what a course measured, as it stands in the file


class OutOfTime(Exception):
    """The next course would end after the limit; the next call goes on."""


def rate_factor(load: int) -> float:
    return float(RATIO**load)


def load_of(factor: float) -> int:
    """The nearest load."""
    return int(np.clip(round(np.log(factor) / np.log(RATIO)), LEAST, MOST))


def largest_load(is_met: Callable[[int], bool], guess: int, stride: int = _STRIDE) -> int | None:
    """The largest load that is met, supposing that every smaller one is; None if none is.

    The search goes up or down from the guess in strides, each twice the last, until it has one that is met below one
    that is not.
    """
    low, high = guess, guess + stride
    if is_met(guess):
        while high <= MOST and is_met(high):
            stride *= 2
            low, high = high, high + stride
    else:
        low, high = guess - stride, guess
        while low < LEAST or not is_met(low):
            if low < LEAST:
                return None
            stride *= 2
            low, high = low - stride, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


class CourseServer(Protocol):
    """Serves courses on one engine."""

    def serve(self, rung: str, policy: str, load: int, seed: int, seconds: float) -> Course:
        """Serve a course of so many seconds from empty caches; `keeps` says whether it kept the SLO."""

    def saturated(self, rung: str, alpha: float) -> dict[str, float]:
        """Requests/s by mix, everything queued at once."""


@dataclass
class CallClock:
    """How much time a call has."""

    limit_s: float
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def need(self, seconds: float) -> None:
        """Raise OutOfTime if so many seconds are not left."""
        if self.elapsed_s + seconds > self.limit_s:
            raise OutOfTime


@dataclass(frozen=True)
class LadderLengths:
    """Seconds of traffic, and how often."""

    seconds: float
    screen_s: float
    extra_s: float  # that a course takes besides
    repeats: int
    alphas: Sequence[float]
    finalists: int  # constants that are compared under the SLO, those with the most throughput


@dataclass
class Climb:
    """One rung on one shape. `found` is its part of the file."""

    rung: str
    found: dict[str, Any]
    lengths: LadderLengths
    clock: CallClock
    save: Callable[[], None]

    def course(self, server: CourseServer, policy: str, load: int, seed: int) -> Course:
        """Return a course of the file, or serve it."""
        seconds = self.lengths.screen_s if seed == SCREEN_SEED else self.lengths.seconds
        asked = {"policy": policy, "load": load, "seed": seed, "seconds": seconds}
        courses: list[Course] = self.found.setdefault("courses", [])
        for each in courses:
            if asked.items() <= each.items():
                return each
        self.clock.need(seconds + self.lengths.extra_s)
        courses.append({**asked, **server.serve(self.rung, policy, load, seed, seconds)})
        self.save()
        last = courses[-1]
        what = f"{self.rung}, {policy}, seed {seed}: {last['offered_per_s']}/s, P99 {last['p99_ms']} ms"
        print(f"{self.clock.elapsed_s:6.1f} s  {what}{'' if last['keeps'] else ', SLO missed'}", flush=True)
        return last

    def limit(self, server: CourseServer, policy: str, seed: int, guess: int, stride: int = _STRIDE) -> int | None:
        return largest_load(lambda load: bool(self.course(server, policy, load, seed)["keeps"]), guess, stride)

    def throughput(self, server: CourseServer) -> dict[str, dict[str, float]]:
        """Requests/s by constant and mix, everything queued at once."""
        found: dict[str, dict[str, float]] = self.found.setdefault("saturated", {})
        for alpha in self.lengths.alphas:
            if f"{alpha:g}" not in found:
                self.clock.need(self.lengths.extra_s)
                found[f"{alpha:g}"] = server.saturated(self.rung, alpha)
        self.save()
        return found

    def tuned(self, server: CourseServer, rates: Mapping[str, float]) -> str:
        """The constant that bears most of those that have the most throughput in the mix that suits them worst."""
        if "policy" not in self.found:
            bears = worst_factors(self.throughput(server), rates)
            best = sorted(bears, key=lambda alpha: -bears[alpha])[: self.lengths.finalists]
            screened = {alpha: self._screened(server, f"static:{alpha}", bears[alpha]) for alpha in best}
            chosen = max(best, key=lambda alpha: screened[alpha])
            self.found |= {"policy": f"static:{chosen}", "screened": screened, "guess": screened[chosen]}
            self.save()
        return str(self.found["policy"])

    def adaptive(self, server: CourseServer, policy: str, guess: int) -> str:
        if "policy" not in self.found:
            reached = self.limit(server, policy, SCREEN_SEED, guess)
            self.found |= {"policy": policy, "guess": LEAST if reached is None else reached}
            self.save()
        return str(self.found["policy"])

    def _screened(self, server: CourseServer, policy: str, bears: float) -> int:
        reached = self.limit(server, policy, SCREEN_SEED, load_of(0.9 * bears))
        return LEAST if reached is None else reached

    def climb(self, server: CourseServer) -> None:
        """Find the largest load of every seed, once the policy is chosen."""
        limits: dict[str, int | None] = self.found.setdefault("limits", {})
        for seed in range(1, self.lengths.repeats + 1):
            if str(seed) not in limits:
                guess = max(LEAST, int(self.found["guess"]))
                limits[str(seed)] = self.limit(server, self.found["policy"], seed, guess, stride=1)
                self.save()

    def at(self, server: CourseServer, load: int) -> None:
        """Measure every seed at this load."""
        for seed in range(1, self.lengths.repeats + 1):
            self.course(server, self.found["policy"], load, seed)


def worst_factors(throughput: Mapping[str, Mapping[str, float]], rates: Mapping[str, float]) -> dict[str, float]:
    """By constant: the multiple of the rates at which it is saturated in the mix that suits it worst."""
    return {alpha: min(by[mix] / rates[mix] for mix in rates) for alpha, by in throughput.items()}


def best_rates(throughput: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Requests/s by mix of the constant that loses least against the best one in the mix that suits it worst."""
    most = {mix: max(by[mix] for by in throughput.values()) for mix in next(iter(throughput.values()))}
    bears = worst_factors(throughput, most)
    return dict(throughput[max(bears, key=lambda alpha: bears[alpha])])


def reached(found: Mapping[str, Any], per_s: float) -> list[float]:
    """Requests/s of the largest load, by seed; 0 if none was met. per_s: of load 0."""
    return [0.0 if load is None else per_s * rate_factor(load) for load in found.get("limits", {}).values()]


def p99_at(found: Mapping[str, Any], load: int) -> list[float | None]:
    """P99 by seed at a load; None where the SLO was missed by so much that the course was cut off."""
    is_it = [each for each in found.get("courses", []) if each["load"] == load and each["seed"] != SCREEN_SEED]
    return [each["p99_ms"] for each in is_it if each["policy"] == found.get("policy")]


def summary(
    found: Mapping[str, Any], first: Mapping[str, Any], per_s: float, shared_load: int | None
) -> dict[str, Any]:
    """Largest load with its interval, and over that of the tuned fixed split on the same seeds."""
    rates, base = reached(found, per_s), reached(first, per_s)
    said: dict[str, Any] = {"policy": found.get("policy"), "seeds": len(rates)}
    if rates:
        said["requests_per_s"] = _spelled(rates)
    if rates and len(base) == len(rates) and all(base):
        over = paired_change(rates, base)
        said["over_fixed_split"] = {"mean": 1 + over.mean, "low": 1 + over.low, "high": 1 + over.high}
    if shared_load is not None:
        said["p99_ms_at_shared_load"] = p99_at(found, shared_load)
    return said


def _spelled(values: Sequence[float]) -> dict[str, float]:
    seen = interval(values)
    return {"mean": seen.mean, "low": seen.low, "high": seen.high}
