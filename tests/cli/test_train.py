import json
import shutil

import pytest
import yaml
from tiny_net import TINY_NET

from listwise.settings import NESTED, TrainConfig

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


def small(**change):
    """The flags of a quick run; names with underscores, None to leave one out."""
    flags = SMALL | {f"--{name.replace('_', '-')}": value for name, value in change.items()}
    return [part for flag, value in flags.items() if value is not None for part in (flag, value)]


@pytest.fixture
def fails(listwise):
    """Run a command that must fail by its user's fault; gives the one line it says."""

    def run(*arguments):
        code, out, err = listwise(*arguments)
        assert code == 2, err
        assert err.startswith("listwise: ")
        assert err.count("\n") == 1, err
        assert "Traceback" not in out + err
        return err

    return run


def test_a_run_prints_settings_with_reasons_progress_and_result(listwise, photos):
    code, out, err = listwise("train", photos, *small())
    assert code == 0
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "training on 30 photos of 5 classes, validating on 18 photos of 3 classes"
    assert any("--learning-rate" in line and "1e-4 for batches" in line for line in lines)
    assert not any("--batch-size" in line for line in lines)  # it was given
    assert sum("validation mAP" in line for line in lines) == 4  # three, and the result
    assert lines[-1] == "the model is in runs/photos/model"


def test_the_result_as_json_is_all_that_goes_to_stdout(listwise, photos):
    code, out, err = listwise("train", photos, *small(), "--json", "--run-folder", "there")
    assert code == 0
    result = json.loads(out)
    assert result["model"] == "there/model"
    assert result["updates"] == 2
    assert 0 <= result["first_map"] <= result["best_map"] <= 1
    assert "Chosen settings" in err


def test_a_rival_loss_is_one_flag(listwise, photos, tmp_path):
    flags = small(loss="triplet", triplet_tuples="5")
    code, out, err = listwise("train", photos, *flags, "--json")
    assert code == 0, err
    assert json.loads(out)["counts"] == {"forwards": 60, "backwards": 30, "updates": 2}
    used = yaml.safe_load((tmp_path / "runs/photos/config.yaml").read_text())
    assert used["loss"] == "triplet"
    assert (used["triplet"]["tuples"], used["triplet"]["pool"]) == (5, 5000)


def test_flags_override_the_file_and_the_file_the_choices(listwise, photos, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("seed: 5\nbins: 10\npatience: 3\ncrops:\n  size: 64\n  flip: 0.5\n")
    flags = small(bins="12", patience="none")
    assert listwise("train", photos, *flags, "--config", config, "--no-class-weights")[0] == 0
    used = yaml.safe_load((tmp_path / "runs/photos/config.yaml").read_text())
    assert (used["seed"], used["bins"], used["patience"]) == (5, 12, None)
    assert used["class_weights"] is False
    assert used["crops"]["size"] == 32
    assert used["crops"]["flip"] == 0.5
    assert used["val_max_side"] == 64


def test_the_paper_preset_takes_the_other_settings_from_the_paper(listwise, photos, tmp_path):
    flags = small(batch_size=None, val_fraction=None)
    code, out, _ = listwise("train", photos, *flags, "--preset", "paper")
    assert code == 0
    assert out.startswith("note: --batch-size 4096 exceeds the number of training photos")
    assert "Chosen settings" not in out
    used = TrainConfig(**yaml.safe_load((tmp_path / "runs/photos/config.yaml").read_text()))
    assert used.learning_rate == 1e-4
    assert used.patience is None


def test_every_setting_has_a_flag(listwise):
    code, out, _ = listwise("train", "--help")
    assert code == 0
    names = [name for name in TrainConfig.model_fields if name not in NESTED]
    names += [f"{group}_{name}" for group, model in NESTED.items() for name in model.model_fields]
    for name in names:
        assert f"--{name.replace('_', '-')} " in out


def test_resume_goes_on(listwise, photos):
    code, _, _ = listwise("train", photos, *small(), "--run-folder", "r")
    assert code == 0
    code, out, _ = listwise("train", "--resume", "r")
    assert code == 0
    assert out.splitlines()[-1] == "the model is in r/model"


def test_resume_removes_damaged_lines_of_the_metrics(listwise, photos, tmp_path):
    assert listwise("train", photos, *small(updates="4"), "--run-folder", "r")[0] == 0
    file = tmp_path / "r" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    file.write_bytes(b"".join([*lines[:2], b"\0" * len(lines[2]), *lines[3:]]))
    code, out, err = listwise("train", "--resume", "r")
    assert (code, err) == (0, "")
    # Without the end of line 3, it is one line with the next.
    assert "note: removed damaged lines of metrics.jsonl: 3" in out
    assert out.splitlines()[-1] == "the model is in r/model"
    assert file.read_bytes() == b"".join([*lines[:2], lines[4]])


def test_resume_takes_nothing_else(fails, photos):
    for extra in (["photos"], ["--seed", 1], ["--run-folder", "x"], ["--preset", "paper"]):
        assert "leave out all other options" in fails("train", "--resume", "r", *extra)


def test_no_run_to_resume(fails, tmp_path):
    assert "is not a training run" in fails("train", "--resume", tmp_path)
    assert "is not a training run" in fails("train", "--resume", tmp_path / "nowhere")


def test_a_used_run_folder_is_refused_before_any_work(fails, tmp_path):
    (tmp_path / "runs" / "nowhere").mkdir(parents=True)
    (tmp_path / "runs" / "nowhere" / "run.json").write_text("{}")
    line = fails("train", "nowhere")
    assert "runs/nowhere contains a run already" in line
    assert "--resume runs/nowhere" in line


def test_data_that_is_not_there_or_not_labelled(fails, photos, tmp_path):
    assert "give the photos to train on" in fails("train")
    assert "no such file or folder" in fails("train", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no photo in this folder" in fails("train", "empty")
    shutil.copytree(photos / "class0", tmp_path / "bare")
    assert "put the photos of each class into a folder" in fails("train", "bare")
    shutil.copytree(photos / "class0", tmp_path / "one" / "class0")
    assert "classes" in fails("train", "one", *small())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"backbone": "resnet10x"}, "resnet10x"),
        ({"pooling": "gum"}, "gum"),
        ({"weights": "no.safetensors"}, "no weights file"),
        ({"batch_size": "0"}, "--batch-size must be greater than or equal to 2, not 0"),
        ({"batch_size": "many"}, "--batch-size"),
        ({"micro_batch": "0"}, "--micro-batch must be greater than or equal to 1 or 'auto', not"),
        ({"patience": "never"}, "--patience must be a valid integer, not 'never'"),
        ({"loss": "hinge"}, "choose one of ap, tie-aware, triplet"),
        ({"triplet_form": "hinge"}, "--triplet-form must be 'margin' or 'log-exp', not 'hinge'"),
        ({"device": "tpu"}, "tpu"),
        ({"seed": "99999999999999999999"}, "--seed must be less than or equal to 4294967295, not"),
        ({"crops_size": "100000"}, "--crops-size must be less than or equal to 8192, not 100000"),
        ({"crops_min_area": "0"}, "--crops-min-area must be greater than 0, not 0.0"),
        ({"preset": "best"}, "auto or paper"),
        ({"config": "none.yaml"}, "cannot read the config file"),
        ({"color": "red"}, "--color"),
    ],
)
def test_a_bad_setting_is_one_line(fails, photos, flags, said, tmp_path):
    assert said in fails("train", photos, *small(**flags))
    assert not (tmp_path / "runs").exists()


def test_weights_that_need_a_network_which_is_not_there(fails, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = fails("train", photos, *small(backbone="resnet18", weights="pretrained"))
    assert "resnet18" in line
    assert not (tmp_path / "runs").exists()


def test_a_broken_config_file_is_one_line(fails, photos, tmp_path):
    (tmp_path / "bad.yaml").write_text("seed: [1\nbins")
    assert "is not YAML" in fails("train", photos, "--config", "bad.yaml")
    (tmp_path / "bad.yaml").write_text("batchsize: 3")
    line = fails("train", photos, "--config", "bad.yaml")
    assert "bad.yaml: unknown setting 'batchsize'; the settings are" in line


def test_broken_photos_are_named_and_strict_stops_at_one(listwise, fails, photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "data")
    (data / "class1" / "header.jpg").write_bytes(b"no photo")
    for kind in range(8):
        cut = data / f"class{kind}" / "0.jpg"
        cut.write_bytes(cut.read_bytes()[:-600])
    code, out, err = listwise("train", data, *small(batch_size="30"))
    assert code == 0
    assert err == ""
    assert f"note: skipped 1 photo that cannot be used: {data / 'class1' / 'header.jpg'}" in out
    named = [line for line in out.splitlines() if "0.jpg" in line]
    assert 3 < len(named) <= 8
    assert len(set(named)) == len(named)
    assert "header.jpg" in fails("train", data, *small(), "--strict", "--run-folder", "s")


def test_commands_and_options_that_do_not_exist(fails):
    assert "No such command 'trian'" in fails("trian")
    assert "see listwise train --help" in fails("train", "--sed", "1")


def test_without_a_command_there_is_help(listwise):
    code, out, _ = listwise()
    assert code == 0
    assert "Usage: listwise" in out
    assert "train" in out
