"""Read lists of photos and labels from folders, tables and text files.

`read_labelled` (with labels) and `read_images` (without) read three layouts:

* **A folder of class folders.** The class of an image is the first folder below the root;
  deeper folders do not matter: `photos/eiffel_tower/2019/a.jpg` is of class `eiffel_tower`. With
  `levels`, all folders are the levels of the class: `photos/bird/sparrow/a.jpg` is `bird/sparrow`.
* **A table**, `.csv` (UTF-8, comma-separated, a header line) or `.parquet`, one image per row:

  ======================  ==================================================================
  `path`                  the image file: absolute, or relative to the folder of the table
  `label`                 its class: any text or number; `bird/sparrow` has two levels
  `label1`, `label2` ...  the levels of its class in place of `label`, from coarse to fine
  `split`                 optional: `train` or `val`, or another name
  `box`                   optional: `"x0,y0,x1,y1"` or `"x0 y0 x1 y1"`, the part of the image
                          to use, in pixels of the upright image; empty for all of it
  `x0`, `y0`, `x1`, `y1`  the same as four columns in place of `box`
  ======================  ==================================================================

* **An image list**, `.txt`, one image per line: the path, a tab, and the label. Without a tab, the
  last word of the line is the label. Paths are absolute, or relative to the folder of the list.
"""

import csv
import io
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from listwise.data.images import IMAGE_SUFFIXES, Box, describe_ignored, image_names
from listwise.data.labelled import Images, LabelledImages, first_names
from listwise.data.memory import Cells, Table, cell_text, is_table, table_cells
from listwise.errors import InputError, ListwiseWarning
from listwise.files import read_text
from listwise.optional import requires
from listwise.progress import count_of

# Each takes about 400 bytes of memory.
MAX_ROWS = 20_000_000
_BOX_COLUMNS = ("x0", "y0", "x1", "y1")
_SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
_PHOTOS = (
    "a folder of photos, a photo, a .csv or .parquet table with a column path, or a .txt list with "
    "one path per line"
)
_LABELLED_PHOTOS = (
    "a folder of class folders, a .csv or .parquet table with the columns path,label, or a .txt "
    "list with path<TAB>label on each line"
)


def read_labelled(
    source: str | Path,
    split: str | None = None,
    split_column: str = "split",
    levels: bool = False,
) -> LabelledImages:
    """Read images and their labels from a folder, a table or a list (see this module's layouts).

    The image files are not opened; `check_images` checks them.

    Args:
        source: path of the folder, table or list.
        split: return only the images of this split; all by default.
        split_column: the column of a table that names the split.
        levels: in a folder, the label of an image has all folders of its path as levels, from
            coarse to fine, instead of the first folder alone. Tables and lists write the levels.

    Returns:
        N images with labels int64 [N], and with `.splits` if the table has them.
    """
    source = Path(source).expanduser()
    if source.is_dir():
        rows, ignored = _class_folders(source, levels)
        images = replace(_labelled(rows), ignored=ignored)
    elif _is_table(source, _LABELLED_PHOTOS):
        images = _labelled(_table_rows(source, split_column=split_column, need_label=True))
    else:
        images = _labelled(_list_rows(source, need_label=True))
    return images if split is None else images.of_split(split)


def read_images(source: str | Path | Table) -> Images:
    """Read N images without labels: a folder, a table with a path column, a list, or one image.

    A table may also be a DataFrame or a list of dictionaries. Boxes are kept. Labels, splits and
    all other columns become attributes.
    """
    if is_table(source):
        cells = table_cells(source)
        return _unlabelled(_read_rows(Path("the table"), cells, split_column=None))
    assert isinstance(source, str | Path)
    source = Path(source).expanduser()
    if source.is_dir():
        rows, ignored = _folder_rows(source)
        return replace(_unlabelled(rows), ignored=ignored, folder=os.path.abspath(source))
    if source.suffix.lower() in IMAGE_SUFFIXES and source.exists():
        return _unlabelled([_ListedImage(os.path.abspath(source), str(source))])
    if _is_table(source, _PHOTOS):
        return _unlabelled(_table_rows(source, split_column=None, need_label=False))
    return _unlabelled(_list_rows(source, need_label=False))


@dataclass(frozen=True)
class _ListedImage:
    """One image of a source; label and split are None if the source has none."""

    path: str
    id: str
    box: Box | None = None
    label: str | None = None
    split: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


def _unlabelled(rows: list[_ListedImage]) -> Images:
    boxes = tuple(row.box for row in rows)
    attributes = tuple(row.attributes for row in rows)
    return Images(
        paths=tuple(row.path for row in rows),
        ids=tuple(row.id for row in rows),
        boxes=boxes if any(boxes) else None,
        attributes=attributes if any(attributes) else None,
    )


def _labelled(rows: list[_ListedImage]) -> LabelledImages:
    splits = [row.split for row in rows if row.split is not None]
    images = replace(_unlabelled(rows), attributes=None)
    return LabelledImages.from_names(images, [str(row.label) for row in rows], splits)


def _folder_rows(folder: Path) -> tuple[list[_ListedImage], Counter[str]]:
    """Return the images of a folder, and the numbers of other files, with a warning of these."""
    root, ignored = os.path.abspath(folder), Counter[str]()
    rows = [_ListedImage(os.path.join(root, name), name) for name in image_names(root, ignored)]
    if not rows:
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        others = f"; {describe_ignored(ignored)}" if ignored else ""
        raise InputError(
            f"{folder}: no photo in this folder or below it (names in {suffixes}){others}"
        )
    if ignored:
        warnings.warn(f"{folder}: {describe_ignored(ignored)}", ListwiseWarning, stacklevel=4)
    return rows, ignored


def _class_folders(folder: Path, levels: bool) -> tuple[list[_ListedImage], Counter[str]]:
    rows, ignored = _folder_rows(folder)
    bare = [row.id for row in rows if "/" not in row.id]
    if bare:
        what = count_of(len(bare), "photo is", "photos are")
        raise InputError(
            f"{folder}: {what} directly in it ({first_names(bare, ', ')}); put the photos of "
            f"each class into a folder of their own, {folder}/CLASS/PHOTO, or give a CSV file "
            "with the columns path,label"
        )
    classes = sorted({row.id.split("/", 1)[0] for row in rows})
    if _SPLIT_NAMES.issuperset(name.lower() for name in classes):
        raise InputError(
            f"{folder}: its folders ({', '.join(classes)}) are named like splits, not classes; "
            f"give one of them, such as {folder / classes[0]}, or a CSV file with the columns "
            "path,label,split"
        )
    cut = str.rsplit if levels else str.split
    return [replace(row, label=cut(row.id, "/", 1)[0]) for row in rows], ignored


def _is_table(source: Path, layouts: str) -> bool:
    """Return whether a file is a table rather than a list; an error names the `layouts`."""
    if not source.exists():
        raise InputError(f"{source}: no such file or folder; give {layouts}")
    suffix = source.suffix.lower()
    if suffix not in (".csv", ".parquet", ".txt"):
        raise InputError(f"{source} is not a source of photos; give {layouts}")
    return suffix != ".txt"


def _list_rows(source: Path, need_label: bool) -> list[_ListedImage]:
    rows, unlabelled = [], 0
    for number, line in enumerate(read_text(source).split("\n"), start=1):
        if not line.strip():
            continue
        written, label = _split_line(line)
        if "\0" in line:
            raise InputError(f"{source}, line {number}: contains a NUL character: remove it")
        if not written:
            where = f"{source}, line {number}"
            raise InputError(f"{where}: {line.strip()!r} has no path; write path<TAB>label")
        if need_label and not label:
            unlabelled += 1
            continue
        attributes = {"label": label} if label and not need_label else {}
        path = os.path.abspath(source.parent / written)
        rows.append(_ListedImage(path, written, label=label or None, attributes=attributes))
    _note_unlabelled(source, unlabelled, bool(rows), "write path<TAB>label")
    if not rows:
        raise InputError(f"{source}: the list is empty")
    return rows


def _split_line(line: str) -> tuple[str, str]:
    """Return the path and the label of a line, with an empty label if it has none."""
    if "\t" in line:
        written, label = line.rsplit("\t", 1)
        return written.strip(), label.strip()
    line = line.strip()
    # A line that ends like an image file is a path with spaces, without a label.
    if Path(line).suffix.lower() in IMAGE_SUFFIXES or len(line.split()) < 2:
        return line, ""
    written, label = line.rsplit(maxsplit=1)
    return written, label


def _table_rows(source: Path, split_column: str | None, need_label: bool) -> list[_ListedImage]:
    """Read a table in a file."""
    cells = _csv_cells(source) if source.suffix.lower() == ".csv" else _parquet_cells(source)
    return _read_rows(source, cells, split_column, need_label)


def _read_rows(
    source: Path, cells: Cells, split_column: str | None, need_label: bool = False
) -> list[_ListedImage]:
    """Read a table with this name from the names of its columns and its rows."""
    _, columns = next(cells)
    if twice := [name for name, times in Counter(columns).items() if times > 1]:
        raise InputError(f"{source}: several columns are called {twice[0]}: keep one of them")
    labels = _label_columns(source, columns) if need_label else []
    required = ["path", *labels]
    missing = [name for name in required if name not in columns]
    if missing:
        hint = ""
        if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
            hint = "; separate the columns by commas"
        raise InputError(
            f"{source}: no column {' and no column '.join(missing)}; the columns are: "
            f"{', '.join(columns)}; needed are {' and '.join(required)}, with split and box "
            f"(or x0,y0,x1,y1) optional{hint}"
        )
    if split_column not in columns:
        if split_column not in (None, "split"):
            raise InputError(
                f"{source}: no split column {split_column!r}; the columns are: {', '.join(columns)}"
            )
        split_column = None
    required += [split_column] if split_column else []
    read_box = _box_reader(source, columns)
    others = [] if need_label else [c for c in columns if c not in ("path", "box", *_BOX_COLUMNS)]
    rows, unlabelled = [], 0
    for place, values in cells:
        row = dict(zip(columns, values, strict=True))
        for name, value in row.items():
            if isinstance(value, str) and "\0" in value:
                raise InputError(
                    f"{source}, {place}: the cell in column {name} contains a NUL character: "
                    "remove it"
                )
        if labels and not any(cell_text(row[name]) for name in labels):
            unlabelled += 1
            continue
        for name in required:
            if not cell_text(row[name]):
                raise InputError(f"{source}, {place}: the cell in column {name} is empty")
        written = cell_text(row["path"])
        rows.append(
            _ListedImage(
                path=os.path.abspath(source.parent / written),
                id=written,
                box=read_box(place, row),
                label="/".join(cell_text(row[name]) for name in labels) if labels else None,
                split=cell_text(row[split_column]) if split_column else None,
                attributes={name: text for name in others if (text := cell_text(row[name]))},
            )
        )
    _note_unlabelled(source, unlabelled, bool(rows), "fill the column label")
    if not rows:
        raise InputError(f"{source}: the table has no rows")
    return rows


def _note_unlabelled(source: Path, count: int, others: bool, advice: str) -> None:
    """Warn of photos without a label, which are ignored; refuse them if there are no others."""
    if count and not others:
        raise InputError(f"{source}: no photo has a label; {advice}")
    if count:
        ignored = count_of(count, "photo")
        warnings.warn(f"{source}: ignored {ignored} without a label", ListwiseWarning, stacklevel=5)


def _label_columns(source: Path, columns: Sequence[str]) -> list[str]:
    """Return the column of the label, or those of its levels from coarse to fine."""
    found = sorted(int(name[5:]) for name in columns if re.fullmatch("label[1-9][0-9]*", name))
    levels = [f"label{level}" for level in found]
    if not levels:
        return ["label"]
    if "label" in columns:
        raise InputError(
            f"{source}: has a column label and {', '.join(levels)}; keep the one or the others"
        )
    if found[-1] != len(found):
        raise InputError(
            f"{source}: has the columns {', '.join(levels)}, with a gap; number the levels of the "
            "labels label1, label2 and so on"
        )
    return levels


def _csv_cells(source: Path) -> Cells:
    reader = csv.reader(io.StringIO(read_text(source)), strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if not any(columns):
            raise InputError(f"{source}: the first line must name the columns, such as path,label")
        yield "line 1", columns
        for row in filter(None, reader):
            place = f"line {reader.line_num}"
            if len(row) != len(columns):
                raise InputError(
                    f"{source}, {place}: {len(row)} cells where the first line names "
                    f"{len(columns)} columns; put quotes around a cell with a comma"
                )
            yield place, row
    except csv.Error as error:
        place = f"{source}, line {max(1, reader.line_num)}"
        raise InputError(f"{place}: not readable as CSV ({error})") from None


def _parquet_cells(source: Path) -> Cells:
    with requires("train", "a Parquet table"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    numbers = count(1)
    try:
        with pq.ParquetFile(source) as file:
            if file.metadata.num_rows > MAX_ROWS:  # a small file may have billions of equal rows
                raise InputError(
                    f"{source}: {file.metadata.num_rows:,} rows; give tables of at most "
                    f"{MAX_ROWS:,} rows"
                )
            yield "the schema", file.schema_arrow.names
            for batch in file.iter_batches(65536):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield f"row {next(numbers)}", row
    except (pa.ArrowException, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{source}: not readable as Parquet ({reason})") from None


def _box_reader(
    source: Path, columns: Sequence[str]
) -> Callable[[str, Mapping[str, Any]], Box | None]:
    """Return a function (place, row) -> box for a table with these columns."""
    four = [name for name in _BOX_COLUMNS if name in columns]
    if "box" in columns and four:
        raise InputError(f"{source}: has a column box and {', '.join(four)}; keep one of the two")
    absent = [name for name in _BOX_COLUMNS if name not in columns]
    if four and absent:
        raise InputError(f"{source}: a box needs x0,y0,x1,y1; no column {', '.join(absent)}")

    box_columns = four or [name for name in columns if name == "box"]

    def read(place: str, row: Mapping[str, Any]) -> Box | None:
        written = " ".join(cell_text(row[name]) for name in box_columns)
        cells = re.sub(r"[\[\](),]", " ", written).split()  # a cell may be a list
        if not cells:
            return None
        where = f"{source}, {place}: the box {','.join(cells)!r}"
        try:
            x0, y0, x1, y1 = map(float, cells)
        except ValueError:
            raise InputError(f"{where} is not four numbers x0,y0,x1,y1") from None
        if not all(map(math.isfinite, (x0, y0, x1, y1))) or x0 >= x1 or y0 >= y1:
            raise InputError(f"{where} is empty; it must have x0 < x1 and y0 < y1")
        return x0, y0, x1, y1

    return read
