"""A server of an index whose model is an ONNX file."""

from pathlib import Path

import httpx
from serving_examples import TOKEN, InThread

from listwise.search import open_index
from listwise.serving.memory import prepare
from listwise.serving.settings import ServeSettings

FILE = Path(__file__).parents[1] / "descriptors" / "version-1.onnx"


def test_an_index_with_an_onnx_file_is_served(photos, tmp_path):
    with open_index(tmp_path / "shop", FILE, max_side=48) as index:
        index.add(photos / "class0", workers=0)
    query = photos / "class0" / "3.jpg"
    added = photos / "class1" / "0.jpg"
    with open_index(tmp_path / "shop", create=False) as index:  # it remembers the file
        settings = ServeSettings(token=TOKEN, uploads=tmp_path / "uploads")
        assert prepare(index, settings.limits).trial_seconds > 0
        server = InThread(index, settings)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            with httpx.Client(
                verify=False, base_url=server.url, headers=headers, timeout=30
            ) as client:
                answer = client.post("/api/search", files={"photos": query.read_bytes()})
                expected = index.search(query, k=1)[0]
                assert answer.json()["results"][0]["id"] == expected.id
                assert client.post("/api/entries", files={"photos": added.read_bytes()}).json()[
                    "added"
                ]
                assert client.get("/api/info").json()["entries"] == 7
        finally:
            server.stop()
