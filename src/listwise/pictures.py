"""Ranked lists as one picture: photos in rows, each in a frame that says what it is."""

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


@dataclass(frozen=True)
class Tile:
    """A photo (or its box) and what it is to the query."""

    path: str
    mark: Mark
    box: Box | None = None


def ranked_sheet(
    rows: Sequence[Sequence[Tile]], captions: Sequence[str] | None = None, side: int = 96
) -> Image.Image:
    """A row of photos for each list; a query is set apart from what was found for it."""
    tile = side + 2 * FRAME + GAP
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
            sheet.paste(_framed(entry, side), (left + GAP + column * tile + apart, top))
    return sheet


def _framed(tile: Tile, side: int) -> Image.Image:
    try:
        photo = load_image(tile.path, tile.box, min_side=side)
    except ImageError:
        photo = Image.new("RGB", (side, side), "lightgrey")
    photo = ImageOps.fit(photo, (side, side), Image.Resampling.BICUBIC)
    return ImageOps.expand(photo, FRAME, COLORS[tile.mark])


def contact_sheet(
    queries: Sequence[Image.Image],
    found: Sequence[tuple[Image.Image, str]],
    columns: int = 6,
    side: int = 168,
) -> Image.Image:
    """The photos found, best first, a caption below each; what was asked for stands above them."""
    font = ImageFont.load_default(size=13)
    line = 20
    step, tall = side + 2 * FRAME + 2 * GAP, side + 2 * FRAME + line + GAP
    rows = -(-len(found) // columns)
    above = -(-len(queries) // columns)
    sheet = Image.new(
        "RGB", (columns * step + GAP, (above + rows) * tall + 2 * GAP + (above and GAP)), "white"
    )
    draw = ImageDraw.Draw(sheet)

    def put(number: int, top: int, photo: Image.Image, caption: str, mark: Mark) -> None:
        x, y = GAP + number % columns * step, top + number // columns * tall
        tile = ImageOps.contain(photo, (side, side), Image.Resampling.BICUBIC)
        framed = ImageOps.expand(tile, FRAME, COLORS[mark])
        x += (side + 2 * FRAME - framed.width) // 2
        y += side + 2 * FRAME - framed.height
        sheet.paste(framed, (x, y))
        shown = _shortened(caption, font, framed.width + GAP)
        draw.text((x + FRAME, y + framed.height + 2), shown, "black", font)

    for number, photo in enumerate(queries):
        put(number, GAP, photo, "query", "query")
    top = GAP + above * tall + (above and GAP)
    for number, (photo, caption) in enumerate(found):
        put(number, top, photo, caption, "junk")
    return sheet


def _shortened(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """A text that fits, its middle left out if need be: both ends of a path tell something."""
    keep = len(text)
    shown = text
    while font.getlength(shown) > width and keep > 8:
        keep -= 1
        shown = f"{text[: keep // 3]}…{text[len(text) - keep * 2 // 3 :]}"
    return shown
