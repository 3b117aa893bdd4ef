"""The page in a real browser, against `listwise serve` on an index of toy landmarks."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from browser import PHONE, WINDOW, Person
from PIL import Image
from playwright.sync_api import expect
from serving_examples import BEARER, TOKEN, Process, serving, url_of, wait_for

from listwise.calibration import Calibration
from listwise.client import Client
from listwise.demo import TOY_PHOTOS, make_toy_landmarks
from listwise.search import open_index
from listwise.search.entries import NewEntries
from listwise.search.opening import create_store, header_of
from listwise.serving.server import Limits

PHOTOS = 69  # more than a page of results
LIKELY = 11
COLORS = ("red", 'it\'s "blue"', "green")


@pytest.fixture(scope="module")
def landmarks(tmp_path_factory):
    """Photos in the index, sorted by name."""
    folder = make_toy_landmarks(
        tmp_path_factory.mktemp("page") / "toy", buildings=9, views=7, workers=1
    )
    return sorted((folder / TOY_PHOTOS).iterdir())


@pytest.fixture(scope="module")
def servers(browser, landmarks, model, model_folder, tmp_path_factory):
    """Two processes: one for this machine, and one that asks everybody for its token."""
    base = tmp_path_factory.mktemp("served")
    table = landmarks[0].parent / "photos.csv"
    lines = [f"{path.name},{COLORS[i % 3]},{i}" for i, path in enumerate(landmarks)]
    table.write_text("\n".join(["path,color,number", *lines]))
    with open_index(base / "other", model) as index:
        assert len(index.add(table, workers=0).added) == PHOTOS
        entries = list(index)
        rows = index.store.vectors([entry.key for entry in entries])
        small = [index.store.thumbnail(entry.key) or b"" for entry in entries]
    table.unlink()
    # Ten results of the eighth photo, and the photo itself, are likely to show the same thing.
    named = [entry.id for entry in entries].index(landmarks[7].name)
    scores = np.sort(rows @ rows[named])[::-1].astype(float)
    found = {"slope": 1e3, "intercept": -1e3 * (scores[LIKELY - 1] + scores[LIKELY]) / 2}
    facts = {"source": "", "photos": 2, "pairs": 2, "positives": 1}
    calibrated = replace(model, calibration=Calibration(**found, **facts))
    with create_store(base / "toy", header_of(calibrated)) as store:
        store.put(NewEntries(entries, rows, small))
    limits = ("--max-upload", 1, "--max-pixels", 1, "--timeout", 60)
    with ThreadPoolExecutor() as pool:
        here = pool.submit(Process, base / "toy", *limits, token=TOKEN)
        open_to_all = pool.submit(Process, base / "other", "--host", "0.0.0.0", token=TOKEN)
        started = [here.result(), open_to_all.result()]
    started[0].client.timeout = 120  # re-ranking reads all photos once
    yield started
    for process in started:
        process.end()


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


def ask(url, *photos, boxes=None, keys=(), **options):
    """What a server answers to a search by all these examples: the results."""
    examples = {"like": keys, "box": boxes, "average": True}
    return Client(url, TOKEN).search(list(photos), PHOTOS, **examples, **options)["results"]


@pytest.fixture
def asked(server):
    """What the server answers to a search: the results."""
    return partial(ask, server.url)


@pytest.fixture(scope="module")
def few(browser, landmarks, model, tmp_path_factory):
    """The page of a server of nine photos, of which two are alike, and a client with the token."""
    base = tmp_path_factory.mktemp("few")
    folder = base / "photos"
    folder.mkdir()
    for path in landmarks[:8]:
        shutil.copy(path, folder)
    Image.open(landmarks[0]).save(folder / "copy.jpg", quality=80)
    with open_index(base / "index", model) as index:
        index.add(folder, workers=0)
        settings = {"limits": Limits(seconds=60), "token": TOKEN, "uploads": base / "uploads"}
        with serving(index, headers=BEARER, **settings) as client:
            visitor = Person(browser, url_of(client), **WINDOW)
            visitor.see("#samples .tile >> nth=0")
            yield visitor, client
            visitor.context.close()


def keys(results, many=60):
    return [result["key"] for result in results[:many]]


def test_the_start_is_useful_at_once(person):
    visitor = person()
    expect(visitor.page.locator("#samples .tile")).to_have_count(24)
    assert visitor.page.locator("#about").inner_text() == f"toy · {PHOTOS} photos"
    before = [tile.get_attribute("data-key") for tile in visitor.page.locator("#samples li").all()]
    assert len(set(before)) == 25  # and the end of the list
    visitor.page.locator("#samples").get_by_label("Search with").first.click()
    visitor.wait()
    assert visitor.page.url.endswith(f"#/entry/{before[0]}")
    assert before[0] not in visitor.found()


def test_results_are_filtered_by_an_attribute(person, asked, landmarks):
    visitor = person()
    visitor.put_in(landmarks[7])
    lists = visitor.page.locator("#filters select")
    expect(lists).to_have_count(1)  # the numbers have too many values, and are a range
    red = {result["key"] for result in asked(landmarks[7], where="color = 'red'")}
    for color in COLORS[:2]:
        number = lists.locator("option").all_inner_texts()
        place = next(i for i, text in enumerate(number) if text.startswith(color))
        lists.focus()
        lists.select_option(index=place)
        visitor.wait()
        expect(visitor.page.locator("#summary")).to_contain_text(f"23 matches, {PHOTOS} photos")
        quoted = color.replace("'", "''")
        shown = keys(asked(landmarks[7], where=f"color = '{quoted}'"))
        assert visitor.found() == shown
        assert (set(shown) <= red) == (color == "red")
    expect(lists).to_be_focused()
    # A search by a result keeps the filter, and its address can be opened again.
    visitor.page.locator("#results").get_by_label("Search with").first.click()
    visitor.wait()
    before = visitor.found()
    visitor.page.reload()
    visitor.wait()
    expect(visitor.page.locator("#results .tile")).to_have_count(len(before))
    assert visitor.found() == before
    visitor.page.get_by_role("button", name="Clear filters").click()
    visitor.wait()
    assert len(visitor.found()) > len(before)
    assert visitor.fits()


def test_a_line_divides_likely_results_from_similar_ones(person, asked, landmarks):
    results = asked(landmarks[7])
    assert sum(result["probability"] >= 0.5 for result in results) == LIKELY
    visitor = person()
    visitor.put_in(landmarks[7])
    expect(visitor.page.locator("#results .divider")).to_have_count(1)
    classes = visitor.page.evaluate(
        "[...document.querySelectorAll('#results li')].map(each => each.className)"
    )
    assert classes.index("divider") == LIKELY + 1  # after what fills the rest of the row
    widths = visitor.page.locator("#results .tile").evaluate_all(
        "tiles => tiles.map(tile => tile.offsetWidth / tile.parentElement.offsetWidth)"
    )
    assert max(widths) < 0.7
    # The next page of results comes when one scrolls, after the same results.
    visitor.page.locator("#results .tile").last.scroll_into_view_if_needed()
    expect(visitor.page.locator("#results .tile")).to_have_count(PHOTOS)
    assert visitor.found() == keys(results, PHOTOS)
    assert sum(url.endswith("/api/search") for url in visitor.requests) == 2  # of 60 each
    expect(visitor.page.locator("#results .divider")).to_have_count(1)


@pytest.mark.parametrize(
    "way", [pytest.param("choose", marks=pytest.mark.thorough), "paste", "drop"]
)
def test_a_photo_put_in_is_searched_for(person, asked, landmarks, way):
    visitor = person()
    photo = landmarks[7]
    if way == "choose":
        with visitor.page.expect_file_chooser() as chooser:
            visitor.page.locator("#choose").click()
        chooser.value.set_files(photo)
    else:
        visitor.see("#samples .tile >> nth=0")
        visitor.page.evaluate(
            """([way, content]) => {
              const carried = new DataTransfer();
              const bytes = Uint8Array.from(content);
              carried.items.add(new File([bytes], "image.jpg", { type: "image/jpeg" }));
              const name = way === "paste" ? "clipboardData" : "dataTransfer";
              const make = way === "paste" ? ClipboardEvent : DragEvent;
              const say = (kind) => document.body.dispatchEvent(
                new make(kind, { [name]: carried, bubbles: true, cancelable: true }));
              if (way === "drop") say("dragenter");
              if (way === "drop" && document.getElementById("veil").hidden) throw "no veil";
              say(way);
              if (!document.getElementById("veil").hidden) throw "the veil stays";
            }""",
            [way, list(photo.read_bytes())],
        )
    expect(visitor.page.locator(".example")).to_have_count(1)
    visitor.wait()
    found = asked(photo)
    assert visitor.found() == keys(found)
    scores = visitor.page.locator("#results .score").all_inner_texts()
    assert scores == [f"{result['score']:.3f}" for result in found[:60]]
    named = visitor.page.locator("#query-name").get_attribute("title")
    assert named.startswith("pasted ") if way == "paste" else named in (photo.name, "image.jpg")


def test_a_box_is_drawn_moved_and_resized(person, asked, landmarks):
    visitor = person()
    photo = landmarks[20]
    width, height = Image.open(photo).size
    visitor.put_in(photo)
    whole = visitor.found()

    def agrees(expected):
        visitor.wait()
        assert visitor.box() == pytest.approx(expected, abs=1.5)
        assert visitor.found() == keys(asked(photo, boxes=[visitor.box()]))

    visitor.drag((0.7, 0.8), (0.2, 0.3))
    agrees([0.2 * width, 0.3 * height, 0.7 * width, 0.8 * height])
    assert visitor.found() != whole
    visitor.drag((0.4, 0.5), (0.5, 0.45))
    agrees([0.3 * width, 0.25 * height, 0.8 * width, 0.75 * height])
    visitor.drag((0.8, 0.75), (0.9, 0.95))
    agrees([0.3 * width, 0.25 * height, 0.9 * width, 0.95 * height])
    visitor.drag((0.5, 0.5), (-3, 0.5))  # no further than the edge
    agrees([0, 0.25 * height, 0.6 * width, 0.95 * height])
    sent = len(visitor.requests)
    visitor.drag((0.9, 0.1), (0.9, 0.1))  # a click is not a box
    assert len(visitor.requests) == sent
    visitor.page.locator("#clear-box").click()
    visitor.wait()
    assert visitor.box() == []
    assert visitor.found() == whole


def test_a_box_by_keys(person, asked, landmarks):
    visitor = person()
    photo = landmarks[33]
    width, height = Image.open(photo).size
    step = round(0.02 * max(width, height))
    visitor.put_in(photo)
    stage = visitor.page.locator("#stage")
    stage.focus()
    half = [round(width / 4), round(height / 4), round(3 * width / 4), round(3 * height / 4)]
    stage.press("ArrowLeft")
    assert visitor.box() == half
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "Shift+ArrowDown", "Shift+ArrowLeft"):
        stage.press(key)
    box = [half[0] + 2 * step, half[1] - step, half[2] + step, half[3]]
    assert visitor.box() == box
    expected = keys(asked(photo, boxes=[box]))
    wait_for(lambda: visitor.found() == expected)
    stage.press("Escape")
    visitor.wait()
    assert visitor.box() == []
    assert visitor.found() == keys(asked(photo))


def test_from_result_to_result_and_back(person, server, asked, landmarks):
    visitor = person()
    page = visitor.page
    visitor.put_in(landmarks[3])
    first = visitor.found()
    tile = page.locator("#results .tile").nth(30)
    tile.scroll_into_view_if_needed()
    scrolled = page.evaluate("scrollY")
    assert scrolled > 200
    tile.get_by_label("Search with").click()
    visitor.wait()
    assert page.url.endswith(f"#/entry/{first[30]}")
    assert page.evaluate("scrollY") == 0
    similar = server.client.get(f"/api/entries/{first[30]}/similar?k=60").json()["results"]
    assert visitor.found() == keys(similar)

    page.locator("#results").get_by_label("Search with").nth(2).click()
    visitor.wait()
    third = visitor.found()
    assert third == keys(asked(keys=[similar[2]["key"]]))
    sent = len(visitor.requests)
    page.go_back()
    page.go_back()
    expect(page.locator(f'#results [data-key="{first[0]}"]')).to_be_visible()
    assert visitor.found()[:60] == first
    assert page.evaluate("scrollY") == scrolled
    assert not [url for url in visitor.requests[sent:] if "/api/search" in url]
    page.go_forward()
    page.go_forward()
    assert visitor.found() == third
    page.reload()
    visitor.wait()
    assert visitor.found() == third
    page.locator(".brand").click()
    visitor.see("#choose")
    page.go_back()
    assert visitor.found() == third


def test_a_part_of_a_result(person, server, asked, tmp_path):
    entry = server.client.get("/api/entries?start=40&count=1").json()["entries"][0]
    visitor = person(f"#/entry/{entry['key']}?expand")
    visitor.wait()
    assert visitor.page.locator("#expand").is_checked()
    visitor.page.locator("#expand").uncheck()
    visitor.drag((0.1, 0.1), (0.7, 0.8))
    visitor.wait()
    path = tmp_path / "photo.jpg"
    path.write_bytes(server.client.get(f"/api/entries/{entry['key']}/photo").content)
    box = visitor.box()
    found = keys(asked(path, boxes=[box]))
    assert visitor.found() == found
    assert visitor.page.url.endswith(f"#/entry/{entry['key']}:{'-'.join(map(str, box))}")
    visitor.page.reload()
    visitor.wait()
    assert visitor.box() == box
    assert visitor.found() == found


def test_several_examples(person, asked, landmarks):
    visitor = person()
    page = visitor.page
    visitor.put_in(landmarks[5], landmarks[60])
    assert visitor.found() == keys(asked(landmarks[5], landmarks[60]))
    visitor.put_in(landmarks[30], more=True)
    assert visitor.found() == keys(asked(landmarks[5], landmarks[60], landmarks[30]))
    tile = page.locator("#results .tile").nth(4)
    added = tile.get_attribute("data-key")
    tile.hover()
    tile.get_by_label("Add ").click()
    expect(page.locator(".example")).to_have_count(4)
    visitor.wait()
    expected = keys(asked(landmarks[5], landmarks[60], landmarks[30], keys=[added]))
    assert visitor.found() == expected

    page.locator(".example .choose").nth(1).click()  # its box alone changes
    visitor.drag((0.2, 0.2), (0.8, 0.8))
    visitor.wait()
    boxes = [None, visitor.box(), None]
    photos = (landmarks[5], landmarks[60], landmarks[30])
    assert visitor.found() == keys(asked(*photos, boxes=boxes, keys=[added]))
    for left in (3, 2, 1):
        page.get_by_label("Remove the example").first.click()
        expect(page.locator(".example")).to_have_count(left)
    visitor.wait()
    assert visitor.found() == keys(asked(keys=[added]))
    page.get_by_label("Remove the example").click()
    visitor.see("#choose")
    page.go_back()
    assert page.locator(".example").count() == 1


def test_the_switches(person, asked, landmarks):
    visitor = person()
    page = visitor.page
    photo = landmarks[11]
    visitor.put_in(photo)
    plain = visitor.found()
    for label, option, said in [
        ("Expand the query", {"expand": True}, "query expanded"),
        ("Re-rank by neighbors", {"refine": "diffusion"}, "re-ranked by neighbors"),
    ]:
        page.get_by_label(label).check()
        visitor.wait()
        assert visitor.found() == keys(asked(photo, **option))
        expect(page.locator("#summary")).to_contain_text(said)
        page.get_by_label(label).uncheck()
        visitor.wait()
        assert visitor.found() == plain


def test_geometry_and_the_large_view(few, landmarks):
    visitor, _ = few
    page = visitor.page
    photo = landmarks[3]

    def reranked():
        return ask(visitor.url, photo, rerank=True)

    # On a busy machine the first one may not get through all photos in time.
    wait_for(lambda: all(each["inliers"] is not None for each in reranked()))
    found = reranked()
    visitor.begin()
    visitor.put_in(photo)
    plain = visitor.found()
    # The results of the descriptors are there before they are re-ranked.
    held = []

    def hold(route):
        if b"true" in route.request.post_data_buffer:
            held.append(route)
        else:
            route.continue_()

    page.route("**/api/search", hold)
    page.get_by_label("Re-rank by geometry").check()
    expect(page.locator("#summary")).to_contain_text("re-ranking")
    expect(page.locator("#found")).to_have_class("found reranking")
    assert visitor.found() == plain
    held[0].continue_()
    visitor.wait()
    expect(page.locator("#found")).to_have_class("found")
    page.unroute("**/api/search")
    assert visitor.found() == keys(found)
    points = page.locator("#results .points").all_inner_texts()
    assert points == [
        str(result["inliers"]) for result in found[:60] if (result["inliers"] or 0) >= 7
    ]
    assert found[1]["inliers"] > 5

    page.locator("#results .pick").first.focus()
    page.keyboard.press("Enter")
    assert visitor.see("#viewer-name").inner_text() == photo.name
    page.keyboard.press("ArrowRight")
    assert page.locator("#viewer-name").inner_text() == found[1]["id"]
    drawing = visitor.see("#viewer-scene svg")
    assert drawing.locator(".lines path").count() == len(found[1]["matches"])
    # The first line ends where the first pair of points is: from top to bottom of the query, or
    # from left to right where the result is drawn below it.
    query, result = (
        drawing.locator("image")
        .nth(i)
        .evaluate("i => [i.x, i.y, i.width, i.height].map(side => side.baseVal.value)")
        for i in (0, 1)
    )
    line = drawing.locator(".lines path").first.get_attribute("d")
    ends = np.array([float(part) for part in line[1:].replace("L", ",").split(",")])
    first = min(found[1]["matches"], key=lambda match: match[0 if result[1] > query[1] else 1])
    size = Image.open(photo).size
    places = [
        query[0] + first[0] / size[0] * query[2],
        query[1] + first[1] / size[1] * query[3],
        result[0] + first[2] / found[1]["width"] * result[2],
        result[1] + first[3] / found[1]["height"] * result[3],
    ]
    assert ends == pytest.approx(places, abs=0.1)
    page.locator("#viewer-matches").click()
    shown = visitor.see("#viewer-scene img")
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#viewer-name").inner_text() == photo.name
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).not_to_be_visible()
    assert page.evaluate("document.activeElement.closest('.tile').dataset.key") == found[0]["key"]
    visitor.check()


def test_duplicates_are_shown_and_removed_but_the_last_photo(few):
    """Side by side and whole; a removal is confirmed, and can be undone."""
    visitor, client = few
    page = visitor.page
    visitor.begin()
    visitor.sign_in()
    groups = client.get("/api/duplicates").json()
    page.get_by_role("link", name="Find duplicates").click()
    visitor.see("#duplicates")
    shown = page.locator("#duplicate-groups > li")
    expect(shown).to_have_count(groups["total"])
    expect(page.locator("#duplicates-count")).not_to_contain_text("Comparing")
    assert visitor.fits()
    entries = groups["groups"][0]["entries"]
    names = [entry["id"].rpartition("/")[2] for entry in entries]
    first = shown.first
    assert first.locator("img").evaluate_all(
        "images => images.every((each) => getComputedStyle(each).objectFit === 'contain')"
    )
    expect(first.locator(".best")).to_have_text(f"Best: {groups['groups'][0]['reason']}")
    first.locator(".choose").last.click()
    expect(page.locator("#viewer-name")).to_have_text(re.compile(re.escape(names[-1]) + "$"))
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.closest('li').dataset.key") == entries[-1]["key"]

    removed = []
    page.on("request", lambda sent: removed.append(sent.url) if sent.method == "DELETE" else None)
    first.get_by_role("button", name=re.compile("^Keep ")).click()
    question = first.locator(".actions p")
    expect(question).to_contain_text(names[1])
    expect(question).to_contain_text("not be deleted")
    first.get_by_role("button", name="Cancel").click()
    assert not removed
    first.locator(".danger").first.click()
    expect(question).to_contain_text(names[0])
    first.locator(".actions .danger").click()
    if len(entries) == 2:
        expect(shown).to_have_count(groups["total"] - 1)
    page.get_by_role("button", name="Undo").click()
    expect(shown).to_have_count(groups["total"])
    assert client.get(f"/api/entries/{entries[0]['key']}").json()["id"] == entries[0]["id"]
    shown.first.get_by_role("button", name=re.compile("^Keep ")).click()
    shown.first.locator(".actions .danger").click()
    expect(shown).to_have_count(groups["total"] - 1)
    assert len(removed) == len(entries)
    assert client.get(f"/api/entries/{entries[0]['key']}").status_code == 200
    visitor.check()


def test_the_grid_by_keys(person, landmarks):
    visitor = person()
    page = visitor.page
    visitor.put_in(landmarks[9])
    order = visitor.found()
    active = "document.activeElement.closest('.tile').dataset.key"
    page.locator("#results .pick").first.focus()
    for key, place in {"ArrowRight": 1, "End": 59, "Home": 0}.items():
        page.keyboard.press(key)
        assert page.evaluate(active) == order[place]
    page.keyboard.press("ArrowDown")
    below = order.index(page.evaluate(active))
    tops = page.evaluate(
        "[...document.querySelectorAll('#results .tile')].map(tile => tile.offsetTop)"
    )
    assert tops[below] == min(top for top in tops if top > tops[0])
    page.keyboard.press("ArrowUp")
    assert page.evaluate(active) == order[0]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    expect(page.locator(".example")).to_have_count(2)
    visitor.wait()
    page.locator("#results .pick").first.focus()
    chosen = page.evaluate(active)
    page.keyboard.press("f")
    visitor.wait()
    assert page.url.endswith(f"#/entry/{chosen}")
    # Tab leads from a photo to its own buttons and then out of the list.
    page.locator("#results .pick").first.focus()
    for start in ("Add ", "Search with ", "Same: ", "Different: "):
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused.startswith(start)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.tile')") is None


def test_what_is_no_photo_or_too_much(person, landmarks, tmp_path):
    visitor = person()
    garbage = tmp_path / "letter.jpg"
    garbage.write_bytes(b"Dear reader, this is not a photo.")
    raw = tmp_path / "raw.heic"
    raw.write_bytes(bytes(1_500_000))
    for path, reason in {
        garbage: "letter.jpg cannot be read as a photo",
        raw: "raw.heic has 1.5 MB; the limit is 1.0 MB",
    }.items():
        visitor.page.set_input_files("#files", path)
        expect(visitor.page.locator("#notice-text")).to_contain_text(reason)
        assert visitor.page.locator("#notice").get_attribute("role") == "alert"
    visitor.see("#choose")
    visitor.page.set_input_files("#files", [garbage, landmarks[2]])  # the good one counts
    expect(visitor.page.locator(".example")).to_have_count(1)
    assert "letter.jpg" in visitor.notice()
    visitor.page.set_input_files("#files", landmarks[:9])
    expect(visitor.page.locator(".example")).to_have_count(8)
    assert "8 examples at most" in visitor.notice()


def test_a_photo_above_the_limits_is_reduced(person, server, tmp_path):
    noise = tmp_path / "noise.png"
    pixels = np.random.default_rng(0).integers(0, 255, (900, 1000, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(noise)
    wide = tmp_path / "wide.png"
    Image.new("RGB", (1500, 1000), "green").save(wide)
    visitor = person(name="Ann")
    sides = "(() => { const i = document.getElementById('stage-image'); "
    sides += "return [i.naturalWidth, i.naturalHeight]; })()"
    for path, size in {noise: (1000, 900), wide: (1500, 1000)}.items():
        visitor.put_in(path)
        expect(visitor.page.locator("#query-name")).to_have_attribute("title", path.name)
        visitor.wait()
        assert not visitor.page.locator("#notice").is_visible()
        expect(visitor.page.locator("#stage-image")).to_have_js_property("complete", value=True)
        width, height = visitor.page.evaluate(sides)
        assert width / height == pytest.approx(size[0] / size[1], abs=0.01)
        assert size[0] / 2 < width <= size[0]
    assert width < 1300
    visitor.page.get_by_role("button", name="Add to the index").click()
    expect(visitor.page.locator("#notice-text")).to_have_text("Added 1 photo.")
    (added,) = Client(server.url, TOKEN).entries(where="uploaded_as = 'wide.jpg'")["entries"]
    assert [added["width"], added["height"]] == [width, height]
    assert Client(server.url, TOKEN).remove(added["key"])


def test_own_photos_are_there_after_a_reload(person, asked, landmarks):
    visitor = person()
    visitor.put_in(landmarks[5], landmarks[60])
    visitor.drag((0.1, 0.2), (0.7, 0.9))
    visitor.wait()
    box, found = visitor.box(), visitor.found()
    assert found == keys(asked(landmarks[5], landmarks[60], boxes=[box, None]))
    visitor.page.reload()
    expect(visitor.page.locator(".example")).to_have_count(2)
    visitor.wait()
    assert visitor.found() == found
    assert visitor.box() == box
    assert not visitor.page.locator("#notice").is_visible()


def test_a_failed_search_keeps_the_results(person, landmarks):
    visitor = person(expected="500")
    visitor.put_in(landmarks[5])
    before = visitor.found()
    fail = {"status": 500, "json": {"error": "the server failed"}}
    visitor.page.route("**/api/search", lambda route: route.fulfill(**fail))
    visitor.page.get_by_label("Expand the query").check()
    assert visitor.notice() == "The server failed."
    visitor.wait()
    assert visitor.found() == before
    assert "before the last change" in visitor.page.locator("#summary").inner_text()
    visitor.page.set_input_files("#files", landmarks[60])  # those would be of another query
    expect(visitor.page.locator("#results .tile")).to_have_count(0)
    visitor.page.go_back()
    visitor.page.unroute("**/api/search")
    visitor.page.get_by_label("Expand the query").uncheck()
    visitor.wait()
    assert visitor.found() == before


def test_addresses_that_lead_nowhere(person):
    visitor = person("#/entry/123", expected="404")
    assert visitor.notice() == "That photo is not in the index."
    visitor.see("#choose")
    visitor.page.goto(visitor.url + "/#/photo")
    expect(visitor.page.locator("#notice-text")).to_contain_text("choose them again")


def test_a_photo_that_is_gone_still_has_its_thumbnail(person, server):
    entry = server.client.get("/api/entries?start=9&count=1").json()["entries"][0]
    visitor = person(expected="404")
    page = visitor.page
    page.route("**/photo", lambda route: route.fulfill(status=404, json={"error": "gone"}))
    page.goto(f"{visitor.url}/#/entry/{entry['key']}")
    visitor.wait()
    thumbnail = f"api/entries/{entry['key']}/thumbnail"
    expect(page.locator("#stage-image")).to_have_attribute("src", thumbnail)
    visitor.drag((0.2, 0.2), (0.8, 0.8))
    assert visitor.box() == []
    page.locator("#results .pick").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#viewer-scene img")).to_have_attribute("src", re.compile("thumbnail$"))


def test_a_busy_server_is_asked_again(person, asked, landmarks):
    visitor = person(expected="503")
    answers = []

    def busy_at_first(route):
        answers.append(route)
        if len(answers) < 3:
            route.fulfill(status=503, headers={"Retry-After": "1"}, json={"error": "busy"})
        else:
            route.continue_()

    visitor.page.route("**/api/search", busy_at_first)
    visitor.page.set_input_files("#files", landmarks[1])
    assert "busy; trying again in 1 second" in visitor.notice()
    visitor.wait()
    assert visitor.found() == keys(asked(landmarks[1]))
    expect(visitor.page.locator("#notice")).not_to_be_visible()
    assert len(answers) == 3


def test_adding_and_removing_asks_for_the_token(person, server, landmarks, tmp_path):
    path = tmp_path / "<b onclick=evil()>new &amp; mine.jpg"
    Image.open(landmarks[0]).rotate(8, expand=True).save(path, quality=95)
    visitor = person(expected="401")
    page = visitor.page
    visitor.put_in(path)
    assert page.locator("#query-name").get_attribute("title") == path.name
    page.get_by_role("button", name="Add to the index").click()
    visitor.see("#token")
    page.get_by_role("button", name="Cancel").click()
    assert "token" in visitor.notice()
    page.get_by_role("button", name="Add to the index").click()
    page.get_by_label("Token", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    visitor.see("#token-wrong")
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#notice-text")).to_have_text("Added 1 photo.")
    expect(page.locator("#about")).to_have_text(f"toy · {PHOTOS + 1} photos")
    page.get_by_role("button", name="Add to the index").click()
    expect(page.locator("#notice-text")).to_have_text("1 photo already in the index.")

    page.get_by_label("Expand the query").check()  # searches again
    visitor.wait()
    tile = page.locator("#results .tile").filter(has_text=path.name).first
    key = tile.get_attribute("data-key")
    tile.hover()
    tile.get_by_label("Enlarge").click()
    page.get_by_role("button", name="Remove …").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Remove …").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page.locator("#notice-text")).to_contain_text("no longer in the index")
    expect(page.locator(f'[data-key="{key}"]')).to_have_count(0)
    assert server.client.get("/api/info").json()["entries"] == PHOTOS
    expect(page.locator("#about")).to_have_text(f"toy · {PHOTOS} photos")


def test_a_phone(newcomer, asked, landmarks):
    visitor = newcomer(**PHONE)
    page = visitor.page
    visitor.see("#samples .tile >> nth=0")
    assert visitor.fits()
    assert page.locator("#choose").inner_text().startswith("Choose or take a photo")
    visitor.put_in(landmarks[15], landmarks[44])
    assert visitor.fits()
    assert page.locator("#results .tile").first.bounding_box()["y"] < 480  # results are in sight
    # Three columns of pictures with their scores alone; the large view has the rest.
    tiles = page.locator("#results .tile")
    places = [tiles.nth(i).bounding_box() for i in range(4)]
    assert min(place["width"] for place in places) >= 110
    assert [place["y"] == places[0]["y"] for place in places] == [True, True, True, False]
    assert tiles.first.inner_text().startswith("0.")
    assert page.locator("#results :is(.caption, .tools)").first.is_hidden()
    page.locator(".choose").first.click()
    page.locator("#unfold").click()
    at = page.locator("#stage").bounding_box()
    touch = page.context.new_cdp_session(page)

    def send(kind, *points):
        places = [
            {"x": at["x"] + x * at["width"], "y": at["y"] + y * at["height"]} for x, y in points
        ]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    send("touchStart", (0.1, 0.1))
    for part in (0.3, 0.5, 0.8):
        send("touchMove", (part, part))
    send("touchEnd")
    visitor.wait()
    width, height = Image.open(landmarks[15]).size
    expected = [0.1 * width, 0.1 * height, 0.8 * width, 0.8 * height]
    assert visitor.box() == pytest.approx(expected, abs=1.5)
    assert page.evaluate("scrollY") == 0
    photos = landmarks[15], landmarks[44]
    assert visitor.found() == keys(asked(*photos, boxes=[visitor.box(), None]))
    page.locator("#results").get_by_label("Enlarge").first.click()
    visitor.see("#viewer")
    assert visitor.fits()
    small = page.evaluate(
        """[...document.querySelectorAll("#viewer button, #viewer a")]
          .map(button => button.getBoundingClientRect())
          .filter(({ width, height }) => width && Math.min(width, height) < 32).length"""
    )
    assert small == 0
    page.locator("#viewer-pick").click()
    visitor.wait()
    assert page.locator(".example").count() == 1
    assert page.evaluate("scrollY") == 0


def test_the_page_of_the_interface_lists_all_requests(newcomer, server):
    visitor = newcomer("docs")
    paths = server.client.get("/openapi.json").json()["paths"]
    visitor.see("section >> nth=0")
    shown = visitor.page.locator("h2").all_inner_texts()
    assert shown == [f"{kind.upper()} {path}" for path in paths for kind in paths[path]]
    assert visitor.page.get_by_text("keys (form)").count() == 2
    assert visitor.fits()


def test_everything_has_a_name(person, landmarks):
    visitor = person()
    page = visitor.page
    visitor.put_in(landmarks[0])
    page.locator("#results .pick").first.focus()
    page.keyboard.press("Enter")
    visitor.see("#viewer")
    nameless = page.evaluate(
        """[
          ...[...document.images].filter(image => !image.hasAttribute("alt")),
          ...[...document.querySelectorAll("button, a, dialog, [role=application], svg[role=img]")]
            .filter(each => !(each.getAttribute("aria-label") || each.innerText
              || each.hasAttribute("aria-labelledby") || each.textContent).trim() && !each.hidden),
          ...[...document.querySelectorAll("input:not([type=file])")]
            .filter(input => !input.labels.length && !input.getAttribute("aria-label")),
        ].map(each => each.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("h1").count() == 1
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    described = page.evaluate(
        """[...document.querySelectorAll("[aria-describedby], [aria-labelledby], label[for]")]
          .flatMap(each => ["aria-describedby", "aria-labelledby", "for"]
            .map(name => each.getAttribute(name)))
          .filter(Boolean)"""
    )
    assert set(described) <= set(ids)


def test_a_server_for_everyone_asks_first_and_may_stop(browser, servers, landmarks):
    guarded = servers[1]
    url = guarded.url
    visitor = Person(browser, url)
    page = visitor.page
    visitor.see("#token")
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#samples .tile")).to_have_count(24)
    shown = page.locator("#samples img").first
    expect(shown).to_have_attribute("src", re.compile("^blob:"))
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    page.locator("#samples").get_by_label("Search with").first.click()
    visitor.wait()
    page.locator("#results .pick").first.focus()
    page.keyboard.press("Enter")
    large = visitor.see("#viewer-scene img")
    expect(large).to_have_attribute("src", re.compile("^blob:"))
    assert large.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    expect(page.locator("#viewer-link")).to_have_attribute("href", re.compile("^blob:"))
    page.keyboard.press("Escape")
    page.reload()  # the token is kept
    visitor.wait()
    visitor.put_in(landmarks[4])

    guarded.popen.kill()
    guarded.popen.wait()
    page.set_input_files("#files", landmarks[6])
    expect(page.locator("#notice-text")).to_have_text(
        "The server does not answer. Is it still running?"
    )
    page.get_by_role("button", name="Try again").click()
    assert "does not answer" in visitor.notice()
    visitor.complaints = [c for c in visitor.complaints if "Failed to load resource" not in c]
    visitor.leave()
