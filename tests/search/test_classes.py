"""Classes of an index, and pairs that are worth marking next."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.models.calibration import Calibration
from listwise.search.classes import assign_classes, find_suggestions, labels_of
from listwise.search.marks import Mark, MarkedQuery

PHOTOS = "abcdef"


def mark(number, query, entry, same, by=""):
    asked = MarkedQuery(query, f"/{query}.jpg", None, query)
    return Mark(f"{number:016x}", asked, entry, same, by, "2026-01-01T00:00:00+00:00")


pairs = st.sampled_from(list(itertools.combinations(PHOTOS, 2)))
marks = st.dictionaries(pairs, st.booleans(), max_size=8).map(
    lambda found: [mark(i, *pair, same) for i, (pair, same) in enumerate(found.items())]
)
labels = st.dictionaries(st.sampled_from(PHOTOS), st.sampled_from(["x", "y"]), max_size=4)


def reachable(photo, links):
    """The photos that are connected to one, itself included."""
    found = {photo}
    while more := {b for a, b in links if a in found and b not in found}:
        found |= more
    return found


@given(marks, labels)
def test_classes_are_those_of_a_plain_transcription(marks, labels):
    """Every photo of a class belongs there by a chain or a label, and nothing is in doubt."""
    classes, left_out = assign_classes(marks, labels)
    same = {pair for each in marks if each.same for pair in (each.pair, each.pair[::-1])}
    seen = set(labels) | {photo for each in marks for photo in each.pair}
    assert set(classes) | left_out == seen
    assert not set(classes) & left_out
    for each in marks:
        one, other = each.pair
        if {one, other} <= set(classes) and not each.same:
            assert classes[one] != classes[other]
    chains = {photo: reachable(photo, same) for photo in seen}
    clear = all(each.same or each.pair[1] not in chains[each.pair[0]] for each in marks) and all(
        len({labels[photo] for photo in chain if photo in labels}) < 2 for chain in chains.values()
    )
    for photo, name in labels.items():
        if photo in classes:
            assert classes[photo] == name
    if not clear:
        return
    # Without contradicting chains, photos are together exactly if a chain or labels connect them.
    named = {
        photo: next((labels[other] for other in sorted(chain) if other in labels), None)
        for photo, chain in chains.items()
    }
    apart = [each.pair for each in marks if not each.same]
    disputed = {p for pair in apart if named[pair[0]] == named[pair[1]] is not None for p in pair}
    assert left_out == disputed
    for one, other in itertools.combinations(sorted(classes), 2):
        together = other in chains[one] or (named[one] is not None and named[one] == named[other])
        assert (classes[one] == classes[other]) == together


def test_photos_with_labels_and_marks_make_the_classes_of_an_index(index):
    one, two, three, four, five = (entry.id for entry in itertools.islice(index.entries(), 5))
    assert (labels_of(index.store), index.classes()) == ({}, [])
    index.label([one, two], "chair")
    index.mark(two, same=[three], different=[four])
    index.mark(four, same=[five])
    chair, other = index.classes()
    assert (chair.name, chair.photos, chair.labelled, chair.marks) == ("chair", 3, 2, 2)
    assert (other.name, other.photos, other.labelled, other.marks) == (min(four, five), 2, 0, 2)
    assert labels_of(index.store) == {one: "chair", two: "chair"}
    assert chair.open >= 0


def test_suggestions_are_unknown_pairs_spread_over_classes(index):
    names = [entry.id for entry in index.entries()]
    classes = {"red": names[:6], "blue": names[6:12]}
    for name, members in classes.items():
        index.label(members, name)
    index.mark(names[12], same=[names[13]], different=[names[0]])
    found = index.suggest(12)
    assert len(found) == 12
    pairs = {frozenset((each.one.id, each.other.id)) for each in found}
    assert len(pairs) == 12
    assert frozenset(names[12:14]) not in pairs
    assert frozenset((names[12], names[0])) not in pairs
    labelled = {name for members in classes.values() for name in members}
    assert all(not pair <= labelled for pair in pairs)
    # The first suggestions are of different classes, of which there are three.
    assert {each.name for each in found[:3]} == {"red", "blue", min(names[12:14])}
    assert all(-1 <= each.score <= 1.001 for each in found)


def test_suggestions_of_a_calibrated_model_are_nearest_to_one_half(index):
    first = next(iter(index.entries())).id
    index.label([first], "red")
    # One half is at the score 0.7.
    known = Calibration(slope=10, intercept=-7, model="", source="", photos=0, pairs=0, positives=0)
    found = find_suggestions(index.store, (), known, 5)
    scores = [hit.score for hit in index.search(like=first, k=20)]
    nearest = sorted(abs(known.probability(score) - 0.5) for score in scores)[:5]
    assert [abs(each.probability - 0.5) for each in found] == pytest.approx(nearest, abs=1e-5)
    assert {each.one.id for each in found} == {first}
    with pytest.raises(InputError, match="`count` must be 1 or more"):
        index.suggest(0)
