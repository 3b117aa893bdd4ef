"""Local features on disk: one Arrow file, a photo a row, mapped into memory and not read whole."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import ipc
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise import __version__
from listwise.errors import InputError
from listwise.files import publish
from listwise.local.features import Features

FORMAT_VERSION: Final = 1
_KEY: Final = b"listwise-local"


class Header(BaseModel):
    """What a file of local features says about itself.

    `extractor` names what made them, with its settings. `unreadable` has a line for each photo
    that is missing in the file because it is broken.
    """

    model_config = ConfigDict(frozen=True)

    format_version: int = FORMAT_VERSION
    listwise: str = __version__
    extractor: str
    dim: int
    unreadable: tuple[str, ...] = ()


class Photo(NamedTuple):
    """A photo's row: its id, the size of the whole upright photo, and its features."""

    id: str
    width: int
    height: int
    features: Features


class FeatureWriter:
    """Writes a file of local features, in its place, whole, once the `with` block has ended.

    If the block ends with an error, nothing is left behind. Descriptors are kept in 8 bits a value.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        self._dim = header.dim
        self._schema = pa.schema(
            [
                ("id", pa.string()),
                ("width", pa.int32()),
                ("height", pa.int32()),
                ("points", pa.list_(pa.list_(pa.float32(), 2))),
                ("scales", pa.list_(pa.float32())),
                ("shapes", pa.list_(pa.list_(pa.float32(), 4))),
                ("low", pa.float32()),  # descriptors are low + step · code
                ("step", pa.float32()),
                ("codes", pa.list_(pa.list_(pa.uint8(), header.dim))),
            ],
            metadata={_KEY: header.model_dump_json()},
        )

    def __enter__(self) -> Self:
        try:
            self._file = pa.OSFile(str(self._partial), "wb")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._writer = ipc.new_file(self._file, self._schema)
        return self

    def write(self, photos: Sequence[Photo]) -> None:
        """Add photos, which are a batch of the file: tens or hundreds."""
        if not photos:
            return
        features = [photo.features for photo in photos]
        coded = [_coded(each.descriptors) for each in features]
        for photo in photos:
            if photo.features.descriptors.shape[1] != self._dim:
                raise InputError(
                    f"the descriptors of {photo.id} have {photo.features.descriptors.shape[1]} "
                    f"dimensions, those of {self.path} have {self._dim}"
                )
        columns = [
            pa.array([photo.id for photo in photos]),
            pa.array([photo.width for photo in photos], pa.int32()),
            pa.array([photo.height for photo in photos], pa.int32()),
            _lists([each.points for each in features], 2),
            _lists([each.scales for each in features], None),
            _lists([each.shapes.reshape(-1, 4) for each in features], 4),
            pa.array([low for low, _, _ in coded], pa.float32()),
            pa.array([step for _, step, _ in coded], pa.float32()),
            _lists([codes for _, _, codes in coded], self._dim),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def copy(self, file: "FeatureFile") -> None:
        """Add all photos of another file as they are."""
        for batch in file.table.to_batches():
            self._writer.write_batch(batch.cast(self._schema))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._writer.close()
            self._file.close()
            if kind is None:
                publish(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """The local features of N photos on disk; `open` makes one.

    It may be read by several threads. A photo's features are read when they are asked for.
    """

    path: Path
    header: Header
    table: Any

    @classmethod
    def open(cls, path: str | Path) -> "FeatureFile":
        """Map a file into memory.

        Raises:
            InputError: there is no such file, it is damaged, or it holds no local features.
        """
        path = Path(path)
        try:
            table = ipc.open_file(pa.memory_map(str(path))).read_all()
        except FileNotFoundError:
            raise InputError(
                f"no file of local features {path}: listwise local extract makes one"
            ) from None
        except (pa.ArrowException, OSError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"{path} is damaged or holds no local features ({said})") from error
        return cls(path, _header(path, table.schema), table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The N ids, in the order of the rows."""
        return tuple(self.table.column("id").to_pylist())

    @cached_property
    def positions(self) -> dict[str, int]:
        """The row of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of features of each photo: [N]."""
        lengths = [pc.list_value_length(part) for part in self.table.column("scales").chunks]
        return np.concatenate([part.to_numpy() for part in lengths]).astype(np.int64)

    @cached_property
    def sizes(self) -> NDArray[np.int32]:
        """Width and height of each photo: int32 [N, 2]."""
        return np.stack([self.table.column(name).to_numpy() for name in ("width", "height")], 1)

    def read(self, row: int) -> Features:
        """The features of the photo in a row."""
        low, step = (np.float32(self.table.column(name)[row].as_py()) for name in ("low", "step"))
        decoded = self._values("codes", row).reshape(-1, self.header.dim) * step + low
        norms = np.linalg.norm(decoded, axis=1, keepdims=True)
        return Features(
            self._values("points", row).reshape(-1, 2),
            self._values("scales", row),
            self._values("shapes", row).reshape(-1, 2, 2),
            decoded / np.maximum(norms, np.float32(1e-12)),
        )

    def get(self, name: str) -> Features:
        """The features of the photo with an id."""
        if name not in self.positions:
            raise InputError(f"{self.path} has no features of {name}: extract them first")
        return self.read(self.positions[name])

    def __iter__(self) -> Iterator[Features]:
        return (self.read(row) for row in range(len(self)))

    def _values(self, column: str, row: int) -> NDArray[Any]:
        values = self.table.column(column)[row].values
        while pa.types.is_fixed_size_list(values.type):
            values = values.flatten()
        array: NDArray[Any] = values.to_numpy()
        return array

    def require(self, extractor: str) -> None:
        """Refuse the file unless this extractor made it, with the same settings."""
        if self.header.extractor != extractor:
            raise InputError(
                f"{self.path} holds features of {self.header.extractor}, not of {extractor}, and "
                "these are never mixed: extract again"
            )


def is_feature_file(path: str | Path) -> bool:
    """Whether a file is one of ours, and not some other."""
    try:
        FeatureFile.open(path)
    except InputError:
        return False
    return True


def _header(path: Path, schema: Any) -> Header:
    content = (schema.metadata or {}).get(_KEY)
    if content is None:
        raise InputError(
            f"{path} is a table, but not one of local features: listwise local extract makes them"
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
    return header


def _coded(descriptors: NDArray[np.float32]) -> tuple[float, float, NDArray[np.uint8]]:
    """Lowest value, step and 8-bit codes of a photo's descriptors: [n, D]."""
    low = float(descriptors.min(initial=0.0))
    step = max((float(descriptors.max(initial=0.0)) - low) / 255, 1e-9)
    return low, step, np.rint((descriptors - low) / step).astype(np.uint8)


def _lists(arrays: Sequence[NDArray[Any]], width: int | None) -> Any:
    """A column with a list of numbers, or of rows of `width` numbers, for each photo."""
    starts = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    values = pa.array(np.concatenate(arrays).reshape(-1))
    if width is not None:
        values = pa.FixedSizeListArray.from_arrays(values, width)
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values)
