"""Write a page of queries, each with its results in two lists, one below the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from listwise.errors import InputError
from listwise.files import write_text
from listwise.results.report.template import fact_list, fill_page, read_part
from listwise.results.report.thumbnails import thumbnails

Frame = Literal["", "red", "green"]


@dataclass(frozen=True)
class ShownPhoto:
    """A photo on the page: its file, its caption, and the color of its frame."""

    path: str
    caption: str
    frame: Frame = ""


@dataclass(frozen=True)
class ShownQuery:
    """A query on the page: its photo, and its lists of results by their headings."""

    photo: ShownPhoto
    note: str
    lists: Mapping[str, Sequence[ShownPhoto]]


def write_queries(
    path: str | Path,
    title: str,
    facts: Mapping[str, str],
    note: str,
    queries: Sequence[ShownQuery],
) -> Path:
    """Write an HTML page of queries and their results, without external parts.

    Args:
        path: file to write.
        title: heading of the page.
        facts: names and values to show below the heading.
        note: sentence that explains the lists and the frames.
        queries: the queries.

    Returns:
        The path of the file.
    """
    path = Path(path)
    hits = [hit.path for query in queries for hits in query.lists.values() for hit in hits]
    photos = thumbnails(
        sorted(filter(None, set(hits))),
        sorted({query.photo.path for query in queries if query.photo.path}),
        [],
        lambda *_: None,
    )
    page = fill_page(
        read_part("queries.html"),
        title=escape(title),
        style=read_part("style.css") + read_part("queries.css"),
        facts=fact_list({escape(name): escape(fact) for name, fact in facts.items()}),
        note=escape(note),
        queries="".join(_query(query, photos) for query in queries),
    )
    try:
        write_text(path, page)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): give another file") from None
    return path


def _query(query: ShownQuery, photos: dict[str, str | None]) -> str:
    lists = "".join(
        f"<h3>{escape(heading)}</h3>{_list(hits, photos)}" for heading, hits in query.lists.items()
    )
    return (
        f'<section class="compared"><figure>{_photo(query.photo.path, photos)}'
        f"<figcaption>{escape(query.photo.caption)}<br>{escape(query.note)}"
        f'</figcaption></figure><div class="lists">{lists}</div></section>\n'
    )


def _list(hits: Iterable[ShownPhoto], photos: dict[str, str | None]) -> str:
    parts = []
    for hit in hits:
        kind = f' class="{hit.frame}"' if hit.frame else ""
        caption = f"<figcaption>{escape(hit.caption)}</figcaption>"
        parts.append(f"<li{kind}><figure>{_photo(hit.path, photos)}{caption}</figure></li>")
    return f"<ol>{''.join(parts)}</ol>"


def _photo(path: str, photos: dict[str, str | None]) -> str:
    uri = photos.get(path)
    return f'<img src="{uri}" alt="">' if uri else '<span class="none">no photo</span>'
