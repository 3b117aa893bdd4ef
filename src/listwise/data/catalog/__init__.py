"""Public data sets by name, and photos given by any source."""

from listwise.data.catalog.dataset import (
    DATA_FOLDER,
    Benchmark,
    Dataset,
    Photos,
    find_dataset,
    find_entry,
    image_files,
    is_one_photo,
    labelled_of,
    list_photos,
    photos_of,
    recognize,
)
from listwise.data.catalog.entries import ENTRIES, DataSetEntry, RemoteFile

__all__ = ["DATA_FOLDER", "ENTRIES", "Benchmark", "DataSetEntry", "Dataset", "Photos"]
__all__ += ["RemoteFile", "find_dataset", "find_entry", "image_files", "is_one_photo"]
__all__ += ["labelled_of", "list_photos", "photos_of", "recognize"]
