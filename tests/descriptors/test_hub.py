"""Models on the Hugging Face Hub, with a local server in its place; model cards."""

import json

import numpy as np
import pytest
from hub_server import HubServer

import listwise
from listwise.calibration import Calibration
from listwise.descriptors import Model, Whitening
from listwise.errors import InputError
from listwise.models import RetrievalNet

NAME = "museum/paintings"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server, in whose name this process is logged in."""
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """A model in the folder of its training run."""
    run = tmp_path_factory.mktemp("runs") / "art"
    net = RetrievalNet("test_resnet", weights="random").eval()
    settings = {"loss": "ap", "crops": {"size": 32}, "weights": "/home/ann/secret/w.safetensors"}
    net.config.provenance["training"] = {
        "data": "/home/ann/secret/art photos",
        "settings": settings,
        "update": 20,
        "validation_map": 0.753,
        "listwise": "0.1.0",
    }
    random = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)
    model = Model(net, Whitening.learn([random], dim=8))
    known = {"photos": 9, "pairs": 20, "positives": 5, "source": "photos of /home/ann/secret/val"}
    fitted = Calibration(slope=9.0, intercept=-5.0, **known)
    model = Model(net, model.whitening, calibration=fitted)
    model.save(run / "model")
    rows = [{"update": n, "loss": 1 / (n + 1), "validation_map": n / 40} for n in range(31)]
    rows.insert(3, {"update": 2.5, "loss": 0.5})
    text = "\n".join(map(json.dumps, rows))
    (run / "metrics.jsonl").write_text(text + '\n{"update": 31, "lo')
    return listwise.load(run)


def test_a_model_goes_to_the_hub_and_back(hub, model):
    url = model.push_to_hub(NAME, license="apache-2.0", token=hub.token)
    assert url == f"{hub.url}/{NAME}"
    files = hub.repositories[NAME]
    assert set(files) == {"model.safetensors", "README.md"}
    assert not [name for name, content in files.items() if b"/home/ann" in content]
    assert b"art photos" in files["model.safetensors"]
    files["payload.pkl"] = b"\x80\x04."  # what others may have added is not downloaded
    loaded = listwise.load(f"hub:{NAME}")
    assert [path.name for path in loaded.folder.iterdir()] == ["model.safetensors"]
    assert loaded.fingerprint == model.fingerprint
    assert loaded.calibration.probability(0.5) == model.calibration.probability(0.5)
    assert not any("payload" in request for request in hub.requests)
    assert model.folder.parent.name == "art"  # as before


def test_the_card(model):
    card = model.card(NAME, license="mit", results={"Labels": {"mAP": 0.8712, "mP@1": 0.9}})
    assert card.startswith('---\nlicense: "mit"\nlibrary_name: listwise\n')
    for text in (
        "# paintings\n",
        'listwise.load("hub:museum/paintings")',
        "| backbone | test_resnet |",
        "| whitening | pca, from 40 descriptors |",
        "| dimensions | 8 |",
        "| data | art photos |",
        "| validation mAP | 75.3 |",
        "crops.size: 32",
        "weights: w.safetensors",
        "| update | loss | validation mAP |",
        "| 0 | 1.0000 | 0.0 |",
        "| 30 | 0.0323 | 75.0 |",
        "| Labels | 87.1 | 90.0 |",
        "## License\n\nmit",
    ):
        assert text in card, text
    assert "/home" not in card
    curve = card.split("| update |")[1].split("\n\n")[0]
    assert 10 <= len(curve.splitlines()) <= 15


def test_a_card_of_a_backbone_without_training():
    card = Model(RetrievalNet("test_resnet", weights="random"), name="test_resnet").card()
    assert card.startswith('---\nlicense: "unknown"\n')
    assert "# test_resnet" in card
    assert "Training" not in card


def test_what_the_hub_does_not_have(hub, model):
    with pytest.raises(InputError, match=r"no model nobody/nothing at http.*give owner/name"):
        listwise.load("hub:nobody/nothing")
    with pytest.raises(InputError, match=r"or it is private .*: give owner/name"):
        listwise.load("hub:a/b/c")
    hub.repositories["other/thing"] = {"weights.bin": b"0"}
    with pytest.raises(InputError, match=r"other/thing at .* is not a model of Listwise"):
        listwise.load("hub:other/thing")
    with pytest.raises(InputError, match=r"no access to museum/paintings at .*: log in with"):
        model.push_to_hub(NAME, token="hf_wrong")


def test_without_a_connection(hub, model, monkeypatch):
    model.push_to_hub(NAME, token=hub.token)
    listwise.load(f"hub:{NAME}")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a port without a server
    assert listwise.load(f"hub:{NAME}").fingerprint == model.fingerprint  # the earlier download
    with pytest.raises(InputError, match="cannot use other/thing at http") as error:
        listwise.load("hub:other/thing")
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="cannot use museum/paintings at http"):
        model.push_to_hub(NAME, token=hub.token)
