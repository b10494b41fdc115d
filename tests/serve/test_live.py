"""The dashboard as a page of its own, and what it asks for."""

import re

import pytest

from helmrec import __version__
from helmrec.engine.choose import device_name
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import rank_body


def test_the_page_loads_nothing_from_other_servers(caller: Caller) -> None:
    reply = caller.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    text = reply.body.decode()
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) == {"http://www.w3.org/2000/svg"}, "a name, never fetched"
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", text)
    assert caller.get("/openapi.json").json["paths"]["/v1/live"]["get"]["parameters"][0]["name"] == "after"


def test_a_look_shows_pool_pages_and_the_seconds_since(caller: Caller) -> None:
    caller.post("/v1/rank", rank_body())
    wait_for(lambda: len(caller.get("/v1/live").json["samples"]) >= 2)
    seen = caller.get("/v1/live").json
    assert (seen["model"], seen["status"], seen["slo_ms"]) == ("tiny", "ready", 80.0)
    assert len(seen["pages"]["cells"]) == seen["stats"]["pool"]["num_pages"] == 30
    assert seen["pages"]["cells"].count("1") == seen["stats"]["pool"]["emb_pages"]
    last = seen["samples"][-1]["number"]
    assert all(sample["number"] > last for sample in caller.get(f"/v1/live?after={last}").json["samples"])
    assert sum(sample["answered"] for sample in seen["samples"]) <= 1


def test_a_look_names_errors_by_cause_but_not_those_of_probes(caller: Caller) -> None:
    caller.post("/v1/rank", rank_body() | {"candidates": []})
    caller.get("/nowhere")
    caller.get("/readyz")
    seen = caller.get("/v1/live?most=0").json
    assert (seen["samples"], seen["errors"]) == ([], {"RequestError": 1, "Not Found": 1})
    assert 'helmrec_http_errors_total{cause="RequestError"} 1.0' in caller.get("/metrics").body.decode()
    assert (seen["version"], seen["device"], seen["replicas"]) == (__version__, device_name("cpu"), None)


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "9" * 30, ""])
def test_a_wrong_number_is_named(caller: Caller, after: str) -> None:
    reply = caller.get(f"/v1/live?after={after}")
    assert (reply.status, reply.json["field"]) == (400, "after")
