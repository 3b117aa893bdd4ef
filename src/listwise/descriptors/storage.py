"""Descriptor files: Parquet files of descriptors, with the model and settings that made them."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from listwise.errors import InputError
from listwise.files import FileHeader, publish
from listwise.optional import requires
from listwise.settings import ExtractSettings

ROW_GROUP: Final = 4096
# Keys of the metadata: the header, and its CRC-32. The values have the checksums of Parquet.
_HEADER, _CRC = b"listwise", b"listwise-crc32"

Rows = npt.NDArray[np.float32]


class DescriptorHeader(FileHeader):
    """The header of a descriptor file.

    Attributes:
        model: fingerprint of the model that made the descriptors.
        whitened: whether the descriptors are whitened.
        settings: the settings of the extraction.
        unreadable: a message for each photo that could not be read.
    """

    model: str
    whitened: bool = False
    settings: ExtractSettings = ExtractSettings()
    unreadable: tuple[str, ...] = ()


class DescriptorWriter:
    """Write a descriptor file, which appears complete at the end of the `with` block.

    If the block ends with an error, no file is written. Rows are buffered up to one row group.

    Examples:
        >>> header = DescriptorHeader(model="demo")
        >>> with DescriptorWriter("photos.parquet", dim=4, header=header) as writer:
        ...     writer.write(["a.jpg"], [(640, 480)], np.ones((1, 4), np.float32) / 2)
    """

    def __init__(self, path: str | Path, dim: int, header: DescriptorHeader) -> None:
        pa = _import_pyarrow()
        self.path = Path(path)
        self.dim = dim
        self._partial = self.path.with_name(f"{self.path.name}.tmp")
        # Reading is twice as fast if neither the list nor its values may be null.
        values = pa.list_(pa.field("item", pa.float32(), nullable=False), dim)
        types = {"id": pa.string(), "width": pa.int32(), "height": pa.int32(), "descriptor": values}
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        text = header.model_dump_json().encode()
        metadata = {_HEADER: text, _CRC: str(zlib.crc32(text))}
        self._schema = pa.schema(fields, metadata)
        self._waiting: list[Any] = []

    def __enter__(self) -> Self:
        from pyarrow.parquet import ParquetWriter

        try:
            self._writer = ParquetWriter(
                str(self._partial),
                self._schema,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and self._waiting:
                self._write_rows(sum(table.num_rows for table in self._waiting))
            self._writer.close()
            if kind is None:
                publish(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)

    def write(
        self, ids: Sequence[str], sizes: npt.ArrayLike, descriptors: npt.NDArray[np.floating]
    ) -> None:
        """Add n rows: n ids, widths and heights [n, 2], descriptors [n, dim]."""
        import pyarrow as pa

        rows = np.ascontiguousarray(descriptors, dtype=np.float32)
        if rows.shape != (len(ids), self.dim):
            raise InputError(
                f"descriptors must be [{len(ids)}, {self.dim}], not {list(rows.shape)}"
            )
        broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(broken):
            raise InputError(
                f"the descriptor of {ids[broken[0]]} is not finite: check the weights of the "
                "network, or use float32 instead of bfloat16"
            )
        widths, heights = np.asarray(sizes, np.int32).reshape(len(ids), 2).T.copy()
        kind = self._schema.field("descriptor").type
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=kind)
        columns = [pa.array(ids, pa.string()), pa.array(widths), pa.array(heights), values]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._schema))
        count = sum(table.num_rows for table in self._waiting)
        if count >= ROW_GROUP:
            self._write_rows(count // ROW_GROUP * ROW_GROUP)

    def _write_rows(self, count: int) -> None:
        """Write the first `count` buffered rows."""
        import pyarrow as pa

        table = pa.concat_tables(self._waiting)
        self._writer.write_table(table.slice(0, count), row_group_size=ROW_GROUP)
        self._waiting = [table.slice(count)] if count < table.num_rows else []


@dataclass(frozen=True, eq=False)
class DescriptorFile:
    """A descriptor file of N rows: ids, sizes [N, 2] and descriptors [N, dim].

    `DescriptorFile.open(path)` opens one. The size of a photo with a box is the size of the box.
    """

    path: Path
    header: DescriptorHeader
    dim: int
    rows: int
    changed: int  # when the file was written, in nanoseconds

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file and read its header; raise an `InputError` for any other file."""
        path = Path(path)
        with _parquet(path) as file:
            metadata = file.schema_arrow.metadata or {}
            if _HEADER not in metadata:
                raise InputError(
                    f"{path} is a table, but not one of descriptors: create one with listwise "
                    "extract"
                )
            header = DescriptorHeader.parse(metadata[_HEADER], path, "extract again")
            if metadata.get(_CRC) != str(zlib.crc32(metadata[_HEADER])).encode():
                raise _damaged(path, "its header does not match its checksum")
            dim = file.schema_arrow.field("descriptor").type.list_size
            return cls(path, header, dim, file.metadata.num_rows, path.stat().st_mtime_ns)

    def __len__(self) -> int:
        return self.rows

    @property
    def model(self) -> str:
        """Fingerprint of the model that made the descriptors."""
        return self.header.model

    @property
    def settings(self) -> ExtractSettings:
        """The settings of the extraction."""
        return self.header.settings

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The N ids, in the order of the rows."""
        with self._opened() as file:
            ids = tuple(file.read(columns=["id"]).column("id").to_pylist())
        if len(ids) != self.rows:
            raise _damaged(self.path, f"it has {len(ids)} ids for {self.rows} rows")
        return ids

    @cached_property
    def sizes(self) -> npt.NDArray[np.int32]:
        """Width and height of each photo: int32 [N, 2]."""
        with self._opened() as file:
            table = file.read(columns=["width", "height"])
        return np.stack([table.column(name).to_numpy() for name in ("width", "height")], 1)

    def batches(self, rows: int = ROW_GROUP) -> Iterator[Rows]:
        """Iterate over the descriptors: float32 [n, dim], read-only, at most `rows` at a time."""
        with self._opened() as file:
            # Group by group, because pyarrow keeps all groups of one call in memory.
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, ["descriptor"], use_threads=False).column(0)
                for chunk in column.chunks:
                    values = chunk.flatten().to_numpy(zero_copy_only=True).reshape(-1, self.dim)
                    del chunk
                    for start in range(0, len(values), rows):
                        yield values[start : start + rows]

    def read(self) -> Rows:
        """Return all descriptors: float32 [N, dim]."""
        everything = np.empty((self.rows, self.dim), np.float32)
        start = 0
        for batch in self.batches():
            everything[start : start + len(batch)] = batch
            start += len(batch)
        if start != self.rows:
            raise _damaged(self.path, f"it has {start} descriptors for {self.rows} rows")
        return everything

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with _parquet(self.path) as file:
            if self.path.stat().st_mtime_ns != self.changed:
                raise InputError(f"{self.path} was replaced while it was in use: open it again")
            yield file

    def require(self, fingerprint: str) -> None:
        """Raise an `InputError` unless the model with this fingerprint made the file."""
        if self.model != fingerprint:
            raise InputError(
                f"{self.path} was made by another model or whitening ({self.model[:12]}, not "
                f"{fingerprint[:12]}), so its descriptors cannot be compared: extract them again "
                "with this model"
            )


def is_descriptor_file(path: str | Path) -> bool:
    """Return whether a file is a descriptor file."""
    _import_pyarrow()
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return _HEADER in (read_schema(path).metadata or {})
    except (ArrowException, OSError, UnicodeDecodeError):
        return False


def _import_pyarrow() -> Any:
    with requires("index", "a descriptor file"):
        import pyarrow
    return pyarrow


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is damaged ({reason}): copy it again, or extract again")


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file; any failure becomes an `InputError` of one line."""
    pa = _import_pyarrow()
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError:
        raise InputError(
            f"no descriptor file at {path}: create one with listwise extract"
        ) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is damaged or not a descriptor file ({reason})") from error
