import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import typer
from sklearn.decomposition import PCA
from typer.testing import CliRunner

from listwise.cli.import_model import EXAMPLES, import_model
from listwise.descriptors import Whitening, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet

app = typer.Typer(rich_markup_mode="rich")
app.command("import", epilog=EXAMPLES)(import_model)


def run(*arguments: object):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def pca() -> PCA:
    rows = np.random.default_rng(0).normal(size=(90, 16)) * np.linspace(0.3, 2, 16)
    return PCA(whiten=True).fit(rows + 0.5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, pca: PCA) -> Path:
    torch.manual_seed(0)
    state = torchvision.models.resnet18(weights=None, num_classes=16).state_dict()
    content = {
        "model_options": {"arch": "resnet18_rmac", "out_dim": 16},
        "state_dict": state | {"adpool.p": torch.tensor([2.5])},
        "pca": {"Landmarks_clean": pca},
    }
    path = tmp_path_factory.mktemp("released") / "Resnet-18-AP-GeM.pt"
    torch.save(content, path)
    return path


def test_makes_a_model_folder_with_its_whitening(
    checkpoint: Path, pca: PCA, tmp_path: Path
) -> None:
    result = run(checkpoint, tmp_path / "model")
    assert "resnet18, gem, 16 dimensions, whitening Landmarks_clean" in result.output
    net = RetrievalNet.load(tmp_path / "model")
    assert net.pooling.p.item() == 2.5
    whitening = Whitening.load(tmp_path / "model", net.fingerprint())
    assert whitening is not None
    assert whitening.info.method == "imported"
    assert whitening.info.power == 0.25
    model = load_model(tmp_path / "model", "cpu")
    x = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    wanted = (x - pca.mean_) @ pca.components_.T / pca.explained_variance_**0.25
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(model.whitening.apply(x), wanted, atol=1e-5)


def test_whitening_can_be_chosen_or_left_out(checkpoint: Path, pca: PCA, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path / "a", "--whitening", "none", "--json")
    assert json.loads(result.stdout) == {
        "folder": str(tmp_path / "a"),
        "backbone": "resnet18",
        "pooling": "gem",
        "dim": 16,
        "whitening": None,
        "whitenings": ["Landmarks_clean"],
    }
    assert not (tmp_path / "a" / "whitening.safetensors").exists()
    run(checkpoint, tmp_path / "b", "--whitening", "Landmarks_clean", "--whiten-power", 0.5)
    model = load_model(tmp_path / "b", "cpu")
    x = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    wanted = pca.transform(x)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(model.whitening.apply(x), wanted, atol=1e-5)


def test_mistakes_are_a_line_and_leave_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no whitening 'other'"):
        run(checkpoint, tmp_path / "model", "--whitening", "other")
    with pytest.raises(InputError, match="cannot be read"):
        run(tmp_path / "none.pt", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    with pytest.raises(InputError, match="exists already: give a new folder"):
        run(checkpoint, tmp_path / "taken")
