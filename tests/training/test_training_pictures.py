import numpy as np

from listwise.data import read_labelled
from listwise.data.sheets import COLORS
from listwise.training.run.record import choose_queries, ranked_list_picture


def frames(picture):
    """The frame colors of each row from left to right: runs of a pure color in a top edge."""
    pixels = np.asarray(picture)
    names = {color: name for name, color in COLORS.items()}
    rows, seen = [], False
    for line in pixels:
        found, before = [], None
        for pixel in map(tuple, line.tolist()):
            name = names.get(pixel)
            if name is not None and name != before:
                found.append(name)
            before = name
        full = sum(tuple(p) in names for p in line.tolist()) > 90 * len(found)
        if full and found and not seen:
            rows.append(found)
        seen = bool(full and found)
    return rows[::2]  # each tile has a top and a bottom edge


def test_queries_are_fixed_and_of_spread_classes_with_something_to_find():
    labels = np.array([3, 0, 0, 1, 2, 2, 3, 4, 4, 5, 5])
    assert choose_queries(labels, 3) == [1, 0, 9]
    assert choose_queries(labels, 99) == [1, 4, 0, 7, 9]
    assert choose_queries(np.array([0, 1, 2]), 3) == []
    assert choose_queries(np.array([], dtype=np.int64), 3) == []


def test_right_and_wrong_photos_are_framed_so(photos):
    images = read_labelled(photos).subset([0, 1, 6, 7, 12])  # of classes 0 0 1 1 2
    angles = np.radians([0, 30, 10, 90, 60])
    descriptors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    picture = ranked_list_picture(images, descriptors, [0, 3], count=3)
    # by angle from photo 0: 2, 1, 4; from photo 3: 4, 1, 2
    assert frames(picture) == [
        ["query", "wrong", "right", "wrong"],
        ["query", "wrong", "wrong", "right"],
    ]


def test_a_query_is_never_in_its_own_list(photos):
    images = read_labelled(photos).subset([0, 1, 6])
    descriptors = np.eye(3, dtype=np.float32)
    assert frames(ranked_list_picture(images, descriptors, [0])) == [["query", "right", "wrong"]]
