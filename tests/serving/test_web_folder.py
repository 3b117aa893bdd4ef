"""The example page of `listwise export --web` in a real browser, with onnxruntime-web from npm."""

import os
import shutil
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from browser import Person
from chromium import chromium
from PIL import Image
from playwright.sync_api import expect

import listwise
from listwise.descriptors.exporting import MODEL_FILE, add_page
from listwise.descriptors.onnx_file import read_onnx

KEPT = Path(__file__).parents[1] / "descriptors" / "version-1.onnx"
# Where `npm install --prefix` put the package.
NPM = Path(os.environ.get("LISTWISE_NPM", Path(tempfile.gettempdir()) / "listwise-npm"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def folder(tmp_path) -> Path:
    """What `Model.export` writes with `web=True`, around a small model."""
    add_page(tmp_path, read_onnx(KEPT)[2])
    shutil.copyfile(KEPT, tmp_path / MODEL_FILE)
    return tmp_path


@pytest.fixture
def url(folder):
    handler = partial(Quiet, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_two_photos_are_described_and_compared(folder, url, tmp_path):
    if not (NPM / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip(f"needs onnxruntime-web: npm install --prefix {NPM} onnxruntime-web")
    random = np.random.default_rng(0)
    paths = [tmp_path / "first.png", tmp_path / "second.png"]
    for path, size in zip(paths, ((48, 64), (70, 50)), strict=True):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    first, second = listwise.load(KEPT).encode(paths)
    with chromium() as browser:
        missing = Person(browser, url)
        expect(missing.see("output")).to_contain_text("Run npm install onnxruntime-web")
        missing.leave("404")
        (folder / "node_modules").symlink_to(NPM / "node_modules")
        person = Person(browser, url)
        expect(person.see("output")).to_have_text("Choose two photos.")
        person.page.get_by_label("First photo").set_input_files(paths[0])
        expect(person.see("output")).to_have_text("Choose the other photo.")
        person.page.get_by_label("Second photo").set_input_files(paths[1])
        expect(person.see("output")).to_have_text(f"Similarity: {first @ second:.3f}")
        found = person.page.evaluate(
            """async () => {
                const { loadModel } = await import("./listwise.js");
                const photo = document.querySelector("img");
                const found = await (await loadModel()).describe(photo);
                return Array.from(found);
            }"""
        )
        np.testing.assert_allclose(found, first, atol=1e-4)
        person.leave()
