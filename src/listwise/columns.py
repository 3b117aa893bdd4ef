"""Table files: columns with a header and checksums, written atomically.

They are the base of descriptor files and files of local features. pyarrow is imported only where it
is used, so that packages that store tables can be imported without it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise import __version__
from listwise.checksums import Checksums, append_checksums, damaged, read_checksums
from listwise.errors import InputError
from listwise.files import publish
from listwise.optional import requires

FORMAT_VERSION: Final = 1
# In the metadata of files that have checksums; those of earlier versions have none.
_CHECKED: Final = b"listwise-checksums"


class FileHeader(BaseModel):
    """The header of a file: the version of its format, and of the Listwise that wrote it."""

    model_config = ConfigDict(frozen=True)

    format_version: int = FORMAT_VERSION
    listwise: str = __version__

    @classmethod
    def parse(cls, content: str | bytes, path: str | Path, repair: str) -> Self:
        """Read a header from JSON; an error names the file and ends with the advice `repair`."""
        try:
            version = FileHeader.model_validate_json(content)
            if version.format_version > FORMAT_VERSION:
                raise InputError(
                    f"{path} has the format {version.format_version} of a newer Listwise "
                    f"({version.listwise}): pip install --upgrade listwise"
                )
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise InputError(f"{path} is damaged (its header cannot be read): {repair}") from error


class TableHeader(FileHeader):
    """The header of a table; `unreadable` has a message for each photo that could not be read."""

    unreadable: tuple[str, ...] = ()


H = TypeVar("H", bound=TableHeader)


@dataclass(frozen=True)
class TableKind(Generic[H]):
    """A kind of table file: where its header is stored, and how messages name it."""

    key: bytes  # key of the header in the metadata of the file
    name: str  # what messages call a file, such as "descriptor file"
    contents: str  # what messages call its rows, such as "descriptors"
    command: str  # the command that writes such files
    suffix: str  # the usual ending of their names
    mark: bytes  # the last bytes of a file of this format
    extra: str  # the extra of the package that installs pyarrow
    header: type[H]
    read_schema: Callable[[Path], Any]  # function that reads the Arrow schema of a file

    def import_pyarrow(self) -> Any:
        """Import pyarrow, or report the extra that installs it."""
        with requires(self.extra, f"a {self.name}"):
            import pyarrow
        return pyarrow

    def matches(self, path: str | Path) -> bool:
        """Return whether a file is of this kind."""
        pa = self.import_pyarrow()
        try:
            return self.key in (self.read_schema(Path(path)).metadata or {})
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            return False

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Turn every failure to read a file into an `InputError` of one line."""
        pa = self.import_pyarrow()
        try:
            yield
        except FileNotFoundError:
            raise InputError(f"no {self.name} at {path}: create one with {self.command}") from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"{path} is damaged or not a {self.name} ({reason})") from error

    def read_header(self, path: Path, schema: Any) -> H:
        """Return the header in the Arrow schema of a file."""
        content = (schema.metadata or {}).get(self.key)
        if content is None:
            raise InputError(
                f"{path} is a table, but not one of {self.contents}: create one with {self.command}"
            )
        return self.header.parse(content, path, "extract again")

    def read_checksums(self, path: Path, schema: Any) -> Checksums | None:
        """Read the checksums of a file, None if it is of a version that wrote none."""
        found = read_checksums(path, self.mark)
        if found is None and _CHECKED in (schema.metadata or {}):
            raise damaged(path)
        return found


class TableWriter(ABC):
    """Write a table file, which appears complete at the end of the `with` block.

    If the block ends with an error, no file is written.
    """

    def __init__(self, path: str | Path, schema: Any, kind: TableKind[H], header: H) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        self._kind = kind
        self._schema = schema.with_metadata({kind.key: header.model_dump_json(), _CHECKED: "1"})
        self._checksums = Checksums()

    @abstractmethod
    def copy(self, file: Any) -> None:
        """Add all rows of another file of the same kind."""

    @abstractmethod
    def _open(self, file: Any) -> Any:
        """Create the pyarrow writer for an open file."""

    def _flush(self) -> None:  # noqa: B027 - a writer need not buffer
        """Write the buffered rows."""

    def __enter__(self) -> Self:
        import pyarrow as pa

        try:
            self._file = pa.OSFile(str(self._partial), "wb")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._writer = self._open(self._file)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            self._file.close()
            if kind is None:
                append_checksums(self._partial, self._checksums, self._kind.mark)
                publish(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class TableFile(ABC, Generic[H]):
    """A table file with a row for each of N photos."""

    kind: ClassVar[TableKind[Any]]

    path: Path
    header: H
    checksums: Checksums | None

    @classmethod
    @abstractmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file; raise an `InputError` if it is missing, damaged or of another kind."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def writer(self, path: Path, header: H) -> TableWriter:
        """Return a writer of files with the same columns."""

    @abstractmethod
    def columns(self, *names: str) -> Any:
        """Return some columns as an Arrow table."""

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The N ids, in the order of the rows."""
        return self._keys[0]

    @cached_property
    def sizes(self) -> NDArray[np.int32]:
        """Width and height of each photo: int32 [N, 2]."""
        return self._keys[1]

    @cached_property
    def _keys(self) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        """Ids and sizes, which match the checksums."""
        table = self.columns("id", "width", "height")
        try:
            ids = tuple(table.column("id").to_pylist())
        except UnicodeDecodeError:
            raise damaged(self.path) from None
        sizes = np.stack([table.column(name).to_numpy() for name in ("width", "height")], 1)
        if self.checksums is not None:
            found = Checksums(values=self.checksums.values)
            found.add(ids, sizes)
            if found != self.checksums:
                raise damaged(self.path)
        return ids, sizes


def join_tables(files: Sequence[TableFile[H]], out: Path) -> None:
    """Write the rows of several files of one kind, with equal settings, into one file."""
    unreadable = tuple(line for file in files for line in file.header.unreadable)
    header = files[0].header.model_copy(update={"unreadable": unreadable})
    with files[0].writer(out, header) as writer:
        for file in files:
            writer.copy(file)
