"""Marks on the command line: `listwise search` with marks, and `listwise index marks`."""

import json

import pytest
import torch
from tiny_net import TINY_NET

from listwise.models import RetrievalNet


@pytest.fixture
def shop(listwise, photos):
    """Run the command line in a folder with an index of photos."""
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save("model")
    options = ("--model", "model", "--workers", 0, "--device", "cpu")
    assert listwise("index", "build", "shop", photos / "class0", *options)[0] == 0
    return listwise


def ids(out):
    return [each["id"] for each in json.loads(out)["results"]]


def test_marks_are_used_stored_listed_exported_and_undone(shop, photos, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    search = ("search", "shop", "--entry", "0.jpg", "-k", 50, "--json")
    plain = ids(shop(*search)[1])
    same, different = plain[-1], plain[0]
    marked = (*search, "--same", same, "--different", different)
    found = ids(shop(*marked)[1])
    assert (found[0], found[-1]) == (same, different)
    assert "0 marks" in shop("index", "marks", "shop")[1]
    assert ids(shop(*marked, "--save")[1]) == found
    assert ids(shop(*search, "--marks")[1]) == found
    code, out, _ = shop("index", "marks", "shop")
    assert code == 0
    assert "2 marks, 0 undone; 0 conflicts" in out
    assert all(text in out for text in ("0.jpg", same, "different", "ann"))
    listed = json.loads(shop("index", "marks", "shop", "--json")[1])
    assert [(mark["entry"], mark["same"]) for mark in listed["marks"]] == [
        (same, True),
        (different, False),
    ]
    out = shop("index", "marks", "shop", "--export", "labels.csv")[1]
    assert "wrote 3 photos of 2 classes to labels.csv" in out
    with open("labels.csv") as file:
        assert file.readline() == "path,label\n"
    undo = ("index", "marks", "shop", "--undo", listed["marks"][1]["id"])
    assert "undid 1 marks" in shop(*undo)[1]
    assert "1 marks, 1 undone" in shop("index", "marks", "shop")[1]


def test_conflicts_are_shown(shop, photos, monkeypatch):
    photo = photos / "class1" / "0.jpg"  # not in the index
    for person, way in ("ann", "--same"), ("bob", "--different"):
        monkeypatch.setattr("getpass.getuser", lambda person=person: person)
        code, out, err = shop("search", "shop", photo, way, "1.jpg", "--save")
        assert (code, err) == (0, "")
        assert "stored the marks; list them with listwise index marks shop" in out
    assert shop("search", "shop", photo, "--marks")[0] == 0  # a disputed mark does not count
    out = shop("index", "marks", "shop", "--conflicts")[1]
    assert "people disagree" in out
    assert all(text in out for text in ("ann", "bob", "query:", "1 conflicts"))
    (conflict,) = json.loads(shop("index", "marks", "shop", "--json")[1])["conflicts"]
    assert conflict["kind"] == "people"
    assert "left out 2 photos in conflict" in shop("index", "marks", "shop", "--export", "l.csv")[1]


def test_marks_of_a_search_that_fails_are_not_stored(shop):
    marked = ("search", "shop", "--entry", "0.jpg", "--same", "1.jpg", "--save")
    for wrong in ("--where", "price <"), ("--box", "0,0,9,9"), ("--min-probability", "0.5"):
        code, _, err = shop(*marked, *wrong)
        assert code == 2, err
    assert "0 marks" in shop("index", "marks", "shop")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search", "shop", "--entry", "0.jpg", "--save"), "give --same or --different"),
        (("search", "shop", "--entry", "0.jpg", "--same", "x"), "has no photo x"),
        (
            ("search", "shop", "--entry", "0.jpg", "--same", "0.jpg", "--save"),
            "nothing to save: the marked entry is the query itself",
        ),
        (
            ("search", "shop", "--entry", "0.jpg", "--entry", "1.jpg", "--marks"),
            "--marks needs one",
        ),
        (
            ("search", "shop", "--entry", "0.jpg", "--same", "1.jpg", "--different", "1.jpg"),
            "1.jpg is in --same and in --different: give it in one of them",
        ),
        (
            ("search", "shop", "--entry", "0.jpg", "--entry", "1.jpg", "--same", "2.jpg", "--save"),
            "--save needs one photo or one --entry",
        ),
        (("index", "marks", "shop", "--undo", "123"), "has no mark 123: give the id of a mark"),
        (("index", "marks", "shop", "--export", "no/folder.csv"), "cannot write no/folder.csv"),
        (("index", "marks", "shop", "--export", "."), "cannot write .: it is a folder"),
    ],
)
def test_a_mistake_is_one_line(shop, arguments, message):
    code, _, err = shop(*arguments)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
