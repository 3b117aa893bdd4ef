"""Marks, labels and suggestions on the page: a real browser and a real server process."""

import csv
import re

import pytest
from browser import PHONE, Person
from index_examples import texture
from playwright.sync_api import expect
from serving_examples import TOKEN, Process, serving, url_of


@pytest.fixture(scope="module")
def server(shared_folder):
    process = Process(shared_folder, "--timeout", 60, token=TOKEN)
    yield process
    process.end()


@pytest.fixture(scope="module")
def entries(server):
    return server.client.get("/api/entries?count=60").json()["entries"]


@pytest.fixture(autouse=True)
def without_marks(server):
    """Undo the marks of earlier tests."""
    for mark in server.client.get("/api/marks?count=1000").json()["marks"]:
        assert server.client.delete(f"/api/marks/{mark['id']}").status_code == 200


def shown(visitor):
    """Wait for the results, ordered by the stored marks."""
    visitor.see("#results .tile >> nth=0")
    visitor.wait()
    return visitor


def similar(server, key, **options):
    found = server.client.get(f"/api/entries/{key}/similar", params={"k": 60, **options}).json()
    return [result["key"] for result in found["results"]]


def marked(visitor, kind):
    tiles = visitor.page.locator(f"#results .tile[data-mark='{kind}']")
    return tiles.evaluate_all("tiles => tiles.map(tile => tile.dataset.key)")


def counts(visitor, same, different):
    expect(visitor.page.locator("#mark-same")).to_have_text(str(same))
    expect(visitor.page.locator("#mark-different")).to_have_text(str(different))


def press(visitor, keys):
    """Press keys on the first result, each after the results of the one before."""
    visitor.page.locator("#results .pick").first.focus()
    for key in keys:
        visitor.page.keyboard.press(key)
        visitor.wait()


def test_marks_by_keys_order_the_results_again(person, server, entries):
    key = entries[0]["key"]
    plain = similar(server, key)
    visitor = shown(person(f"#/entry/{key}", name="Ann"))
    press(visitor, ["d", "s", "s"])
    counts(visitor, 2, 1)
    same, different = plain[1:3], plain[:1]
    assert set(marked(visitor, "same")) == set(visitor.found()[:2])
    assert visitor.found()[-1:] == marked(visitor, "different") == different
    asked = similar(server, key, same=",".join(marked(visitor, "same")), different=different[0])
    assert visitor.found() == asked
    assert asked != [*same, *plain[3:], *different]  # the others have another order, too
    focused = "document.activeElement.closest('.tile').dataset"
    assert "mark" not in visitor.page.evaluate(f"({{...{focused}}})")
    # The photos since the last mark, in one step.
    visitor.page.keyboard.press("ArrowRight")
    visitor.page.keyboard.press("ArrowRight")
    visitor.page.keyboard.press("Shift+D")
    visitor.wait()
    several = len(marked(visitor, "different"))
    assert several >= 3
    visitor.page.keyboard.press("Control+z")
    counts(visitor, 2, 1)
    for _ in range(3):
        visitor.page.keyboard.press("u")
        visitor.wait()
    expect(visitor.page.locator("#mark-bar")).to_be_hidden()
    assert visitor.found() == plain


def test_saving_asks_for_name_and_token_and_survives_a_reload(person, newcomer, server, entries):
    key = entries[0]["key"]
    visitor = shown(person(f"#/entry/{key}", expected="401"))
    press(visitor, ["s", "d"])
    order = visitor.found()
    visitor.page.locator("#mark-save").click()
    visitor.page.locator("#person-name").fill("Ann")
    visitor.page.locator("#person").get_by_text("Continue").click()
    visitor.page.locator("#token-value").fill(TOKEN)
    visitor.page.locator("#token").get_by_text("Continue").click()
    expect(visitor.page.locator("#mark-save")).to_have_text("Saved")
    stored = server.client.get("/api/marks").json()["marks"]
    assert {(mark["by"], mark["query"]["key"]) for mark in stored} == {("Ann", key)}
    assert {mark["rank"]: mark["same"] for mark in stored} == {1: True, 2: False}
    visitor.page.reload()
    counts(shown(visitor), 1, 1)
    assert visitor.found() == order
    # Others see the marks, and an undone mark is undone on the server.
    other = newcomer()
    other.sign_in("Ben")
    other.go_to(f"#/entry/{key}")
    counts(shown(other), 1, 1)
    assert other.found() == order
    other.page.locator("#results .tile[data-mark='same'] .same").click()
    other.wait()
    counts(other, 0, 1)
    other.page.locator("#mark-save").click()
    expect(other.page.locator("#mark-save")).to_have_text("Saved")
    assert server.client.get("/api/marks").json()["same"] == 0


def test_a_conflict_names_both_people_and_can_be_resolved(person, server, entries):
    one, other = entries[0]["key"], entries[1]["key"]
    files = {"entry": (None, other), "same": (None, one), "by": (None, "Ben")}
    assert server.client.post("/api/marks", files=files).status_code == 200
    visitor = shown(person(f"#/entry/{one}", name="Ann"))
    place = visitor.found().index(other)
    visitor.page.locator("#results .tile").nth(place).hover()
    visitor.page.locator("#results .different").nth(place).click()
    visitor.page.locator("#mark-save").click()
    assert re.search(r"Ben marked .* as the same on \d+ \w+, \d\d:\d\d", visitor.notice())
    visitor.page.get_by_role("button", name="Show conflicts").click()
    conflict = visitor.page.locator(".conflict")
    expect(conflict).to_have_count(1)
    for text in ("Ann", "Ben", "same", "different"):
        expect(conflict).to_contain_text(text)
    conflict.get_by_role("button", name="Undo: Ben").click()
    expect(conflict).to_have_count(0)
    (mark,) = server.client.get("/api/marks").json()["marks"]
    assert (mark["by"], mark["same"]) == ("Ann", False)


def test_a_phone_marks_a_photo_of_the_user(newcomer, server, tmp_path):
    photo = tmp_path / "mine.jpg"
    texture(3).save(photo)
    visitor = newcomer(**PHONE)
    visitor.sign_in()
    visitor.put_in(photo)
    page = visitor.page
    tile = page.locator("#results .tile")
    expect(tile.first.locator(".same")).to_be_hidden()
    page.locator("#mark-mode").tap()
    first = visitor.found()[0]
    tile.first.locator(".different").tap()
    visitor.wait()
    counts(visitor, 0, 1)
    assert visitor.found()[-1] == first
    tile.first.locator(".pick").tap()
    page.locator("#viewer-same").tap()
    expect(page.locator("#viewer-same")).to_have_attribute("aria-pressed", "true")
    page.locator("#viewer-close").tap()
    counts(visitor, 1, 1)
    assert visitor.fits()
    page.locator("#mark-save").tap()
    expect(page.locator("#mark-save")).to_have_text("Saved")
    stored = server.client.get("/api/marks").json()["marks"]
    assert [mark["query"]["key"] for mark in stored] == [None, None]
    page.reload()
    visitor.wait()
    counts(visitor, 1, 1)


def test_a_search_becomes_a_class(person, server, entries, tmp_path):
    key = entries[0]["key"]
    first = similar(server, key)[:3]
    visitor = shown(person(f"#/entry/{key}", name="Ann"))
    page = visitor.page
    page.locator("#label-open").click()
    page.locator("#label-name").fill("red house")
    page.locator("#label-first").fill("3")
    expect(page.locator("#label-preview img")).to_have_count(3)
    page.locator("#label-rest").check()
    page.locator("#label-save").click()
    assert "4 photos have the label “red house”." in visitor.notice()  # with the query
    counts(visitor, 3, len(entries) - 4)
    found = server.client.get("/api/entries", params={"where": "label = 'red house'"}).json()
    assert {entry["key"] for entry in found["entries"]} == {key, *first}
    page.goto(f"{server.url}/#/classes")
    card = page.locator(".class")
    expect(card.get_by_role("heading", name="red house")).to_be_visible()
    expect(card.first).to_contain_text("4 photos")
    with page.expect_download() as download:
        page.locator("#classes-export").click()
    download.value.save_as(tmp_path / "labels.csv")
    with open(tmp_path / "labels.csv", newline="") as file:
        rows = [row["path"] for row in csv.DictReader(file) if row["label"] == "red house"]
    assert len(rows) == 4
    # The next class has the name that exists as a suggestion.
    page.goto(f"{server.url}/#/entry/{key}")
    visitor.see("#results .tile >> nth=0")
    page.locator("#mark-label").click()
    expect(page.locator("#label-names option")).to_have_attribute("value", "red house")
    page.keyboard.press("Escape")
    everything = ",".join(entry["key"] for entry in found["entries"])
    form = {"name": (None, ""), "keys": (None, everything)}
    assert server.client.post("/api/labels", files=form).status_code == 200


def test_pairs_are_answered_by_keys(person, server):
    pairs = server.client.get("/api/suggestions?count=20").json()["suggestions"]
    visitor = person("#/classes", name="Ann")
    page = visitor.page

    def asks_for(pair):
        expect(page.locator("#pair-first")).to_have_attribute("alt", name_of(pair["one"]))
        expect(page.locator("#pair-second")).to_have_attribute("alt", name_of(pair["other"]))

    asks_for(pairs[0])
    page.keyboard.press("s")
    asks_for(pairs[1])
    page.locator("#pair-different").click()
    asks_for(pairs[2])
    page.keyboard.press("n")
    asks_for(pairs[3])
    expect(page.locator("#classes-status")).to_contain_text("1 same · 1 different")
    stored = server.client.get("/api/marks").json()["marks"]
    asked = [{pair["one"]["key"], pair["other"]["key"]} for pair in pairs[:2]]
    assert [{mark["query"]["key"], mark["entry"]["key"]} for mark in stored] == asked[::-1]
    page.keyboard.press("u")
    asks_for(pairs[2])
    page.keyboard.press("u")
    asks_for(pairs[1])
    expect(page.locator("#classes-status")).to_contain_text("1 same · 0 different")
    assert visitor.fits()


def name_of(entry):
    return entry["id"].rpartition("/")[2]


def test_a_failed_request_keeps_results_and_marks(person, entries):
    visitor = person(f"#/entry/{entries[0]['key']}", "Failed to load resource", name="Ann")
    shown(visitor)
    before = visitor.found()
    visitor.page.route("**/api/search", lambda route: route.abort())
    press(visitor, ["s"])
    assert "does not answer" in visitor.notice()
    assert visitor.found() == before
    counts(visitor, 1, 0)
    visitor.page.unroute("**/api/search")
    visitor.page.get_by_role("button", name="Try again").click()
    visitor.wait()
    assert visitor.found()[0] == before[0]
    visitor.page.route("**/api/marks", lambda route: route.abort())
    visitor.page.locator("#mark-save").click()
    assert "does not answer" in visitor.notice()
    expect(visitor.page.locator("#mark-save")).to_have_text("Save")
    counts(visitor, 1, 0)


def test_without_a_token_marks_only_order_the_results(browser, module_index, entries):
    with serving(module_index) as client:
        visitor = Person(browser, url_of(client), f"#/entry/{entries[0]['key']}")
        press(shown(visitor), ["d"])
        counts(visitor, 0, 1)
        expect(visitor.page.locator("#mark-note")).to_contain_text("--edit")
        expect(visitor.page.locator("#mark-save")).to_be_hidden()
        expect(visitor.page.locator("#mark-label")).to_be_hidden()
        visitor.leave()
