"""Files that are always whole."""

import os
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Put a finished file in its place: readers see the old one or the new one, never a part.

    A kill or a loss of power at any moment leaves one of the two. The file gets the permissions
    that an ordinary new file has.
    """
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    mask = os.umask(0)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)
    os.replace(partial, final)


def write_text(path: Path, text: str) -> None:
    """Write a text file that is at every moment the old one or the new one."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)
