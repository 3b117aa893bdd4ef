"""The saved search method of an index: `search.json`, and the files that it names.

The files can be rebuilt from the table at any time. `search.json` is written after them and holds
their checksums and its own, so a damaged or unfinished file is never used.
"""

import hashlib
from pathlib import Path
from secrets import token_hex
from typing import Any

import faiss
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.files import publish, write_text
from listwise.search.folder.descriptor_file import DescriptorFile, SavedDescriptors, file_digest
from listwise.search.folder.keymap import KeyMap
from listwise.search.store import SearchIntent, TuningResult

_STATE = "search.json"
_CODES = "codes.faiss"
_STAMPS = "stamps.npy"


class SavedFiles(BaseModel):
    """The files of a compressed search: the prefix of their names, and their checksums."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    codes: str
    stamps: str


class SearchState(BaseModel):
    """The intent of the user, the search method chosen for it, and its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    intent: SearchIntent
    tuned: TuningResult
    entries: int  # number of entries when it was measured
    probes: int = 0  # of a compressed search, like the next two
    candidates: int = 0
    files: SavedFiles | None = None
    descriptors: SavedDescriptors | None = None  # a copy of the descriptors
    digest: str = ""  # of everything above; empty in files of earlier versions

    def with_digest(self) -> "SearchState":
        """The same state with its digest."""
        bare = self.model_copy(update={"digest": ""})
        # Earlier versions saved no copy, and a checksum without its field.
        left_out = None if bare.descriptors else {"descriptors"}
        content = bare.model_dump_json(exclude=left_out).encode()
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return bare.model_copy(update={"digest": digest})

    @property
    def compressed(self) -> bool:
        """Whether search is compressed."""
        return self.probes > 0


def read_state(folder: Path) -> SearchState | None:
    """Read the saved state; None if it is missing or damaged."""
    try:
        state = SearchState.model_validate_json((folder / _STATE).read_bytes())
    except (OSError, ValidationError):
        return None
    return state if state.digest in ("", state.with_digest().digest) else None


def save_state(folder: Path, state: SearchState) -> None:
    """Save a state, and delete the files that it does not name."""
    write_text(folder / _STATE, state.with_digest().model_dump_json(indent=2))
    names = tuple(saved.name for saved in (state.files, state.descriptors) if saved)
    for path in folder.glob("search-*"):
        if not path.name.startswith(names):
            path.unlink(missing_ok=True)


def save_files(folder: Path, index: Any, stamps: KeyMap) -> SavedFiles:
    """Write the files of a compressed search under a new name."""
    name = f"search-{token_hex(8)}"
    partial = folder / f"{name}.tmp"
    faiss.write_index(index, str(partial))
    codes = file_digest(partial)
    publish(partial, folder / f"{name}.{_CODES}")
    with partial.open("wb") as file:
        np.save(file, np.stack([stamps.keys, stamps.values]), allow_pickle=False)
    digest = file_digest(partial)
    publish(partial, folder / f"{name}.{_STAMPS}")
    return SavedFiles(name=name, codes=codes, stamps=digest)


def read_files(folder: Path, files: SavedFiles) -> tuple[Any, KeyMap] | None:
    """The FAISS index and the stamps of its rows; None if a file is missing or damaged."""
    codes, stamps = (folder / f"{files.name}.{kind}" for kind in (_CODES, _STAMPS))
    try:
        if (file_digest(codes), file_digest(stamps)) != (files.codes, files.stamps):
            return None
        index = faiss.read_index(str(codes))
        held = KeyMap()
        held.put(*np.load(stamps, allow_pickle=False))
    except (OSError, RuntimeError, ValueError):
        return None
    return index, held


def damaged_caches(folder: Path) -> list[str]:
    """Names of the files of this module that are damaged; all can be deleted and made again."""
    if not (folder / _STATE).exists():
        return []
    state = read_state(folder)
    if state is None:
        return [_STATE]
    names = []
    if state.files is not None and read_files(folder, state.files) is None:
        names.append(state.files.name)
    if state.descriptors is not None:
        copy = DescriptorFile.open(folder, state.descriptors)
        if copy is None or not copy.sound():
            names.append(state.descriptors.name)
    return sorted(path.name for name in names for path in folder.glob(f"{name}*"))
