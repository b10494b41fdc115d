"""The page at /docs: every call of the API, without a request to another host."""

import re
from html import escape

from tests.serve.asgi import Caller


def test_the_page_shows_every_call_and_type(caller: Caller) -> None:
    reply, document = caller.get("/docs"), caller.get("/openapi.json").json
    page = reply.body.decode()
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            assert f"<b>{method.upper()}</b> <code>{path}</code> {escape(about['summary'])}" in page
    linked, shown = set(re.findall(r'href="#(\w+)"', page)), set(re.findall(r'id="(\w+)"', page))
    assert linked <= shown == document["components"]["schemas"].keys()


def test_the_page_loads_nothing_and_runs_no_script(caller: Caller) -> None:
    reply = caller.get("/docs")
    page = reply.body.decode()
    assert "//" not in page.replace("<!doctype html>", "")
    assert "<script" not in page
    assert reply.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
