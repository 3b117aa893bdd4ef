"""Descriptors of recent query photos: after a mark, the same photo is searched for again."""

from collections import OrderedDict
from hashlib import blake2b

from listwise.data.images import Box
from listwise.search.entries import Float32
from listwise.search.generation import Generation
from listwise.serving.uploads import Upload

RECENT = 256
"""Number of photos whose descriptors are kept."""

Name = tuple[str, bytes, Box | None]


class RecentDescriptors:
    """Descriptors by generation, photo and box; only one thread may use it."""

    def __init__(self) -> None:
        self._rows: OrderedDict[Name, Float32] = OrderedDict()

    def find(self, name: Name) -> Float32 | None:
        """The descriptor [C] of a photo; None if it is not known."""
        row = self._rows.get(name)
        if row is not None:
            self._rows.move_to_end(name)
        return row

    def keep(self, name: Name, row: Float32) -> None:
        """Keep the descriptor [C] of a photo, and forget the oldest one if there are too many."""
        self._rows[name] = row
        self._rows.move_to_end(name)
        if len(self._rows) > RECENT:
            self._rows.popitem(last=False)


def name_of(generation: Generation, photo: Upload, box: Box | None) -> Name:
    """What the descriptor of a photo depends on."""
    digest = blake2b(photo.getbuffer(), digest_size=16).digest()
    return f"{generation.header.model}/{generation.store.generation}", digest, box
