"""The Grafana dashboard and the alarms name only metrics, and labels of them, that a server has."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.asgi import Caller
from tests.serve.cases import events_body, rank_body

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "helmrec.json"
BOARD = json.loads(FILE.read_text())
ALARMS = (FILE.parent / "alerts.yml").read_text()
ALARM_EXPRESSIONS = re.findall(r"expr: (?:>-\n)?((?:.+\n)(?: {10}[>h].*\n)*)", ALARMS)
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
OF_PROMETHEUS = {"instance"}


def test_every_metric_and_label_it_names_exists(keeper: Caller) -> None:
    assert keeper.post("/v1/rank", rank_body()).status == 200
    assert keeper.post("/v1/events", events_body(0)).status == 200
    families = text_string_to_metric_families(keeper.get("/metrics").body.decode())
    labels: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in (*EXPRESSIONS, *ALARM_EXPRESSIONS):
        named = re.findall(r"(helmrec_\w+)(?:\{([^}]*)\})?", expression)
        assert named, expression
        for name, selector in named:
            assert name in labels, expression
            asked = set(re.findall(r"(\w+)=", selector))
            assert asked <= labels[name] | OF_PROMETHEUS, expression
        grouped = set(re.findall(r"by \((\w+)\)", expression))
        assert all(any(label in labels[name] for name, _ in named) for label in grouped), expression


@pytest.mark.parametrize("route", ["/v1/rank", "/v2/models/{name}/infer"])
def test_its_routes_are_those_of_ranking(route: str) -> None:
    patterns = {found for expression in EXPRESSIONS for found in re.findall(r'route=~"([^"]+)"', expression)}
    assert len(patterns) == 1
    assert re.fullmatch(patterns.pop(), route)


def test_an_alarm_stands_on_wrong_scores_and_every_alarm_says_what_it_means() -> None:
    assert len(ALARM_EXPRESSIONS) == ALARMS.count("- alert:") == ALARMS.count("summary:") == 11
    assert "increase(helmrec_audit_mismatches_total[10m]) > 0" in ALARM_EXPRESSIONS[0]


def test_panels_have_names_and_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
