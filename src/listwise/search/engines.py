"""Where an index is stored: in a folder or in Milvus. Neither needs PyTorch."""

from pathlib import Path

from listwise.errors import InputError
from listwise.optional import requires
from listwise.search.store import Generations, IndexHeader, Store


def store_exists(uri: str) -> bool:
    """Whether an index exists at this place."""
    engine, place = engine_of(uri)
    return engine.exists(place)


def open_store(uri: str | Path) -> Store:
    """Open the store of an index: a folder, `milvus://host:port/name`, or a `.db` file."""
    engine, place = engine_of(str(uri))
    if not engine.exists(place):
        raise InputError(f"no index at {uri}: create one with listwise index build {uri} PHOTOS")
    return engine.open_index(place)


def create_store(uri: str | Path, header: IndexHeader) -> Store:
    """Create an empty index; `uri` is as in `open_index`."""
    engine, place = engine_of(str(uri))
    if engine.exists(place):
        raise InputError(f"an index at {uri} exists already: add to it, or give another name")
    return engine.create_index(place, header)


def engine_of(uri: str) -> tuple[type[Generations], str]:
    """The engine of an index, and its name for the place."""
    # A file of milvus-lite is a folder, and shells complete folders with a slash.
    file = uri.rstrip("/").endswith(".db")
    if file or uri.startswith("milvus://"):
        from listwise.search.milvus.store import MilvusGenerations

        return MilvusGenerations, uri.rstrip("/") if file else uri
    if "://" in uri:
        raise InputError(
            f"{uri}: an index is a folder, milvus://host:port/name, or a .db file of milvus-lite"
        )
    with requires("index", "an index in a folder"):
        from listwise.search.folder.store import FolderGenerations

    return FolderGenerations, uri
