"""An extraction in parts, which are kept in a folder beside its file until they are joined."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from listwise.columns import TableFile, join_tables
from listwise.data import Images
from listwise.data.images import printable
from listwise.errors import InputError
from listwise.files import publish, write_text

KEY_FILE = "listwise.key"
LOCK_FILE = "listwise.lock"
# Raised when what a part holds changes: parts of another version are not used.
PARTS_VERSION = 2

F = TypeVar("F", bound=TableFile[Any])


@dataclass(frozen=True)
class Part:
    """Positions of some photos, and the file of their descriptors or features."""

    photos: range
    path: Path


class Parts(Generic[F]):
    """The parts of one extraction, in `OUT.partial/`, which survive an interruption.

    The file of a part exists only when it is complete. The next run with the same photos and
    settings uses the finished parts; a run with other settings discards them.
    """

    def __init__(self, table: type[F], out: Path, images: Images, size: int, how: str) -> None:
        """Prepare parts of `size` photos; `how` identifies the extractor and its settings."""
        if not len(images):
            raise InputError(f"no photos to extract {table.kind.contents} from: give at least one")
        if re.match(r"\w{2,}:/", str(out)):  # as pathlib writes a URL; one letter is a drive
            raise InputError(
                f"{out} is not a file: `out` must be the name of a {table.kind.name}, such as "
                f"photos{table.kind.suffix}; listwise index build adds photos to Milvus"
            )
        if printable(out) != str(out):
            raise InputError(f"the path {printable(out)} is not UTF-8: give another name")
        if out.exists() and not table.kind.matches(out):
            raise InputError(f"{out} exists and is not a {table.kind.name}: give another name")
        self.out = out
        self.images = images
        self.folder = out.with_name(f"{out.name}.partial")
        self._table = table
        self._suffix = table.kind.suffix
        self._key = photos_key(f"{how} {size} {PARTS_VERSION}", images)
        self._parts = [
            Part(range(i, min(i + size, len(images))), self.folder / f"{i:09d}{self._suffix}")
            for i in range(0, len(images), size)
        ]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from extracting into the same file, and refuse if one does."""
        with lock_folder(self.folder, f"another process is extracting into {self.out}"):
            try:
                yield
            finally:
                if not (self.folder / KEY_FILE).exists():
                    (self.folder / LOCK_FILE).unlink(missing_ok=True)

    def start(
        self, strict: bool, on_progress: Callable[[int], object], on_note: Callable[[str], object]
    ) -> list[Part]:
        """Return the parts to extract; with `strict` also those that lack unreadable photos."""
        self._make_folder(on_note)
        missing = [part for part in self._parts if not self._is_done(part, strict)]
        done = len(self.images) - sum(len(part.photos) for part in missing)
        if done:
            on_note(f"resuming: {done} of {len(self.images)} photos are already done")
            on_progress(done)
        return missing

    def _is_done(self, part: Part, strict: bool) -> bool:
        done = part.path.exists()
        return done and not (strict and self._table.open(part.path).header.unreadable)

    def join(self) -> F:
        """Join all parts into the file, and remove them."""
        files = [self._table.open(part.path) for part in self._parts]
        if not any(len(file) for file in files):
            errors = [error for file in files for error in file.header.unreadable]
            raise InputError(
                f"none of the {len(errors)} photos can be read; the first: {errors[0]}"
            )
        joined = self._parts[0].path
        if len(files) > 1:
            # In the folder of the parts, so that the next run removes it after a kill.
            joined = self.folder / f"joined{self._suffix}"
            join_tables(files, joined)
        publish(joined, self.out)
        self._remove()
        return self._table.open(self.out)

    def _make_folder(self, on_note: Callable[[str], object]) -> None:
        """Mark the folder with the key of this run, and empty it if it belongs to another run."""
        name = self.folder / KEY_FILE
        try:
            if name.exists() and name.read_text(encoding="utf-8") != self._key:
                on_note(
                    f"{self.folder} is from another model, other settings or other photos: "
                    "discarding it"
                )
                self._remove_parts()
            if not name.exists():
                if any(self.folder.glob(f"*{self._suffix}")):
                    raise InputError(
                        f"{self.folder} contains other files: move them, or give another name"
                    )
                write_text(name, self._key)
        except OSError as error:
            raise InputError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _remove(self) -> None:
        """Remove the parts and their folder, but no other files."""
        self._remove_parts()
        (self.folder / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # another process may have started in it by now
            self.folder.rmdir()

    def _remove_parts(self) -> None:
        """Remove the parts, and the key last: it marks files that remain after a kill as ours."""
        files = [*self.folder.glob(f"*{self._suffix}*"), *self.folder.glob(f"{KEY_FILE}*")]
        for file in files:
            file.unlink(missing_ok=True)


def lock_folder(folder: Path, busy: str) -> IO[bytes]:
    """Create and lock a folder until the file that is returned is closed, or the process ends.

    `busy` is the beginning of the error if another process has locked the folder.
    """
    path = folder / LOCK_FILE
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except FileNotFoundError:
            continue  # the process that had it has just removed the folder
        except OSError as error:
            raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
        try:
            # Not flock: the processes that decode photos would inherit the lock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise InputError(f"{busy}: wait until it ends, or give another name") from None
        except OSError:
            return file  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # it was removed between opening and locking


def photos_key(how: str, images: Images) -> str:
    """Return a hash of the photos and of how they are extracted; equal for equal parts."""
    digest = hashlib.sha256(how.encode())
    for index in range(len(images)):
        entry = (images.ids[index], images.paths[index], images.box(index))
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()
