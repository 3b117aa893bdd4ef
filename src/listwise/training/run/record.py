"""What a run leaves to read: `metrics.jsonl`, one line per update, and TensorBoard."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from listwise.files import write_text

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class Record:
    """Appends to a run's metrics; resumed after `update`, it removes what came later.

    At 0 the run starts, and everything is removed.
    """

    def __init__(self, run: Path, update: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = run / METRICS_FILE
        first = update + 1 if update else 0
        kept = [line for line in _whole_lines(path) if json.loads(line)["update"] < first]
        write_text(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = SummaryWriter(str(run / TENSORBOARD_FOLDER), purge_step=first)

    def write(self, update: int, **values: float) -> None:
        """Note the figures of an update."""
        self._file.write(json.dumps({"update": update, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, update)

    def picture(self, update: int, name: str, image: Image.Image) -> None:
        """Show a picture in TensorBoard."""
        self._board.add_image(name, np.asarray(image), update, dataformats="HWC")

    def flush(self) -> None:
        """Write what is in memory: a checkpoint must not be ahead of its metrics."""
        self._board.flush()

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        self._board.close()


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The figures of a run, one entry per update."""
    return [json.loads(line) for line in _whole_lines(run / METRICS_FILE)]


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that were written to their end."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()
