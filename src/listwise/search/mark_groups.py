"""Group photos by marks, and find marks that contradict each other.

Photos are nodes of a graph, "same" marks are its edges. The result depends on which marks are
active, and not on their order.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Literal, Protocol

Pair = tuple[str, str]
"""The ids of two photos, sorted."""
Found = tuple[Literal["people", "chain", "labels"], frozenset[Pair], tuple[str, ...]]
"""A conflict: its kind, the pairs whose marks contradict each other, the photos to leave out."""
QUERY = "query:"
"""The ids of photos that are not entries begin with this."""
_Graph = dict[str, set[str]]


class _PairMark(Protocol):
    @property
    def pair(self) -> Pair: ...

    @property
    def same(self) -> bool: ...


def pair_of(one: str, other: str) -> Pair:
    """The pair of two photos."""
    return (one, other) if one <= other else (other, one)


def disputed_pairs(marks: Iterable[_PairMark]) -> set[Pair]:
    """Pairs that are marked both ways."""
    ways: dict[Pair, set[bool]] = {}
    for mark in marks:
        ways.setdefault(mark.pair, set()).add(mark.same)
    return {pair for pair, found in ways.items() if len(found) == 2}


def split_into_groups(
    marks: Collection[_PairMark], labels: Mapping[str, str]
) -> tuple[dict[str, set[str]], list[Found]]:
    """Divide the photos of marks into named groups without those in conflict.

    Args:
        marks: at most one mark per pair and person. A mark of a photo with itself is left out.
        labels: the labels of photos that have one, by id.

    Returns:
        The photos of each group by its name, and the conflicts.
    """
    marks = [mark for mark in marks if mark.pair[0] != mark.pair[1]]
    disputed = disputed_pairs(marks)
    conflicts: list[Found] = [("people", frozenset([pair]), pair) for pair in sorted(disputed)]
    same = {mark.pair for mark in marks if mark.same} - disputed
    different = sorted({mark.pair for mark in marks if not mark.same} - disputed)
    graph: _Graph = {photo: set() for mark in marks for photo in mark.pair}
    for one, other in same:
        graph[one].add(other)
        graph[other].add(one)
    conflicts += _cut_chains(graph, different)
    left_out = {photo for _, _, photos in conflicts for photo in photos}
    groups: dict[str, set[str]] = {}
    known = set(labels.values())
    for group in _components(graph):
        names = {labels[photo] for photo in group if photo in labels}
        if len(names) > 1:
            # What each labelled photo shows is known; what the others show is not.
            inside = frozenset(pair for pair in same if pair[0] in group)
            unknown = tuple(sorted(group - set(labels) - left_out))
            conflicts.append(("labels", inside, unknown))
            for photo in group & set(labels):
                groups.setdefault(labels[photo], set()).add(photo)
            continue
        name = names.pop() if names else _free_name(min(group), known)
        groups.setdefault(name, set()).update(group)
    conflicts += _within_labels(groups, different)
    left_out = {photo for _, _, photos in conflicts for photo in photos}
    kept = {name: group - left_out for name, group in groups.items()}
    return {name: group for name, group in kept.items() if group}, conflicts


def _cut_chains(graph: _Graph, different: Collection[Pair]) -> list[Found]:
    """Remove the chains of edges between photos that are marked different, the shortest first."""
    conflicts: list[Found] = []
    while True:
        # All are looked for before any is cut, so that their order does not matter.
        group_of = {photo: i for i, group in enumerate(_components(graph)) for photo in group}
        connected = [pair for pair in different if group_of[pair[0]] == group_of[pair[1]]]
        chains = [(pair, _chain(graph, *pair)) for pair in connected]
        if not chains:
            return conflicts
        for pair, chain in chains:
            edges = [pair_of(*edge) for edge in pairwise(chain)]
            conflicts.append(("chain", frozenset([pair, *edges]), tuple(sorted(chain))))
            for one, other in edges:
                graph[one].discard(other)
                graph[other].discard(one)


def _chain(graph: _Graph, start: str, end: str) -> list[str]:
    """A shortest path between two connected photos, the first by id."""
    before = {start: start}
    waiting = deque([start])
    while waiting and end not in before:
        here = waiting.popleft()
        for other in sorted(graph[here]):
            if other not in before:
                before[other] = here
                waiting.append(other)
    chain = [end]
    while chain[-1] != start:
        chain.append(before[chain[-1]])
    return chain


def _components(graph: _Graph) -> list[set[str]]:
    """The groups of connected photos, in the order of their first id."""
    groups: list[set[str]] = []
    seen: set[str] = set()
    for photo in sorted(graph):
        if photo in seen:
            continue
        group, waiting = {photo}, [photo]
        while waiting:
            new = graph[waiting.pop()] - group
            group |= new
            waiting += new
        seen |= group
        groups.append(group)
    return groups


def _within_labels(groups: Mapping[str, set[str]], different: Collection[Pair]) -> list[Found]:
    """Photos that are marked different although they have the same label."""
    name_of = {photo: name for name, group in groups.items() for photo in group}
    return [
        ("labels", frozenset([pair]), pair)
        for pair in different
        if name_of.get(pair[0], "") == name_of.get(pair[1], " ")
    ]


def _free_name(photo: str, labels: Collection[str]) -> str:
    """A name for a group without labels: the id of its first photo, unless it is a label."""
    return photo if photo not in labels else f"photo:{photo}"
