"""Parts of a long extraction in a folder beside its file, until they are joined."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from listwise.data import Images
from listwise.errors import InputError
from listwise.files import write_text

KEY_FILE = "listwise.key"


def parts_key(how: str, images: Images) -> str:
    """Names a run by how it extracts and from what: the same key means the same parts."""
    digest = hashlib.sha256(how.encode())
    for index in range(len(images)):
        entry = (images.ids[index], images.paths[index], images.box(index))
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


def open_parts(folder: Path, suffix: str, key: str, on_note: Callable[[str], object]) -> None:
    """Make the folder of a run's parts, emptied if they are another run's."""
    name = folder / KEY_FILE
    try:
        if name.exists() and name.read_text(encoding="utf-8") != key:
            on_note(f"{folder} is of another model, other settings or photos: starting over")
            remove_parts(folder, suffix)
        folder.mkdir(parents=True, exist_ok=True)
        if not name.exists():
            if any(folder.glob(f"*{suffix}")):
                raise InputError(f"{folder} is in the way: move it, or give another name")
            write_text(name, key)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def remove_parts(folder: Path, suffix: str) -> None:
    """Remove a run's parts and nothing else, the key last: with it, a rest is known for ours."""
    for file in [*folder.glob(f"*{suffix}*"), *folder.glob(f"{KEY_FILE}*")]:
        file.unlink(missing_ok=True)
    folder.rmdir()
