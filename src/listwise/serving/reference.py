"""A page that lists the HTTP interface; it loads nothing from other servers."""

import base64
import hashlib
import json
from html import escape
from typing import Any

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;"
    "margin:2rem auto;padding:0 1rem}code{font-size:.95em}section{margin:2rem 0}"
    "td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}"
)
# The content security policy allows this style alone beside the files of the server.
STYLE_POLICY = f"'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"


def reference_page(schema: dict[str, Any]) -> str:
    """The HTML page of an OpenAPI schema."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style><h1>{title}</h1>"
        f"<p>{escape(schema['info'].get('description', ''))} "
        '<a href="openapi.json">openapi.json</a> describes the same for programs.</p>'
        f"{operations}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (f"{given['name']} ({given['in']})", _shape(given["schema"]), given.get("description", ""))
        for given in operation.get("parameters", [])
    ]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows += [
            (f"{name} (form)", _shape(field), field.get("description", ""))
            for name, field in content["schema"].get("properties", {}).items()
        ]
    for status, response in operation["responses"].items():
        kinds = response.get("content", {})
        shapes = ", ".join(_shape(kind.get("schema", {})) or name for name, kind in kinds.items())
        rows.append((f"response {status}", shapes, response.get("description", "")))
    table = "".join(
        f"<tr><th>{escape(name)}</th><td><code>{escape(shape)}</code></td><td>{escape(text)}</td></tr>"
        for name, shape, text in rows
    )
    return (
        f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<p>{escape(operation.get('description', ''))}</p><table>{table}</table></section>"
    )


def _shape(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_shape(option) for option in schema["anyOf"])
    shape = str(schema.get("type", ""))
    if shape == "array":
        shape = f"list of {_shape(schema.get('items', {})) or 'any'}"
    return f"{shape} = {json.dumps(schema['default'])}" if "default" in schema else shape
