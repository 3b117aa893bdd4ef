"""The folder of photos that clients add: files named by their content."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from hashlib import blake2b
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel

from listwise.data import Images
from listwise.data.photos import photo_digest
from listwise.files import write_bytes, write_text
from listwise.search.entries import UPLOADED_AS, Entry, NewEntries, entry_key
from listwise.search.filling import add_photos
from listwise.search.index import Index
from listwise.search.stored_marks import read_marks
from listwise.search.views import Key
from listwise.serving.forms import Upload, merge_attributes

PREFIX = "uploads/"
LOCK = ".lock"
CLEAN_SECONDS = 5.0
_SUFFIXES = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"RI": ".webp", b"GI": ".gif"}


class AddedView(BaseModel):
    """Keys of added photos and of known ones, and a message for each photo that failed."""

    added: list[Key]
    unchanged: list[Key]
    errors: list[str]


class UploadFolder:
    """A folder of added photos, with an entry of the index for each.

    While photos are added or removed, a hidden file has their names, so that the next server can
    complete what a killed one began. Several servers may use one folder, also for different
    indexes: a server locks it while it adds or removes photos, and while it cleans up.
    """

    def __init__(self, index: Index, folder: Path) -> None:
        self.index = index
        self.folder = folder.absolute()
        self._lock = FileLock(self.folder / LOCK, thread_local=False)
        of_index = blake2b(os.fsencode(index.uri), digest_size=8).hexdigest()
        self._pending = self.folder / f".{of_index}.pending"

    def add(
        self, photos: Sequence[Upload], attributes: Sequence[Mapping[str, str]], exif: bool = False
    ) -> AddedView:
        """Store n photos and add them to the index; files of photos that fail are deleted.

        Args:
            photos: the photos.
            attributes: the attributes of each photo; an empty text removes one. Others of a photo
                that was added before stay.
            exif: also add the attributes of `PhotoFile.exif`.
        """
        names = [self._name(photo.getvalue()) for photo in photos]
        contents = dict(zip(names, photos, strict=True))
        given = dict(zip(names, attributes, strict=True))
        paths = {PREFIX + name: self.folder / name for name in contents}
        generation = self.index.generation
        known = generation.store.get(list(map(entry_key, paths)))
        before = {entry.id: entry.attributes for entry in known.values()}

        def merged(name: str, photo: Upload) -> dict[str, str]:
            known = before.get(PREFIX + name, {})
            return merge_attributes({UPLOADED_AS: photo.name}, known, given[name])

        images = Images(
            paths=tuple(map(str, paths.values())),
            ids=tuple(paths),
            boxes=None,
            attributes=tuple(merged(name, photo) for name, photo in contents.items()),
        )
        with self._changing(contents):
            for path, photo in zip(paths.values(), contents.values(), strict=True):
                write_bytes(path, photo.getvalue())
            result = add_photos(generation.store, generation.model, images, exif=exif, workers=0)
        errors = list(result.errors)
        for path, photo in zip(paths.values(), contents.values(), strict=True):
            errors = [error.replace(str(path), photo.name) for error in errors]
        found = (*result.moved, *result.copies)  # the second name is that of the entry
        names = [*result.unchanged, *result.updated, *(name for _, name in found)]
        return AddedView(
            added=[str(entry_key(name)) for name in (*result.added, *result.replaced)],
            unchanged=[str(entry_key(name)) for name in names],
            errors=errors,
        )

    def remove(self, entry: Entry) -> int:
        """Remove an entry, and its file if it was added through the server; no other file."""
        if not self.owns(entry):
            return self.index.store.remove([entry.key])
        with self._changing([Path(entry.path).name]):
            return self.index.store.remove([entry.key])

    def owns(self, entry: Entry) -> bool:
        """Whether the file of an entry was added through the server, and is deleted with it."""
        path = self.folder / entry.id.removeprefix(PREFIX)
        return entry.id.startswith(PREFIX) and entry.path == str(path) and path.exists()

    def restore(self, removed: NewEntries, content: bytes) -> None:
        """Add an entry and its file again, as they were before they were removed."""
        path = Path(removed.entries[0].path)
        with self._changing([path.name]):
            write_bytes(path, content)
            self.index.store.put(removed)

    @contextmanager
    def query(self, photo: Upload) -> Iterator[Path]:
        """Store a query photo; in the end it is deleted, unless a mark refers to this file."""
        name = self._name(photo.getvalue())
        with self._changing([name]):
            write_bytes(self.folder / name, photo.getvalue())
            yield self.folder / name

    def clean(self) -> None:
        """Delete what a killed server left: unfinished files, and photos without an entry.

        Nothing is deleted while another server adds photos.
        """
        if self.folder.is_dir():
            # An error after the time, or in a folder that cannot be written to.
            with suppress(OSError), self._lock.acquire(timeout=CLEAN_SECONDS):
                self._clean()

    @contextmanager
    def _changing(self, names: Iterable[str]) -> Iterator[None]:
        """Add or remove photos; afterwards those without an entry or a mark have no file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._clean()  # what a server left that was killed meanwhile
            try:
                write_text(self._pending, " ".join(names))
                yield
            finally:  # the change may be made although it fails
                self._clean()

    def _clean(self) -> None:
        if self._pending.exists():
            self.index.store.refresh()
            self._delete_unused(self._pending.read_text("utf-8").split())
        for file in self.folder.glob(f"{self._pending.name}*"):
            file.unlink()

    def _delete_unused(self, names: Iterable[str]) -> None:
        """Delete files that no entry and no mark of the index refers to."""
        paths = {entry_key(PREFIX + name): self.folder / name for name in names}
        for path in paths.values():
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        store = self.index.store
        # Another server may have added the same photo to the upgraded index.
        generations, number = store.generations, store.generations.record().current
        current = number == store.generation
        with nullcontext(store) if current else generations.open(number) as opened:
            known = opened.get(list(paths))
            same = opened.with_digests([path.stem for path in paths.values()])
            used = {entry.path for entry in [*known.values(), *same.values()]}
            if not used.issuperset(map(str, paths.values())):
                used |= {mark.query.path for mark in read_marks(opened, all_labels=False).history}
        for key, path in paths.items():
            if key not in known and str(path) not in used:
                path.unlink(missing_ok=True)

    def _name(self, content: bytes) -> str:
        return photo_digest(content) + _SUFFIXES.get(content[:2], ".tif")
