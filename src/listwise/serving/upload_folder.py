"""Photos that people add through the server: files named by what is in them."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from listwise.data import Images
from listwise.data.photos import photo_digest
from listwise.files import publish
from listwise.search.entries import Entry, entry_key
from listwise.search.filling import add_photos
from listwise.search.index import Index
from listwise.serving.uploads import Upload
from listwise.serving.views import AddedView

PREFIX = "uploads/"
_SUFFIXES = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"RI": ".webp", b"GI": ".gif"}


class UploadFolder:
    """A folder of added photos; an entry of the index for each."""

    def __init__(self, index: Index, folder: Path) -> None:
        self.index = index
        self.folder = folder.absolute()

    def add(self, photos: Sequence[Upload]) -> AddedView:
        """Store photos and put them into the index; a file without an entry does not stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        contents = {self._name(photo.getvalue()): photo for photo in photos}
        paths = {PREFIX + name: self.folder / name for name in contents}
        for path, photo in zip(paths.values(), contents.values(), strict=True):
            self._write(path, photo.getvalue())
        images = Images(
            paths=tuple(map(str, paths.values())),
            ids=tuple(paths),
            boxes=None,
            attributes=tuple({"name": photo.name} for photo in contents.values()),
        )
        try:
            result = add_photos(self.index.store, self.index.model, images, workers=0)
        finally:
            present = self.index.store.get([entry_key(name) for name in paths])
            for name, path in paths.items():
                if entry_key(name) not in present:
                    path.unlink(missing_ok=True)
        errors = list(result.errors)
        for path, photo in zip(paths.values(), contents.values(), strict=True):
            errors = [error.replace(str(path), photo.name) for error in errors]
        copied = self.index.store.with_digests([Path(name).stem for name in result.copies])
        known = [entry_key(name) for name in (*result.unchanged, *result.updated)]
        known += [entry.key for entry in copied.values()]
        return AddedView(
            added=[str(entry_key(name)) for name in (*result.added, *result.replaced)],
            unchanged=list(map(str, known)),
            errors=errors,
        )

    def forget(self, entry: Entry) -> None:
        """Delete the file of an entry that was added here; other files are not ours."""
        path = Path(entry.path)
        if entry.id.startswith(PREFIX) and path == self.folder / entry.id.removeprefix(PREFIX):
            path.unlink(missing_ok=True)

    def _name(self, content: bytes) -> str:
        return photo_digest(content) + _SUFFIXES.get(content[:2], ".tif")

    def _write(self, path: Path, content: bytes) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        partial.write_bytes(content)
        publish(partial, path)
