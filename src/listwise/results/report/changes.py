"""Write the changes of an upgrade as a page: the queries whose results differ most."""

from collections.abc import Container, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from listwise import __version__
from listwise.errors import InputError
from listwise.files import write_text
from listwise.results.report.page import source_digest
from listwise.results.report.thumbnails import thumbnails
from listwise.search.changes import ResultChange, UpgradeChanges
from listwise.search.hits import Hit

SHOWN = 100
"""Maximum number of queries on the page."""


def write_changes(path: str | Path, title: str, changes: UpgradeChanges) -> Path:
    """Write an HTML page of the queries whose results changed most, without external parts.

    Args:
        path: file to write.
        title: heading of the page.
        changes: what `Index.changes` returned.

    Returns:
        The path of the file.
    """
    path = Path(path)
    shown = changes.queries[:SHOWN]
    hits = [hit.path for change in shown for hit in (*change.before, *change.after)]
    queries = [change.query.path for change in shown]
    photos = thumbnails(
        sorted(filter(None, set(hits))), sorted(filter(None, set(queries))), [], lambda *_: None
    )
    facts = {
        "Queries": str(len(changes.queries)),
        f"Results kept, of the first {changes.k}": f"{100 * changes.kept:.1f} %",
        "Queries with the same first result": f"{100 * changes.same_first:.1f} %",
        "Queries on this page": str(len(shown)),
    }
    style = _read("style.css") + _read("changes.css")
    page = Template(_read("changes.html")).substitute(
        style_digest=source_digest(style),
        version=__version__,
        style=style,
        title=escape(title),
        facts="".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts.items()),
        queries="".join(_query(change, photos) for change in shown),
    )
    try:
        # File names may contain bytes that are not text; they become question marks.
        write_text(path, page.encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): give another file") from None
    return path


def _query(change: ResultChange, photos: dict[str, str | None]) -> str:
    before, after = ({hit.id for hit in hits} for hits in (change.before, change.after))
    return (
        f'<section class="change"><figure>{_photo(change.query.path, photos)}'
        f"<figcaption>{escape(change.query.id)}<br>{change.kept} of {len(change.before)} kept"
        '</figcaption></figure><div class="lists">'
        f"<h3>before</h3>{_list(change.before, after, 'gone', photos)}"
        f"<h3>after</h3>{_list(change.after, before, 'new', photos)}</div></section>\n"
    )


def _list(
    hits: Sequence[Hit], others: Container[str], mark: str, photos: dict[str, str | None]
) -> str:
    parts = []
    for hit in hits:
        kind = "" if hit.id in others else f' class="{mark}"'
        caption = f"<figcaption>{hit.score:.3f} {escape(hit.id)}</figcaption>"
        parts.append(f"<li{kind}><figure>{_photo(hit.path, photos)}{caption}</figure></li>")
    return f"<ol>{''.join(parts)}</ol>"


def _photo(path: str, photos: dict[str, str | None]) -> str:
    uri = photos.get(path)
    return f'<img src="{uri}" alt="">' if uri else '<span class="none">no photo</span>'


def _read(name: str) -> str:
    return files("listwise.results.report").joinpath(name).read_text("utf-8")
