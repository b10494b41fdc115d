"""What the paper claims, by which rule we judge it, and what came of it. Verdicts follow from data by stated rules."""

import math
from dataclasses import dataclass, replace
from typing import Literal

_FORMATS = {"share": "{:.1%}", "ratio": "{:.2f} x", "alpha": "{:.3f}", "us": "{:.3g} µs", "count": "{:.0f}"}

Finding = Literal["reproduced", "partly", "not", "not judged"]
WORDS: dict[Finding, str] = {
    "reproduced": "reproduced",
    "partly": "partly",
    "not": "not reproduced",
    "not judged": "not judged",
}
OUR_WORDS: dict[Finding, str] = {"reproduced": "met", "partly": "partly", "not": "missed", "not judged": "not judged"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim beside one figure of ours."""

    claim: str
    paper: str
    ours: str
    rule: str
    finding: Finding
    reason: str
    is_papers: bool = True  # else a bound of our own, which is met or missed


@dataclass(frozen=True, slots=True)
class Rule:
    """Thresholds of a figure. `is_more_better`: whether larger figures support the claim."""

    reproduced: float
    partly: float
    is_more_better: bool = True
    unit: Literal["share", "ratio", "alpha", "us", "count"] = "share"

    def details(self, *, is_papers: bool = True) -> str:
        word, (best, _, worst) = "at least" if self.is_more_better else "at most", _words(is_papers=is_papers)
        return f"{best}: {word} {self.shown(self.reproduced)}; partly: {word} {self.shown(self.partly)}; else {worst}"

    def finding(self, value: float) -> Finding:
        if math.isnan(value):  # there was nothing to compare with
            return "not judged"
        if self._reaches(value, self.reproduced):
            return "reproduced"
        return "partly" if self._reaches(value, self.partly) else "not"

    def shown(self, value: float) -> str:
        return _FORMATS[self.unit].format(value)

    def _reaches(self, value: float, threshold: float) -> bool:
        return value >= threshold if self.is_more_better else value <= threshold


def _words(*, is_papers: bool) -> list[str]:
    return list((WORDS if is_papers else OUR_WORDS).values())[:3]


def judged(claim: str, paper: str | None, value: float, rule: Rule, because: str) -> Verdict:
    """`because`: the figures behind the value, in words. Without `paper` the claim is ours."""
    is_papers = paper is not None
    stated, finding = rule.details(is_papers=is_papers), rule.finding(value)
    return Verdict(claim, paper or "not given", rule.shown(value), stated, finding, because, is_papers)


def unjudged(verdict: Verdict, why: str) -> Verdict:
    return replace(verdict, finding="not judged", reason=why)
