"""Marks, labels and suggestions through the HTTP interface."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from index_examples import texture
from serving_examples import BEARER, TOKEN, numbers, upload

from listwise.search.index import Index
from listwise.search.opening import open_store


@pytest.fixture
def server(serve, index, tmp_path):
    return serve(index, token=TOKEN, uploads=tmp_path / "uploads")


@pytest.fixture
def keys(index):
    """The keys of six entries of the index."""
    return [str(entry.key) for entry in index.entries(count=6)]


def send(client, path, **fields):
    """Send a form with text fields and the token."""
    return client.post(path, **upload(**fields), headers=BEARER)


def kept(index):
    """Files of query photos: in the folder of uploads, and beside the index."""
    folders = [Path(index.uri) / "queries", Path(index.uri).parent / "uploads"]
    return [path.name for folder in folders for path in folder.glob("[0-9a-f]*")]


def test_marks_order_the_results_again_and_are_not_stored(server, index, keys, photos):
    """The photo is described once."""
    file = (photos / "class3" / "2.jpg").read_bytes() + b"\0"  # a file that is not in the index
    described = []
    plain_describe = index.generation.describe
    index.generation.describe = lambda *given: described.append(given) or plain_describe(*given)
    plain = server.post("/api/search", **upload(file, k=48)).json()["results"]
    order = [result["key"] for result in plain]
    marks = {"same": ",".join(order[5:7]), "different": ",".join(order[:2])}
    moved = server.post("/api/search", **upload(file, k=48, **marks)).json()["results"]
    found = [result["key"] for result in moved]
    assert len(described) == 1
    assert (set(found[:2]), set(found[-2:])) == (set(order[5:7]), set(order[:2]))
    assert server.get("/api/marks").json()["total"] == 0
    # The same for an entry, page by page and with re-ranking.
    similar = f"/api/entries/{keys[0]}/similar"
    marks = {"same": keys[3], "different": keys[1]}
    pages = [server.get(similar, params=marks | {"k": 30, "start": n}).json() for n in (0, 30)]
    assert [page["more"] for page in pages] == [True, False]
    ranked = server.get(similar, params=marks | {"rerank": True, "k": 47}).json()["results"]
    for results in (pages[0]["results"] + pages[1]["results"], ranked):
        assert (results[0]["key"], results[-1]["key"]) == (keys[3], keys[1])
    for fields, status in [
        ({"same": "1"}, 404),
        ({"same": "x"}, 400),
        ({"same": keys[1], "different": keys[1]}, 400),
    ]:
        assert server.get(similar, params=fields).status_code == status
        assert server.post("/api/search", **upload(file, **fields)).status_code == status


def test_marks_are_stored_listed_and_undone(server, index, keys):
    ranks = json.dumps({keys[1]: 3, keys[2]: 12})
    answer = send(
        server, "/api/marks", entry=keys[0], same=keys[1], different=keys[2], by="Ann", ranks=ranks
    )
    assert answer.status_code == 200, answer.text
    same, different = answer.json()["marks"]
    assert (same["same"], same["entry"]["key"], same["rank"]) == (True, keys[1], 3)
    assert (different["same"], different["entry"]["key"], different["rank"]) == (False, keys[2], 12)
    assert same["query"] == {"id": index.entry(int(keys[0])).id, "key": keys[0], "box": None}
    assert same["by"] == "Ann"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", same["time"])
    assert send(server, "/api/marks", entry=keys[3], same=keys[4]).status_code == 200
    page = server.get("/api/marks?count=1").json()
    assert [page[name] for name in ("total", "same", "different", "undone")] == [3, 2, 1, 0]
    assert [mark["entry"]["key"] for mark in page["marks"]] == [keys[4]]  # the latest first
    of_entry = server.get("/api/marks", params={"entry": keys[0]}).json()["marks"]
    assert {mark["id"] for mark in of_entry} == {same["id"], different["id"]}
    # Python reads what the server wrote.
    assert {mark.id for mark in index.marks.read()} >= {same["id"], different["id"]}
    for undone in (1, 0):  # the second request changes nothing
        answer = server.delete(f"/api/marks/{same['id']}", headers=BEARER)
        assert (answer.status_code, answer.json()) == (200, {"undone": undone})
    page = server.get("/api/marks").json()
    assert [page[name] for name in ("total", "same", "different", "undone")] == [2, 1, 1, 1]
    found = numbers(server)
    assert found['listwise_marks_total{kind="same"}'] == 2
    assert found['listwise_marks_total{kind="different"}'] == 1
    assert found['listwise_first_marks_total{kind="same"}'] == 1  # one without a place
    assert found['listwise_first_marks_total{kind="different"}'] == 0
    assert found["listwise_undone_marks_total"] == 1


def test_a_query_photo_is_kept_once_and_shown(server, index, keys):
    photo = texture(5, (60, 40))
    for box in ("[5, 5, 50, 30]", ""):
        fields = {"same": keys[1], "by": "Ann"} | ({"box": box} if box else {})
        answer = server.post("/api/marks", **upload(photo, **fields), headers=BEARER)
        assert answer.status_code == 200, answer.text
        (mark,) = answer.json()["marks"]
        assert mark["query"]["key"] is None
        assert mark["query"]["box"] == (json.loads(box) if box else None)
        picture = server.get(f"/api/marks/{mark['id']}/photo")
        assert picture.headers["content-type"] == "image/jpeg"
    assert len(kept(index)) == 1
    # A photo of the index is its entry, and is not kept.
    path = index.entry(int(keys[2])).path
    with open(path, "rb") as file:
        answer = server.post("/api/marks", **upload(file.read(), different=keys[3]), headers=BEARER)
    assert answer.json()["marks"][0]["query"]["key"] == keys[2]
    assert len(kept(index)) == 1


def test_marks_that_fail_leave_nothing(server, index, keys):
    photo = texture(6, (60, 40))
    for fields, status, reason in [
        ({}, 400, "nothing to mark"),
        ({"same": "1"}, 404, "the index has no entry 1"),
        ({"same": "x,2"}, 400, "`same` must be a valid integer"),
        ({"same": keys[1], "different": keys[1]}, 400, "is in `same` and in `different`"),
        ({"same": ",".join(str(n) for n in range(1001))}, 400, "at most 1000 items"),
        ({"same": keys[1], "box": "[3, 3, 3, 3]"}, 400, "is empty"),
        ({"same": keys[1], "box": "[70, 3, 90, 30]"}, 400, "outside the image"),
        ({"same": keys[1], "entry": keys[0]}, 400, "one photo, or the key of an entry"),
        ({"same": keys[1], "by": "two\nlines"}, 400, "`by`"),
        ({"same": keys[1], "ranks": '{"1": 0}'}, 400, "`ranks`"),
        ({"same": keys[1], "who": "Ann"}, 400, "unknown setting 'who'"),
    ]:
        answer = server.post("/api/marks", **upload(photo, **fields), headers=BEARER)
        assert (answer.status_code, reason in answer.text) == (status, True), answer.text
        assert set(answer.json()) == {"error"}
        assert str(Path(index.uri).parent) not in answer.text
    entry = {"entry": keys[0]}
    for fields, status, reason in [
        ({"same": keys[1]}, 400, "one photo, or the key of an entry"),
        (entry | {"same": keys[1], "box": "[1, 1, 9, 9]"}, 400, "`box` is for a photo"),
        (entry | {"different": keys[0]}, 400, "is the query itself"),
        ({"entry": "7", "same": keys[1]}, 404, "the index has no entry 7"),
        ({"entry": "chair", "same": keys[1]}, 400, "`entry` must be a valid integer"),
    ]:
        answer = send(server, "/api/marks", **fields)
        assert (answer.status_code, reason in answer.text) == (status, True), answer.text
    damaged = server.post("/api/marks", **upload(b"no photo", same=keys[1]), headers=BEARER)
    assert damaged.status_code == 400
    assert server.delete("/api/marks/0123", headers=BEARER).status_code == 404
    assert server.get("/api/marks/0123/photo").status_code == 404
    assert (kept(index), server.get("/api/marks").json()["total"]) == ([], 0)


def test_photos_need_a_folder(serve, index, keys):
    client = serve(index, token=TOKEN)
    for path, fields in [("/api/marks", {"same": keys[1]}), ("/api/entries", {})]:
        answer = client.post(path, **upload(texture(1), **fields), headers=BEARER)
        assert (answer.status_code, "--uploads" in answer.text) == (400, True)


def test_conflicts_name_both_people_and_both_processes_see_them(serve, index, folder, model, keys):
    first = serve(index, token=TOKEN)
    with open_store(folder) as store:
        second = serve(Index(store, model), token=TOKEN)
        assert send(first, "/api/marks", entry=keys[0], same=keys[1], by="Ann").status_code == 200
        answer = send(second, "/api/marks", entry=keys[1], different=keys[0], by="Ben").json()
        (conflict,) = answer["conflicts"]
        assert conflict["kind"] == "people"
        assert [(mark["by"], mark["same"]) for mark in conflict["marks"]] == [
            ("Ann", True),
            ("Ben", False),
        ]
        for client in (first, second):
            assert client.get("/api/marks").json()["conflicts"] == [conflict]
        second.delete(f"/api/marks/{answer['marks'][0]['id']}", headers=BEARER)
        assert first.get("/api/marks").json()["conflicts"] == []


def test_labels_and_classes(server, index, keys):
    name = 'Tower "A", été'
    answer = send(server, "/api/labels", name=f" {name} ", keys=",".join(keys[:2]))
    assert (answer.status_code, answer.json()) == (200, {"labelled": 2})
    assert server.get(f"/api/entries/{keys[0]}").json()["attributes"]["label"] == name
    facets = {
        facet["name"]: facet["values"] for facet in server.get("/api/facets").json()["facets"]
    }
    assert facets["label"] == [{"value": name, "count": 2}]
    table = server.get("/api/marks/labels", headers=BEARER)
    assert len(list(csv.DictReader(io.StringIO(table.text)))) == 2  # without any marks
    send(server, "/api/marks", entry=keys[0], same=",".join(keys[1:3]))
    (shown,) = server.get("/api/classes").json()["classes"]
    assert [shown[each] for each in ("name", "photos", "labelled", "marks")] == [name, 3, 2, 2]
    assert {entry["key"] for entry in shown["entries"]} == set(keys[:3])
    assert server.get("/api/classes?start=1").json() == {"classes": [], "total": 1}
    table = server.get("/api/marks/labels", headers=BEARER)
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    paths = {index.entry(int(key)).path for key in keys[:3]}
    assert {row["path"] for row in rows} == paths
    assert {row["label"] for row in rows} == {name}
    for fields, status in [
        ({"name": "x"}, 400),
        ({"name": "x", "keys": "1"}, 404),
        ({"name": "x" * 201, "keys": keys[0]}, 400),
        ({"name": "=1+1", "keys": keys[0]}, 400),  # a formula in the table
        ({"name": "x", "keys": keys[0], "more": "1"}, 400),
    ]:
        assert send(server, "/api/labels", **fields).status_code == status
    assert send(server, "/api/labels", name="", keys=keys[0]).json() == {"labelled": 1}
    assert "label" not in server.get(f"/api/entries/{keys[0]}").json()["attributes"]


def test_suggestions_are_pairs_that_nobody_has_marked(server, keys):
    pairs = server.get("/api/suggestions?count=5").json()["suggestions"]
    assert len(pairs) == 5
    one, other = pairs[0]["one"]["key"], pairs[0]["other"]["key"]
    assert one != other
    assert pairs[0]["probability"] is None  # the model is not calibrated
    send(server, "/api/marks", entry=one, different=other)
    again = server.get("/api/suggestions?count=100").json()["suggestions"]
    assert {one, other} not in [{pair["one"]["key"], pair["other"]["key"]} for pair in again]
    for count in (0, 201, "x"):
        assert server.get(f"/api/suggestions?count={count}").status_code == 400
