"""Checksums and copies of the files that a table cannot be read without.

LanceDB stores no checksum of its manifests, lists of deleted rows, indices and file footers. The
folder `guards` holds one file for each of them. The name of a guard ends with a mark: the size of
the file, the number of bytes at its end that are protected, and their checksum. Its content is a
copy from which `restore` repairs the original, except for indices, which can be built again.
LanceDB never changes a file that it has written, so a guard is written once.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from listwise.files import publish, sync_folder

_FOLDER = "guards"
_HEADER = "index.json"
_TABLE = "entries.lance"
_TAIL = 64 << 10  # bytes: the end of a data file, which describes its columns
_SLASH = "@"  # in the name of a guard
_MARK = re.compile(r"\.\d+-\d+-[0-9a-f]{32}")


def update(folder: Path) -> None:
    """Write the guards that are missing and drop those of files that are no longer used.

    Only the process that holds the lock of the index may call it.
    """
    guards = folder / _FOLDER
    guards.mkdir(exist_ok=True)
    present = _present(folder)
    for path in _files(folder):
        file = str(path.relative_to(folder))
        if present.pop(file, None) is None:
            size = path.stat().st_size
            content = _end(path, min(size, _TAIL) if path.parent.name == "data" else size)
            partial = guards / "new.tmp"
            # No fsync: the name holds the checksum, and a copy is compared with it before use.
            partial.write_bytes(b"" if is_index_file(file) else content)
            partial.replace(guards / f"{file.replace(os.sep, _SLASH)}.{_mark(content, size)}")
    for guard in present.values():
        guard.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Wait until the files that have no guard yet are on the disk: LanceDB does not.

    Call it before `update`. Then a finished change survives a power failure.
    """
    present = _present(folder)
    new = [path for path in _files(folder) if str(path.relative_to(folder)) not in present]
    for path in new:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for parent in {path.parent for path in new} | {folder, folder / _TABLE}:
        sync_folder(parent)


def damaged_files(folder: Path) -> list[str]:
    """Names of the guarded files that have changed since they were written."""
    found = []
    for file, guard in _present(folder).items():
        try:
            kept = int(guard.suffix[1:].split("-")[1])
            size = (folder / file).stat().st_size
            if _mark(_end(folder / file, kept), size) != guard.suffix[1:]:
                found.append(file)
        except FileNotFoundError:
            continue  # removed by another process; LanceDB reports the files that it misses
    return sorted(found)


def unfinished(folder: Path) -> list[str]:
    """Names of the manifests of changes that were committed, but not finished with `update`."""
    present = _present(folder)
    found: list[str] = []
    for path in _manifests(folder):
        file = str(path.relative_to(folder))
        if file in present:
            return found
        found.append(file)
    return []  # an index of an earlier version


def damaged_copies(folder: Path) -> list[str]:
    """Names of the guards whose copy is damaged, which `update` makes again once deleted."""
    found: list[str] = []
    for file, guard in _present(folder).items():
        size = int(guard.suffix[1:].split("-")[0])
        if not is_index_file(file) and _mark(guard.read_bytes(), size) != guard.suffix[1:]:
            found.append(str(guard.relative_to(folder)))
    return sorted(found)


def restore(folder: Path) -> list[str]:
    """Repair damaged files from their copies and return the names of those still damaged."""
    present = _present(folder)
    for file in damaged_files(folder):
        path, copy = folder / file, present[file].read_bytes()
        size = int(present[file].suffix[1:].split("-")[0])
        if _mark(copy, size) != present[file].suffix[1:]:
            continue  # no copy, or a damaged one
        if len(copy) == size:
            partial = path.with_name(f"{path.name}.tmp")
            partial.write_bytes(copy)
            publish(partial, path)
        elif path.stat().st_size == size:
            with path.open("r+b") as opened:
                opened.seek(size - len(copy))
                opened.write(copy)
                os.fsync(opened.fileno())
    return damaged_files(folder)


def is_index_file(file: str) -> bool:
    """Whether a guarded file belongs to an index of LanceDB, which can be built again."""
    return "_indices" in Path(file).parts


def _present(folder: Path) -> dict[str, Path]:
    """The guards by the names of the files that they protect."""
    try:
        paths = list((folder / _FOLDER).iterdir())
    except FileNotFoundError:  # an index of an earlier version
        return {}
    # Other programs may leave files in any folder.
    ours = (path for path in paths if _MARK.fullmatch(path.suffix))
    return {path.stem.replace(_SLASH, os.sep): path for path in ours}


def _files(folder: Path) -> Iterator[Path]:
    """The files to guard. Of the manifests, only the last is read."""
    table = folder / _TABLE
    if (folder / _HEADER).exists():
        yield folder / _HEADER
    yield from _manifests(folder)[:1]
    for kind in ("_deletions", "_indices", "data"):
        yield from (path for path in (table / kind).rglob("*") if path.is_file())


def _manifests(folder: Path) -> list[Path]:
    """The manifests of a table, the last version first: LanceDB counts down in their names."""
    return sorted((folder / _TABLE / "_versions").glob("*.manifest"))


def _end(path: Path, count: int) -> bytes:
    """The last bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - count))
        return file.read()


def _mark(content: bytes, size: int) -> str:
    """The mark of a file of this size with this content at its end."""
    return f"{size}-{len(content)}-{hashlib.blake2b(content, digest_size=16).hexdigest()}"
