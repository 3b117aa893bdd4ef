"""Download public data sets, with resume, checksums and safe unpacking.

Every finished file is listed in `downloads.json` beside the data, with its SHA-256. A second run
resumes where the first one ended.
"""

import hashlib
import http.client
import json
import os
import shutil
import socket
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from listwise.data.catalog.dataset import Dataset, recognize
from listwise.data.catalog.entries import DataSetEntry, RemoteFile
from listwise.errors import InputError
from listwise.files import read_json, write_text

LOCK_FILE: Final = "downloads.json"
TIMEOUT: Final = 60.0
RETRIES: Final = 5  # of a download without progress
PAUSE = 1.0  # seconds before the first retry
CHUNK: Final = 2**20
Progress = Callable[[str, int, int | None], object]
"""Called with the current step, the bytes done, and the total bytes if known."""
# HTTP status codes after which a second try may succeed.
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


def download(
    entry: DataSetEntry, folder: Path, *, progress: Progress = lambda what, done, total: None
) -> list[str]:
    """Fetch and unpack the files of a data set that are not in `folder` yet.

    An archive or file with the right name that is already in `folder` is used and not downloaded.

    Returns the names of the files without a published checksum, whose SHA-256 is only recorded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock: dict[str, Any] = {}
    if (folder / LOCK_FILE).exists():
        lock = read_json(folder / LOCK_FILE, "is damaged: delete it and run again")
    if not lock:
        _need_space(folder, int(entry.gigabytes * 1e9), entry.name)
    for file in entry.files:
        if file.name not in lock:
            lock[file.name] = _one(file, folder, progress)
            write_text(folder / LOCK_FILE, json.dumps(lock, indent=2) + "\n")
    return [file.name for file in entry.files if not lock[file.name].get("verified")]


class DownloadResult(NamedTuple):
    """A data set in its folder, its problems, and the files without a checksum."""

    dataset: Dataset
    problems: list[str]
    unverified: list[str]


def get_dataset(
    entry: DataSetEntry, folder: str | Path, progress: Progress = lambda what, done, total: None
) -> DownloadResult:
    """Return the data set in `folder`, and download it if it is missing or incomplete."""
    folder = Path(folder)
    found = recognize(folder)
    if found is not None and found.entry is not entry:
        raise InputError(f"{folder} contains {found.name}, not {entry.name}: give another folder")
    problems = found.check() if found else []
    if found is not None and not problems:
        return DownloadResult(found, [], [])
    if not entry.files:
        raise InputError(problems[0] if problems else f"{entry.name}: {entry.how}")
    unverified = download(entry, folder, progress=progress)
    found = recognize(folder)
    if found is None:
        raise InputError(f"{folder} does not have the layout of {entry.name} after the download")
    return DownloadResult(found, found.check(), unverified)


def _one(file: RemoteFile, folder: Path, progress: Progress) -> dict[str, Any]:
    published = file.checksum
    if file.checksum_url is not None:
        published = f"md5:{_text(file.checksum_url, folder)}"
    # A plain file is downloaded to its place; an archive stays in the folder until unpacked.
    here = folder / file.name
    target = here if file.unpack or here.exists() else folder / file.to
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch(file.url, target, room=2 if file.unpack else 1, progress=progress)
    found = _checksums(target, progress)
    if published is not None:
        kind, _, wanted = published.partition(":")
        if found[kind] != wanted:
            target.unlink()
            raise InputError(
                f"{file.name} from {file.url} is damaged or has changed ({kind} {found[kind]}, "
                f"published is {wanted}): it was deleted, run again"
            )
    size = target.stat().st_size
    if file.unpack:
        unpack(target, folder / file.to, flat=file.flat, progress=progress)
        target.unlink()
    elif target != folder / file.to:
        os.replace(target, folder / file.to)
    return {
        "url": file.url,
        "bytes": size,
        "sha256": found["sha256"],
        "verified": published is not None,
    }


def fetch(
    address: str,
    target: Path,
    *,
    room: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Download one file, resuming `TARGET.part` if an earlier try left one.

    A server that cannot resume starts again from the beginning, and so does one
    whose file has changed since. `room` is how many times the file must fit on the disk.
    """
    part = target.with_name(f"{target.name}.part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _continue(address, part, target.name, room, progress):
                break
            reason = "the connection broke off"
        except HTTPError as error:
            if error.code == 416:  # no bytes beyond these: complete, or another file
                if before and error.headers.get("Content-Range", "").endswith(f"/{before}"):
                    break
                part.unlink(missing_ok=True)
            elif error.code not in _PASSING:
                raise _unreachable(address, target, f"it answers {error.code}") from None
            reason = f"it answers {error.code}"
        except (URLError, http.client.HTTPException, OSError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, socket.gaierror):
                raise _unreachable(address, target, "its name cannot be looked up") from None
            if isinstance(cause, OSError) and _is_disk_error(cause):
                raise InputError(f"cannot write {part}: {cause.strerror}") from None
            reason = str(cause) or type(cause).__name__
        gained = part.exists() and part.stat().st_size > before
        failures = 0 if gained else failures + 1
        if failures > RETRIES:
            raise _unreachable(address, target, reason)
        time.sleep(min(60.0, PAUSE * 2 ** max(0, failures - 1)))
    _tag(part).unlink(missing_ok=True)
    os.replace(part, target)


def _continue(address: str, part: Path, name: str, room: int, progress: Progress) -> bool:
    """Receive the missing bytes of `part`; return whether it is complete."""
    request = Request(address, headers={"User-Agent": "listwise"})
    offset = part.stat().st_size if part.exists() else 0
    if offset:
        request.add_header("Range", f"bytes={offset}-")
        if _tag(part).exists():
            request.add_header("If-Range", _tag(part).read_text(encoding="utf-8"))
    with urlopen(request, timeout=TIMEOUT) as answer:
        ranged = answer.headers.get("Content-Range", "")
        if answer.status == 206 and not ranged.startswith(f"bytes {offset}-"):
            raise http.client.HTTPException("the server sent another part than requested")
        if answer.status != 206:
            offset = 0
        length = answer.headers.get("Content-Length")
        total = offset + int(length) if length is not None else None
        if total is not None:
            _need_space(part.parent, room * total - offset, name)
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        if tag and not tag.startswith("W/"):
            _tag(part).write_text(tag, encoding="utf-8")
        with part.open("ab" if offset else "wb") as out:
            progress(f"downloading {name}", offset, total)
            while chunk := answer.read1(CHUNK):
                out.write(chunk)
                offset += len(chunk)
                progress(f"downloading {name}", offset, total)
    return total is None or offset == total


def _tag(part: Path) -> Path:
    """Return the file that stores the server's version tag until the download is complete."""
    return part.with_name(f"{part.name}.tag")


def _text(address: str, folder: Path) -> str:
    """Return the first word of a small text file."""
    target = folder / f".{PurePosixPath(urlsplit(address).path).name}"
    fetch(address, target)
    words = target.read_text(encoding="utf-8", errors="replace").split()
    target.unlink()
    return words[0] if words else ""


def _unreachable(address: str, target: Path, reason: str) -> InputError:
    return InputError(
        f"cannot reach {urlsplit(address).netloc}: {reason}; run again later, or download "
        f"{address} in another way, save it as {target} and run again"
    )


def _need_space(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{name} needs about {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: "
            "free some space, or choose another folder (`to`)"
        )


def _checksums(path: Path, progress: Progress) -> dict[str, str]:
    digests = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            for digest in digests.values():
                digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def unpack(
    archive: Path,
    folder: Path,
    *,
    flat: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Unpack a tar or zip archive into `folder`; `flat` leaves out the folders of the archive.

    Nothing is written outside of `folder`, and no devices are created.

    Raises:
        InputError: the archive is damaged, or a member would be outside of the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = archive.stat().st_size
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for member in zipped.infolist():
                    if flat and not member.is_dir():
                        member.filename = PurePosixPath(member.filename).name
                    if not (flat and member.is_dir()):
                        zipped.extract(member, folder)
                    progress(f"unpacking {archive.name}", member.header_offset, total)
            return
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:*") as packed:
            for entry in packed:
                if flat and not entry.isdir():
                    entry = entry.replace(name=PurePosixPath(entry.name).name)
                if not (flat and entry.isdir()):
                    packed.extract(entry, folder, filter="data")
                progress(f"unpacking {archive.name}", file.tell(), total)
            # The checksum of the compressed stream follows the last member.
            while packed.fileobj is not None and packed.fileobj.read(CHUNK):
                pass
    except tarfile.FilterError as error:
        raise InputError(f"{archive}: refused, {error}") from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and _is_disk_error(error):
            raise InputError(f"cannot unpack into {folder}: {error.strerror}") from None
        raise InputError(f"{archive} is damaged ({error}): delete it and run again") from None


def _is_disk_error(error: OSError) -> bool:
    """Return whether an error comes from the disk: it names a file, or space or quota ran out."""
    return error.filename is not None or error.errno in (28, 122)
