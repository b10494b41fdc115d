"""Every measured figure of the README and of the pages below is found in a committed file of docs/measurements.

A figure is a number with a unit: `8.4 ms`, `3.0 to 4.5%`, `2.4 times`. It is looked for in the files that its line
names, else in those that its section or a section around it names, in numbers and in texts of the file, up to the
rounding that is shown. So the test finds figures that were made up, are out of date or name no file; it cannot know
whether the right number of a file was taken. A figure that is computed from numbers of a file is listed in `DERIVED`
with its computation. A number that no measurement gave (a setting, a limit, what a test asks for) is listed in
`NOT_MEASURED` with its reason. Entries whose text is no longer on the page fail.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from tests.test_measurements import MEASUREMENTS, NAMED, ROOT, is_kept, sections

PAGES = (
    "README.md",
    "docs/baselines.md",
    "docs/cluster.md",
    "docs/controller.md",
    "docs/evaluation.md",
    "docs/map.md",
    "docs/peers.md",
    "docs/precision.md",
    "docs/simulator.md",
    "docs/trade-off.md",
)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
SCALES = {  # of a number in a file, by the unit that it is shown with
    "%": (100.0, 1.0),
    "points": (100.0, 1.0),
    "ms": (1.0, 1e3, 1e-3),
    "µs": (1.0, 1e3, 1e6),
    "s": (1.0, 1e-3),
    "M": (1e-6, 1.0),
    "GiB": (1.0, 2.0**-30),
}
UNITS = (
    *("ms", "µs", "%", "x", "GB/s", "MiB/s", "TFLOP/s", "requests/s", "lookups/s", "rows/s"),
    *("/s", "times", "points", "M", "s", "GiB"),
)
SIGNED = rf"(?:(?<!\d)[+\-])?{NUMBER}"
LIST = rf"{SIGNED}(?:(?: to | and | or | / |/|-|, ){SIGNED})*"
PLAIN = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})  # of pages, so that texts here have one sign
FIGURES = re.compile(rf"(?<![\w.])({LIST})\s?({'|'.join(map(re.escape, UNITS))})(?![\w/])")


class Derived(NamedTuple):
    """Figures of a page that are computed from numbers of files; `values` are the numbers of `text`, in order."""

    page: str
    text: str
    values: Callable[[], Sequence[float]]


def read(name: str) -> Any:
    return json.loads((MEASUREMENTS / name).read_text())


def split_costs(rows_per_token: int) -> dict[float, dict[float, float]]:
    """Requests/s by share of hot users and alpha: overlapping, without the host tier."""
    found: dict[float, dict[float, float]] = {}
    for cell in read("gpu-tradeoff-h200.json")["cells"]:
        if cell["rows_per_token"] == rows_per_token and cell["overlap"] and not cell["host_tier"]:
            found.setdefault(cell["hot_share"], {})[cell["alpha"]] = cell["requests_per_s"]
    return found


def costs_of(precision: str, rows_per_token: int) -> dict[float, dict[float, float]]:
    """Requests/s by share of hot users and alpha in one precision."""
    found: dict[float, dict[float, float]] = {}
    for cell in read("gpu-tradeoff-precision-h200.json")[f"{precision}, {rows_per_token} rows"]:
        found.setdefault(cell["hot_share"], {})[cell["alpha"]] = cell["requests_per_s"]
    return found


def gains_of_eight_bits() -> list[float]:
    """Least and most that the best split in eight bits serves over the best one in bfloat16."""
    model, low = ([by for rows in (6, 24) for by in costs_of(one, rows).values()] for one in ("model", "fp8-all"))
    gains = [max(theirs.values()) / max(ours.values()) for ours, theirs in zip(model, low, strict=True)]
    return [min(gains), max(gains)]


def loss(by_alpha: dict[float, float], alpha: float) -> float:
    """Percent of the best split's requests/s that this one loses."""
    return 100 * (1 - by_alpha[alpha] / max(by_alpha.values()))


def worst_losses(rows_per_token: int) -> list[float]:
    """Percent that the worst split loses, by share of hot users."""
    return [max(loss(by, alpha) for alpha in by) for _, by in sorted(split_costs(rows_per_token).items())]


def loss_at_other_best() -> float:
    """Percent that the best split of one mix loses in another, at most; 24 rows a token."""
    mixes = split_costs(24).values()
    return max(loss(by, max(other, key=other.__getitem__)) for by in mixes for other in mixes)


def flat_part() -> float:
    """Percent that any split from 0.1 to 0.8 loses, at most, with 35% hot users and 1 or 6 rows a token."""
    return max(loss(by, alpha) for rows in (1, 6) for by in [split_costs(rows)[0.35]] for alpha in by if alpha <= 0.8)


def overlap_gains(*rows_per_token: int) -> list[float]:
    """Least and most percent of requests/s that overlap adds without the host tier."""
    cells = {
        (cell["rows_per_token"], cell["hot_share"], cell["alpha"], cell["overlap"]): cell["requests_per_s"]
        for cell in read("gpu-tradeoff-h200.json")["cells"]
        if cell["rows_per_token"] in rows_per_token and not cell["host_tier"]
    }
    gains = [100 * (rate / cells[(*key, False)] - 1) for (*key, is_on), rate in cells.items() if is_on]
    return [min(gains), max(gains)]


def tier_changes(rows: Sequence[int], alphas: tuple[float, float], hot_share: float | None = None) -> list[float]:
    """Percent of requests/s that the host tier adds where steps overlap, in rising order."""
    cells = {
        (cell["rows_per_token"], cell["hot_share"], cell["alpha"], cell["host_tier"]): cell["requests_per_s"]
        for cell in read("gpu-tradeoff-h200.json")["cells"]
        if cell["overlap"] and cell["rows_per_token"] in rows and alphas[0] <= cell["alpha"] <= alphas[1]
        if hot_share in {None, cell["hot_share"]}
    }
    return sorted(100 * (rate / cells[(*key, False)] - 1) for (*key, has_tier), rate in cells.items() if has_tier)


def tier_rule_changes() -> list[float]:
    """Average, least and most percent of requests/s that the rule against long loads adds."""
    names = ("rows_per_token", "hot_share", "host_tier", "alpha", "overlap")
    before = {tuple(c[n] for n in names): c["requests_per_s"] for c in read("gpu-tradeoff-h200.json")["cells"]}
    cells = read("gpu-tradeoff-rule-h200.json")["cells"]
    changes = [100 * (c["requests_per_s"] / before[tuple(c[n] for n in names)] - 1) for c in cells]
    return [sum(changes) / len(changes), min(changes), max(changes)]


def move_changes(name: str) -> dict[tuple[float, float], float]:
    """Percent by which a figure after a move differs from that of a twin that did not move."""
    found: dict[tuple[float, float], dict[bool, float]] = {}
    for one in read("gpu-moves-h200.json")["moves"]:
        value = one["mib_by_cause"][name] if name in one["mib_by_cause"] else one[name]
        found.setdefault((one["from"], one["to"]), {})[one["moves"]] = value
    return {move: 100 * (by[True] / by[False] - 1) for move, by in found.items()}


def missed_bytes_after_moves() -> list[float]:
    """Percent, each growth with its size; then both shrinks."""
    changes = move_changes("row-miss")
    return [changes[0.3, 0.4], 0.1, changes[0.3, 0.7], 0.4, changes[0.4, 0.3], changes[0.7, 0.3]]


def row_cache(system: str, share: float, name: str, *, is_drifting: bool = False) -> float:
    systems = [one for one in read("gpu-peers-h200.json")["systems"] if (one["drift"] > 0) == is_drifting]
    return float(next(one[name] for one in systems if one["system"].startswith(system) and one["share"] == share))


def lookups_over(system: str, *, of_all: bool = False) -> list[float]:
    """Least and most lookups/s of ours over those of another cache; the default of ours, or all of them."""
    ours = ("ours, LRU, every", "ours, LRU, second", "ours, frequency") if of_all else ("ours, LRU, second",)
    rates = [(one, share, "lookups_per_s") for one in ours for share in (0.01, 0.05)]
    ratios = [row_cache(*one) / row_cache(system, *one[1:]) for one in rates]
    return [min(ratios), max(ratios)]


def lookups_over_fbgemm() -> list[float]:
    """Least and most lookups/s of our default over those of FBGEMM's faster order, over sizes and traces."""
    ratios = [
        row_cache("ours, LRU, second", share, "lookups_per_s", is_drifting=drifts)
        / max(row_cache(f"FBGEMM, {order}", share, "lookups_per_s", is_drifting=drifts) for order in ("LRU", "LFU"))
        for share, drifts in ((0.01, False), (0.05, False), (0.01, True))
    ]
    return [min(ratios), max(ratios)]


def compact_costs() -> list[float]:
    """Percent by which the compact index makes a step longer, in rising order."""
    times = {
        (one["system"], one["share"], one["drift"]): one["ms_per_step"]
        for one in read("gpu-peers-h200.json")["systems"]
    }
    dense_of = {"ours, frequency": "ours, frequency", "ours, LRU, second touch": "ours, LRU, second touch (default)"}
    return sorted(
        100 * (ms / times[dense_of[system.removesuffix(", compact index")], *where] - 1)
        for (system, *where), ms in times.items()
        if "compact" in system
    )


def hits_over_fbgemm_in_drift() -> list[float]:
    """Points of hit rate of our default over the better of FBGEMM's orders, where popularity drifts."""
    theirs = max(row_cache(f"FBGEMM, {order}", 0.01, "hit_rate", is_drifting=True) for order in ("LRU", "LFU"))
    return [100 * (row_cache("ours, LRU, second", 0.01, "hit_rate", is_drifting=True) - theirs)]


def filter_gains() -> list[float]:
    """Points of hit rate by which the second touch beats every miss: least and most over both sizes."""
    rates = {
        (name, share): row_cache(name, share, "hit_rate")
        for name in ("ours, LRU, second", "ours, LRU, every")
        for share in (0.01, 0.05)
    }
    gains = [100 * (rates["ours, LRU, second", share] - rates["ours, LRU, every", share]) for share in (0.01, 0.05)]
    return [min(gains), max(gains)]


def kept_quality(precision: str) -> list[float]:
    """Percent of full precision that the trained model keeps of AUC and of NDCG@10, each after its value."""
    rows = read("precision-cpu.json")["quality"]
    row = next(row for row in rows if row["model"] == "trained" and row["precision"] == precision)
    return [value for name in ("auc", "ndcg") for value in (row[name], 100 * row[name] / row[f"full_{name}"])]


def kept_text(precision: str, *shown: str) -> Derived:
    """The two cells of a row of the table."""
    auc, auc_share, ndcg, ndcg_share = shown
    text = f"{auc} ({auc_share}%) | {ndcg} ({ndcg_share}%)"
    return Derived(_PRECISION, text, lambda: kept_quality(precision))


def live_averages() -> dict[str, float]:
    """Mean latency of each policy on a CPU, averaged over its runs."""
    runs = read("live-cpu.json")["runs"]
    return {name: statistics.mean(run["scored"]["mean_ms"] for run in runs[name]) for name in runs}


def live_below_best() -> list[float]:
    """Percent by which the controller's average is below the best constant's."""
    found = live_averages()
    return [100 * (1 - found["helm"] / found["static:0.2"])]


def load_over_best(*names: str) -> list[float]:
    """Percent by which the controller's largest load differs from the best constant's, without the sign."""
    found = {name: read("controller-loads.json")["scenarios"][name] for name in names}
    return [100 * abs(one["loads"]["helm"] / one["loads"][one["best_constant"]] - 1) for one in found.values()]


def steady(name: str) -> list[float]:
    (policy,) = read("controller-steady.json")["policies"].values()
    return [row[name] for row in policy["scenarios"].values()]


def over_untuned() -> float:
    """Percent by which the mean of a steady mix is above the untuned split's, at most."""
    pairs = zip(steady("mean_over_best"), steady("untuned_over_best"), strict=True)
    return 100 * max((1 + ours) / (1 + untuned) - 1 for ours, untuned in pairs)


def wrong_costs() -> list[float]:
    """Mean over that of the best constant, of every run with a wrong cost."""
    policies = read("controller-wrong-costs.json")["policies"].values()
    return [row["mean_over_best"] for policy in policies for row in policy["scenarios"].values()]


def changed_means() -> list[float]:
    """Percent by which the mean is longer with a number halved or doubled, in rising order."""
    numbers = read("controller-sensitivity.json")["numbers"].values()
    return sorted(100 * one[way]["mean"] for one in numbers for way in ("half", "double"))


_EVALUATION, _TRADE_OFF, _PEERS = "docs/evaluation.md", "docs/trade-off.md", "docs/peers.md"
_PRECISION, _CONTROLLER = "docs/precision.md", "docs/controller.md"
_AIMS = (((0.01, "ms_per_step"), 0.5), ((0.05, "ms_per_step"), 0.4))  # of a row cache: of what, and what we want
DERIVED: tuple[Derived, ...] = (
    Derived("README.md", "1.9 to 2.0 times the lookups/s", lookups_over_fbgemm),
    Derived("README.md", "costs up to 43%", lambda: [max(worst_losses(24))]),
    Derived(_EVALUATION, "costs up to 43%", lambda: [max(worst_losses(24))]),
    Derived(_EVALUATION, "loses 25 / 13 / 43%", lambda: worst_losses(24)),
    Derived(
        _EVALUATION,
        "21-87 / 13-66 / 14-52%",
        lambda: [*overlap_gains(24), *overlap_gains(6), *overlap_gains(1)],
    ),
    Derived(_EVALUATION, "2.4% more missed bytes", lambda: [move_changes("row-miss")[0.3, 0.7]]),
    Derived(_EVALUATION, " -2% |", lambda: [move_changes("service_p99_ms")[0.3, 0.7]]),
    Derived(_EVALUATION, "+0.6% for +0.1, +2.4% for +0.4, 0 and -1.9% for shrinks", missed_bytes_after_moves),
    Derived(_EVALUATION, "-2 to +2% |", lambda: _ends(sorted(move_changes("service_p99_ms").values()))),
    Derived(_EVALUATION, "1.9 to 2.0 times the lookups/s", lookups_over_fbgemm),
    Derived(_EVALUATION, "14 to 26 times", lambda: lookups_over("plain")),
    Derived(_EVALUATION, "4.0 points more", hits_over_fbgemm_in_drift),
    Derived(_EVALUATION, "up to 18% of the throughput", lambda: tier_changes((1, 6, 24), (0.7, 0.9))[:1]),
    Derived(_PEERS, "3% and 4% above", lambda: [100 * (row_cache("ours, freq", *of) / aim - 1) for of, aim in _AIMS]),
    Derived(_PEERS, "1.9 to 2.0 times the lookups/s", lookups_over_fbgemm),
    Derived(_PEERS, "at most 1% of the time in five cases of six and 25% in one", lambda: compact_costs()[-2:]),
    Derived(_PEERS, "4.0 points more", hits_over_fbgemm_in_drift),
    Derived(_PEERS, "by 3.5 to 4.3 points", filter_gains),
    Derived(_PEERS, "12 to 26 times", lambda: lookups_over("plain", of_all=True)),
    Derived(_TRADE_OFF, "costs 25, 13 and 43%", lambda: worst_losses(24)),
    Derived(_TRADE_OFF, "costs up to 30% in another", lambda: [loss_at_other_best()]),
    Derived(_TRADE_OFF, "loses 8, 0 and 20%", lambda: [loss(by, 0.5) for _, by in sorted(split_costs(24).items())]),
    Derived(_TRADE_OFF, "is within 6%", lambda: [flat_part()]),
    Derived(_TRADE_OFF, "by 21 to 87%", lambda: overlap_gains(24)),
    Derived(_TRADE_OFF, "by 13 to 66%", lambda: overlap_gains(1, 6)),
    Derived(_TRADE_OFF, "5 to 12% more", lambda: _ends(tier_changes((1,), (0.1, 0.8), 0.6))),
    Derived(_TRADE_OFF, "-6 to +7%", lambda: _ends(tier_changes((6, 24), (0.1, 0.6)))),
    Derived(_TRADE_OFF, "-18 to +10%", lambda: _ends(tier_changes((1, 6, 24), (0.7, 0.9)))),
    Derived(_TRADE_OFF, "2% more requests/s on average, -3 to +7%", tier_rule_changes),
    Derived(_TRADE_OFF, "1.22 to 1.37 times", gains_of_eight_bits),
    Derived(
        _TRADE_OFF,
        "costs 27, 22 and 34%",
        lambda: [max(loss(by, alpha) for alpha in by) for _, by in sorted(costs_of("fp8-all", 24).items())],
    ),
    Derived(
        _TRADE_OFF,
        "loses 1% where it loses 31%",
        lambda: [loss(costs_of(one, 6)[0.85], 0.5) for one in ("fp8-all", "model")],
    ),
    Derived(_CONTROLLER, "is 0.8% below the best constant", live_below_best),
    Derived("README.md", "0.8% below the best constant", live_below_best),
    Derived(_CONTROLLER, "never more than 0.2% above", lambda: [over_untuned()]),
    Derived(_CONTROLLER, "up to 14 times the best constant's", lambda: [1 + max(steady("untuned_over_best"))]),
    Derived(_CONTROLLER, "0.3% below it", lambda: [-100 * fmean(wrong_costs())]),
    Derived(_CONTROLLER, "379 of 400", lambda: [sum(one <= 0.05 for one in wrong_costs()), len(wrong_costs())]),
    Derived(_CONTROLLER, "None makes the mean more than 0.3% shorter", lambda: [-changed_means()[0]]),
    Derived(_CONTROLLER, "costs at most 1.2%", lambda: [changed_means()[-4]]),
    Derived(_CONTROLLER, "3.4% larger on stress-trend", lambda: load_over_best("stress-trend")),
    Derived(_CONTROLLER, "1.6% smaller on", lambda: load_over_best("main-burst-20s")),
    Derived(_CONTROLLER, "6.8% smaller on", lambda: load_over_best("stress-burst-20s")),
    kept_text("fp8", "0.8344", "100.01", "0.1123", "99.63"),
    kept_text("int8", "0.8343", "100.00", "0.1127", "100.03"),
    kept_text("fp8-products", "0.8341", "99.98", "0.1132", "100.48"),
    kept_text("fp8-rows", "0.8343", "99.99", "0.1130", "100.32"),
    kept_text("int8-rows", "0.8343", "100.00", "0.1127", "100.03"),
    kept_text("fp8-layers", "0.8342", "99.99", "0.1139", "101.08"),
    kept_text("int8-caches", "0.8343", "100.00", "0.1128", "100.09"),
    kept_text("fp8-all", "0.8342", "99.99", "0.1116", "99.03"),
)
_RULE, _LAYOUT = "a setting of the controller", "follows from the layout of pages, not from a measurement"
NOT_MEASURED: dict[tuple[str, str], str] = {
    ("docs/peers.md", "0.50 ms a step with slots for 1% of the rows and 0.40 ms for 5%"): "an aim",
    (_EVALUATION, "P99 -24 to -38%"): "the paper's figure",
    (_EVALUATION, "published -24 to -38%"): "the paper's figure",
    (_EVALUATION, "under 5% slowdown"): "the paper's figure",
    (_CONTROLLER, "within 1.5% of the least predicted"): _RULE,
    (_CONTROLLER, "half-life of 4 s"): _RULE,
    (_CONTROLLER, "at least 1.25 times"): _RULE,
    (_CONTROLLER, "main-burst-20s"): "the name of a scenario",
    (_CONTROLLER, "stress-burst-20s"): "the name of a scenario",
    (_CONTROLLER, "and 30 s have passed"): _RULE,
    (_CONTROLLER, "within 7.5 s"): _RULE,
    (_CONTROLLER, "a half-life of 5 s, predictions one of 4 s"): _RULE,
    (_PRECISION, "AUC and NDCG@10 of at least 99.9%"): "what the check asks for",
    (_PRECISION, "1.98 times"): _LAYOUT,
    (_PRECISION, "1.94 times"): _LAYOUT,
}


def _ends(changes: Sequence[float]) -> list[float]:
    return [changes[0], changes[-1]]


class Shown(NamedTuple):
    """A number of a page with its unit, and where it stands."""

    number: str
    unit: str
    line: str
    section: str
    files: frozenset[str]

    @property
    def value(self) -> float:
        return float(self.number.replace(",", ""))

    @property
    def half_step(self) -> float:
        """Half of the last place that is shown."""
        decimals = self.number.partition(".")[2]
        return 0.5001 * 10.0 ** -len(decimals)


def figures_of(page: Path) -> Iterator[Shown]:
    """All but those of derived and allowed texts."""
    texts = [one.text for one in DERIVED if ROOT / one.page == page]
    texts += [text for name, text in NOT_MEASURED if ROOT / name == page]
    for section in sections(text_of(page)):
        around = _files(section.lines) | _files(section.around)
        for line in section.lines:
            rest = line
            for text in sorted(texts, key=len, reverse=True):
                rest = rest.replace(text, "…")
            for numbers, unit in FIGURES.findall(rest):
                for number in re.findall(NUMBER, numbers):
                    yield Shown(number, unit, line, section.title, frozenset(_files([line]) or around))


def text_of(page: Path) -> str:
    return page.read_text().translate(PLAIN)


def _files(lines: Sequence[str]) -> set[str]:
    named = {path or bare for line in lines for path, bare in NAMED.findall(line)}
    return {name for name in named if is_kept(name) and (MEASUREMENTS / name).suffix == ".json"}


@cache
def numbers_of(name: str) -> tuple[float, ...]:
    """Every number of a file, those in its texts too, without signs."""
    path = MEASUREMENTS / name
    return tuple(_numbers(json.loads(path.read_text()))) if path.exists() else ()


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(key)
            yield from _numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, str):
        yield from (float(number.replace(",", "")) for number in re.findall(NUMBER, value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield abs(float(value))


def is_found(shown: Shown) -> bool:
    scales = SCALES.get(shown.unit, (1.0,))
    return any(
        abs(number * scale - shown.value) <= shown.half_step
        for name in shown.files
        for number in numbers_of(name)
        for scale in scales
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_in_a_file_that_is_named(page: str) -> None:
    lost = [
        f"{one.section}: {one.number} {one.unit} in {sorted(one.files)}: {one.line[:160]}"
        for one in figures_of(ROOT / page)
        if not is_found(one)
    ]
    assert not lost, "name the file, correct the figure, or list it as derived or as not measured"


@pytest.mark.parametrize("derived", DERIVED, ids=lambda one: f"{one.page}: {one.text}")
def test_derived_figures_are_what_the_files_give(derived: Derived) -> None:
    shown, values = re.findall(SIGNED, derived.text), derived.values()
    assert len(shown) == len(values)
    for number, value in zip(shown, values, strict=True):
        has_sign = number[0] in "+-"
        one = Shown(number, "", "", "", frozenset())
        off = (value if has_sign else abs(value)) - one.value
        assert abs(off) <= one.half_step, f"{number} is shown, the files give {value:.4g}"


@pytest.mark.parametrize(("page", "text"), [*((one.page, one.text) for one in DERIVED), *NOT_MEASURED])
def test_listed_texts_are_still_on_their_pages(page: str, text: str) -> None:
    assert text in text_of(ROOT / page)


def test_reasons_are_given() -> None:
    assert all(reason.strip() for reason in NOT_MEASURED.values())


def test_the_rule_sees_what_no_file_has() -> None:
    (numbers, unit), (other, _) = FIGURES.findall("it took 3.0 to 4.55 ms, or -7% less; see v2, 3 rows and 12 msgs")
    assert re.findall(NUMBER, numbers) == ["3.0", "4.55"]
    assert unit == "ms"
    assert other == "-7"
    name = "gpu-h200.json"
    assert is_found(Shown("8.4", "ms", "", "", frozenset({name})))
    assert not is_found(Shown("8.4321", "ms", "", "", frozenset({name})))
    assert not is_found(Shown("8.4", "ms", "", "", frozenset())), "without a file there is nothing to find"
