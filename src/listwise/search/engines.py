"""Which engine holds an index: a folder of this machine, or Milvus."""

from pathlib import Path
from typing import Any

from listwise.errors import InputError
from listwise.optional import requires
from listwise.search.store import IndexHeader, Store


def store_exists(uri: str) -> bool:
    """Whether there is an index."""
    engine, place = _engine(uri)
    found: bool = engine.exists(place)
    return found


def open_store(uri: str | Path) -> Store:
    """Open an index: a folder, `milvus://host:port/name`, or a `.db` file of milvus-lite."""
    engine, place = _engine(str(uri))
    if not engine.exists(place):
        raise InputError(
            f"there is no index at {uri}: make one with listwise index build {uri} PHOTOS"
        )
    opened: Store = engine.open(place)
    return opened


def create_store(uri: str | Path, header: IndexHeader) -> Store:
    """Make an empty index where there is none; places are named as for `open_index`."""
    engine, place = _engine(str(uri))
    if engine.exists(place):
        raise InputError(f"there is an index at {uri} already: add to it, or give another name")
    created: Store = engine.create(place, header)
    return created


def _engine(uri: str) -> tuple[Any, str]:
    # milvus-lite's files are folders, which shells end with a slash.
    file = uri.rstrip("/").endswith(".db")
    if file or uri.startswith("milvus://"):
        from listwise.search.milvus.store import MilvusStore

        return MilvusStore, uri.rstrip("/") if file else uri
    if "://" in uri:
        raise InputError(
            f"{uri}: an index is a folder, milvus://host:port/name, or a .db file of milvus-lite"
        )
    with requires("index", "an index in a folder"):
        from listwise.search.folder.store import FolderStore

    return FolderStore, uri
