"""Fill the template of a page: a single HTML file without external parts."""

import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from string import Template
from typing import Any

from listwise import __version__

PACKAGE = "listwise.results.report"
"""The package of the head of the pages and of the styles and scripts that pages share."""


def read_part(name: str, package: str = PACKAGE) -> str:
    """Return the text of a template, style or script of a package."""
    return files(package).joinpath(name).read_text("utf-8")


def fill_page(template: str, *, title: str, style: str, script: str = "", **parts: str) -> str:
    """Return a page whose security policy allows only its own style and script.

    Args:
        template: text with `$head`, `$title` and the names of other parts.
        title: title of the page, escaped.
        style: style sheet of the page.
        script: script of the page; the template has `$script` where it belongs.
        parts: HTML text for the other names in the template.
    """
    sources = f"style-src '{_digest(style)}'"
    if script:
        sources += f"; script-src '{_digest(script)}'"
    known = {"version": __version__, "title": title}
    head = Template(read_part("head.html")).substitute(known, sources=sources, style=style)
    page = Template(template).substitute(known, head=head, script=script, **parts)
    # File names may contain bytes that are not text; they become question marks.
    return page.encode("utf-8", "replace").decode("utf-8")


def fact_list(facts: Mapping[str, str]) -> str:
    """Return the terms and descriptions (HTML text) of a description list, without empty ones."""
    shown = ((name, text) for name, text in facts.items() if text)
    return "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in shown)


def json_for_html(content: Any) -> str:
    """Return content as JSON that is safe inside a script element of a page."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Only these characters could end the script element or start a comment.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
