"""`listwise train` on a few photos; tests/training has what it does with them."""

import pytest
import yaml
from tiny_net import TINY_NET

from listwise.settings import TrainConfig

SMALL = {
    "--backbone": TINY_NET,
    "--weights": "random",
    "--val-fraction": "0.4",
    "--batch-size": "12",
    "--crops-size": "32",
    "--updates": "2",
    "--device": "cpu",
    "--workers": "0",
}


@pytest.fixture
def train(run, photos):
    """Train on photos, with options that override those of a quick run; None leaves one out."""

    def call(*others, **options):
        flags = SMALL | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        given = [part for flag in flags.items() if flag[1] is not None for part in flag]
        return run("train", photos, *given, *others)

    return call


def used(tmp_path):
    return yaml.safe_load((tmp_path / "runs/photos/config.yaml").read_text())


def test_a_run_prints_settings_with_reasons_progress_and_result(train):
    lines = train().splitlines()
    assert lines[0] == "training on 30 photos of 5 classes, validating on 18 photos of 3 classes"
    assert any("--learning-rate" in line and "1e-4 for batches" in line for line in lines)
    assert not any("--batch-size" in line for line in lines)  # it was given
    assert sum("validation mAP" in line for line in lines) == 4  # three, and the result
    assert lines[-2] == "the model is in runs/photos/model"
    assert lines[-1] == "next: listwise index build INDEX PHOTOS --model runs/photos/model"


def test_flags_override_the_file_and_the_file_the_choices(train, tmp_path):
    (tmp_path / "my.yaml").write_text(
        "seed: 5\nbins: 10\npatience: 3\nloss: triplet\ncrops:\n  size: 64\n  flip: 0.5\n"
    )
    flags = {"bins": "12", "patience": "none", "triplet_tuples": "5", "config": "my.yaml"}
    answer = train("--no-class-weights", "--json", **flags)
    assert answer["counts"] == {"forwards": 60, "backwards": 30, "updates": 2}
    config = TrainConfig(**used(tmp_path))
    assert (config.seed, config.bins, config.patience, config.loss) == (5, 12, None, "triplet")
    assert (config.triplet.tuples, config.triplet.pool) == (5, 5000)
    assert config.class_weights is False
    assert (config.crops.size, config.crops.flip, config.val_max_side) == (32, 0.5, 64)


def test_the_paper_preset_takes_the_other_settings_from_the_paper(train, tmp_path):
    out = train("--preset", "paper", batch_size=None, val_fraction=None)
    assert out.startswith("note: --batch-size 4096 exceeds the number of training photos")
    assert "Chosen settings" not in out
    assert (used(tmp_path)["learning_rate"], used(tmp_path)["patience"]) == (1e-4, None)


def test_resume_removes_damaged_lines_of_the_metrics(train, run, tmp_path):
    train("--run-folder", "r", updates="4")
    file = tmp_path / "r" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    file.write_bytes(b"".join([*lines[:2], b"\0" * len(lines[2]), *lines[3:]]))
    out = run("train", "--resume", "r")
    # Without the end of line 3, it is one line with the next.
    assert "note: removed damaged lines of metrics.jsonl: 3" in out
    assert out.splitlines()[-2] == "the model is in r/model"
    assert file.read_bytes() == b"".join([*lines[:2], lines[4]])


def test_weights_that_need_a_network_which_is_not_there(listwise, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    code, _, err = listwise("train", photos, "--backbone", "resnet18", "--crops-size", "32")
    assert (code, err.count("\n")) == (2, 1)
    assert "resnet18" in err
    assert not (tmp_path / "runs").exists()
