"""The public data sets by name: what is known of them, and reading them where they are in place."""

from listwise.data.catalog.dataset import (
    DATA_FOLDER,
    Benchmark,
    Dataset,
    find_dataset,
    find_entry,
    labelled_of,
    photos_of,
    recognise,
)
from listwise.data.catalog.entries import ENTRIES, Entry, RemoteFile

__all__ = [
    "DATA_FOLDER",
    "ENTRIES",
    "Benchmark",
    "Dataset",
    "Entry",
    "RemoteFile",
    "find_dataset",
    "find_entry",
    "labelled_of",
    "photos_of",
    "recognise",
]
