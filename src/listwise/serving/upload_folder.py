"""The folder of photos that clients add: files named by their content."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from listwise.data import Images
from listwise.data.photos import photo_digest
from listwise.files import publish
from listwise.search.entries import Entry, entry_key
from listwise.search.filling import add_photos
from listwise.search.index import Index
from listwise.search.marking import read_marks
from listwise.search.store import Store
from listwise.serving.uploads import Upload
from listwise.serving.views import AddedView

PREFIX = "uploads/"
LOCK_SECONDS = 5.0
_SUFFIXES = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"RI": ".webp", b"GI": ".gif"}
_LEFT_OVER = re.compile(
    r"\.(?P<name>[0-9a-f]{32}\.(jpg|png|webp|gif|tif))\.[0-9]+-[0-9]+\.(?P<kind>tmp|pending)"
)


class UploadFolder:
    """A folder of added photos, with an entry of the index for each.

    While a photo is added or removed, a file `.NAME.pending` marks it, so that the next server can
    complete what a killed one began. Several servers may use one folder: a server holds a shared
    lock on it while it adds or removes photos, and an exclusive one while it cleans up.
    """

    def __init__(self, index: Index, folder: Path, max_side: Callable[[], int]) -> None:
        self.index = index
        self.folder = folder.absolute()
        self.max_side = max_side
        self._mark = os.fsencode(index.uri) + b"\n"

    def add(self, photos: Sequence[Upload]) -> AddedView:
        """Store photos and add them to the index; files of photos that fail are deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        contents = {self._name(photo.getvalue()): photo for photo in photos}
        paths = {PREFIX + name: self.folder / name for name in contents}
        images = Images(
            paths=tuple(map(str, paths.values())),
            ids=tuple(paths),
            boxes=None,
            attributes=tuple({"name": photo.name} for photo in contents.values()),
        )
        generation = self.index.generation
        with self._pending(contents):
            try:
                for path, photo in zip(paths.values(), contents.values(), strict=True):
                    self._write(path, photo.getvalue())
                result = add_photos(
                    generation.store,
                    generation.model,
                    images,
                    workers=0,
                    max_side=self.max_side(),
                )
            finally:
                self._delete_unused(contents)
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

    def remove(self, entry: Entry) -> int:
        """Remove an entry, and its file if it was added through the server; no other file."""
        name = entry.id.removeprefix(PREFIX)
        path = self.folder / name
        if entry.id == name or Path(entry.path) != path or not path.exists():
            return self.index.store.remove([entry.key])
        with self._pending([name]):
            try:
                return self.index.store.remove([entry.key])
            finally:  # the change may be made although it fails
                self._delete_unused([name])

    @contextmanager
    def query(self, photo: Upload) -> Iterator[Path]:
        """Store a query photo; in the end it is deleted, unless a mark refers to this file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = self._name(photo.getvalue())
        with self._pending([name]):
            try:
                self._write(self.folder / name, photo.getvalue())
                yield self.folder / name
            finally:
                self._delete_unused([name])

    def clean(self) -> None:
        """Delete what a killed server left: unfinished files, and photos without an entry.

        Nothing is deleted while another server adds photos, or where folders cannot be locked.
        """
        if not self.folder.is_dir():
            return
        with _locked(self.folder, shared=False) as locked:
            if not locked:
                return
            self.index.store.refresh()
            for found in filter(None, map(_LEFT_OVER.fullmatch, os.listdir(self.folder))):
                left_over = self.folder / found[0]
                if found["kind"] == "pending":
                    mark = left_over.read_bytes()
                    if mark == self._mark:
                        self._delete_unused([found["name"]])
                    elif mark.endswith(b"\n"):
                        # Another index uses this folder too; its photos are not in this one.
                        continue
                    # A mark without its end is older than any change: only the mark is deleted.
                left_over.unlink(missing_ok=True)

    @contextmanager
    def _pending(self, names: Iterable[str]) -> Iterator[None]:
        """Mark photos while they are added or removed."""
        marks = [self._left_over(name, "pending") for name in names]
        with _locked(self.folder, shared=True):
            try:
                for mark in marks:
                    mark.write_bytes(self._mark)
                yield
            finally:
                for mark in marks:
                    mark.unlink(missing_ok=True)

    def _delete_unused(self, names: Iterable[str]) -> None:
        """Delete files that no entry and no mark of the index refers to."""
        store = self.index.store
        if store.is_current():
            self._delete_without_entry(store, names)
            return
        # Another server may have added the same photo to the upgraded index.
        with store.open_generation(store.record().current) as current:
            self._delete_without_entry(current, names)

    def _delete_without_entry(self, store: Store, names: Iterable[str]) -> None:
        paths = {entry_key(PREFIX + name): self.folder / name for name in names}
        known = store.get(list(paths))
        same = store.with_digests([path.stem for path in paths.values()])
        used = {entry.path for entry in same.values()}
        unused = [path for key, path in paths.items() if key not in known and str(path) not in used]
        marked = {mark.query.path for mark in read_marks(store).history} if unused else set()
        for path in unused:
            if str(path) not in marked:
                path.unlink(missing_ok=True)

    def _name(self, content: bytes) -> str:
        return photo_digest(content) + _SUFFIXES.get(content[:2], ".tif")

    def _write(self, path: Path, content: bytes) -> None:
        partial = self._left_over(path.name, "tmp")
        try:
            partial.write_bytes(content)
            publish(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _left_over(self, name: str, kind: str) -> Path:
        return self.folder / f".{name}.{os.getpid()}-{threading.get_ident()}.{kind}"


@contextmanager
def _locked(folder: Path, *, shared: bool) -> Iterator[bool]:
    """Hold a lock on a folder; yields False where it cannot be had.

    A shared lock is waited for; an exclusive one for a few seconds only.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    until = time.monotonic() + LOCK_SECONDS
    locked = False
    try:
        while not locked:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
            except OSError:  # this file system has no locks
                break
        yield locked
    finally:
        os.close(handle)
