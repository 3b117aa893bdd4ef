"""Unpack downloaded archives safely: only files and folders, and only inside the folder."""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Final

from listwise.errors import InputError

CHUNK: Final = 2**20
Progress = Callable[[str, int, int | None], object]
"""Called with the current step, the bytes done, and the total bytes if known."""


def is_disk_error(error: OSError) -> bool:
    """Return whether an error comes from the disk: it names a file, or space or quota ran out."""
    return error.filename is not None or error.errno in (28, 122)


def unpack(
    archive: Path,
    folder: Path,
    *,
    flat: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Unpack the files and folders of a tar or zip archive into `folder`.

    Raises:
        InputError: the archive is damaged, or a member is a link, a device or outside the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder, flat, progress)
        else:
            _unpack_tar(archive, folder, flat, progress)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and is_disk_error(error):
            raise InputError(f"cannot unpack into {folder}: {error.strerror}") from None
        raise InputError(f"{archive} is damaged ({error}): delete it and run again") from None


def _unpack_tar(archive: Path, folder: Path, flat: bool, progress: Progress) -> None:
    total = archive.stat().st_size
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:*") as members:
        for member in members:
            if member.isdir():
                _place(archive, folder, member.name, flat)
                continue
            content = members.extractfile(member) if member.isreg() else None
            if content is None:
                raise InputError(f"{archive}: refused, {member.name} is a link or a device")
            _write(content, _place(archive, folder, member.name, flat))
            progress(f"unpacking {archive.name}", min(file.tell(), total), total)
        # The checksum of the compressed stream follows the last member.
        while members.fileobj is not None and members.fileobj.read(CHUNK):
            pass


def _unpack_zip(archive: Path, folder: Path, flat: bool, progress: Progress) -> None:
    with zipfile.ZipFile(archive) as members:
        total = sum(member.file_size for member in members.infolist())
        done = 0
        for member in members.infolist():
            place = _place(archive, folder, member.filename, flat)
            if member.is_dir():
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                raise InputError(f"{archive}: refused, {member.filename} is a link or a device")
            with members.open(member) as content:
                _write(content, place)
            done += member.file_size
            progress(f"unpacking {archive.name}", done, total)


def _place(archive: Path, folder: Path, name: str, flat: bool) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive:
        raise InputError(f"{archive}: refused, {name!r} would be written outside of {folder}")
    return folder / path.name if flat else folder / path


def _write(content: IO[bytes], place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as out:
        shutil.copyfileobj(content, out, CHUNK)
