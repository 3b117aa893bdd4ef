"""The page of labels: what it shows, how much of it, and that it works in a browser."""

import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from chromium import chromium
from label_examples import view, write_table

from listwise.data import LabelledImages
from listwise.labeling import Labels, LabelSettings, label
from listwise.labeling.outputs import MOST, class_views, shown_pairs
from listwise.labeling.result import LabelledPhoto, PhotoGroup


@pytest.fixture(scope="module")
def labels(mixed, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "labels.csv"
    return label(mixed, out, workers=0, command="listwise label mixed.csv --out labels.csv")


def text_of(html):
    body = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_page_tells_what_happened(labels):
    html = labels.page.read_text(encoding="utf-8")
    text = text_of(html)
    assert "Photos kept 16" in text
    assert "Photos dropped 8" in text
    assert "matches no other photo of its class 4" in text
    assert "Group 2: dropped 3 photos" in text
    assert "No match: dropped 2 photos" in text
    assert "1 pair of classes" in text
    assert "not merged" in text
    assert "broken.jpg" in text
    assert "at least 8 local features" in text
    assert "All 5 classes are shown" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert all(photo.startswith("data:image/jpeg") for photo in data["photos"])
    one, two, inliers, points = max(data["pairs"], key=lambda pair: pair[2])
    assert inliers >= 8
    assert len(points) % 4 == 0
    assert all(0 <= part <= 1000 for part in points)
    assert one != two


def test_names_cannot_change_the_page(tmp_path):
    one, two = '<u onclick="x">&amp;', "<u>two"
    for number in range(6):
        view(3, number).save(tmp_path / f"{number}<u>.jpg", quality=92)
    shutil.copy(tmp_path / "0<u>.jpg", tmp_path / "copy<u>.jpg")
    (tmp_path / "broken<u>.jpg").write_bytes(b"not a photo")
    rows = [(f"{number}<u>.jpg", one if number < 3 else two) for number in range(6)]
    rows += [("copy<u>.jpg", one), ("broken<u>.jpg", two)]
    table = write_table(tmp_path / "a.csv", rows)
    found = label(table, tmp_path / "labels.csv", workers=0, command="listwise label <u>")
    assert (len(found.merges), len(found.copies), len(found.errors)) == (1, 1, 1)
    html = found.page.read_text(encoding="utf-8")
    assert "<u" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL).replace("<ul", "")
    text = text_of(html).replace(" ", "")
    names = [one, two, "3<u>.jpg", "copy<u>.jpg", "broken<u>.jpg", "listwise label <u>"]
    for name in names:
        assert name.replace(" ", "") in text, name


def test_a_large_collection_is_shown_in_part():
    photos, groups = [], []
    for kind in range(700):
        first = len(photos)
        numbers = tuple(range(first, first + 30))
        groups.append(PhotoGroup(f"class{kind}", 1, numbers[:20], f"class{kind}"))
        groups += [
            PhotoGroup(f"class{kind}", 2 + i, numbers[20 + 2 * i : 22 + 2 * i], "")
            for i in range(5)
        ]
        photos += [LabelledPhoto(f"class{kind}", f"class{kind}", "", 1, 1, 0, 9)] * 20
        photos += [LabelledPhoto(f"class{kind}", "", "smaller group", 2, 1, 0, 9)] * 10
    images = LabelledImages((), (), None, labels=np.zeros(0, int), class_names=(), splits=None)
    labels = Labels(images, tuple(photos), tuple(groups), (), (), {}, LabelSettings(), Path("a"), 0)
    views = class_views(labels)
    assert len(views) == 700
    assert (views[0].total, views[0].kept, views[0].groups) == (30, 20, 6)
    assert [len(row.photos) for row in views[0].rows] == [7, 2, 2, 2, 0]
    assert views[0].rows[-1].title == "2 further groups"
    assert sum(row.total for row in views[0].rows) == 30
    shown = views[: MOST["classes"]]
    assert len(shown_pairs(labels, shown)) <= 13 * MOST["classes"]


@pytest.fixture(scope="module")
def window():
    """A page in a browser, and what it complains of and requests."""
    with chromium() as started:
        page = started.new_page()
        page.set_default_timeout(30_000)
        complaints, requests = [], []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        yield page, complaints, requests


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(window, labels, width, scheme):
    page, complaints, requests = window
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(labels.page.absolute().as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    card = page.locator('.query[data-name="square"]')
    card.scroll_into_view_if_needed()
    card.locator("img").first.wait_for()
    card.locator("button.points").first.click()
    assert "kept" in page.locator("dialog p").inner_text()
    assert page.locator("dialog svg circle").count() >= 16
    page.keyboard.press("Escape")
    page.locator("#filter").fill("TOW")
    assert page.locator("#classes .query:visible").count() == 1
    assert page.locator("#classes .query:visible h3").inner_text() == "tower"
    page.locator("#filter").fill("nothing like this")
    assert page.locator("#nothing").is_visible()
    assert complaints == []
    assert {url.split(":")[0] for url in requests} <= {"file", "data"}
