"""`listwise download` from a server of this machine, and `listwise import` of a checkpoint."""

import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from sklearn.decomposition import PCA

from listwise.data.catalog import ENTRIES, RemoteFile
from listwise.descriptors import load_model
from listwise.models import RetrievalNet


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def products(tmp_path_factory, monkeypatch):
    """A server of two files of Stanford Online Products."""
    public = tmp_path_factory.mktemp("public")
    for split, first in (("train", 1), ("test", 3)):
        rows = [f"{i} {first + i // 2} 1 bicycle_final/{split}{i}.JPG" for i in range(4)]
        (public / f"Ebay_{split}.txt").write_text("\n".join(["image_id ...", *rows]) + "\n")
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(public)))
    address = f"http://127.0.0.1:{http.server_address[1]}"
    files = tuple(RemoteFile(f"{address}/{path.name}", path.name) for path in public.iterdir())
    entry = replace(ENTRIES["SOP"], files=files, gigabytes=0.0, counts={"train": 4, "test": 4})
    monkeypatch.setitem(ENTRIES, "SOP", entry)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.mark.usefixtures("products")
def test_a_download_says_the_terms_and_is_checked(run, listwise):
    out = run("download", "sop", "--to", "sop")
    lines = out.splitlines()
    assert lines[0].startswith("Stanford Online Products: product photos from eBay")
    assert "downloads.json stores the SHA-256 of the downloaded file" in out
    assert "note: SOP: 8 of 8 photos are missing" in out
    assert lines[-2:] == ["SOP is in sop", "next: listwise evaluate MODEL sop"]
    for split in ("train", "test"):
        for i in range(4):
            photo = Path("sop", "bicycle_final", f"{split}{i}.JPG")
            photo.parent.mkdir(exist_ok=True)
            photo.touch()
    Path("sop", "downloads.json").unlink()  # as if it had come in another way
    answer = run("download", "SOP", "--to", "sop", "--json")
    assert answer == {"name": "SOP", "folder": "sop", "problems": []}
    assert not Path("sop", "downloads.json").exists()
    code, _, err = listwise("download", "CUB-200", "--to", "sop")
    assert (code, "contains SOP, not CUB-200" in err) == (2, True)


def test_list_names_every_set(run):
    assert [entry["name"] for entry in run("download", "--list", "--json")] == list(ENTRIES)
    table = run("download", "--list")
    assert all(name in table for name in ("SOP", "In-shop", "by hand"))


def test_a_released_checkpoint_becomes_a_model_with_its_whitening(run, listwise):
    rows = np.random.default_rng(0).normal(size=(90, 16)) * np.linspace(0.3, 2, 16)
    pca = PCA(whiten=True).fit(rows + 0.5)
    torch.manual_seed(0)
    state = torchvision.models.resnet18(weights=None, num_classes=16).state_dict()
    content = {
        "model_options": {"arch": "resnet18_rmac", "out_dim": 16},
        "state_dict": state | {"adpool.p": torch.tensor([2.5])},
        "pca": {"Landmarks_clean": pca},
    }
    torch.save(content, "released.pt")
    out = run("import", "released.pt", "model")
    assert "resnet18, gem, 16 dimensions, whitening Landmarks_clean" in out
    assert RetrievalNet.load("model").pooling.p.item() == 2.5
    assert run("import", "released.pt", "plain", "--whitening", "none", "--json") == {
        "folder": "plain",
        "backbone": "resnet18",
        "pooling": "gem",
        "dim": 16,
        "whitening": None,
        "whitenings": ["Landmarks_clean"],
    }
    assert load_model("plain", "cpu").whitening is None
    run("import", "released.pt", "full", "--whiten-power", 0.5)
    x = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    for name, power in (("model", 0.25), ("full", 0.5)):
        whitening = load_model(name, "cpu").whitening
        assert (whitening.info.method, whitening.info.power) == ("imported", power)
        assert (whitening.info.max_side, whitening.info.scales) == (1024, (1.0,))
        wanted = (x - pca.mean_) @ pca.components_.T / pca.explained_variance_**power
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(whitening.apply(x), wanted, atol=1e-5)
    code, _, err = listwise("import", "released.pt", "new", "--whitening", "other")
    assert (code, "no whitening 'other'" in err) == (2, True)
    assert not Path("new").exists()
