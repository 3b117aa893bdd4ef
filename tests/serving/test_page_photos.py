"""Photos that people have: large ones, and formats that the browser cannot show."""

import httpx
import numpy as np
import pytest
from browser import PHONE
from PIL import Image
from playwright.sync_api import expect
from serving_examples import TOKEN, InThread

from listwise.search import open_index
from listwise.serving.server import ServeSettings

# Keeps the photos and the boxes that the page sends.
WATCH = """() => {
  window.sent = [];
  const before = window.fetch;
  window.fetch = (path, options) => {
    if (options?.body) {
      const files = options.body.getAll("photos");
      const photos = files.map(({ name, size, type }) => ({ name, size, type }));
      window.sent.push({ photos, boxes: JSON.parse(options.body.get("boxes") ?? "null") });
    }
    return before(path, options);
  };
}"""


def draw_photo(seed: int, size: tuple[int, int]) -> Image.Image:
    """Large colored areas with fine texture."""
    rng = np.random.default_rng(seed)
    areas, texture = (
        Image.fromarray(rng.integers(0, 255, (*shape, 3), dtype=np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        for shape in ((7, 5), (size[1] // 4, size[0] // 4))
    )
    return Image.blend(areas, texture, 0.2)


@pytest.fixture
def server(shop):
    return shop[0]


@pytest.fixture(scope="module")
def shop(model, tmp_path_factory):
    """A server of six photos, one of which is that of a camera that was held upright.

    Also a client, the folder of the photos, and their keys.
    """
    base = tmp_path_factory.mktemp("shop")
    folder = base / "photos"
    folder.mkdir()
    for seed in range(4):
        draw_photo(seed, (480, 640)).save(folder / f"{seed}.jpg")
    draw_photo(4, (480, 640)).save(folder / "scan.tiff")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the upright photo is 3024 × 4032
    upright = draw_photo(5, (3024, 4032))
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    turned.save(folder / "camera.jpg", quality=95, exif=exif)
    with open_index(base / "index", model, max_side=320) as index:
        assert len(index.add(folder, workers=0).added) == 6
        keys = {entry.id: str(entry.key) for entry in index}
        running = InThread(index, ServeSettings(token=TOKEN, uploads=base / "uploads"))
        with httpx.Client(base_url=running.url, timeout=120) as client:
            yield running, client, folder, keys
        running.stop()


def scores(answer):
    return {each["id"]: each["score"] for each in answer.json()["results"]}


def test_a_large_photo_is_reduced_to_search_and_added_as_it_is(newcomer, shop):
    _, client, folder, keys = shop
    camera = folder / "camera.jpg"
    assert camera.stat().st_size > 4e6
    visitor = newcomer(**PHONE)
    visitor.see("#samples .tile >> nth=0")
    visitor.page.evaluate(WATCH)
    visitor.sign_in()
    visitor.put_in(camera)
    assert visitor.found()[0] == keys["camera.jpg"]
    [whole] = visitor.page.evaluate("sent")
    [photo] = whole["photos"]
    assert (photo["name"], photo["type"]) == ("camera.jpg", "image/jpeg")
    assert photo["size"] < 2e6
    shown = (
        "[...document.querySelectorAll('#stage img')].map(i => [i.naturalWidth, i.naturalHeight])"
    )
    assert visitor.page.evaluate(shown) == [[1536, 2048]]
    assert visitor.fits()

    visitor.page.get_by_role("button", name="Draw a box").click()
    with visitor.page.expect_response("**/api/search") as answered:
        visitor.drag((0.25, 0.25), (0.75, 0.5))
    visitor.wait()
    box = visitor.box()
    assert box == pytest.approx([384, 512, 1152, 1024], abs=12)
    assert visitor.page.evaluate("sent.at(-1).boxes") == [box]
    form = {"boxes": str([[round(edge * 3024 / 1536) for edge in box]])}
    original = client.post("/api/search", data=form, files={"photos": camera.read_bytes()})
    assert scores(answered.value) == pytest.approx(scores(original), abs=0.01)

    visitor.page.reload()  # the original file is kept, too
    visitor.wait()
    assert visitor.box() == box
    visitor.page.evaluate(WATCH)
    visitor.page.get_by_role("button", name="Add to the index").click()
    expect(visitor.page.locator("#notice-text")).to_have_text("1 photo already in the index.")
    assert visitor.page.evaluate("sent.at(-1).photos[0].size") == camera.stat().st_size


def test_a_photo_is_sent_as_it_is_to_an_index_of_original_sizes(newcomer, shop):
    folder = shop[2]

    def describe(page):
        def answer(route):
            route.fulfill(json=route.fetch().json() | {"max_side": None})

        page.route("**/api/info", answer)

    visitor = newcomer(prepare=describe)
    visitor.see("#samples .tile >> nth=0")
    visitor.page.evaluate(WATCH)
    visitor.put_in(folder / "camera.jpg")
    size = (folder / "camera.jpg").stat().st_size
    assert visitor.page.evaluate("sent[0].photos[0].size") == size


def test_transparent_parts_of_a_large_photo_are_white(newcomer, shop, tmp_path):
    Image.new("RGBA", (3000, 40), (0, 0, 0, 0)).save(tmp_path / "logo.png")
    visitor = newcomer()
    visitor.see("#samples .tile >> nth=0")
    visitor.page.evaluate(WATCH)
    visitor.put_in(tmp_path / "logo.png")
    assert visitor.page.evaluate("sent[0].photos[0].name") == "logo.jpg"
    assert visitor.page.locator("#query-name").get_attribute("title") == "logo.png"
    color = """async () => {
      const photo = document.getElementById("stage-image");
      const canvas = new OffscreenCanvas(1, 1);
      const context = canvas.getContext("2d");
      context.drawImage(photo, 0, 0, 1, 1);
      return [...context.getImageData(0, 0, 1, 1).data];
    }"""
    assert visitor.page.evaluate(color) == [255, 255, 255, 255]


def test_a_photo_that_the_browser_cannot_show_is_searched(newcomer, shop, tmp_path):
    _, _, folder, keys = shop
    visitor = newcomer(expected="Failed to load resource", **PHONE)
    visitor.see("#samples .tile >> nth=0")
    assert ".heic,.heif,.hif" in (visitor.page.locator("#files").get_attribute("accept") or "")
    visitor.put_in(folder / "scan.tiff")
    assert visitor.found()[0] == keys["scan.tiff"]
    picture = visitor.page.locator("#stage-image")
    assert picture.evaluate("each => [each.naturalWidth, each.naturalHeight]") == [400, 300]
    expect(visitor.page.get_by_role("button", name="Draw a box")).to_have_count(0)
    visitor.page.reload()
    visitor.wait()
    assert visitor.found()[0] == keys["scan.tiff"]
    assert picture.evaluate("each => each.naturalWidth") == 400
    # The server decides about a format, and gives the reason if it cannot read it.
    (tmp_path / "IMG_0001.HEIC").write_bytes(b"not a photo")
    visitor.page.set_input_files("#files", tmp_path / "IMG_0001.HEIC")
    assert "IMG_0001.HEIC" in visitor.notice()
    assert picture.evaluate("each => each.naturalWidth") == 400
