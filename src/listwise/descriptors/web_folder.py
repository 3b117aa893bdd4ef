"""A folder with a model that runs in a browser, and an example page."""

import json
import shutil
from pathlib import Path
from typing import Final

from listwise.descriptors.onnx_file import OnnxInfo
from listwise.errors import InputError
from listwise.files import write_text

MODEL_FILE: Final = "model.onnx"
SETTINGS_FILE: Final = "settings.json"
PAGE: Final = ("index.html", "listwise.js")
MAX_SIDE: Final = 512  # of photos in a browser, unless the model or the user chooses another


def make_folder(folder: str | Path) -> Path:
    """Create a folder, and return the path of the model in it."""
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder for the files of a web page")
    if not folder.parent.is_dir():
        raise InputError(f"cannot write {folder}: the folder {folder.parent} does not exist")
    folder.mkdir(exist_ok=True)
    return folder / MODEL_FILE


def add_page(folder: Path, info: OnnxInfo) -> None:
    """Write the settings that a page needs, and the example page, next to the model."""
    settings = {
        "backbone": info.network.backbone,
        "dim": info.dim,
        "max_side": info.tuned.max_side if info.tuned else None,
        "precision": info.precision,
        "fingerprint": info.fingerprint,
    }
    write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
    for name in PAGE:
        shutil.copyfile(Path(__file__).parent / "web" / name, folder / name)
