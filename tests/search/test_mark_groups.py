"""What follows from a log of marks: active marks, conflicts and classes, for any log."""

import itertools
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from listwise.search.marks import Mark, MarkedQuery, Marks

PHOTOS = {name: MarkedQuery(name, f"/{name}.jpg", None, name) for name in "abcdefg"}
NAMES = st.sampled_from(sorted(PHOTOS))
FEW = settings(max_examples=60, deadline=None)


@st.composite
def logs(draw, people=("ann", "bob"), most=12):
    """Marks in the order in which they were made."""
    events = st.tuples(NAMES, NAMES, st.booleans(), st.sampled_from(people))
    drawn = draw(st.lists(events.filter(lambda each: each[0] != each[1]), max_size=most))
    return [
        Mark(f"{number:016x}", PHOTOS[query], entry, same, by, f"{number:03d}")
        for number, (query, entry, same, by) in enumerate(drawn)
    ]


LABELS = st.dictionaries(NAMES, st.sampled_from(["a", "tower"]), max_size=3)


def classes(marks):
    return {(each.name, tuple(photo.id for photo in each.photos)) for each in marks.classes}


def contradictions(marks):
    """The conflicts that do not depend on the order of the marks."""
    return {
        (each.kind, frozenset(mark.pair for mark in each.marks), each.photos)
        for each in marks.conflicts
        if each.kind != "changed"
    }


@FEW
@given(logs(), st.randoms(use_true_random=False))
def test_the_latest_mark_of_a_pair_by_a_person_counts(log, chance):
    undone = frozenset(mark.id for mark in log if chance.random() < 0.3)
    expected = []
    for pair, by in {(frozenset([mark.query.id, mark.entry]), mark.by) for mark in log}:
        made = [mark for mark in log if {mark.query.id, mark.entry} == pair and mark.by == by]
        # From the last one back: marks before an undone one that had the same value are undone too.
        while made and made[-1].id in undone:
            gone = made.pop()
            before = [mark for mark in made if mark.id not in undone]
            while before and before[-1].same == gone.same:
                made = made[: made.index(before.pop())]
        expected += made[-1:]
    marks = Marks(log, undone, PHOTOS)
    assert list(marks) == sorted(expected, key=lambda mark: mark.id)
    assert marks.undone == len(undone)


@FEW
@given(logs(), LABELS, st.integers(0, 10**6))
def test_the_order_of_active_marks_and_the_side_of_the_query_do_not_matter(log, labels, seed):
    marks = Marks(log, frozenset(), PHOTOS, labels)
    mixed = list(marks)
    random.Random(seed).shuffle(mixed)
    turned = [
        Mark(each.id, PHOTOS[each.entry], each.query.id, each.same, each.by, each.time)
        for each in mixed
    ]
    for others in mixed, turned:
        again = Marks(others, frozenset(), PHOTOS, labels)
        assert classes(again) == classes(marks)
        assert contradictions(again) == contradictions(marks)
        assert again.left_out == marks.left_out


@FEW
@given(logs(people=("ann",), most=8))
def test_a_changed_mark_is_shown_and_leaves_nothing_out(log):
    marks = Marks(log, frozenset(), PHOTOS)
    ways = {}
    for mark in log:
        ways.setdefault(mark.pair, []).append(mark)
    changed = {pair for pair, made in ways.items() if len({each.same for each in made}) == 2}
    shown = [each for each in marks.conflicts if each.kind == "changed"]
    assert {each.marks[0].pair for each in shown} == changed
    for each in shown:
        made = ways[each.marks[0].pair]
        values = [value for value, _ in itertools.groupby(one.same for one in made)]
        assert [one.same for one in each.marks] == values  # a repeated mark is shown once
        assert each.marks[-1] == made[-1]
    assert not any(each.photos for each in shown)


def mark(number, query, entry, same, by=""):
    return Mark(f"{number:016x}", PHOTOS[query], entry, same, by, str(number))


def test_people_who_disagree_leave_out_the_pair_and_keep_the_rest():
    log = [mark(1, "a", "b", True), mark(2, "a", "c", True), mark(3, "a", "d", True, "ann")]
    marks = Marks([*log, mark(4, "d", "a", False, "bob")], frozenset(), PHOTOS)
    (conflict,) = marks.conflicts
    assert (conflict.kind, conflict.photos) == ("people", ("a", "d"))
    assert [each.id for each in conflict.marks] == [log[2].id, f"{4:016x}"]
    assert classes(marks) == {("a", ("b", "c"))}
    assert marks.of("a") == (["b", "c"], [])


def test_a_chain_leaves_out_its_photos_and_keeps_the_groups_at_its_ends():
    pairs = [("a", "b"), ("b", "c"), ("a", "d"), ("c", "e")]
    log = [mark(number, *pair, True) for number, pair in enumerate(pairs)]
    marks = Marks([*log, mark(9, "a", "c", False)], frozenset(), PHOTOS)
    (conflict,) = marks.conflicts
    assert (conflict.kind, conflict.photos) == ("chain", ("a", "b", "c"))
    assert [each.id for each in conflict.marks] == [log[0].id, log[1].id, f"{9:016x}"]
    assert {ids for _, ids in classes(marks)} == {("d",), ("e",)}


def test_labels_name_classes_and_contradict_marks():
    log = [mark(1, "a", "b", True), mark(2, "c", "d", True), mark(3, "e", "f", False)]
    marks = Marks(log, frozenset(), PHOTOS, {"a": "tower", "d": "tower"})
    assert classes(marks) == {("tower", ("a", "b", "c", "d")), ("e", ("e",)), ("f", ("f",))}
    marks = Marks(log, frozenset(), PHOTOS, {"a": "tower", "b": "bridge", "e": "x", "f": "x"})
    assert classes(marks) == {("tower", ("a",)), ("bridge", ("b",)), ("c", ("c", "d"))}
    assert [(each.kind, each.photos) for each in marks.conflicts] == [
        ("labels", ()),
        ("labels", ("e", "f")),
    ]


def test_a_photo_that_is_marked_with_itself_is_in_no_conflict():
    marks = Marks([mark(1, "a", "a", False), mark(2, "a", "b", True)], frozenset(), PHOTOS)
    assert classes(marks) == {("a", ("a", "b"))}
    assert not marks.conflicts


PAIRS = st.dictionaries(
    st.sampled_from(list(itertools.combinations(PHOTOS, 2))), st.booleans(), max_size=8
)


def reachable(photo, links):
    """The photos that are connected to one, itself included."""
    found = {photo}
    while more := {b for a, b in links if a in found and b not in found}:
        found |= more
    return found


@given(PAIRS, LABELS)
def test_classes_are_those_of_a_plain_transcription(pairs, labels):
    """Every photo of a class belongs there by a chain or a label, and nothing is in doubt."""
    marks = [mark(number, *pair, same) for number, (pair, same) in enumerate(pairs.items())]
    found = Marks(marks, frozenset(), PHOTOS, labels)
    classes, left_out = found.class_names, set(found.left_out)
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


def test_many_people_who_disagree_take_no_long_time():
    names = [f"p{i:03d}" for i in range(120)]
    photos = {name: MarkedQuery(name, f"/{name}.jpg", None, name) for name in names}
    pairs = itertools.product(("ann", "bob"), itertools.combinations(names, 2))
    log = [
        Mark(f"{number:016x}", photos[one], other, by == "ann", by, f"{number:06d}")
        for number, (by, (one, other)) in enumerate(pairs)
    ]
    started = time.perf_counter()
    assert len(Marks(log, frozenset(), photos).conflicts) == len(log) // 2 == 7140
    assert time.perf_counter() - started < 3  # about 20 if each conflict reads all marks
