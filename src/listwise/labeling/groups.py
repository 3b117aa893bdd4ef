"""Groups of photos that match each other, directly or through other photos."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from listwise.labeling.comparisons import Pairs

Numbers = NDArray[np.int64]
LARGE = 3  # photos of a group that a single weak match may not join to another such group


class Groups:
    """Groups of N photos, from the matches between them.

    A match with `strong` or more inliers joins the groups of its two photos. A weaker match adds
    a photo, or a pair of photos, to a group. It joins two groups of three or more photos only
    together with a second match between them: a single weak match may be chance, and joining two
    large groups by mistake would do the most harm.

    Args:
        count: N.
        links: numbers of two photos that match: [m, 2].
        inliers: number of inliers of each match: [m].
        strong: number of inliers from which one match alone joins any groups.
    """

    def __init__(self, count: int, links: Pairs, inliers: Numbers, strong: int) -> None:
        self._above = list(range(count))
        self._size = [1] * count
        certain = inliers >= strong
        for one, two in links[certain].tolist():
            self._join(one, two)
        self.doubtful = self._join_weak(
            links[~certain][np.argsort(-inliers[~certain], kind="stable")]
        )

    def _join_weak(self, links: Pairs) -> Pairs:
        """Join groups by weak matches until nothing changes; return those that stay unused."""
        waiting = links.tolist()
        changed = True
        while changed:
            changed = False
            roots = [(self.root(one), self.root(two)) for one, two in waiting]
            number = Counter((min(pair), max(pair)) for pair in roots)
            left = []
            for (one, two), (first, second) in zip(waiting, roots, strict=True):
                a, b = self.root(one), self.root(two)
                if a == b:
                    continue
                small = min(self._size[a], self._size[b]) < LARGE
                if small or number[min(first, second), max(first, second)] > 1:
                    self._join(a, b)
                    changed = True
                else:
                    left.append([one, two])
            waiting = left
        return np.array(waiting, np.int64).reshape(-1, 2)

    def root(self, photo: int) -> int:
        """Return the photo that stands for the group of a photo."""
        above = self._above
        while above[photo] != photo:
            above[photo] = above[above[photo]]
            photo = above[photo]
        return photo

    def _join(self, one: int, two: int) -> None:
        a, b = sorted((self.root(one), self.root(two)))
        if a != b:
            self._above[b] = a
            self._size[a] += self._size[b]

    def roots(self) -> Numbers:
        """Return the group of each photo, named by its first photo: [N]."""
        return np.array([self.root(photo) for photo in range(len(self._above))], np.int64)
