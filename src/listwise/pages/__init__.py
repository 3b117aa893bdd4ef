"""Pages as single HTML files without external parts, from the templates in `templates/`."""

import math
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from listwise import __version__
from listwise.errors import InputError
from listwise.files import write_text
from listwise.progress import count_of


def write_page(
    path: Path, template: str, styles: Sequence[str], scripts: Sequence[str] = (), **values: Any
) -> None:
    """Write a page whose security policy allows only its own style and script.

    Args:
        path: file to write.
        template: name of the template.
        styles: names of the style sheets.
        scripts: names of the scripts, which read the value `data` as JSON.
        values: what the template shows.
    """
    text = render(template, styles, scripts, **values)
    try:
        # File names may contain bytes that are not text; they become question marks.
        write_text(path, text.encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): give another file") from None


def render(template: str, styles: Sequence[str], scripts: Sequence[str] = (), **values: Any) -> str:
    """Return the text of a page; the arguments are those of `write_page`."""
    style, script = ("".join(map(_read, names)) for names in (styles, scripts))
    sources = f"style-src '{_digest(style)}'"
    if script:
        sources += f"; script-src '{_digest(script)}'"
    page = _environment().get_template(template)
    return page.render(
        values, style=Markup(style), script=Markup(script), sources=sources, version=__version__
    )


def render_text(template: str, **values: Any) -> str:
    """Return the text that a template without styles and scripts makes of some values."""
    return _environment().get_template(template).render(values) + "\n"


def notebook_html(
    title: str, photos: Sequence[tuple[bytes, str]] = (), rows: Sequence[tuple[str, object]] = ()
) -> str:
    """Return what a notebook shows of an object.

    Args:
        title: sentence above the rest.
        photos: JPEG files with their captions.
        rows: names and values of a table.
    """
    return render_text("notebook.html", title=title, rows=rows, photos=photos)


def percent(value: float) -> str:
    """Format a value in percent with one decimal; a dash for NaN."""
    return "–" if value != value else f"{100 * value:.1f}"


def change(before: float, after: float) -> str:
    """Format the difference of two values after rounding them as `percent` shows them."""
    if math.isnan(before) or math.isnan(after):
        return "–"
    difference = round(round(100 * after, 1) - round(100 * before, 1), 1)
    return f"{difference:+.1f}".replace("-", "−") if difference else "0.0"


def _breakable(name: str) -> Markup:
    """Return the HTML of a name that may be broken after punctuation."""
    return Markup("<wbr>").join(map(escape, re.split(r"(?<=[_./-])", name)))


def _cell(text: object) -> str:
    """Return a text as it stands in a table in Markdown."""
    return str(text).replace("|", "\\|")


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("listwise.pages"),
        autoescape=lambda name: name is None or not name.endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"base64": lambda content: b64encode(content).decode()}
    found.filters |= {"percent": percent, "breakable": _breakable, "cell": _cell}
    found.globals |= {"change": change, "count_of": count_of}
    found.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    return found


def _read(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
