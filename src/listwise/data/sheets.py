"""Draw ranked lists as one picture: rows of photos in colored frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont, ImageOps

from listwise.data import ImageError, load_image
from listwise.data.images import Box

Mark = Literal["query", "right", "wrong", "junk"]
COLORS: dict[Mark, tuple[int, int, int]] = {
    "query": (58, 98, 204),
    "right": (38, 158, 84),
    "wrong": (214, 64, 58),
    "junk": (168, 168, 168),
}
FRAME, GAP = 5, 6
SIDE, COLUMNS, LARGE_SIDE = 96, 6, 176


@dataclass(frozen=True)
class Tile:
    """A photo or its box, and whether it is the query, right, wrong or junk."""

    path: str
    mark: Mark
    box: Box | None = None


def load_thumbnail(path: str, box: Box | None, side: int) -> Image.Image:
    """Load a photo or its box as a square; gray if it cannot be read."""
    try:
        photo = load_image(path, box, min_side=side)
    except ImageError:
        return Image.new("RGB", (side, side), "lightgray")
    return ImageOps.fit(photo, (side, side), Image.Resampling.BICUBIC)


def ranked_sheet(
    rows: Sequence[Sequence[Tile]], captions: Sequence[str] | None = None
) -> Image.Image:
    """Draw a row of photos for each list, with a gap between a query and its results."""
    tile = SIDE + 2 * FRAME + GAP
    left = 0
    font = ImageFont.load_default(size=15)
    if captions:
        left = GAP + max(round(font.getlength(caption)) for caption in captions) + GAP
    width = left + max(len(row) for row in rows) * tile + 2 * GAP
    sheet = Image.new("RGB", (width, len(rows) * tile + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for line, row in enumerate(rows):
        top = GAP + line * tile
        if captions:
            draw.text((GAP, top + tile // 2), captions[line], "black", font, anchor="lm")
        for column, entry in enumerate(row):
            apart = GAP if column and row[0].mark == "query" else 0
            photo = load_thumbnail(entry.path, entry.box, SIDE)
            framed = ImageOps.expand(photo, FRAME, COLORS[entry.mark])
            sheet.paste(framed, (left + GAP + column * tile + apart, top))
    return sheet


def contact_sheet(
    queries: Sequence[Image.Image], found: Sequence[tuple[Image.Image, str, str]]
) -> Image.Image:
    """Draw the photos found, best first, with two lines of text each, below the query."""
    font = ImageFont.load_default(size=13)
    line, tile = 18, LARGE_SIDE + 2 * GAP
    asked = [(photo, "query", "") for photo in queries]
    parts: list[tuple[Mark, Sequence[tuple[Image.Image, str, str]]]]
    parts = [("query", asked), ("junk", found)]
    rows = [
        (mark, each[i : i + COLUMNS]) for mark, each in parts for i in range(0, len(each), COLUMNS)
    ]
    width, height = max(len(row) for _, row in rows), tile + FRAME + 2 * line
    sheet = Image.new("RGB", (width * tile + 2 * GAP, len(rows) * height + 2 * GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (mark, row) in enumerate(rows):
        bottom = 2 * GAP + number * height + LARGE_SIDE + FRAME
        for column, (photo, first, second) in enumerate(row):
            left = 2 * GAP + column * tile
            small = ImageOps.contain(photo, (LARGE_SIDE, LARGE_SIDE), Image.Resampling.BICUBIC)
            framed = ImageOps.expand(small, FRAME // 2, COLORS[mark])
            sheet.paste(framed, (left, bottom - framed.height))
            draw.text((left, bottom + 2), first, "black", font)
            shown = _shortened(second, font, LARGE_SIDE)
            draw.text((left, bottom + 2 + line), shown, (110, 110, 110), font)
    return sheet


def _shortened(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a text to a width by leaving out its middle: both ends of a path matter."""
    keep = len(text)
    shown = text
    while font.getlength(shown) > width and keep > 8:
        keep -= 1
        shown = f"{text[: keep // 3]}...{text[len(text) - keep * 2 // 3 :]}"
    return shown
