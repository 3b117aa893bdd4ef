"""The marks of an index in a folder: a file of lines, and copies of the query photos.

A line counts once its end is on the disk. A process that is killed while it writes leaves a part of
a line at the end of the file; readers ignore it, and the next writer cuts it off.
"""

import os
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from listwise.data.photos import photo_digest
from listwise.errors import InputError
from listwise.files import publish, sync_folder
from listwise.search.mark_log import LogLine, MarkLog, parse_line

FILE = "marks.jsonl"
_LOCK = "marks.lock"
_PHOTOS = "queries"


class MarkFile(MarkLog):
    """The file of the marks of an index in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / FILE

    def append(self, texts: Sequence[str]) -> None:
        """Write lines; when it returns, they survive a kill and a power failure."""
        content = "".join(f"{text}\n" for text in texts).encode()
        try:
            with FileLock(self._root / _LOCK):
                _append(self._path, content)
        except OSError as error:
            raise InputError(f"cannot write to {self._path}: {error.strerror}") from error

    def read(self) -> list[LogLine]:
        """Read all lines in the order in which they were written."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}") from error
        lines = content.split(b"\n")[:-1]  # after the last line end is nothing, or a part of a line
        return [
            LogLine(f"{FILE} line {number}", line.decode(errors="replace"))
            for number, line in enumerate(lines, 1)
        ]

    def stamp(self) -> Hashable:
        """Return a value that changes when lines are written."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""
        try:
            with FileLock(self._root / _LOCK):
                # Another repair may have removed lines meanwhile, so the numbers may be others.
                kept = [
                    line.text
                    for line in self.read()
                    if line.name not in names or parse_line(line.text) is not None
                ]
                partial = self._path.with_name(f"{FILE}.tmp")
                partial.write_bytes("".join(f"{text}\n" for text in kept).encode())
                publish(partial, self._path)
        except OSError as error:
            raise InputError(f"cannot write to {self._path}: {error.strerror}") from error

    def keep_photo(self, path: str, content: bytes | None) -> str:
        """Keep a query photo beside the index and return the path of the copy."""
        folder = self._root / _PHOTOS
        content = Path(path).read_bytes() if content is None else content
        copy = folder / f"{photo_digest(content)}{Path(path).suffix.lower()}"
        try:
            with FileLock(self._root / _LOCK):
                if not copy.exists():
                    folder.mkdir(exist_ok=True)
                    partial = folder / "new.tmp"
                    partial.write_bytes(content)
                    publish(partial, copy)
                    sync_folder(self._root)
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
        return str(copy.absolute())

    def find_photo(self, path: str) -> str:
        """Return where a kept query photo is now; an index may have been moved."""
        moved = self._root / _PHOTOS / Path(path).name
        return str(moved.absolute()) if not Path(path).exists() and moved.is_file() else path


def _append(path: Path, content: bytes) -> None:
    """Append to a file all of the content, or nothing if that fails."""
    is_new = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = _end_of_lines(file)
        os.ftruncate(file, end)
        os.lseek(file, end, os.SEEK_SET)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, end)
            raise
    finally:
        os.close(file)
    if is_new:
        sync_folder(path.parent)


def _end_of_lines(file: int) -> int:
    """The position after the last complete line."""
    end = os.lseek(file, 0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        part = os.pread(file, end - start, start)
        if (found := part.rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
