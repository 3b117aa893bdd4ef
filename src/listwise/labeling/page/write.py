"""Write the page as a single HTML file without external parts."""

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import Any

import numpy as np

from listwise.data.images import printable
from listwise.files import write_text
from listwise.labeling.comparisons import matching_points
from listwise.labeling.page import content
from listwise.labeling.page.content import ClassView, PhotoRow
from listwise.labeling.result import REASONS, Labels, short_names
from listwise.labeling.rounds import PhotoMatches
from listwise.results.report.classes import breakable
from listwise.results.report.template import fact_list, fill_page, json_for_html, read_part
from listwise.results.report.thumbnails import thumbnails

_POINTS = 60  # points drawn for a pair of photos; more would be unreadable


def write_page(
    labels: Labels,
    matches: PhotoMatches,
    command: str,
    on_progress: Callable[[int, int], object],
) -> None:
    """Write the page next to the table of labels.

    A large collection is shown in part, and the page tells how many of each are shown.
    """
    every = content.class_views(labels)
    shown = every[: content.CLASSES]
    pairs = content.shown_pairs(labels, shown)
    numbers = sorted(
        {i for pair in pairs for i in pair}
        | {i for view in shown for row in view.rows for i in row.photos}
        | {i for each in labels.copies[: content.COPIES] for i in each[: content.COPIES_EACH]}
    )
    place = {number: index for index, number in enumerate(numbers)}
    paths = [labels.images.paths[i] for i in numbers]
    pictures = thumbnails(paths, [], paths, on_progress)
    names = short_names(labels.images.ids)
    data = {
        "photos": [pictures[path] for path in paths],
        "names": [names[i] for i in numbers],
        "pairs": _pairs(matches, pairs, place),
    }
    draw = _Tiles(labels, names, place, {pair: number for number, pair in enumerate(pairs)})
    page = _page(
        title=escape(f"Labels: {labels.file.name}"),
        facts=_facts(labels, command),
        summary=_summary(labels),
        thresholds=_thresholds(labels),
        merges=_merges(labels, draw),
        copies=_copies(labels, draw),
        table=_table(every) if labels.labelled else "",
        classes="".join(_class(view, draw) for view in shown),
        classes_note=_classes_note(len(shown), len(every), labels.labelled),
        unreadable=_unreadable(labels),
        data=json_for_html(data),
    )
    write_text(labels.page, printable(page))


def _pairs(
    matches: PhotoMatches, pairs: Sequence[tuple[int, int]], place: dict[int, int]
) -> list[list[Any]]:
    """Return photos, number of inliers and points in thousandths of the sizes, for each pair."""
    table = matches.store.table()
    sizes = np.stack([table["width"], table["height"]], 1).astype(np.float64)
    found = []
    for (one, two), match in zip(pairs, matching_points(matches.store, pairs), strict=True):
        points = np.concatenate([match.query_points, match.points], axis=1)
        kept = points[np.linspace(0, len(points) - 1, min(_POINTS, len(points))).astype(int)]
        parts = np.clip((kept + 0.5) / np.concatenate([sizes[one], sizes[two]]), 0, 1)
        numbers = np.rint(1000 * parts).astype(int).ravel().tolist()
        found.append([place[one], place[two], match.inliers, numbers])
    return found


class _Tiles:
    """Draws lists of photos; a script adds the pictures and opens the matching points."""

    def __init__(
        self,
        labels: Labels,
        names: Sequence[str],
        place: dict[int, int],
        pairs: dict[tuple[int, int], int],
    ) -> None:
        self._labels, self._names, self._place, self._pairs = labels, names, place, pairs

    def tiles(self, photos: Sequence[int], kept: bool, partners: Sequence[int]) -> str:
        drawn = (
            self._tile(photo, kept, partner)
            for photo, partner in zip(photos, partners, strict=True)
        )
        return f'<ul class="tiles">{"".join(drawn)}</ul>'

    def row(self, row: PhotoRow) -> str:
        partners = [self._labels.photos[i].partner for i in row.photos]
        hidden = row.total - len(row.photos)
        more = f", {hidden} not shown" if hidden and row.photos else ""
        count = "1 photo" if row.total == 1 else f"{row.total:,} photos"
        head = f'<div class="row-head"><b>{escape(row.title)}</b><span>{count}{more}</span></div>'
        return f"<div>{head}{self.tiles(row.photos, row.kept, partners)}</div>"

    def _tile(self, photo: int, kept: bool, partner: int) -> str:
        mark, symbol = ("right", "✓") if kept else ("wrong", "✕")
        name = self._names[photo]
        pair = self._pairs.get((photo, partner))
        link = "" if pair is None else f' data-pair="{pair}"'
        chip = f'<i class="chip {mark}" aria-hidden="true">{symbol}</i>'
        return (
            f'<li class="tile {mark}" data-photo="{self._place[photo]}" data-mark="{mark}"{link}>'
            f'<div class="thumb">{chip}</div><div class="label">{breakable(name)}</div></li>'
        )


def _facts(labels: Labels, command: str) -> str:
    return fact_list(
        {
            "Photos": f"{len(labels):,}",
            "Date": f"<time>{datetime.now():%Y-%m-%d %H:%M}</time>",
            "Command": f"<code>{escape(command)}</code>" if command else "",
        }
    )


def _summary(labels: Labels) -> str:
    counts = labels.summary()
    total = max(1, counts["photos"])
    rows = [("Photos kept", counts["kept"], f"{100 * counts['kept'] / total:.0f} %")]
    rows.append(("Photos dropped", counts["dropped"], f"{100 * counts['dropped'] / total:.0f} %"))
    for reason, count in counts["reasons"].items():
        rows.append((f"– {REASONS[reason]}", count, f"{100 * count / total:.0f} %"))
    if labels.labelled:
        rows.append(("Classes before", counts["classes_before"], ""))
    rows.append(("Classes now", counts["classes"], ""))
    if labels.labelled:
        rows.append(("Pairs of classes that may show the same thing", counts["merges"], ""))
    rows.append(("Copies and near-duplicates", counts["copies"], ""))
    rows.append(("Pairs of photos compared", counts["pairs_compared"], ""))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{count:,}</td><td>{share}</td></tr>'
        for name, count, share in rows
    )
    return f'<div class="wide"><table><tbody>{body}</tbody></table></div>'


def _thresholds(labels: Labels) -> str:
    used = labels.settings
    return (
        f"Two photos match if at least {used.inliers} local features agree on one transform "
        f"between them (<code>inliers</code>). A match with fewer than {used.strong} joins two "
        "groups of three or more photos only together with a second match. Each photo was compared "
        f"with up to {used.partners} others (<code>partners</code>). A class has at least "
        f"{used.min_photos} photos (<code>min_photos</code>). If photos that belong together were "
        "dropped, compare each with more partners; if different things are in one class, raise "
        "<code>inliers</code>."
    )


def _merges(labels: Labels, draw: _Tiles) -> str:
    if not labels.merges:
        return ""
    cards = []
    for merge in labels.merges[: content.MERGES]:
        one, two = merge.photos
        pairs = "1 pair of photos matches" if merge.matches == 1 else f"{merge.matches} pairs match"
        state = "merged" if merge.merged else "not merged"
        cards.append(
            f'<article class="query pair"><header><h3>{breakable(merge.one)} and '
            f'{breakable(merge.two)}</h3><span class="ap"><small>{state}; {pairs}, best '
            f"{merge.inliers} inliers</small></span></header>"
            f"{draw.tiles(merge.photos, True, (two, one))}</article>"
        )
    note = _part(len(cards), len(labels.merges), "pair of classes", "pairs of classes")
    advice = "" if labels.settings.merge else " Use <code>merge</code> to merge them."
    return (
        '<section aria-labelledby="merges">'
        '<h2 id="merges">Classes that may show the same thing</h2>'
        f'<p class="note">{note}{advice}</p><div class="cards">{"".join(cards)}</div></section>'
    )


def _copies(labels: Labels, draw: _Tiles) -> str:
    if not labels.copies:
        return ""
    cards = []
    for numbers in labels.copies[: content.COPIES]:
        some = numbers[: content.COPIES_EACH]
        kept = bool(labels.photos[numbers[0]].label)
        classes = {labels.photos[i].given for i in numbers}
        several = "in different classes" if len(classes) > 1 else ""
        cards.append(
            f'<article class="query pair"><header><h3>{len(numbers)} copies</h3>'
            f'<span class="ap"><small>{several}</small></span></header>'
            f"{draw.tiles(some, kept, [some[0]] * len(some))}</article>"
        )
    note = _part(len(cards), len(labels.copies), "set of copies", "sets of copies")
    return (
        '<section aria-labelledby="copies"><h2 id="copies">Copies and near-duplicates</h2>'
        f'<p class="note">{note} They are kept; the table names the original of each copy.</p>'
        f'<div class="cards">{"".join(cards)}</div></section>'
    )


def _part(shown: int, total: int, one: str, several: str) -> str:
    if shown < total:
        return f"{shown} of {total:,} {several} are shown."
    return f"1 {one}." if total == 1 else f"{total:,} {several}."


def _table(views: Sequence[ClassView]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{breakable(view.name)}</th><td>{view.total}</td><td>{view.kept}</td>'
        f"<td>{100 * view.kept / view.total:.0f} %</td><td>{view.groups}</td></tr>"
        for view in views[: content.ROWS]
    )
    note = _part(min(len(views), content.ROWS), len(views), "class", "classes")
    return (
        '<section aria-labelledby="table"><h2 id="table">Classes, smallest share kept first</h2>'
        '<div class="wide tall" tabindex="0" role="region" aria-labelledby="table"><table><thead>'
        '<tr><th scope="col">class</th><th scope="col">photos</th><th scope="col">kept</th>'
        '<th scope="col">share</th><th scope="col">groups</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="note">{note}</p></section>'
    )


def _class(view: ClassView, draw: _Tiles) -> str:
    rows = "".join(map(draw.row, view.rows))
    return (
        f'<article class="query" data-name="{escape(view.name)}"><header>'
        f'<h3>{breakable(view.name)}</h3><span class="ap"><small>kept</small> <b>{view.kept}</b> '
        f'<small>of {view.total}</small></span></header><div class="rows">{rows}</div></article>'
    )


def _classes_note(shown: int, total: int, labelled: bool) -> str:
    if shown == total:
        return f"All {total:,} classes are shown."
    chosen = "the smallest share of photos kept" if labelled else "most photos"
    return f"The {shown} of {total:,} classes with {chosen} are shown."


def _unreadable(labels: Labels) -> str:
    if not labels.errors:
        return ""
    lines = content.unreadable(labels)
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    note = _part(len(lines), len(labels.errors), "photo", "photos")
    return (
        '<section aria-labelledby="unreadable"><h2 id="unreadable">Photos that cannot be read</h2>'
        f'<p class="note">{note}</p><ul>{items}</ul></section>'
    )


def _page(**parts: str) -> str:
    own = "listwise.labeling.page"
    style = read_part("style.css") + read_part("matches.css") + read_part("page.css", own)
    script = read_part("matches.js") + read_part("page.js", own)
    return fill_page(read_part("page.html", own), style=style, script=script, **parts)
