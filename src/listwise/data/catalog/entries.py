"""The catalog of public data sets, from `entries.toml`."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set at its public address.

    A plain file becomes `to`; an archive is unpacked into the folder `to`, without its own
    folders if `flat`. `checksum` is "md5:…" or "sha256:…"; `checksum_url` is the address of a text
    whose first word is the file's MD5. `name` is what a copy downloaded by hand is called.
    """

    url: str
    to: str = ""
    unpack: bool = False
    flat: bool = False
    checksum: str | None = None
    checksum_url: str | None = None
    saved_as: str | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.saved_as or urlsplit(self.url).path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class DataSetEntry:
    """One data set by name.

    `layout` names its reader, `marks` are files (glob patterns) that only this one has, `counts`
    are numbers of images by split (database and queries for a benchmark). Without `files` there
    is no public address: `how` explains how to get it. `gigabytes` is the size of a download, 0
    where that is not known. `broken` names photos that its makers say are damaged.
    """

    name: str
    title: str
    layout: str
    terms: str
    page: str
    marks: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    files: tuple[RemoteFile, ...] = ()
    how: str = ""
    gigabytes: float = 0.0
    broken: frozenset[str] = frozenset()


def _read_entries() -> Iterator[DataSetEntry]:
    text = files("listwise.data.catalog").joinpath("entries.toml").read_text(encoding="utf-8")
    for entry in tomllib.loads(text)["data_set"]:
        remote = [each for file in entry.pop("files", ()) for each in _numbered(**file)]
        marks, broken = tuple(entry.pop("marks")), frozenset(entry.pop("broken", ()))
        yield DataSetEntry(**entry, marks=marks, broken=broken, files=tuple(remote))


def _numbered(numbers: Sequence[int] = (0, 0), **file: Any) -> Iterator[RemoteFile]:
    """Yield a file of each number, which replaces {} in its addresses."""
    for number in range(numbers[0], numbers[-1] + 1):
        addresses = file.keys() & {"url", "checksum_url"}
        yield RemoteFile(**file | {key: file[key].format(number) for key in addresses})


ENTRIES: Final[Mapping[str, DataSetEntry]] = {entry.name: entry for entry in _read_entries()}
"""The catalog: all data sets by name."""
