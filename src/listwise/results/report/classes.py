"""The table of the classes of a labelled benchmark."""

import math
import re
from collections.abc import Sequence
from html import escape

from listwise.results.report.content import ClassResult, ModelResult
from listwise.results.table import change, percent

MOST = 500
"""Maximum number of classes in the table; those with the lowest mAP are shown."""


def class_table(models: Sequence[ModelResult]) -> str:
    """The section with the mAP of each class, lowest first; empty if there are no classes."""
    if not models[0].classes:
        return ""
    rows = sorted(zip(*(model.classes for model in models), strict=True), key=_lowest_first)
    protocols = list(models[0].figures)
    head = "".join(
        f'<th scope="col" class="first"><i class="swatch model{index}"></i>{escape(model.name)}'
        f"{_of(protocol, protocols)}</th>"
        for protocol in protocols
        for index, model in enumerate(models)
    )
    if len(models) == 2:
        head += "".join(f"<th>difference{_of(name, protocols)}</th>" for name in protocols)
    body = "".join(_row(row, protocols) for row in rows[:MOST])
    shown = (
        f"The {MOST} of {len(rows):,} classes with the lowest mAP"
        if len(rows) > MOST
        else (f"All {len(rows):,} classes")
    )
    return (
        '<section aria-labelledby="classes"><h2 id="classes">Classes: mAP, %, lowest first</h2>'
        '<div class="wide tall" tabindex="0" role="region" aria-labelledby="classes"><table>'
        f'<thead><tr><th scope="col">class</th><th scope="col">queries</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        f'<p class="note">{shown}. The mAP of a class is the mean AP of its queries.</p></section>'
    )


def breakable(name: str) -> str:
    """The HTML of a name that may be broken after punctuation."""
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[_./-])", name))


def _of(protocol: str, protocols: Sequence[str]) -> str:
    return f", {escape(protocol)}" if len(protocols) > 1 else ""


def _lowest_first(row: Sequence[ClassResult]) -> tuple[float, str]:
    values = [value for value in row[-1].ap.values() if not math.isnan(value)]
    return (sum(values) / len(values) if values else math.inf, row[-1].name)


def _row(row: Sequence[ClassResult], protocols: Sequence[str]) -> str:
    cells = [
        f'<td class="first">{percent(each.ap[protocol])}</td>'
        for protocol in protocols
        for each in row
    ]
    if len(row) == 2:
        for protocol in protocols:
            text = change(row[0].ap[protocol], row[1].ap[protocol])
            kind = {"+": "gain", "−": "loss"}.get(text[0], "change")
            cells.append(f'<td class="{kind}">{text}</td>')
    name = f'<th scope="row">{breakable(row[0].name)}</th>'
    return f"<tr>{name}<td>{row[0].queries}</td>{''.join(cells)}</tr>"
