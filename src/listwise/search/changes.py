"""Compare the results of two generations of an index: what did an upgrade change?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from listwise.errors import InputError
from listwise.search.entries import Entry, Keys, in_parts
from listwise.search.hits import Hit
from listwise.search.store import Store

_TOGETHER = 64  # queries that are searched together


@dataclass(frozen=True, eq=False)
class ResultChange:
    """The results of one query before and after an upgrade.

    Attributes:
        query: the entry that was used as query; it is not among its results.
        before: the first results of the earlier generation, best first.
        after: the first results of the current generation, best first.
    """

    query: Entry
    before: Sequence[Hit]
    after: Sequence[Hit]

    @property
    def kept(self) -> int:
        """The number of results that are in both lists."""
        return len({hit.id for hit in self.before} & {hit.id for hit in self.after})


@dataclass(frozen=True, eq=False)
class UpgradeChanges:
    """How the results of some queries changed with the last upgrade or rollback.

    Attributes:
        k: the number of results that were compared.
        queries: one change per query, those with the fewest results in common first.
    """

    k: int
    queries: list[ResultChange] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """The share of the results before that are among the results after, from 0 to 1."""
        before = sum(len(change.before) for change in self.queries)
        return sum(change.kept for change in self.queries) / before if before else 1.0

    @property
    def same_first(self) -> float:
        """The share of queries whose first result is the same, from 0 to 1."""
        same = [
            [hit.id for hit in change.before[:1]] == [hit.id for hit in change.after[:1]]
            for change in self.queries
        ]
        return sum(same) / len(same) if same else 1.0


def find_changes(store: Store, queries: int, k: int) -> UpgradeChanges:
    """Search by some entries in the current and the previous generation, and compare the results.

    The descriptors of the entries are in both, so no photo is read and no model is loaded.

    Args:
        store: the store of the current generation.
        queries: the number of entries to search by, drawn evenly from the entries of both.
        k: the number of results to compare.
    """
    if queries < 1 or k < 1:
        raise InputError("`queries` and `k` must be 1 or more")
    number = store.record().previous
    if number is None:
        raise InputError(
            f"{store.uri} has no earlier generation to compare with: it was not upgraded, or the "
            "earlier one was discarded"
        )
    with store.open_generation(number, aside=True) as earlier:
        # Keys are hashes, so those at even distances are a random sample.
        common = np.intersect1d(store.versions()[0], earlier.versions()[0])
        sample = common[np.linspace(0, len(common) - 1, min(queries, len(common))).astype(np.int64)]
        found = []
        for part in in_parts(sample, _TOGETHER):
            entries = store.get(part.tolist())
            rows = zip(part, _results(earlier, part, k), _results(store, part, k), strict=True)
            for key, before, after in rows:
                if int(key) in entries:  # another process may have just removed it
                    found.append(ResultChange(entries[int(key)], before, after))
    return UpgradeChanges(k, sorted(found, key=lambda change: (change.kept, change.query.id)))


def _results(store: Store, keys: Keys, k: int) -> Iterator[list[Hit]]:
    """The nearest entries of each of these entries, without itself."""
    scores, found = store.search(store.vectors(keys), k + 1)
    entries = store.get(np.unique(found[found >= 0]).tolist())
    for own, row, values in zip(keys, found, scores, strict=True):
        hits = [
            Hit(entries[int(key)], float(score))
            for key, score in zip(row, values, strict=True)
            if key != own and int(key) in entries
        ]
        yield hits[:k]
