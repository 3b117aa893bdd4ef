"""What people add to an index: photos from anywhere, and descriptor files."""

from collections.abc import Sequence
from pathlib import Path

from listwise.data import Images
from listwise.data.catalog import photos_of
from listwise.data.given import image_files, is_one_photo
from listwise.descriptors import DescriptorFile
from listwise.descriptors.storage import is_descriptor_file
from listwise.errors import InputError

Source = str | Path | Images | DescriptorFile
Sources = Source | Sequence[Source]
"""A folder, a table, a text list, an image file, a descriptor file, the name of a data set, or a
list of these."""


def open_sources(given: Sources) -> list[Images | DescriptorFile]:
    """Photos and descriptor files, in the order given; image files in a row come together."""
    if isinstance(given, str | Path | Images | DescriptorFile):
        given = [given]
    found: list[Images | DescriptorFile] = []
    files: list[str | Path] = []
    for source in given:
        if isinstance(source, Images | DescriptorFile):
            found.append(source)
            continue
        if not isinstance(source, str | Path):
            raise InputError(
                f"an index keeps the places of its photos: add a file or a folder, not "
                f"{type(source).__name__}"
            )
        if is_one_photo(source) and Path(source).expanduser().exists():
            files.append(source)
            continue
        if files:
            found.append(image_files(files))
            files = []
        if str(source).lower().endswith(".parquet") and is_descriptor_file(source):
            found.append(DescriptorFile.open(source))
        else:
            found.append(photos_of(source))
    return [*found, *([image_files(files)] if files else [])]
