"""The marks of an index in a folder: a table of its database, and copies of query photos."""

from collections.abc import Hashable, Sequence
from pathlib import Path

from listwise.errors import InputError
from listwise.files import sync_folder, write_bytes
from listwise.search.folder.database import Database
from listwise.search.marks import Mark, MarkLog, Undo, write_line

TABLE = "CREATE TABLE marks (number INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL)"
_QUERIES = "queries"  # the folder of the photos of marked queries


class FolderMarks(MarkLog):
    """The table of the marks in the database of an index in the folder `root`."""

    def __init__(self, root: Path, database: Database) -> None:
        self._root = root
        self._database = database

    def append(self, records: Sequence[Mark | Undo]) -> None:
        """Write records; when it returns, they survive a kill and a power failure."""
        with self._database.writing() as connection:
            lines = [(write_line(record),) for record in records]
            connection.executemany("INSERT INTO marks (line) VALUES (?)", lines)

    def read(self) -> dict[str, str]:
        """Read all lines in the order in which they were written, by name."""
        with self._database.reading() as connection:
            found = connection.execute("SELECT number, line FROM marks ORDER BY number")
            return {f"mark {number}": line for number, line in found}

    def stamp(self) -> Hashable:
        """Return a value that changes when lines are written."""
        with self._database.reading() as connection:
            found: Hashable = connection.execute(
                "SELECT count(*), max(number) FROM marks"
            ).fetchone()
        return found

    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""
        with self._database.writing() as connection:
            numbers = [(int(name.removeprefix("mark ")),) for name in names]
            connection.executemany("DELETE FROM marks WHERE number = ?", numbers)

    def keep_photo(self, path: str, content: bytes | None) -> str:
        """Keep a query photo beside the index and return the path of the copy."""
        from listwise.data.photos import photo_digest

        folder = self._root / _QUERIES
        content = Path(path).read_bytes() if content is None else content
        copy = folder / f"{photo_digest(content)}{Path(path).suffix.lower()}"
        try:
            with self._database.writing():  # one process at a time
                if not copy.exists():
                    folder.mkdir(exist_ok=True)
                    write_bytes(copy, content)
                    sync_folder(self._root)
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
        return str(copy.absolute())

    def find_photo(self, path: str) -> str:
        """Return where a kept query photo is now; an index may have been moved."""
        moved = self._root / _QUERIES / Path(path).name
        return str(moved.absolute()) if not Path(path).exists() and moved.is_file() else path
