"""The page at `/docs`: the OpenAPI document as HTML. It has no script and loads nothing."""

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
:root { color-scheme: light dark }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8886; border-radius: 4px }
summary { cursor: pointer; padding: .3rem 0 }
b { display: inline-block; min-width: 4.5rem }
"""
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "cache-control": "no-cache",
}


def api_page(document: dict[str, Any]) -> bytes:
    """Render an OpenAPI document."""
    operations = [
        _operation(method.upper(), path, about)
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    ]
    schemas = [
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> {escape(schema.get("description", ""))}'
        f"</summary>{_json(schema)}</details>"
        for name, schema in document["components"]["schemas"].items()
    ]
    title = f"{document['info']['title']} API, version {document['info']['version']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        '<p>The same as a document for tools: <a href="openapi.json">openapi.json</a>. <a href="./">Dashboard</a>.</p>',
        *("<h2>Calls</h2>", *operations, "<h2>Types</h2>", *schemas),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en">{head}<style>{_STYLE}</style>{"".join(body)}</html>\n'.encode()


def _operation(method: str, path: str, about: dict[str, Any]) -> str:
    parameters = [
        f"<li><code>{escape(each['name'])}</code> in the {each['in']}: {_schema(each['schema'])}</li>"
        for each in about["parameters"]
    ]
    contents = [
        ("Body", about.get("requestBody", {}).get("content", {})),
        ("200", about["responses"]["200"]["content"]),
    ]
    lines = [
        f"<li>{label}, <code>{escape(kind)}</code>: {_schema(content['schema'])}</li>"
        for label, content_of in contents
        for kind, content in content_of.items()
    ]
    errors = ", ".join(status for status in about["responses"] if status != "200")
    admin = " (needs the admin token)" if "security" in about else ""
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {escape(about['summary'])}{admin}</summary>"
        f"<ul>{''.join(parameters + lines)}<li>Errors: {errors}</li></ul></details>"
    )


def _schema(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    return f"<code>{escape(json.dumps(schema))}</code>" if schema else "any"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"
