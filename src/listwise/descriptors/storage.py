"""Descriptor files: Parquet files of descriptors, with the model and settings that made them."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from listwise.checksums import Checksums, damaged
from listwise.columns import TableFile, TableHeader, TableKind, TableWriter
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError

ROW_GROUP: Final = 4096

Rows = npt.NDArray[np.float32]


class DescriptorHeader(TableHeader):
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


def _read_schema(path: Path) -> Any:
    from pyarrow.parquet import read_schema

    return read_schema(path)


KIND: Final = TableKind(
    b"listwise",
    "descriptor file",
    "descriptors",
    "listwise extract",
    ".parquet",
    b"PAR1",
    "index",
    DescriptorHeader,
    _read_schema,
)


class DescriptorWriter(TableWriter):
    """Write a descriptor file, which appears complete at the end of the `with` block.

    If the block ends with an error, no file is written. Rows are buffered up to one row group.

    Examples:
        >>> header = DescriptorHeader(model="demo")
        >>> with DescriptorWriter("photos.parquet", dim=4, header=header) as writer:
        ...     writer.write(["a.jpg"], [(640, 480)], np.ones((1, 4), np.float32) / 2)
    """

    def __init__(self, path: str | Path, dim: int, header: DescriptorHeader) -> None:
        pa = KIND.import_pyarrow()
        self.dim = dim
        # Reading is twice as fast if neither the list nor its values may be null.
        values = pa.list_(pa.field("item", pa.float32(), nullable=False), dim)
        types = {"id": pa.string(), "width": pa.int32(), "height": pa.int32(), "descriptor": values}
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        super().__init__(path, pa.schema(fields), KIND, header)
        self._waiting: list[Any] = []

    def _open(self, file: Any) -> Any:
        from pyarrow.parquet import ParquetWriter

        return ParquetWriter(
            file, self._schema, compression="none", use_dictionary=False, write_statistics=False
        )

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
        width_height = np.asarray(sizes, dtype=np.int32).reshape(len(ids), 2)
        self._checksums.add(ids, width_height)
        columns = [
            pa.array(ids, pa.string()),
            pa.array(np.ascontiguousarray(width_height[:, 0])),
            pa.array(np.ascontiguousarray(width_height[:, 1])),
            pa.FixedSizeListArray.from_arrays(
                pa.array(rows.reshape(-1)), type=self._schema.field("descriptor").type
            ),
        ]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._schema))
        count = sum(table.num_rows for table in self._waiting)
        if count >= ROW_GROUP:
            self._write_rows(count // ROW_GROUP * ROW_GROUP)

    def copy(self, file: "DescriptorFile") -> None:
        """Add all rows of another file."""
        self.write(file.ids, file.sizes, file.read())

    def _flush(self) -> None:
        if count := sum(table.num_rows for table in self._waiting):
            self._write_rows(count)

    def _write_rows(self, count: int) -> None:
        """Write the first `count` buffered rows."""
        import pyarrow as pa

        table = pa.concat_tables(self._waiting)
        for start in range(0, count, ROW_GROUP):
            group = table.slice(start, min(ROW_GROUP, count - start)).column("descriptor")
            self._checksums.values.append(_checksum(group))
        self._writer.write_table(table.slice(0, count), row_group_size=ROW_GROUP)
        self._waiting = [table.slice(count)] if count < table.num_rows else []


@dataclass(frozen=True, eq=False)
class DescriptorFile(TableFile[DescriptorHeader]):
    """A descriptor file of N rows: ids, sizes [N, 2] and descriptors [N, dim].

    `DescriptorFile.open(path)` opens one. The size of a photo with a box is the size of the box.
    """

    kind = KIND

    dim: int
    rows: int

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file and read its header; raise an `InputError` for any other file."""
        path = Path(path)
        with _parquet(path) as file:
            return cls(path, *_read_head(path, file))

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

    def writer(self, path: Path, header: DescriptorHeader) -> DescriptorWriter:
        """Return a writer of files with the same columns."""
        return DescriptorWriter(path, self.dim, header)

    def columns(self, *names: str) -> Any:
        """Return some columns as an Arrow table."""
        with self._opened() as file:
            return file.read(columns=list(names))

    def batches(self, rows: int = ROW_GROUP) -> Iterator[Rows]:
        """Iterate over the descriptors: float32 [n, dim], read-only, at most `rows` at a time."""
        with self._opened() as file:
            # Group by group, because pyarrow keeps all groups of one call in memory.
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, ["descriptor"], use_threads=False).column(0)
                if self.checksums and self.checksums.values[group] != _checksum(column):
                    raise damaged(self.path)
                for chunk in column.chunks:
                    values = _values(chunk).reshape(-1, self.dim)
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
            raise damaged(self.path)
        return everything

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with _parquet(self.path) as file:
            opened = (self.header, self.checksums, self.dim, self.rows)
            if _read_head(self.path, file) != opened:
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
    return KIND.matches(path)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file; any failure becomes an `InputError` of one line."""
    with KIND.reading(path):
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            yield file


def _read_head(path: Path, file: Any) -> tuple[DescriptorHeader, Checksums | None, int, int]:
    """Return header, checksums, dimensions and number of rows."""
    schema = file.schema_arrow
    checksums = KIND.read_checksums(path, schema)
    header = KIND.read_header(path, schema)
    dim = schema.field("descriptor").type.list_size
    return header, checksums, dim, file.metadata.num_rows


def _values(chunk: Any) -> Rows:
    """Return the values of an Arrow array of n descriptors: float32 [n · dim]."""
    values: Rows = chunk.flatten().to_numpy(zero_copy_only=True)
    return values


def _checksum(column: Any) -> int:
    """Return the CRC-32 of an Arrow column of descriptors."""
    checksum = 0
    for chunk in column.chunks:
        checksum = zlib.crc32(_values(chunk).data, checksum)
    return checksum
