"""The page for one person: names, filters by attributes, photos that are added, and its link."""

import re
from pathlib import Path

import pytest
from browser import PHONE, Person
from index_examples import texture
from PIL import Image
from playwright.sync_api import expect
from serving_examples import TOKEN, InThread, wait_for

from listwise.client import Client
from listwise.search import open_index
from listwise.serving.server import ServeSettings

PHOTOS = 48


@pytest.fixture(scope="module")
def library(model, tmp_path_factory):
    """An index of two folders with the same file names, with prices, days and titles."""
    base = tmp_path_factory.mktemp("library")
    lines = ["path,price,day,title"]
    for i in range(PHOTOS):
        path = base / "ab"[i % 2] / f"{i // 2:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        texture(i).save(path)
        when = f"2024-{1 + i // 24:02}-{1 + i % 24:02}" + "T12:00:00" * (i % 3 == 0)
        lines.append(f"{path.relative_to(base)},{i + 0.5},{when},Chair {i} of Ann's")
    (base / "photos.csv").write_text("\n".join(lines))
    with open_index(base / "index", model) as index:
        assert len(index.add(base / "photos.csv", workers=0).added) == PHOTOS
        running = InThread(index, ServeSettings(token=TOKEN, uploads=base / "uploads"))
        yield running, base
        running.stop()


@pytest.fixture
def server(library):
    return library[0]


@pytest.fixture
def shop(server):
    return Client(server.url, TOKEN)


def test_numbers_dates_and_texts_are_filtered(newcomer, shop, library):
    visitor = newcomer()
    page = visitor.page
    visitor.put_in(library[1] / "a" / "0003.jpg")
    expect(page.locator("#summary")).to_contain_text(f"{PHOTOS} photos")
    expect(page.get_by_label("price to")).to_have_attribute("placeholder", "47.5")
    filters = []
    for label, value, where in [
        ("price from", "10", "price >= 10"),
        ("price to", "40.5", "price <= 40.5"),
        ("day to", "2024-02-07", "day < '2024-02-08'"),
        ("title contains", "CHAIR 1", "title contains 'chair 1'"),
    ]:
        page.get_by_label(label).fill(value)
        with page.expect_response("**/api/search"):
            page.get_by_label(label).press("Enter")
        visitor.wait()
        filters.append(where)
        wanted = shop.search(library[1] / "a" / "0003.jpg", k=60, where=" and ".join(filters))
        assert visitor.found() == [each["key"] for each in wanted["results"]]
        count = len(wanted["results"])
        expect(page.locator("#summary")).to_contain_text(f"{count} matches, {PHOTOS} photos")
        expect(page.get_by_label(label)).to_be_focused()
    assert count == 10
    page.reload()
    visitor.wait()
    assert len(visitor.found()) == count
    expect(page.get_by_label("day to")).to_have_value("2024-02-07")
    page.get_by_label("title contains").fill("Ann's")
    page.get_by_label("title contains").press("Enter")
    page.get_by_role("button", name="Clear filters").click()
    visitor.wait()
    expect(page.get_by_label("price to")).to_have_value("")
    assert len(visitor.found()) == PHOTOS
    # The filters of an address that was changed by hand.
    key = shop.entries(count=1)["entries"][0]["key"]
    filters = "%7B%22price%22%3A%7B%22least%22%3A%221%20or%22%2C%22most%22%3A%225%22%7D%7D"
    page.goto(f"{visitor.url}/#/entry/{key}?filters={filters}")
    expect(page.locator("#summary")).to_contain_text("matches")
    expect(page.get_by_label("price to")).to_have_value("5")
    assert visitor.fits()


def test_nothing_on_a_desktop_touches_or_is_cut_off(newcomer, library):
    visitor = newcomer(viewport={"width": 1280, "height": 800})
    visitor.put_in(library[1] / "a" / "0003.jpg")
    places = "['filters', 'summary', 'results'].map(id => document.getElementById(id)"
    filters, summary, results = visitor.page.evaluate(f"{places}.getBoundingClientRect().toJSON())")
    assert filters["bottom"] + 8 <= summary["top"]
    assert summary["bottom"] + 4 <= results["top"]
    # The numbers of a result in the narrowest tile there can be.
    cut_off = visitor.page.evaluate(
        """() => {
          const tile = document.querySelector("#results .tile");
          tile.style = "flex: none; width: 110px";
          const points = document.createElement("span");
          points.className = "points";
          points.innerHTML = '<svg class="icon"></svg>1234';
          tile.querySelector(".marks").append(points);
          const [inner, outer] = [points, tile].map((each) => each.getBoundingClientRect());
          return inner.right > outer.right || inner.top < outer.top;
        }"""
    )
    assert not cut_off


def test_names_tell_photos_of_several_folders_apart(newcomer, library):
    visitor = newcomer()
    visitor.put_in(library[1] / "a" / "0003.jpg")
    shown = visitor.page.locator("#results .caption b").all_text_contents()
    assert sorted(shown) == sorted(f"{folder}/{i:04}.jpg" for folder in "ab" for i in range(24))
    visitor.page.locator("#results .pick").first.focus()
    visitor.page.keyboard.press("Enter")
    assert visitor.see("#viewer-name").inner_text() == "a/0003.jpg"


def test_filters_of_a_phone_are_in_a_sheet(newcomer, library):
    visitor = newcomer(**PHONE)
    page = visitor.page
    visitor.put_in(library[1] / "a" / "0003.jpg")
    price = page.get_by_label("price from")
    expect(price).not_to_be_visible()
    page.get_by_role("button", name="Filters").click()
    page.locator("#filters").wait_for()
    wide = page.viewport_size["width"]
    for control in page.locator("#filters :is(input, select, button):visible").all():
        box = control.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= wide
        assert box["height"] >= 44
    price.fill("40")
    price.press("Enter")
    visitor.wait()
    assert price.is_visible()
    page.get_by_role("button", name="Show results").click()
    expect(price).not_to_be_visible()
    expect(page.get_by_role("button", name="Filters (1)")).to_be_visible()
    expect(page.locator("#summary")).to_contain_text(f"8 matches, {PHOTOS} photos")
    # The buttons that mark fit into a tile.
    page.locator("#mark-mode").click()
    tile = page.locator("#results .tile").first
    outer, same = tile.bounding_box(), tile.get_by_label("Same").bounding_box()
    assert outer["x"] <= same["x"]
    assert same["width"] >= 32
    assert visitor.fits()


def test_an_added_photo_makes_no_filter_of_its_name(newcomer, shop, tmp_path):
    photo = tmp_path / "IMG_0001.jpg"
    exif = Image.Exif()
    exif[0x0110] = "Pixel 6"
    exif.get_ifd(0x8769)[0x9003] = "2024:05:01 18:30:00"
    texture(99).save(photo, exif=exif)
    visitor = newcomer()
    visitor.sign_in()
    visitor.put_in(photo)
    visitor.page.get_by_label("with date, place and camera").check()
    visitor.page.get_by_role("button", name="Add to the index").click()
    expect(visitor.page.locator("#notice-text")).to_have_text("Added 1 photo.")
    (added,) = shop.entries(where="uploaded_as = 'IMG_0001.jpg'")["entries"]
    written = {"date": "2024-05-01T18:30:00", "camera": "Pixel 6"}
    assert added["attributes"] == {"uploaded_as": "IMG_0001.jpg"} | written
    names = [facet["name"] for facet in shop.facets()["facets"]]
    assert names == ["camera", "date", "day", "price", "title"]
    assert shop.remove(added["key"])


def test_the_link_of_edit_allows_changes(browser, library, start, tmp_path, monkeypatch):
    """The browser of this machine is a program that keeps the page it is to open."""
    opened = tmp_path / "opened.html"
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {opened}.part; mv {opened}.part {opened}\n')
    program.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(program))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    served = start(library[1] / "index", "--edit")
    link = re.search(r"http://\S+", served.said)[0]
    token = re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=([\w-]{32})", link)[1]
    served.client.get("/health")  # the server runs, so its browser was called
    wait_for(opened.exists)
    assert link in opened.read_text()
    visitor = Person(browser, served.url, f"#token={token}")
    visitor.see("#samples .tile >> nth=0")
    assert visitor.page.url == f"{served.url}/#/"
    texture(77).save(tmp_path / "new.jpg")
    visitor.put_in(tmp_path / "new.jpg")
    visitor.page.get_by_role("button", name="Add to the index").click()
    expect(visitor.page.locator("#notice-text")).to_have_text("Added 1 photo.")
    visitor.page.reload()
    visitor.page.get_by_role("button", name="Add to the index").click()
    expect(visitor.page.locator("#notice-text")).to_have_text("1 photo already in the index.")
    client = Client(served.url, token)
    (entry,) = client.entries(where="uploaded_as = 'new.jpg'")["entries"]
    assert client.remove(entry["key"])
    visitor.leave()


def test_without_edit_nothing_is_changed_or_opened(library, start):
    served = start(library[1] / "index")
    assert "#" not in served.said
    # The memory that it announces is what it has.
    status = Path(f"/proc/{served.popen.pid}/status").read_text()
    used = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
    said = float(re.search(r"using ([\d.]+) GB of memory", served.said)[1]) * 1e9
    assert said == pytest.approx(used, rel=0.3, abs=1e8)
    refused = served.client.patch("/api/entries/1", files={"attributes": (None, "{}")})
    assert refused.status_code == 403
    assert "--edit" in refused.json()["error"]
