"""Local features on disk: an Arrow file with one row per photo, memory-mapped, not read whole."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from listwise.checksums import damaged
from listwise.columns import TableFile, TableHeader, TableKind, TableWriter
from listwise.errors import InputError
from listwise.local.features import Features


class FeatureHeader(TableHeader):
    """Header of a file of local features.

    `extractor` is the name of the extractor with its settings, `dim` the dimensions of a
    descriptor.
    """

    extractor: str
    dim: int


def _read_table(path: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


KIND: Final = TableKind(
    b"listwise-local",
    "file of local features",
    "local features",
    "listwise local extract",
    ".arrow",
    b"ARROW1",
    "local",
    FeatureHeader,
    lambda path: _read_table(path).schema,
)


class PhotoFeatures(NamedTuple):
    """Row of a photo: its id, the size of the upright whole photo, and its features."""

    id: str
    width: int
    height: int
    features: Features


class FeatureWriter(TableWriter):
    """Writes a file of local features; the file appears when the `with` block ends.

    If the block ends with an error, no file is left behind. Descriptors take 8 bits per value.
    """

    def __init__(self, path: str | Path, header: FeatureHeader) -> None:
        pa = KIND.import_pyarrow()
        self._dim = header.dim
        schema = pa.schema(
            [
                ("id", pa.string()),
                ("width", pa.int32()),
                ("height", pa.int32()),
                ("points", pa.list_(pa.list_(pa.float32(), 2))),
                ("scales", pa.list_(pa.float32())),
                ("shapes", pa.list_(pa.list_(pa.float32(), 4))),
                ("low", pa.float32()),  # a descriptor is low + step · codes
                ("step", pa.float32()),
                ("codes", pa.list_(pa.list_(pa.uint8(), header.dim))),
                ("checksum", pa.uint32()),  # CRC-32 of the rest of the row
            ]
        )
        super().__init__(path, schema, KIND, header)

    def _open(self, file: Any) -> Any:
        from pyarrow import ipc

        return ipc.new_file(file, self._schema)

    def write(self, photos: Sequence[PhotoFeatures]) -> None:
        """Add photos as one batch of the file; tens or hundreds at a time are efficient."""
        import pyarrow as pa

        if not photos:
            return
        features = [photo.features for photo in photos]
        coded = [_encode(each.descriptors) for each in features]
        for photo in photos:
            if photo.features.descriptors.shape[1] != self._dim:
                raise InputError(
                    f"the descriptors of {photo.id} have {photo.features.descriptors.shape[1]} "
                    f"dimensions, but {self.path} holds descriptors of {self._dim}"
                )
        ids = [photo.id for photo in photos]
        sizes = np.array([(photo.width, photo.height) for photo in photos], np.int32)
        self._count(ids, sizes, np.array([len(each.scales) for each in features], np.int64))
        columns = [
            pa.array([photo.id for photo in photos]),
            pa.array([photo.width for photo in photos], pa.int32()),
            pa.array([photo.height for photo in photos], pa.int32()),
            _list_column([each.points for each in features], 2),
            _list_column([each.scales for each in features], None),
            _list_column([each.shapes.reshape(-1, 4) for each in features], 4),
            pa.array([low for low, _, _ in coded], pa.float32()),
            pa.array([step for _, step, _ in coded], pa.float32()),
            _list_column([codes for _, _, codes in coded], self._dim),
            pa.array(
                [
                    _checksum(photo, size, each.points, each.scales, each.shapes, *code)
                    for photo, size, each, code in zip(ids, sizes, features, coded, strict=True)
                ],
                pa.uint32(),
            ),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def copy(self, file: "FeatureFile") -> None:
        """Add all photos of another file without change."""
        self._count(file.ids, file.sizes, file.counts)
        for batch in file.table.to_batches():
            self._writer.write_batch(batch.cast(self._schema))

    def _count(
        self, ids: Sequence[str], sizes: NDArray[np.int32], counts: NDArray[np.int64]
    ) -> None:
        self._checksums.add(ids, sizes)
        before = self._checksums.values or [0]
        self._checksums.values = [zlib.crc32(counts.data, before[0])]


@dataclass(frozen=True, eq=False)
class FeatureFile(TableFile[FeatureHeader]):
    """The local features of N photos on disk; create it with `FeatureFile.open`.

    Several threads may read it. The features of a photo are read when they are used.
    """

    kind = KIND

    table: Any

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file by mapping it into memory."""
        path = Path(path)
        with KIND.reading(path):
            table = _read_table(path)
            checksums = KIND.read_checksums(path, table.schema)
            header = KIND.read_header(path, table.schema)
            # Lists that end outside of the file would end the process when they are read.
            table.validate(full=True)
        if checksums is not None and checksums.rows != len(table):
            raise damaged(path)
        return cls(path, header, checksums, table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def writer(self, path: Path, header: FeatureHeader) -> FeatureWriter:
        """Return a writer of a file with the same columns."""
        return FeatureWriter(path, header)

    def columns(self, *names: str) -> Any:
        """Return some columns as an Arrow table."""
        return self.table.select(list(names))

    @cached_property
    def positions(self) -> dict[str, int]:
        """The row number of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of features of each photo: [N]."""
        import pyarrow.compute as pc

        lengths = [pc.list_value_length(part) for part in self.table.column("scales").chunks]
        parts = [np.empty(0, np.int64), *(part.to_numpy() for part in lengths)]
        counts = np.concatenate(parts).astype(np.int64)
        if self.checksums and self.checksums.values not in ([], [zlib.crc32(counts.data)]):
            raise damaged(self.path)
        return counts

    def read(self, row: int) -> Features:
        """Return the features of the photo in a row."""
        low, step = (np.float32(self.table.column(name)[row].as_py()) for name in ("low", "step"))
        points, scales, shapes, codes = (
            self._values(name, row) for name in ("points", "scales", "shapes", "codes")
        )
        if self.checksums is not None:
            saved = self.table.column("checksum")[row].as_py()
            size = self.sizes[row]
            if saved != _checksum(self.ids[row], size, points, scales, shapes, low, step, codes):
                raise damaged(self.path)
        decoded = codes.reshape(-1, self.header.dim) * step + low
        norms = np.linalg.norm(decoded, axis=1, keepdims=True)
        return Features(
            points.reshape(-1, 2),
            scales,
            shapes.reshape(-1, 2, 2),
            decoded / np.maximum(norms, np.float32(1e-12)),
        )

    def get(self, name: str) -> Features:
        """Return the features of the photo with an id."""
        if name not in self.positions:
            raise InputError(f"{self.path} has no features of {name}: extract them first")
        return self.read(self.positions[name])

    def __iter__(self) -> Iterator[Features]:
        return (self.read(row) for row in range(len(self)))

    def _values(self, column: str, row: int) -> NDArray[Any]:
        from pyarrow import types

        values = self.table.column(column)[row].values
        while types.is_fixed_size_list(values.type):
            values = values.flatten()
        array: NDArray[Any] = values.to_numpy()
        return array

    def require(self, extractor: str) -> None:
        """Raise an error unless this extractor made the file, with the same settings."""
        if self.header.extractor != extractor:
            raise InputError(
                f"{self.path} holds features of {self.header.extractor}, not of {extractor}: "
                "extract them again"
            )


def _encode(descriptors: NDArray[np.float32]) -> tuple[float, float, NDArray[np.uint8]]:
    """Quantize descriptors [n, D] to 8 bits: lowest value, step and codes [n, D]."""
    low = float(descriptors.min(initial=0.0))
    step = max((float(descriptors.max(initial=0.0)) - low) / 255, 1e-9)
    return low, step, np.rint((descriptors - low) / step).astype(np.uint8)


def _checksum(
    name: str,
    size: NDArray[np.int32],
    points: NDArray[np.float32],
    scales: NDArray[np.float32],
    shapes: NDArray[np.float32],
    low: float | np.float32,
    step: float | np.float32,
    codes: NDArray[np.uint8],
) -> int:
    """Compute the checksum of a photo's row."""
    checksum = zlib.crc32(name.encode())
    arrays: list[NDArray[Any]] = [size, points, scales, shapes, codes]
    for values in (*arrays, np.array([low, step], np.float32)):
        checksum = zlib.crc32(np.ascontiguousarray(values).data, checksum)
    return checksum


def _list_column(arrays: Sequence[NDArray[Any]], width: int | None) -> Any:
    """Build a column with a list of numbers, or of rows of `width` numbers, for each photo."""
    import pyarrow as pa

    starts = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    values = pa.array(np.concatenate(arrays).reshape(-1))
    if width is not None:
        values = pa.FixedSizeListArray.from_arrays(values, width)
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values)
