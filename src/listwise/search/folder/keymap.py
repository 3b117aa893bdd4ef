"""A map from keys to numbers in two sorted arrays, 16 bytes per key."""

import numpy as np
from numpy.typing import NDArray

from listwise.search.entries import Keys


class KeyMap:
    """A map from keys to numbers. A lookup of n keys costs n log N, a change copies the arrays.

    Attributes:
        keys: sorted keys, int64 [N].
        values: their numbers, int64 [N].
    """

    def __init__(self) -> None:
        self.keys: Keys = np.zeros(0, np.int64)
        self.values: Keys = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Keys]:
        """Which keys are known, and the numbers of those: [n] -> bool [n], [found]."""
        places = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), bool)
        inside = places < len(self.keys)
        known[inside] = self.keys[places[inside]] == keys[inside]
        return known, self.values[places[known]]

    def put(self, keys: Keys, values: Keys) -> None:
        """Set the numbers of distinct keys: [n], [n]."""
        if not (keys[1:] > keys[:-1]).all():
            # Sorted keys are found several times faster: their places are next to each other.
            order = np.argsort(keys)
            keys, values = keys[order], values[order]
        if not len(self):
            self.keys, self.values = keys.copy(), values.copy()
            return
        known, _ = self.find(keys)
        self.values[np.searchsorted(self.keys, keys[known])] = values[known]
        new, numbers = keys[~known], values[~known]
        places = np.searchsorted(self.keys, new)
        self.keys = np.insert(self.keys, places, new)
        self.values = np.insert(self.values, places, numbers)

    def remove(self, keys: Keys) -> None:
        """Remove keys [n]; unknown ones are ignored."""
        known, _ = self.find(keys)
        places = np.searchsorted(self.keys, keys[known])
        self.keys = np.delete(self.keys, places)
        self.values = np.delete(self.values, places)
