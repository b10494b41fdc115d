"""One HTML file of all results of a tier, with everything in it: plots, tables, paper beside ours, verdicts.

Verdicts are computed here, from the figures by the rules of the experiments: a file cannot claim one.
"""

import html
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import get_args

from helmrec_bench.experiments.experiment import Experiment, Measured
from helmrec_bench.experiments.registry import EXPERIMENTS
from helmrec_bench.experiments.results import Result, read_measured, read_results, verdicts
from helmrec_bench.lab.place import Place
from helmrec_bench.lab.tiers import TIERS
from helmrec_bench.report.claims import OUR_WORDS, WORDS, Finding, Verdict

_CLASS: dict[Finding, str] = {"reproduced": "reproduced", "partly": "partly", "not": "not", "not judged": "unjudged"}


def write_report(place: Place, tier: str) -> Path:
    results = read_results(place.build, tier)
    path = place.build / tier / "report.html"
    path.write_text(report_html(results, read_measured(place.measurements), tier))
    return path


def report_html(results: Mapping[str, Result], measured: Measured, tier: str) -> str:
    """Of the experiments that were run, in the order of the registry."""
    ran = {name: one for name, one in EXPERIMENTS.items() if name in results}
    judged = {name: verdicts(one, results[name]["figures"], tier) for name, one in ran.items()}
    style = (resources.files("helmrec_bench.experiments") / "report.css").read_text()
    sections = "\n".join(_section(one, results[name], judged[name], measured) for name, one in ran.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>HelmRec: the evaluation</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{style}</style></head>\n<body><main>\n"
        f"{_header(results, tier)}\n{_tally(judged)}\n{_claims(ran, judged)}\n{sections}\n{_missing(results)}\n"
        "</main></body></html>\n"
    )


def _header(results: Mapping[str, Result], tier: str) -> str:
    first = next(iter(results.values()))
    commits = ", ".join(sorted({result["commit"] for result in results.values()}))
    hardware = first["hardware"]
    banner = "" if TIERS[tier].is_judged else (
        '<p class="banner">Smoke tier: tiny nodes, seconds of traffic, one seed. It shows that every experiment runs; '
        "its figures mean nothing and nothing is judged.</p>"
    )  # fmt: skip
    return (
        "<header><h1>HelmRec: the evaluation</h1>"
        "<p>Every figure and table of HELM (“One Pool, Two Caches”, arXiv 2605.04450), what its reviewers asked for, "
        "and ours beside it.</p>"
        f"<p>Tier <b>{tier}</b>, {_seeds(first)}, commit <code>{html.escape(commits)}</code>, costs of "
        f"<b>{html.escape(first['calibration'])}</b>, on {html.escape(hardware['cpu'])}, {hardware['cores']} cores. "
        f"<code>helmrec bench all --{tier}</code> makes it again.</p></header>{banner}"
    )


def _chip(verdict: Verdict) -> str:
    words = WORDS if verdict.is_papers else OUR_WORDS
    return f'<span class="chip {_CLASS[verdict.finding]}">{words[verdict.finding]}</span>'


def _tally(judged: Mapping[str, list[Verdict]]) -> str:
    every = [verdict for ones in judged.values() for verdict in ones]
    items = ""
    for whose, is_papers, words in (("of the paper's claims", True, WORDS), ("of our own bounds", False, OUR_WORDS)):
        counts = Counter(verdict.finding for verdict in every if verdict.is_papers == is_papers)
        items += "".join(
            f'<li><b>{counts[one]}</b><span class="chip {_CLASS[one]}">{words[one]}</span> {whose}</li>'
            for one in get_args(Finding)
            if counts[one]
        )
    return f'<ul class="tally">{items}</ul>'


def _claims(ran: Mapping[str, Experiment], judged: Mapping[str, list[Verdict]]) -> str:
    """The paper's first, then ours."""
    pairs = [(ran[name], verdict) for name, ones in judged.items() for verdict in ones]
    pairs.sort(key=lambda pair: not pair[1].is_papers)
    rows = "".join(
        f"<tr><td>{html.escape(verdict.claim)}</td><td>{html.escape(verdict.paper)}</td>"
        f"<td>{html.escape(verdict.ours)}</td><td>{_chip(verdict)}</td>"
        f'<td><a href="#{one.name}">{html.escape(one.title)}</a></td></tr>'
        for one, verdict in pairs
    )
    return (
        '<section><h2>Claim by claim</h2><p class="about">Rules and reasons stand with each experiment below.</p>'
        '<div class="scroll"><table class="claims"><thead><tr><th>claim</th><th>paper</th><th>ours</th><th>verdict</th>'
        f"<th>experiment</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _section(one: Experiment, result: Result, judged: list[Verdict], measured: Measured) -> str:
    blocks = "\n".join(block.html() for block in one.show(result["figures"], measured))
    scenarios = ", ".join(f"<code>{html.escape(name)}</code>" for name in result["scenarios"])
    return (
        f'<section id="{one.name}"><span class="source">{html.escape(one.source)}</span>'
        f"<h2>{html.escape(one.title)}</h2>"
        f'<p class="about">{html.escape(one.shows)} <b>Run here:</b> {html.escape(one.ran)}</p>'
        f"{''.join(_verdict(verdict) for verdict in judged)}{blocks}"
        f"<footer>Scenarios {scenarios}; {_seeds(result)}; <code>{html.escape(result['command'])}</code>; "
        f"{result['times']['wall_s']:,.0f} s, pieces kept from before not counted.</footer></section>"
    )


def _verdict(verdict: Verdict) -> str:
    return (
        f'<div class="verdict {_CLASS[verdict.finding]}"><p>{_chip(verdict)} '
        f"{html.escape(verdict.claim)}: <b>{html.escape(verdict.ours)}</b>{_beside(verdict)}.</p>"
        f'<p class="why">{html.escape(verdict.reason)}.<br>Rule: {html.escape(verdict.rule)}.</p></div>'
    )


def _beside(verdict: Verdict) -> str:
    return f"; paper: {html.escape(verdict.paper)}" if verdict.is_papers else ""


def _missing(results: Mapping[str, Result]) -> str:
    missing = [one.title for name, one in EXPERIMENTS.items() if name not in results]
    return f'<p class="banner">Not run: {html.escape(", ".join(missing))}.</p>' if missing else ""


def _seeds(result: Result) -> str:
    return "1 seed" if len(result["seeds"]) == 1 else f"{len(result['seeds'])} seeds"
