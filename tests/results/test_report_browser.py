"""The report in a real browser; skipped without one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import chromium
from PIL import Image
from playwright.sync_api import Browser

from listwise.data import Images, LabelledImages
from listwise.data.catalog import Benchmark
from listwise.evaluation import JudgedQueries, Protocol, ProtocolResult
from listwise.results.report import MatchFunction, ModelSearch, write_report

EVIL = [
    "<script>window.evil = 1</script>",
    "</script><script>window.evil = 2</script>",
    "\"><img src=x onerror='window.evil = 3'>",
    "<!--<script>",
    "' autofocus onfocus='window.evil = 4' &amp; &lt;b&gt;",
]


class Page:
    """A file in a window of the browser."""

    def __init__(self, browser: Browser, path: Path, width: int = 1280, dark: bool = False) -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            is_mobile=width < 600,
        )
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.run = self.page.evaluate
        self.settle()

    def settle(self) -> None:
        """Until what is near the window is drawn."""
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame("
            "() => setTimeout(done, 50))))"
        )

    def key(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.settle()

    def click(self, x: float, y: float) -> None:
        self.page.mouse.click(x, y)
        self.settle()

    def choose(self, protocol: str) -> None:
        self.page.locator("#protocols label", has_text=protocol).click()
        self.settle()

    def sort(self, order: str) -> None:
        self.page.locator("#sort").select_option(order)
        self.settle()

    def filter(self, text: str) -> None:
        self.page.locator("#filter").fill(text)
        self.settle()

    def names(self) -> list[str]:
        return self.page.locator(".query h3").all_inner_texts()

    def figures(self) -> list[str]:
        return self.page.locator(".query .ap").all_inner_texts()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


QUERIES = 30
AP = {  # protocol -> model -> AP of each query, all different
    "Easy": [np.roll(np.linspace(0.3, 0.9, QUERIES), shift) for shift in (3, 11)],
    "Medium": [np.roll(np.linspace(0.1, 0.8, QUERIES), shift) for shift in (17, 7)],
    "Hard": [np.roll(np.linspace(0.01, 0.5, QUERIES), shift) for shift in (23, 5)],
}
AP["Hard"][0][4] = AP["Hard"][1][4] = np.nan  # a query that does not count


def make_report(
    folder: Path,
    names: list[str],
    models: list[str],
    title: str = "Report",
    matches: MatchFunction | None = None,
) -> Path:
    """The last model's lists have points."""
    paths = []
    for number in range(40):
        paths.append(str(folder / f"{number}.png"))
        Image.new("RGB", (60, 40), (6 * number, 90, 200)).save(paths[-1])
    random = np.random.default_rng(0)
    positives = [random.choice(40, 6, replace=False) for _ in names]
    judged = JudgedQueries(
        [names[i % len(names)] + str(i) for i in range(40)],
        names,
        [(6.0, 4.0, 30.0, 36.0)] * len(names),
        {"right": positives, "junk": [np.setdiff1d([1, 2, 3], p) for p in positives]},
        dict.fromkeys(AP, Protocol(("right",), ("junk",))),
    )
    searches = []
    for model, name in enumerate(models):
        found = {
            protocol: ProtocolResult(
                {"mAP": float(np.nanmean(aps[model]))}, np.array(aps[model][: len(names)])
            )
            for protocol, aps in AP.items()
        }
        scores = random.random((len(names), 40))
        points = matches if model == len(models) - 1 else None
        searches.append(ModelSearch(name, scores.__getitem__, found, points))
    database, queries = (Images(tuple(p), tuple(p), None) for p in (paths, paths[: len(names)]))
    benchmark = Benchmark(title, database, queries, judged)
    command = f"listwise evaluate '{title}'"
    file = folder / "report.html"
    return write_report(file, title, searches, benchmark, command=command, notes=[title])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"place{i:02d}" for i in range(QUERIES)]
    return make_report(tmp_path_factory.mktemp("report"), names, ["before", "after"])


def test_queries_are_sorted_and_filtered_and_nobody_is_asked(
    browser: Browser, report: Path
) -> None:
    page = Page(browser, report)
    before, after = AP["Medium"]

    def order(key: Callable[[int], float]) -> list[str]:
        return [f"place{i:02d}" for i in sorted(range(QUERIES), key=key)]

    assert page.names() == order(lambda i: after[i])
    for key, expected in {
        "best1": order(lambda i: -after[i]),
        "worst0": order(lambda i: before[i]),
        "gain": order(lambda i: before[i] - after[i]),
        "loss": order(lambda i: after[i] - before[i]),
        "name": order(lambda i: i),
    }.items():
        page.sort(key)
        assert page.names() == expected, key
    page.sort("difference")
    sizes = [abs(after[int(name[5:])] - before[int(name[5:])]) for name in page.names()]
    assert sizes == sorted(sizes, reverse=True)
    page.key("/")
    assert page.run("document.activeElement.id") == "filter"
    page.filter("PLACE1")
    assert sorted(page.names()) == [f"place1{i}" for i in range(10)]
    assert page.run("document.getElementById('count').textContent") == "10 of 30 queries"
    page.filter("nowhere")
    assert page.names() == []
    assert page.run("document.getElementById('nothing').hidden") is False
    assert page.complaints == []
    urls = page.requests
    assert report.as_uri() in urls
    assert {url.split(":")[0] for url in urls} <= {"file", "data"}


def test_the_protocol_changes_what_is_shown(browser: Browser, report: Path) -> None:
    page = Page(browser, report)
    page.sort("name")
    for protocol in ("Hard", "Easy", "Medium"):
        page.choose(protocol)
        for number, shown in enumerate(page.figures()):
            before, after = (100 * aps[number] for aps in AP[protocol])
            if np.isnan(after):
                assert shown == "not counted: no positives"
            else:
                assert shown.startswith(f"AP {before:.1f} → {after:.1f}")
    page.choose("Hard")
    page.sort("worst1")
    assert page.names()[-1] == "place04"


def test_keys_and_chart_lead_to_a_query(browser: Browser, report: Path) -> None:
    page = Page(browser, report)
    names = page.names()
    page.key("j")
    page.key("j")
    page.key("j")
    page.key("k")
    assert page.run("document.activeElement.getAttribute('aria-label')") == names[1]
    page.run("document.getElementById('chart').focus()")
    page.key("End")
    page.key("ArrowLeft")
    assert names[-2] in page.run("document.getElementById('readout').textContent")
    page.key("Enter")
    assert page.run("document.activeElement.getAttribute('aria-label')") == names[-2]
    top = page.run("document.activeElement.getBoundingClientRect().top")
    tools = page.run("document.getElementById('tools').getBoundingClientRect().bottom")
    assert tools <= top < 450

    left, y, width = page.run(
        """(() => {
          document.getElementById("chart").scrollIntoView({ block: "center" });
          const at = document.querySelector("#chart svg").getBoundingClientRect();
          return [at.x, at.y + at.height / 2, at.width];
        })()"""
    )
    page.click(left + width - 6, y)
    assert page.run("document.activeElement.getAttribute('aria-label')") == names[-1]


def test_lists_are_drawn_when_they_are_near(browser: Browser, report: Path) -> None:
    page = Page(browser, report)
    drawn = "document.querySelectorAll('.body > *').length / 2"
    assert 1 <= page.run(drawn) < QUERIES
    first = page.run(
        """(() => {
          const card = document.querySelector(".query");
          const box = card.querySelector(".box").getBoundingClientRect();
          const photo = card.querySelector(".frame img").getBoundingClientRect();
          return {
            rows: card.querySelectorAll(".tiles").length,
            ranks: [...card.querySelector(".tiles").querySelectorAll(".tile:not(.junk) b")]
              .map((rank) => rank.textContent),
            symbols: [...card.querySelectorAll(".tile")]
              .map((tile) => [tile.className, tile.querySelector(".chip").textContent]),
            box: [(box.x - photo.x) / photo.width, (box.y - photo.y) / photo.height,
                  box.width / photo.width, box.height / photo.height],
          };
        })()"""
    )
    assert first["rows"] == 2
    assert first["ranks"] == [str(rank) for rank in range(1, 11)]
    symbols = {"tile right": "✓", "tile wrong": "✕", "tile junk": "–"}
    assert all(symbols[kind] == symbol for kind, symbol in first["symbols"])
    assert {kind for kind, _ in first["symbols"]} >= {"tile right", "tile wrong"}
    assert first["box"] == pytest.approx([0.1, 0.1, 0.4, 0.8], abs=0.03)
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run(drawn) == QUERIES
    page.settle()
    broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
    assert page.run(broken) == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_is_readable(browser: Browser, report: Path, width: int, dark: bool) -> None:
    page = Page(browser, report, width, dark)
    assert (
        page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    )
    assert page.run("document.documentElement.scrollWidth") <= width
    colors = page.run(
        """["body", ".query h3", ".note", ".chip.right", ".chip.wrong", ".chip.junk", ".gain",
            ".loss"].map((what) => {
          const element = document.querySelector(what);
          let back = element;
          while (getComputedStyle(back).backgroundColor === "rgba(0, 0, 0, 0)") {
            back = back.parentElement;
          }
          return [getComputedStyle(element).color, getComputedStyle(back).backgroundColor];
        })"""
    )
    assert (luminance(colors[0][1]) < 0.1) is dark
    for text, back in colors:
        low, high = sorted([luminance(text), luminance(back)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)


def luminance(color: str) -> float:
    """Relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in color[4:-1].split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_evil_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    title = "".join(EVIL)
    report = make_report(tmp_path, EVIL, [EVIL[1], EVIL[2]], title, matches=points_of)
    page = Page(browser, report)
    assert page.run("window.evil") is None
    assert page.complaints == []
    assert page.run("document.scripts.length") == 2
    assert page.run("document.querySelectorAll('img:not([src^=\"data:image/jpeg\"])').length") == 0
    assert page.run("document.querySelector('h1').textContent") == title
    assert page.run("document.title") == " ".join(title.split())
    assert sorted(page.run("[...document.querySelectorAll('h3 a')].map(a => a.textContent)")) == (
        sorted(EVIL)
    )
    labels = page.run("[...document.querySelectorAll('.label')].map(a => a.textContent)")
    assert {label.rstrip("0123456789") for label in labels} == set(EVIL)
    # Should a name ever become markup, the page's own policy still stops it.
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=data:x onerror=\"evil=5\">')")
    page.settle()
    assert page.run("window.evil") is None
    page.run("document.querySelector('button.points').click()")
    page.settle()
    assert page.run(DIALOG)["lines"] > 0
    assert page.run("window.evil") is None


@pytest.mark.parametrize("width", [390, 1280])
def test_a_photo_is_enlarged_beside_its_query(browser: Browser, report: Path, width: int) -> None:
    page = Page(browser, report, width)
    tile = page.page.locator("#queries .tile").first
    page.run("document.getElementById('queries').scrollIntoView()")
    page.settle()
    small = tile.locator("img").bounding_box()
    tile.locator(".thumb").click()
    page.settle()
    shown = page.page.locator("dialog.large[open] img")
    pictures = [shown.nth(i).bounding_box() for i in range(shown.count())]
    assert len(pictures) == 2
    for each in pictures:
        assert small is not None
        assert each is not None
        assert each["width"] > 2 * small["width"]
        assert each["x"] + each["width"] <= width
        assert each["y"] + each["height"] <= 900
    name = tile.get_attribute("title").split("\n")[0]
    expected = [page.names()[0], f"{name}: "]
    for text, caption in zip(expected, page.page.locator(".large figcaption").all(), strict=True):
        assert caption.inner_text().startswith(text)
    page.key("Escape")
    assert not page.page.locator("dialog.large").is_visible()
    page.page.locator("#queries .frame").first.click()
    assert page.page.locator("dialog.large img").count() == 1
    assert page.complaints == []


READOUT = "document.getElementById('readout').textContent"


@pytest.mark.parametrize("models", [["only"], ["runs_before_the_change/model", "after"]])
def test_the_chart_has_queries_without_a_list(
    browser: Browser, tmp_path: Path, models: list[str]
) -> None:
    count = 600
    path = tmp_path / "photo.png"
    Image.new("RGB", (30, 20), "teal").save(path)
    random = np.random.default_rng(0)
    labels = np.arange(count) % 20
    names = tuple(f"photo{i:03d}" for i in range(count))
    photos = Images((str(path),) * count, names, None)
    classes = [f"class{label}_of_the_long_name" for label in labels]
    benchmark = Benchmark.of_labels("b", LabelledImages.from_names(photos, classes, None))
    scores = [random.random((count, count)) + (labels == labels[:, None]) for _ in models]
    searches = [
        ModelSearch.of_scores(name, table, benchmark.judged)
        for name, table in zip(models, scores, strict=True)
    ]
    file = write_report(tmp_path / "report.html", "t", searches, benchmark, most=10)
    page = Page(browser, file, dark=True)
    assert page.complaints == []
    assert len(page.names()) == 10
    assert page.run("document.querySelectorAll('#classes, .tall tbody tr').length") == 21
    sides = "(() => { const all = document.querySelector('.tall'); "
    scrolled, wide = page.run(f"{sides} return [all.scrollWidth, all.clientWidth]; }})()")
    assert scrolled == wide  # no column is cut off
    assert page.run("document.querySelectorAll('#chart path, #chart rect').length") < 20
    page.run("document.getElementById('chart').focus()")
    page.key("End")
    best = max(searches[-1].results["Labels"].per_query_ap)
    assert f"{100 * best:.1f}" in page.run(READOUT)
    page.key("Home")
    while "no list in this report" not in page.run(READOUT):
        page.key("ArrowRight")
    before = page.run("location.hash")
    page.key("Enter")
    assert page.run("location.hash") == before
    page.filter("photo01")
    page.run("document.getElementById('chart').focus()")
    page.key("Home")
    assert "photo01" in page.run(READOUT)
    if len(models) == 1:
        assert page.run("[...document.getElementById('sort').options].map(o => o.value)") == [
            "worst0",
            "best0",
            "name",
        ]
        assert all("→" not in figures for figures in page.figures())


def points_of(query: int, image: int) -> np.ndarray | None:
    """For every second image none, for the others points of 60 × 40 pixels, some or many."""
    if image % 2:
        return None
    random = np.random.default_rng([query, image])
    count = {0: 0, 2: 5}.get(image % 6, 80)
    return random.random((count, 4)) * (59, 39, 59, 39)


@pytest.fixture(scope="module")
def matched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"place{i:02d}" for i in range(QUERIES)]
    folder = tmp_path_factory.mktemp("matched")
    return make_report(folder, names, ["before", "after"], matches=points_of)


DIALOG = """(() => {
  const dialog = document.querySelector("dialog");
  if (!dialog?.open) return null;
  const box = (element) => {
    const { x, y, width, height } = element.getBoundingClientRect();
    return [x, y, width, height];
  };
  return {
    text: dialog.innerText,
    at: box(dialog),
    photos: [...dialog.querySelectorAll("image")].map(box),
    dots: [...dialog.querySelectorAll("circle")].map(box),
    lines: dialog.querySelectorAll(".lines path").length,
    part: box(dialog.querySelector(".part")),
    scroll: [dialog.scrollWidth - dialog.clientWidth, dialog.scrollHeight - dialog.clientHeight],
  };
})()"""


def open_points(page: Page, count: int) -> tuple[int, int]:
    """Open the first tile that has so many points: the numbers of its query and its image."""
    page.run("document.getElementById('queries').scrollIntoView()")
    page.settle()
    query, label = page.run(
        f"""(() => {{
          const button = [...document.querySelectorAll("button.points")]
            .find((button) => button.textContent === "{count} points");
          button.scrollIntoView({{ block: "center" }});
          button.focus();
          return [button.closest(".query").getAttribute("aria-label"),
                  button.closest(".tile").title.split("\\n")[0]];
        }})()"""
    )
    page.key("Enter")
    return int(query.removeprefix("place")), int(label[len("place00") :])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_points_are_drawn_where_they_are(
    browser: Browser, matched: Path, width: int, dark: bool
) -> None:
    page = Page(browser, matched, width, dark)
    query, image = open_points(page, 5)
    shown = page.run(DIALOG)
    assert f"place{query:02d} →" in shown["text"]
    assert "5 matching points" in shown["text"]
    assert shown["lines"] == 5
    first, second = shown["photos"]
    if width == 390:
        assert first[1] + first[3] < second[1]  # one above the other
    else:
        assert first[0] + first[2] < second[0]
    points = points_of(query, image)
    expected = []
    for x, y, u, v in (points + 0.5) / (60, 40, 60, 40):
        expected.append((first[0] + x * first[2], first[1] + y * first[3]))
        expected.append((second[0] + u * second[2], second[1] + v * second[3]))
    dots = [(x + w / 2, y + h / 2) for x, y, w, h in shown["dots"]]
    assert np.array(sorted(dots)) == pytest.approx(np.array(sorted(expected)), abs=1)
    part = np.array(shown["part"]) - [*first[:2], 0, 0]
    assert part / (first[2:] * 2) == pytest.approx([0.1, 0.1, 0.4, 0.8], abs=0.02)
    for x, y, w, h in (first, second):  # large, and within the window
        assert w > 150
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= 900
    assert shown["scroll"] == [0, 0]
    assert page.complaints == []
    back = page.run("getComputedStyle(document.querySelector('dialog')).backgroundColor")
    assert (luminance(back) < 0.1) is dark


def test_the_dialog_closes_and_gives_the_focus_back(browser: Browser, matched: Path) -> None:
    page = Page(browser, matched)
    query, _ = open_points(page, 80)
    shown = page.run(DIALOG)
    assert shown["lines"] == 60
    assert "80 matching points (60 shown)" in shown["text"]
    page.key("j")  # a key of the page, which lies behind
    assert page.run("location.hash") == ""
    page.key("Escape")
    assert page.run(DIALOG) is None
    assert page.run("document.activeElement.textContent") == "80 points"
    thumb = """(() => {
      const at = document.activeElement.closest(".tile").querySelector(".thumb")
        .getBoundingClientRect();
      return [at.x + at.width / 2, at.y + at.height / 2];
    })()"""
    page.click(*page.run(thumb))  # the photo opens it as well
    assert page.run(DIALOG)["lines"] == 60
    x, y, w, h = page.run(DIALOG)["at"]
    page.click(x + w / 2, y + h + (900 - y - h) / 2)  # beside it
    assert page.run(DIALOG) is None
    page.key("j")
    names = page.names()
    following = names[names.index(f"place{query:02d}") + 1]
    assert page.run("document.activeElement.getAttribute('aria-label')") == following
