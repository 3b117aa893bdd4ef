"""What a user wants of search, as options of the index commands."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.search import SearchIntent

Memory = Annotated[
    str | None, typer.Option(help="Maximum memory for search, such as 500MB or 2GB.")
]
Milliseconds = Annotated[
    float | None, typer.Option(help="Maximum time per query, in milliseconds.")
]
Recall = Annotated[
    float | None, typer.Option(help="Minimum recall of the ten nearest photos, from 0 to 1.")
]


def parse_intent(
    memory: str | None, milliseconds: float | None, recall: float | None
) -> "SearchIntent":
    """What a user wants of search."""
    from listwise.search.store import search_intent

    size = None if memory is None else _bytes(memory)
    return search_intent(size, milliseconds, recall)


def _bytes(text: str) -> int:
    """Parse a size such as 500MB or 2GB."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not found:
        raise InputError(f"`memory` takes a size such as 500MB or 2GB, not {text!r}")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))
