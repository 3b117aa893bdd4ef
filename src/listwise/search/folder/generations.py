"""The generations of an index in a folder: the files of each, and the database of their record.

The database `index.sqlite` has the marks and the record. Each generation has a database
`entries-N.sqlite`, and a file of descriptors, which the database names.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from listwise.errors import InputError
from listwise.search.entries import DamagedIndexError, damage
from listwise.search.folder import filtering, marks
from listwise.search.folder.database import Database, read_settings, write_settings
from listwise.search.folder.store import FolderStore
from listwise.search.folder.table import TABLES, create_descriptors, database_path
from listwise.search.folder.tuning import read_codes, read_state
from listwise.search.generations import GenerationRecord, Generations
from listwise.search.store import IndexHeader

_ROOT = "index.sqlite"
_UPGRADE_LOCK = "upgrade.lock"
_OURS = re.compile(
    rf"(index|entries-\d+)\.sqlite(-\w+)?|(descriptors|codes)-\d+-.*|{re.escape(_UPGRADE_LOCK)}"
)


class FolderGenerations(Generations):
    """The generations of an index in the folder `root`, for the store of one of them."""

    def __init__(self, root: Path, number: int, aside: bool = False) -> None:
        self.uri, self.number, self.aside = str(root), number, aside
        self.root = root
        self.database = Database(root / _ROOT, self.uri)

    @staticmethod
    def exists(place: str) -> bool:
        """Whether a folder holds an index."""
        return "record" in _settings(Path(place, _ROOT), place)

    @staticmethod
    def open_index(place: str) -> FolderStore:
        """Open the current generation of the index in a folder."""
        with closing(FolderGenerations(Path(place), 0)) as generations:
            return generations.open(generations.record().current)

    @staticmethod
    def create_index(place: str, header: IndexHeader) -> FolderStore:
        """Create an empty index in a new or empty folder."""
        root = Path(place)
        try:
            root.mkdir(parents=True, exist_ok=True)
            foreign = {path.name for path in root.iterdir() if not _OURS.fullmatch(path.name)}
            if foreign and not FolderGenerations.exists(place):
                raise InputError(f"{root} holds other files ({min(foreign)}): give another folder")
            made = closing(Database.create(root / _ROOT, place, marks.TABLE))
            # Another process that creates it waits.
            with made as database, database.writing() as connection:
                if "record" in read_settings(connection, place):
                    raise InputError(f"an index at {root} exists already")
                if int(_settings(database_path(root, 0), place).get("rows", "0")):
                    raise damage(place, f"{_ROOT} has lost its content")
                _delete_all_but(root, set())  # of an unfinished attempt
                _create_files(root, 0, header)
                # Written last: a folder without it is not an index.
                write_settings(connection, {"record": GenerationRecord().model_dump_json()})
        except OSError as error:
            raise InputError(f"cannot create an index at {root}: {error.strerror}") from error
        return FolderStore(FolderGenerations(root, 0))

    @staticmethod
    def check_files(place: str, repair: bool = False) -> list[str]:
        """Names of the damaged files, relative to the folder; with `repair`, they are restored."""
        root = Path(place)
        found = _check_database(root / _ROOT, place, repair)
        if found and not repair:
            return found
        with closing(FolderGenerations(root, 0)) as generations:
            path = database_path(root, generations.record().current)
        found += _check_database(path, place, repair)
        if found and not repair:
            return found
        with (
            closing(Database(path, place)) as database,
            database.writing() if repair else database.reading() as connection,
        ):
            settings = read_settings(connection, place)
            if not filtering.attributes_agree(connection):
                found.append(path.name)
                if repair:
                    filtering.rebuild_attributes(connection)
            descriptors = root / settings["descriptors"]
            size = 4 * json.loads(settings["header"])["dim"] * int(settings["rows"])
            if not descriptors.exists() or descriptors.stat().st_size < size:
                found.append(descriptors.name)
                if repair:  # its rows do not match their checksums: they are encoded again
                    with descriptors.open("ab") as file:
                        file.truncate(size)
        state = read_state(settings)
        if state.codes and read_codes(root, state) is None:
            found.append(state.codes)
            if repair:  # they are built again for the next search
                (root / state.codes).unlink(missing_ok=True)
        return list(dict.fromkeys(found))

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        with self.database.reading() as connection:
            settings = read_settings(connection, self.uri)
        return GenerationRecord.model_validate_json(settings["record"])

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record in one step."""
        with self.database.writing() as connection:
            write_settings(connection, {"record": record.model_dump_json()})

    def open(self, number: int, *, aside: bool = False) -> FolderStore:
        """Open another generation of the index."""
        try:
            return FolderStore(FolderGenerations(self.root, number, aside))
        except DamagedIndexError as error:
            if not aside:
                raise
            raise DamagedIndexError(
                f"an earlier or unfinished generation of {self.uri} is damaged, which listwise "
                "index check does not repair: delete it with listwise index discard "
                f"{shlex.quote(self.uri)}"
            ) from error

    def create(self, number: int, header: IndexHeader) -> FolderStore:
        """Create an empty generation; it replaces an unfinished one."""
        _create_files(self.root, number, header)
        return FolderStore(FolderGenerations(self.root, number, aside=True))

    def drop_unused(self) -> None:
        """Delete the data of the generations that the record does not name."""
        _delete_all_but(self.root, self.record().numbers)

    def free_bytes(self) -> int:
        """Free space on the disk of the folder."""
        return shutil.disk_usage(self.root).free

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Allow one upgrade at a time."""
        try:
            with FileLock(self.root / _UPGRADE_LOCK, timeout=0):
                self.check_current()
                yield
        except Timeout:
            raise InputError(
                f"another process upgrades {self.uri}, or rolls it back: wait until it is done"
            ) from None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch."""
        entries = Database(database_path(self.root, self.number), self.uri)
        with closing(entries), entries.writing():
            self.check_current()
            yield

    def close(self) -> None:
        """Close the database; the next use opens it again."""
        self.database.close()


def _settings(path: Path, uri: str) -> dict[str, str]:
    """The settings of a database; none if it does not exist or was not finished."""
    if not path.is_file():
        return {}
    with closing(Database(path, uri)) as database, database.reading() as connection:
        made = connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return read_settings(connection, uri) if made else {}


def _check_database(path: Path, uri: str, repair: bool) -> list[str]:
    """The name of a database if it is damaged; with `repair`, its indexes are built again."""
    database = Database(path, uri)
    if path.exists() and not database.damage():
        return []
    if repair and (not path.exists() or database.damage(repair=True)):
        raise DamagedIndexError(
            f"{uri} cannot be repaired: {path.name} is damaged; restore a backup of it, or build "
            "the index again"
        )
    return [path.name]


def _create_files(root: Path, number: int, header: IndexHeader) -> None:
    """Create the files of an empty generation, unless they exist."""
    made = closing(Database.create(database_path(root, number), str(root), TABLES))
    with made as database, database.writing() as connection:
        if not read_settings(connection, str(root)):
            name = create_descriptors(root, number, 0)
            settings = {"descriptors": name, "rows": "0", "version": "0"}
            write_settings(connection, {"header": header.model_dump_json(), **settings})


def _delete_all_but(root: Path, kept: set[int]) -> None:
    """Delete the files of all generations but some."""
    for path in root.iterdir():
        found = re.match(r"(entries|descriptors|codes)-(\d+)[-.]", path.name)
        if found and int(found[2]) not in kept:
            with suppress(OSError):  # Windows keeps a file that is in use
                path.unlink()
