"""Write the report as a single HTML file without external parts."""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from listwise.data.images import ImageError, image_size
from listwise.errors import InputError
from listwise.files import write_text
from listwise.results.report.classes import breakable, class_table
from listwise.results.report.content import (
    ListEntry,
    Match,
    ModelResult,
    QueryResult,
    RankedList,
    TableRow,
)
from listwise.results.report.curves import draw_curves
from listwise.results.report.template import fact_list, fill_page, json_for_html, read_part
from listwise.results.report.thumbnails import thumbnails
from listwise.results.table import change as change_text
from listwise.results.table import percent


def write_report(
    path: str | Path,
    title: str,
    models: Sequence[ModelResult],
    *,
    benchmark: str = "",
    command: str = "",
    date: datetime | None = None,
    table: Sequence[TableRow] = (),
    notes: Sequence[str] = (),
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Write the HTML report of one model, or of two models side by side, on a benchmark.

    Args:
        path: file to write.
        title: heading of the page.
        models: what `report_models` returned; two models have the same protocols and queries.
        benchmark: name of the benchmark.
        command: command to show.
        date: date to show; now by default.
        table: further rows of the table of metrics.
        notes: sentences to show below the table.
        on_progress: called with the number of thumbnails done and in total.

    Returns:
        The path of the file.
    """
    _check(models)
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent} for the report: create it first")
    queries = [query for model in models for query in model.queries]
    entries = [e for query in queries for ranked in query.lists.values() for e in ranked.entries]
    found = {entry.path for entry in entries}
    query_paths = {query.path for query in models[0].queries}
    matched = {entry.path for entry in entries if entry.matches}
    photos = thumbnails(sorted(found), sorted(query_paths), sorted(matched), on_progress)
    every_note = dict.fromkeys([*notes, *(model.note for model in models if model.note)])
    page = _page(
        with_points=any(entry.inliers is not None for entry in entries),
        title=escape(title),
        facts=_facts(models, benchmark, command, date or datetime.now()),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in every_note),
        data=_data(models, photos, {entry.path: entry.name for entry in entries}),
        **_table([*(TableRow(model.name, model.figures) for model in models), *table], models),
        **_curves(models),
        classes=class_table(models),
    )
    try:
        write_text(path, page)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): give another file") from None
    return path


def _check(models: Sequence[ModelResult]) -> None:
    if len(models) not in (1, 2):
        raise InputError(f"a report shows one or two models, not {len(models)}")
    first = models[0]
    if not first.figures or not first.queries:
        raise InputError(f"{first.name} has no protocol or no query: nothing to report")
    for model in models[1:]:
        if list(model.figures) != list(first.figures):
            raise InputError(
                f"{first.name} and {model.name} have different protocols: give the same benchmark"
            )
        if [query.name for query in model.queries] != [query.name for query in first.queries]:
            raise InputError(
                f"{first.name} and {model.name} have different queries: give the same benchmark"
            )


def _facts(models: Sequence[ModelResult], benchmark: str, command: str, date: datetime) -> str:
    names = "".join(
        f'<span class="model"><i class="swatch model{index}"></i>{escape(model.name)}</span>'
        for index, model in enumerate(models)
    )
    return fact_list(
        {
            "Benchmark": escape(benchmark),
            "Models" if len(models) > 1 else "Model": names,
            "Date": f"<time>{date:%Y-%m-%d %H:%M}</time>",
            "Command": f"<code>{escape(command)}</code>" if command else "",
        }
    )


def _table(rows: Sequence[TableRow], models: Sequence[ModelResult]) -> dict[str, str]:
    columns = _columns(rows)
    spans: dict[str, int] = {}
    for protocol, _ in columns:
        spans[protocol] = spans.get(protocol, 0) + 1
    starts = {next(column for column in columns if column[0] == protocol) for protocol in spans}
    figures = {column: [_figure(row, column) for row in rows] for column in columns}
    best = {
        column: percent(max((value for value in found if value == value), default=math.nan))
        for column, found in figures.items()
    }

    def line(name: str, cells: Iterable[str], kind: str = "") -> str:
        return f'<tr{kind}><th scope="row">{name}</th>{"".join(cells)}</tr>'

    def cell(row: TableRow, column: tuple[str, str]) -> str:
        shown = percent(_figure(row, column))
        leads = len(rows) > 1 and shown == best[column] and shown != "–"
        return f"<td{_classes(first=column in starts, best=leads)}>{shown}</td>"

    def difference(column: tuple[str, str]) -> str:
        change = change_text(_figure(rows[0], column), _figure(rows[1], column))
        classes = _classes(first=column in starts, gain=change[0] == "+", loss=change[0] == "−")
        return f"<td{classes}>{change}</td>"

    lines = []
    for index, row in enumerate(rows):
        swatch = f'<i class="swatch model{index}"></i>' if index < len(models) else ""
        lines.append(line(swatch + breakable(row.name), (cell(row, column) for column in columns)))
    if len(models) == 2:
        lines.insert(2, line("difference", map(difference, columns), ' class="change"'))
    top = "".join(
        f'<th colspan="{span}" scope="colgroup" class="first">{escape(name)}</th>'
        for name, span in spans.items()
    )
    second = "".join(
        f'<th scope="col"{_classes(first=column in starts)}>{escape(column[1])}</th>'
        for column in columns
    )
    return {"protocols": top, "metrics": second, "rows": "".join(lines)}


def _columns(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Return (protocol, metric) for all metrics of any row, protocol by protocol."""
    metrics: dict[str, dict[str, None]] = {}
    for row in rows:
        for protocol, figures in row.figures.items():
            metrics.setdefault(protocol, {}).update(dict.fromkeys(figures))
    return [(protocol, metric) for protocol, names in metrics.items() for metric in names]


def _figure(row: TableRow, column: tuple[str, str]) -> float:
    protocol, metric = column
    return row.figures.get(protocol, {}).get(metric, math.nan)


def _classes(**given: bool) -> str:
    names = " ".join(name for name, holds in given.items() if holds)
    return f' class="{names}"' if names else ""


def _curves(models: Sequence[ModelResult]) -> dict[str, str]:
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 28 8" aria-hidden="true">'
        f'<path class="curve model{index}" d="M0 4H28"/></svg>{escape(model.name)}</li>'
        for index, model in enumerate(models)
    )
    figures = []
    for protocol in models[0].curves:
        drawn = draw_curves([model.curves[protocol] for model in models], protocol)
        values = [model.figures[protocol].get("mAP", math.nan) for model in models]
        caption = " → ".join(percent(value) for value in values)
        figures.append(
            f"<figure><figcaption><b>{escape(protocol)}</b> mAP {caption}</figcaption>{drawn}"
            "</figure>"
        )
    return {"legend": legend, "plots": "".join(figures)}


def _data(
    models: Sequence[ModelResult], photos: dict[str, str | None], names: dict[str, str]
) -> str:
    """Return all ranked lists as JSON that is safe inside HTML."""
    places = {path: place for place, path in enumerate(photos)}
    protocols = list(models[0].figures)
    points: _Points = {}
    content = {
        "models": [model.name for model in models],
        "protocols": protocols,
        "photos": list(photos.values()),
        "names": [names.get(path, "") for path in photos],
        "chart": {
            "names": models[0].names,
            "ap": [[_rounded(model.ap[protocol]) for protocol in protocols] for model in models],
            "places": models[0].places,
        },
        "queries": [
            {
                "name": query.name,
                "photo": places[query.path],
                "box": _fractions(query),
                "lists": [
                    [
                        _list(model.queries[number].lists[protocol], places, points)
                        for protocol in protocols
                    ]
                    for model in models
                ],
            }
            for number, query in enumerate(models[0].queries)
        ],
    }
    if points:
        content["matches"] = [
            [inliers, [round(1000 * part) for match in matches or () for part in match]]
            for inliers, matches in points
        ]
    return json_for_html(content)


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(float(value), 4) for value in values]


_Points = dict[tuple[int, tuple[Match, ...] | None], int]
"""The position in the data of each set of points; several protocols may share one."""


def _list(ranked: RankedList, places: dict[str, int], points: _Points) -> dict[str, Any]:
    return {
        "ap": ranked.ap,
        "found": ranked.found,
        "positives": ranked.positives,
        "hidden": ranked.hidden_junk,
        "entries": [_entry(entry, places, points) for entry in ranked.entries],
    }


def _entry(entry: ListEntry, places: dict[str, int], points: _Points) -> list[Any]:
    score = round(entry.score, 4) if math.isfinite(entry.score) else None
    written = [places[entry.path], score, entry.mark, entry.rank]
    if entry.inliers is not None:
        written.append(points.setdefault((entry.inliers, entry.matches), len(points)))
    return written


def _fractions(query: QueryResult) -> list[float] | None:
    """Return left, top, right and bottom of the query's box as fractions of the photo's size."""
    if query.box is None:
        return None
    try:
        size = image_size(query.path)
    except ImageError:
        return None
    return [
        round(min(max(edge / length, 0.0), 1.0), 4)
        for edge, length in zip(query.box, size * 2, strict=True)
    ]


def _page(with_points: bool, **parts: str) -> str:
    style, script = read_part("style.css"), read_part("script.js")
    if with_points:
        style, script = style + read_part("matches.css"), read_part("matches.js") + script
    parts["lists"] = read_part("lists.html")
    return fill_page(read_part("page.html"), style=style, script=script, **parts)
