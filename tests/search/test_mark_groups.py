"""What follows from a log of marks: active marks, conflicts and classes, for any log."""

import itertools
import random

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


def connected(pairs):
    """The groups of connected photos, by merging them one by one."""
    groups = [{name} for name in PHOTOS]
    for one, other in pairs:
        joined = [group for group in groups if one in group or other in group]
        groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return groups


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


def test_undoing_a_repeated_mark_undoes_it_and_returns_to_the_other_one():
    log = [mark(1, "a", "b", True), mark(2, "a", "b", False), mark(3, "b", "a", False)]
    last = Marks(log, frozenset([log[2].id]), PHOTOS)
    assert list(last) == [log[0]]
    assert not last.conflicts
    assert list(Marks(log, frozenset([log[1].id]), PHOTOS)) == [log[2]]
    assert list(Marks(log, frozenset([log[1].id, log[2].id]), PHOTOS)) == [log[0]]


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
@given(logs(), LABELS)
def test_classes_contain_every_photo_once_unless_it_is_in_conflict(log, labels):
    marks = Marks(log, frozenset(), PHOTOS, labels)
    found = [photo.id for each in marks.classes for photo in each.photos]
    assert len(set(found)) == len(found)
    assert not set(found) & set(marks.left_out)
    named = {name for mark in marks for name in mark.pair}
    assert set(found) | set(marks.left_out) == named
    name_of = {photo.id: each.name for each in marks.classes for photo in each.photos}
    for mark in marks:
        if not mark.same and set(mark.pair) <= set(found):
            assert name_of[mark.pair[0]] != name_of[mark.pair[1]]
    for photo, label in labels.items():
        assert name_of.get(photo, label) == label


@FEW
@given(logs(people=("ann",)))
def test_without_conflicts_classes_are_the_connected_photos(log):
    marks = Marks(log, frozenset(), PHOTOS)
    groups = connected(mark.pair for mark in marks if mark.same)
    clashes = [
        mark.pair
        for mark in marks
        if not mark.same and any(set(mark.pair) <= group for group in groups)
    ]
    assert bool(clashes) == any(each.kind == "chain" for each in marks.conflicts)
    if not clashes:
        named = {name for mark in marks for name in mark.pair}
        expected = {tuple(sorted(group)) for group in groups if group & named}
        assert {ids for _, ids in classes(marks)} == expected
        assert not marks.left_out


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


def test_marks_of_a_photo_that_was_replaced_do_not_count():
    old = Mark("1", MarkedQuery("a", "/a.jpg", None, "earlier"), "b", True, "", "1")
    later = Mark("3", PHOTOS["d"], "c", True, "", "3", None, "earlier")
    marks = Marks([old, mark(2, "a", "c", True), later], frozenset(), PHOTOS)
    assert classes(marks) == {("a", ("a", "c"))}
    assert marks.missing == (old, later)
