"""Write the metrics of a run to `metrics.jsonl` and TensorBoard, with pictures of ranked lists."""

import io
import json
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.data import LabelledImages
from listwise.data.images import Box
from listwise.data.sheets import Tile, load_thumbnail, ranked_sheet
from listwise.errors import InputError
from listwise.files import write_text

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
THUMBNAILS = 256  # kept, 28 kB each: pictures of a run mostly show the same photos


class Record:
    """Appends the metrics of a run to `metrics.jsonl` and TensorBoard.

    A run that is resumed after `update` keeps the metrics up to that update and removes later ones;
    with 0 a new run starts, and all earlier metrics are removed. Damaged lines are removed too;
    `damaged` has their numbers. `sum` is a checksum of all lines of the file. `load_thumbnail`
    keeps the thumbnails of earlier pictures.
    """

    def __init__(self, run: Path, update: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.load_thumbnail = lru_cache(THUMBNAILS)(load_thumbnail)
        path = run / METRICS_FILE
        first = update + 1 if update else 0
        entries, self.damaged = _read_entries(path)
        kept = "".join(json.dumps(entry) + "\n" for entry in entries if entry["update"] < first)
        write_text(path, kept)
        self.sum = zlib.crc32(kept.encode())
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = SummaryWriter(str(run / TENSORBOARD_FOLDER), purge_step=first)

    def write(self, update: int, **values: float) -> None:
        """Write the metrics of an update."""
        line = json.dumps({"update": update, **values}) + "\n"
        self._file.write(line)
        self._file.flush()
        self.sum = zlib.crc32(line.encode(), self.sum)
        for name, value in values.items():
            self._board.add_scalar(name, value, update)

    def picture(self, update: int, name: str, image: Image.Image) -> None:
        """Write a picture to TensorBoard, as a JPEG file.

        `add_image` would write a PNG file, which is several times as large, and TensorBoard
        computes its checksum in Python.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        content = io.BytesIO()
        image.convert("RGB").save(content, "JPEG", quality=90)
        picture = Summary.Image(
            height=image.height,
            width=image.width,
            colorspace=3,
            encoded_image_string=content.getvalue(),
        )
        summary = Summary(value=[Summary.Value(tag=name, image=picture)])
        self._board._get_file_writer().add_summary(summary, update)

    def flush(self) -> None:
        """Write buffered metrics to disk; call it before a checkpoint is saved."""
        self._board.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._board.close()


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the metrics of a run, one dictionary per update."""
    entries, damaged = _read_entries(run / METRICS_FILE)
    if damaged:
        raise InputError(
            f"{run / METRICS_FILE}, line {damaged[0]} is damaged: listwise train --resume {run} "
            "removes damaged lines"
        )
    return entries


def choose_queries(labels: npt.NDArray[np.int64], count: int) -> list[int]:
    """Choose the same few queries every time: the first image of evenly spaced classes."""
    _, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    usable = first[sizes > 1]
    picks = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [int(usable[i]) for i in picks]


def ranked_list_picture(
    images: LabelledImages,
    descriptors: npt.NDArray[np.float32],
    queries: Sequence[int],
    count: int = 8,
    load: Callable[[str, Box | None, int], Image.Image] = load_thumbnail,
) -> Image.Image:
    """Draw one row per query: the query, then the first `count` photos of its ranked list.

    Shapes: descriptors [N, C] of the images; `queries` are positions in them.
    """
    rows = []
    for query in queries:
        scores = descriptors @ descriptors[query]
        scores[query] = -np.inf
        row = [Tile(images.paths[query], "query", images.box(query))]
        for index in np.argsort(-scores, kind="stable")[: min(count, len(scores) - 1)]:
            right = images.labels[index] == images.labels[query]
            row.append(Tile(images.paths[index], "right" if right else "wrong", images.box(index)))
        rows.append(row)
    return ranked_sheet(rows, load=load)


def _read_entries(path: Path) -> tuple[list[dict[str, float]], list[int]]:
    """Read the entries of a file, and the numbers of its damaged lines, counted from 1.

    The last line may be unfinished, if the run was interrupted: it is left out.
    """
    entries: list[dict[str, float]] = []
    damaged: list[int] = []
    if not path.exists():
        return entries, damaged
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:  # UnicodeDecodeError is one
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("update"), int):
            entries.append(entry)
        else:
            damaged.append(number)
    return entries, damaged
