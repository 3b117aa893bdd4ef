"""Descriptors on disk: one Parquet file, read in pieces, that says which model made it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise import __version__
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.files import publish

FORMAT_VERSION: Final = 1
ROW_GROUP: Final = 4096
_KEY: Final = b"listwise"

Rows = npt.NDArray[np.float32]


class Header(BaseModel):
    """What a descriptor file says about itself: `model` is the fingerprint of what made it.

    `unreadable` has a line for each photo that is missing in the file because it is broken.
    """

    model_config = ConfigDict(frozen=True)

    format_version: int = FORMAT_VERSION
    listwise: str = __version__
    model: str
    whitened: bool = False
    settings: ExtractSettings = ExtractSettings()
    unreadable: tuple[str, ...] = ()


class DescriptorWriter:
    """Writes a descriptor file, which is in its place, whole, once the `with` block has ended.

    If the block ends with an error, nothing is left behind. Rows are buffered up to one row group.

    Example:
        >>> with DescriptorWriter("photos.parquet", dim=4, header=Header(model="demo")) as writer:
        ...     writer.write(["a.jpg"], [(640, 480)], np.ones((1, 4), np.float32) / 2)
    """

    def __init__(self, path: str | Path, dim: int, header: Header) -> None:
        self.path = Path(path)
        self.dim = dim
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        # Neither the list nor its values may be null: reading is twice as fast without the marks.
        values = pa.list_(pa.field("item", pa.float32(), nullable=False), dim)
        self._schema = pa.schema(
            [
                pa.field("id", pa.string(), nullable=False),
                pa.field("width", pa.int32(), nullable=False),
                pa.field("height", pa.int32(), nullable=False),
                pa.field("descriptor", values, nullable=False),
            ],
            metadata={_KEY: header.model_dump_json()},
        )
        self._waiting: list[Any] = []

    def __enter__(self) -> Self:
        try:
            self._writer = pq.ParquetWriter(
                self._partial,
                self._schema,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
            )
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        return self

    def write(
        self,
        ids: Sequence[str],
        sizes: npt.ArrayLike,
        descriptors: npt.NDArray[np.floating],
    ) -> None:
        """Add rows: n ids, widths and heights [n, 2], descriptors [n, dim]."""
        rows = np.ascontiguousarray(descriptors, dtype=np.float32)
        if rows.shape != (len(ids), self.dim):
            raise InputError(
                f"{len(ids)} ids need descriptors [{len(ids)}, {self.dim}], not {list(rows.shape)}"
            )
        broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(broken):
            raise InputError(
                f"the descriptor of {ids[broken[0]]} is not finite: the network's weights are "
                "broken, or float32 is needed in place of bfloat16"
            )
        width_height = np.asarray(sizes, dtype=np.int32).reshape(len(ids), 2)
        columns = [
            pa.array(ids, pa.string()),
            pa.array(np.ascontiguousarray(width_height[:, 0])),
            pa.array(np.ascontiguousarray(width_height[:, 1])),
            pa.FixedSizeListArray.from_arrays(
                pa.array(rows.reshape(-1)), type=self._schema.field("descriptor").type
            ),
        ]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._schema))
        if sum(table.num_rows for table in self._waiting) >= ROW_GROUP:
            self._flush(whole_groups=True)

    def _flush(self, whole_groups: bool) -> None:
        table = pa.concat_tables(self._waiting)
        stop = table.num_rows // ROW_GROUP * ROW_GROUP if whole_groups else table.num_rows
        self._writer.write_table(table.slice(0, stop), row_group_size=ROW_GROUP)
        self._waiting = [table.slice(stop)] if stop < table.num_rows else []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._waiting:
                self._flush(whole_groups=False)
            self._writer.close()
            if kind is None:
                publish(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class DescriptorFile:
    """N descriptors of dimension `dim` on disk, with ids and sizes; `open` makes one."""

    path: Path
    header: Header
    dim: int
    rows: int

    @classmethod
    def open(cls, path: str | Path) -> "DescriptorFile":
        """Read a file's head and nothing more.

        Raises:
            InputError: there is no such file, it is damaged, or it holds no descriptors.
        """
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
        """How the descriptors were made of the photos."""
        return self.header.settings

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The N ids, in the order of the rows."""
        with self._opened() as file:
            return tuple(file.read(columns=["id"]).column("id").to_pylist())

    @cached_property
    def sizes(self) -> npt.NDArray[np.int32]:
        """Width and height of each photo, or of its box: int32 [N, 2]."""
        with self._opened() as file:
            table = file.read(columns=["width", "height"])
            return np.stack([table.column(name).to_numpy() for name in ("width", "height")], 1)

    def batches(self, rows: int = ROW_GROUP) -> Iterator[Rows]:
        """The descriptors in order, float32 [n, dim], read-only, at most `rows` at a time."""
        with self._opened() as file:
            # Asked for all groups at once, pyarrow keeps those that are read until the end.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(
                    rows, row_groups=[group], columns=["descriptor"], use_threads=False
                ):
                    values: Rows = batch.column(0).flatten().to_numpy(zero_copy_only=True)
                    yield values.reshape(-1, self.dim)

    def read(self) -> Rows:
        """All descriptors at once: float32 [N, dim]."""
        everything = np.empty((self.rows, self.dim), np.float32)
        start = 0
        for batch in self.batches():
            everything[start : start + len(batch)] = batch
            start += len(batch)
        return everything

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with _parquet(self.path) as file:
            if _read_head(self.path, file) != (self.header, self.dim, self.rows):
                raise InputError(f"{self.path} was replaced while it was in use: open it again")
            yield file

    def require(self, fingerprint: str) -> None:
        """Refuse the file unless the model of this fingerprint made it."""
        if self.model != fingerprint:
            raise InputError(
                f"{self.path} was made by another model or whitening ({self.model[:12]}, not "
                f"{fingerprint[:12]}), and descriptors of two models are never mixed: extract again"
            )


def is_descriptor_file(path: str | Path) -> bool:
    """Whether a file is one of ours, and not some other table."""
    try:
        return _KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """An open file; whatever is wrong with it is one line."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"no descriptor file {path}: listwise extract makes one") from None
    except (pa.ArrowException, OSError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is damaged or no descriptor file ({said})") from error


def _read_head(path: Path, file: Any) -> tuple[Header, int, int]:
    """Header, dimensions and number of rows."""
    content = (file.schema_arrow.metadata or {}).get(_KEY)
    if content is None:
        raise InputError(
            f"{path} is a table, but not one of descriptors: listwise extract makes them"
        )
    try:
        header = Header.model_validate_json(content)
    except ValidationError as error:
        raise InputError(f"{path} has a damaged header: extract again") from error
    if header.format_version > FORMAT_VERSION:
        raise InputError(
            f"{path} was written by a newer Listwise ({header.listwise}): "
            "pip install --upgrade listwise"
        )
    return header, file.schema_arrow.field("descriptor").type.list_size, file.metadata.num_rows
