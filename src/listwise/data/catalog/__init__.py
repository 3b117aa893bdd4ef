"""Public data sets by name: where to download them, and how to read them."""

from listwise.data.catalog.benchmark import Benchmark
from listwise.data.catalog.dataset import (
    DATA_FOLDER,
    Dataset,
    find_dataset,
    find_entry,
    labelled_of,
    photos_of,
    recognize,
)
from listwise.data.catalog.entries import ENTRIES, DataSetEntry, RemoteFile

__all__ = ["DATA_FOLDER", "ENTRIES", "Benchmark", "DataSetEntry", "Dataset", "RemoteFile"]
__all__ += ["find_dataset", "find_entry", "labelled_of", "photos_of", "recognize"]
