"""What a camera wrote into a photo: when and where it was taken, and with which camera."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from PIL import Image
from PIL.ExifTags import GPS, IFD, Base


def exif_attributes(image: Image.Image) -> dict[str, str]:
    """Return the attributes `date`, `latitude`, `longitude` and `camera` of an opened image.

    The date is local time, such as 2024-05-01T18:30:00. The place is in degrees, negative in the
    south and west. What the file does not have, or what cannot be read, is left out.
    """
    if image.format == "PNG" and "exif" not in image.info:
        return {}  # reading it would decode the photo
    try:
        exif = image.getexif()
        details, place = exif.get_ifd(IFD.Exif), exif.get_ifd(IFD.GPSInfo)
    except Exception:  # damaged EXIF data causes errors of many kinds
        return {}
    taken = str(details.get(Base.DateTimeOriginal) or exif.get(Base.DateTime))
    maker, model = (_text(exif.get(tag)) for tag in (Base.Make, Base.Model))
    found = {
        "date": _date(taken[:19]),
        "latitude": _degrees(place, GPS.GPSLatitude, GPS.GPSLatitudeRef, 90),
        "longitude": _degrees(place, GPS.GPSLongitude, GPS.GPSLongitudeRef, 180),
        "camera": model if model.startswith(maker) else f"{maker} {model}".strip(),
    }
    return {name: text for name, text in found.items() if text}


def _date(taken: str) -> str:
    try:
        return datetime.strptime(taken, "%Y:%m:%d %H:%M:%S").isoformat()
    except ValueError:  # a camera whose clock is not set writes zeros
        return ""


def _text(value: Any) -> str:
    """A text of EXIF data on one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value or "")).split())


def _degrees(place: Mapping[int, Any], angle: int, side: int, most: float) -> str:
    """Degrees, minutes and seconds as a number with six decimals, which are 11 cm."""
    try:
        degrees, minutes, seconds = map(float, place[angle])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ""
    value = degrees + minutes / 60 + seconds / 3600
    if not 0 <= value <= most:  # also NaN, which cameras without a fix write
        return ""
    return f"{-value if place.get(side) in ('S', 'W') else value:.6f}"
