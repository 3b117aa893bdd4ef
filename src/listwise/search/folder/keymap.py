"""A number for each of many keys, in two sorted arrays: 16 bytes a key."""

import numpy as np
from numpy.typing import NDArray

from listwise.search.entries import Keys


class KeyMap:
    """Numbers by key; finding n of N costs n log N, a change copies the arrays once.

    Shapes: keys, sorted, and values, both [N].
    """

    def __init__(self) -> None:
        self.keys: Keys = np.zeros(0, np.int64)
        self.values: Keys = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Keys]:
        """Which keys there are, and the numbers of those: [n] -> [n], [found]."""
        places = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), bool)
        inside = places < len(self.keys)
        known[inside] = self.keys[places[inside]] == keys[inside]
        return known, self.values[places[known]]

    def put(self, keys: Keys, values: Keys) -> None:
        """Set the numbers of distinct keys: [n], [n]."""
        known, _ = self.find(keys)
        self.values[np.searchsorted(self.keys, keys[known])] = values[known]
        new, numbers = keys[~known], values[~known]
        order = np.argsort(new)
        places = np.searchsorted(self.keys, new[order])
        self.keys = np.insert(self.keys, places, new[order])
        self.values = np.insert(self.values, places, numbers[order])

    def remove(self, keys: Keys) -> None:
        """Forget keys: [n]."""
        known, _ = self.find(keys)
        places = np.searchsorted(self.keys, keys[known])
        self.keys = np.delete(self.keys, places)
        self.values = np.delete(self.values, places)
