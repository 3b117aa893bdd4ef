"""A server of an index whose model is an ONNX file."""

from pathlib import Path

from serving_examples import BEARER, TOKEN, serving

from listwise.search import open_index
from listwise.serving.engine import prepare
from listwise.serving.server import Limits

FILE = Path(__file__).parents[1] / "descriptors" / "version-1.onnx"


def test_an_index_with_an_onnx_file_is_served(photos, tmp_path):
    with open_index(tmp_path / "shop", FILE, max_side=48) as index:
        index.add(photos / "class0", workers=0)
    query = photos / "class0" / "3.jpg"
    added = photos / "class1" / "0.jpg"
    with open_index(tmp_path / "shop", create=False) as index:  # it remembers the file
        writing = {"token": TOKEN, "uploads": tmp_path / "uploads"}
        assert prepare(index, Limits())[1] > Limits().held_bytes
        with serving(index, headers=BEARER, **writing) as client:
            answer = client.post("/api/search", files={"photos": query.read_bytes()})
            expected = index.search(query, k=1)[0]
            assert answer.json()["results"][0]["id"] == expected.id
            new = client.post("/api/entries", files={"photos": added.read_bytes()})
            assert new.json()["added"]
            assert client.get("/api/info").json()["entries"] == 7
