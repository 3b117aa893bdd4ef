"""Generations of an index in a folder: where each has its files, and the record of them.

Generation 0 is in the folder of the index itself, generation N in its subfolder `generations/N`.
The file `generations.json` names the current one. It is replaced atomically, after its copy, from
which it is repaired. An index that was never upgraded has no such file.
"""

import shutil
from pathlib import Path

from listwise.files import write_text
from listwise.search.checksums import DamagedIndexError, damage
from listwise.search.generations import GenerationRecord

FOLDER = "generations"
RECORDS = ("generations.json", "generations.copy.json")
"""Names of the record and of its copy."""
_ZERO = ("index.json", "search.json", "guards", "entries.lance")  # files of generation 0


def generation_folder(root: Path, number: int) -> Path:
    """The folder of a generation."""
    return root / FOLDER / str(number) if number else root


def has_record(root: Path) -> bool:
    """Whether an index was ever upgraded."""
    return any((root / name).exists() for name in RECORDS)


def read_record(root: Path) -> GenerationRecord:
    """Read the record of an index; `DamagedIndexError` if it is not what was written."""
    record, copy = (_read(root / name) for name in RECORDS)
    if record is not None:
        return record
    if (root / RECORDS[0]).exists():
        record = _read(root / RECORDS[0])  # another process may have just written the first one
        if record is not None:
            return record
        raise damage(str(root), f"{RECORDS[0]} changed after it was written")
    if copy is not None and copy.current:
        raise damage(str(root), f"{RECORDS[0]} is missing")
    return GenerationRecord()  # never upgraded, or killed before the first record was written


def write_record(root: Path, record: GenerationRecord) -> None:
    """Replace the record atomically."""
    for name in reversed(RECORDS):
        write_text(root / name, record.write())


def damaged_records(root: Path) -> list[str]:
    """Names of the files of this module that are damaged or missing."""
    if not has_record(root):
        return []
    damaged = [name for name in RECORDS if _read(root / name) is None]
    try:
        read_record(root)
    except DamagedIndexError:
        return damaged
    return damaged if _read(root / RECORDS[0]) else []


def sound_record(root: Path) -> GenerationRecord | None:
    """The record, or its copy if the record is damaged; None if both are."""
    if not has_record(root):
        return GenerationRecord()
    return next(filter(None, (_read(root / name) for name in RECORDS)), None)


def drop_unused(root: Path, record: GenerationRecord) -> None:
    """Delete the files of generations that the record does not name."""
    for folder in (root / FOLDER).glob("*"):
        if folder.name not in map(str, record.numbers):
            _delete(folder)
    if 0 not in record.numbers:
        for path in [*(root / name for name in _ZERO), *root.glob("search-*")]:
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read(path: Path) -> GenerationRecord | None:
    try:
        return GenerationRecord.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
