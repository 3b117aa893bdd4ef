"""Marks, labels and suggestions on the page: a real browser and a real server process."""

import csv
import re
import shutil

import pytest
from browser import Person
from index_examples import texture
from playwright.sync_api import expect
from serving_examples import TOKEN, InThread, Process

from listwise.search.index import Index
from listwise.search.opening import open_store
from listwise.serving.settings import ServeSettings

PHONE = {"viewport": {"width": 390, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def server(filled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marked") / "shop"
    shutil.copytree(filled, folder)
    process = Process(folder, "--timeout", 60, token=TOKEN)
    yield process
    process.client.close()
    process.popen.kill()
    process.popen.communicate()


@pytest.fixture(scope="module")
def entries(server):
    return server.client.get("/api/entries?count=60").json()["entries"]


@pytest.fixture(autouse=True)
def without_marks(server):
    """Undo the marks of earlier tests."""
    for mark in server.client.get("/api/marks?count=1000").json()["marks"]:
        assert server.client.delete(f"/api/marks/{mark['id']}").status_code == 200


def go_to(visitor, address, name):
    """Open an address as someone with a name and the token, or without both."""
    if name is not None:
        visitor.page.evaluate(f"sessionStorage['listwise-token'] = {TOKEN!r}")
        visitor.page.evaluate(f"localStorage['listwise-name'] = {name!r}")
    if address:
        visitor.page.goto(f"{visitor.url}/{address}")
    if "entry" in address:
        visitor.see("#results .tile >> nth=0")
        visitor.wait()
    return visitor


@pytest.fixture
def newcomer(browser, server):
    """Opens the page in a new window; in the end nothing was complained of."""
    opened = []

    def open_page(address="", name="Ann", url=server.url, **settings):
        opened.append(Person(browser, url, **settings))
        return go_to(opened[-1], address, name)

    yield open_page
    for each in opened:
        each.leave()


@pytest.fixture
def person(window):
    """Opens an address in the window that tests share; only `expected` may be complained of."""
    allowed = []

    def begin(address, expected="", name="Ann"):
        allowed.append(expected)
        window.begin()
        return go_to(window, address, name)

    yield begin
    for expected in allowed:
        window.check(expected)


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
    visitor = person(f"#/entry/{key}")
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
    visitor = person(f"#/entry/{key}", expected="401", name=None)
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
    counts(visitor, 1, 1)
    expect(visitor.page.locator("#results .tile")).to_have_count(len(order))
    assert visitor.found() == order
    # Others see the marks, and an undone mark is undone on the server.
    other = newcomer(f"#/entry/{key}", name="Ben")
    counts(other, 1, 1)
    other.wait()
    assert other.found() == order
    other.page.locator("#results .tile[data-mark='same'] .same").click()
    other.wait()
    counts(other, 0, 1)
    other.page.locator("#mark-save").click()
    expect(other.page.locator("#mark-save")).to_have_text("Saved")
    assert server.client.get("/api/marks").json()["same"] == 0


def test_undo_of_a_saved_mark(person, server, entries):
    visitor = person(f"#/entry/{entries[1]['key']}")
    press(visitor, ["s"])
    visitor.page.locator("#mark-save").click()
    expect(visitor.page.locator("#mark-save")).to_have_text("Saved")
    assert server.client.get("/api/marks").json()["total"] == 1
    visitor.page.locator("#mark-undo").click()
    expect(visitor.page.locator("#mark-bar")).to_be_hidden()
    assert server.client.get("/api/marks").json()["total"] == 0


def test_a_conflict_names_both_people_and_can_be_resolved(person, server, entries):
    one, other = entries[0]["key"], entries[1]["key"]
    files = {"entry": (None, other), "same": (None, one), "by": (None, "Ben")}
    assert server.client.post("/api/marks", files=files).status_code == 200
    visitor = person(f"#/entry/{one}")
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
    visitor = person(f"#/entry/{key}")
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
    visitor = person("#/classes")
    page = visitor.page

    def shown(pair):
        expect(page.locator("#pair-first")).to_have_attribute("alt", name_of(pair["one"]))
        expect(page.locator("#pair-second")).to_have_attribute("alt", name_of(pair["other"]))

    shown(pairs[0])
    page.keyboard.press("s")
    shown(pairs[1])
    page.locator("#pair-different").click()
    shown(pairs[2])
    page.keyboard.press("n")
    shown(pairs[3])
    expect(page.locator("#classes-status")).to_contain_text("1 same · 1 different")
    stored = server.client.get("/api/marks").json()["marks"]
    asked = [{pair["one"]["key"], pair["other"]["key"]} for pair in pairs[:2]]
    assert [{mark["query"]["key"], mark["entry"]["key"]} for mark in stored] == asked[::-1]
    page.keyboard.press("u")
    shown(pairs[2])
    page.keyboard.press("u")
    shown(pairs[1])
    expect(page.locator("#classes-status")).to_contain_text("1 same · 0 different")
    assert visitor.fits()


def name_of(entry):
    return entry["id"].rpartition("/")[2]


def test_a_failed_request_keeps_results_and_marks(person, entries):
    visitor = person(f"#/entry/{entries[0]['key']}", expected="Failed to load resource")
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


KEYDOWN = """settings => document.body.dispatchEvent(
    new KeyboardEvent("keydown", { bubbles: true, ...settings }))"""


def test_keys_of_the_browser_mark_nothing(person, entries):
    visitor = person(f"#/entry/{entries[0]['key']}")
    page = visitor.page
    page.locator("#results .pick").first.click()
    verdict = page.locator("#viewer-verdict [aria-pressed='true']")
    for key in ("s", "d", "ArrowRight"):
        page.evaluate(KEYDOWN, {"key": key, "ctrlKey": True})
    expect(verdict).to_have_count(0)
    expect(page.locator("#viewer-place")).to_contain_text("1 of")
    page.keyboard.press("s")
    page.evaluate(KEYDOWN, {"key": "s", "repeat": True})  # the key is held
    expect(verdict).to_have_count(1)
    page.keyboard.press("Escape")
    counts(visitor, 1, 0)


def test_the_page_stays_where_a_photo_was_marked(person, entries):
    visitor = person(f"#/entry/{entries[0]['key']}")
    tile = visitor.page.locator("#results .tile").nth(1)
    key = tile.get_attribute("data-key")
    tile.hover()
    tile.locator(".different").click()
    visitor.wait()
    assert visitor.found()[-1] == key
    assert visitor.page.evaluate("window.scrollY") == 0


def test_marks_are_saved_for_the_query_they_were_made_for(person, server, entries):
    """Although the user opens another search while the server stores them."""
    visitor = person(f"#/entry/{entries[0]['key']}")
    page = visitor.page
    press(visitor, ["s"])
    page.locator("#mark-save").click()
    expect(page.locator("#mark-save")).to_have_text("Saved")
    press(visitor, ["s", "ArrowRight", "d"])  # the saved mark is removed
    held = []
    page.route("**/api/marks/*", lambda route: held.append(route))
    with page.expect_request("**/api/marks/*"):
        page.locator("#mark-save").click()
    page.evaluate(f"location.hash = '#/entry/{entries[1]['key']}'")
    expect(page.locator("#query-name")).to_have_text(name_of(entries[1]))
    with page.expect_response("**/api/marks"):
        held[0].continue_()
    page.unroute("**/api/marks/*")
    (mark,) = server.client.get("/api/marks").json()["marks"]
    assert (mark["same"], mark["query"]["key"]) == (False, entries[0]["key"])


def test_without_a_token_marks_only_order_the_results(newcomer, filled, model, entries):
    with open_store(filled) as store:
        started = InThread(Index(store, model), ServeSettings())
        visitor = newcomer(f"#/entry/{entries[0]['key']}", url=started.url)
        press(visitor, ["d"])
        counts(visitor, 0, 1)
        expect(visitor.page.locator("#mark-note")).to_contain_text("without a token")
        expect(visitor.page.locator("#mark-save")).to_be_hidden()
        expect(visitor.page.locator("#mark-label")).to_be_hidden()
        visitor.page.goto("about:blank")
        started.stop()
