"""Training from an index: better models, models that are not, and their comparison."""

import itertools
import json
from pathlib import Path

import numpy as np
import programs
import pytest
from feedback_examples import QUICK, mark_truly
from tiny_net import TINY_NET

import listwise as lw
from listwise import training
from listwise.descriptors import Model, Whitening, load_model
from listwise.descriptors.learning import remove_whitening
from listwise.errors import InputError
from listwise.feedback import comparison, resume_from_index, retrain
from listwise.feedback.comparison import read_comparison
from listwise.feedback.photos import LAYER_FILE, read_index_run, read_tensor
from listwise.feedback.retrain import whiten_again
from listwise.feedback.trainers import with_layer
from listwise.models import RetrievalNet
from listwise.training.run import is_index_run


@pytest.fixture(scope="module")
def trained(marked_folder, model, tmp_path_factory):
    """An index, and a layer that was trained from it; leave both as they are."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with lw.open_index(marked_folder, model) as index:
        yield index, lw.train(run_folder=folder, from_index=index, adapter=True, **QUICK)


def test_a_layer_follows_the_descriptors_of_the_index(trained):
    marked, run = trained
    found = run.comparison
    assert found.better
    assert found.new_map > found.old_map
    assert (run.result.first_map, run.result.best_map) == pytest.approx(
        (found.old_map, found.new_map)
    )
    assert run.model.whitening.info.method == "adapter"
    assert run.model.net.fingerprint() == marked.model.net.fingerprint()
    assert len(found.queries) == 8
    entries = list(marked)
    layer = read_tensor(run.folder, LAYER_FILE, "layer")
    expected = marked.store.vectors([entry.key for entry in entries]) @ layer.T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    described = run.model.encode([entry.path for entry in entries])
    assert np.abs(described - expected).max() < 1e-4
    # The next layer follows both.
    twice = with_layer(run.model, layer, 3)
    again = expected @ layer.T
    again /= np.linalg.norm(again, axis=1, keepdims=True)
    assert np.abs(twice.encode([entry.path for entry in entries]) - again).max() < 1e-3


def test_a_worse_model_is_not_kept(marked, tmp_path):
    settings = QUICK | {"learning_rate": 1e4}
    run = lw.train(run_folder=tmp_path / "run", from_index=marked, adapter=True, **settings)
    assert not run.comparison.better
    assert run.model.fingerprint == marked.model.fingerprint
    assert not list((tmp_path / "run").glob("*-model"))
    # Killed between the two renames, a run that is resumed puts the old model into its place.
    (tmp_path / "run" / "model").rename(tmp_path / "run" / "old-model")
    with pytest.raises(InputError, match="resume it with listwise"):
        training.resume(tmp_path / "run")
    resume_from_index(tmp_path / "run")
    assert marked.upgrade(run.model).described == 0


def test_a_model_that_is_worse_on_marked_queries_is_not_kept(trained, monkeypatch):
    marked, run = trained
    worse = [
        each.model_copy(update={"new_ap": 0.0, "old_ap": 0.5}) for each in run.comparison.queries
    ]
    monkeypatch.setattr(comparison, "_compare_queries", lambda *_: worse)
    record, images = read_index_run(run.folder)
    found = comparison.compare_models(record, marked.model, run.model, images, run.folder)
    assert found.new_map > found.old_map
    assert not found.better


def test_a_trained_network_gets_a_new_whitening(marked, tmp_path):
    whitened, run = tmp_path / "whitened", tmp_path / "run"
    rows = marked.store.vectors([entry.key for entry in marked])
    Model(marked.model.net, Whitening.learn([rows], 20, 0.5, 0.1)).save(whitened)
    marked.upgrade(whitened, workers=0)
    small = {"updates": 1, "batch_size": 16, "crops": {"size": 32}}
    done = lw.train(run_folder=run, from_index=marked, **QUICK, **small)
    assert len(read_index_run(run)[0].whitening) == 48  # a resumed run does not need the index
    settings = (run / "config.yaml").read_text()
    assert "backbone: test_resnet.r160_in1k" in settings
    assert "adapter: false" in settings
    assert done.model.dim == 20
    same = done.model.fingerprint == marked.model.fingerprint
    assert same != done.comparison.better
    trained = tmp_path / "trained"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(trained)
    whiten_again(trained, marked.model, read_index_run(run)[0])
    info = load_model(trained).whitening.info
    assert (info.method, info.power, info.learned_from) == ("pca", 0.5, 48)
    assert info.shrinkage == pytest.approx(0.1)
    # Too few photos for the dimensions of the old whitening without shrinkage.
    record = read_index_run(run)[0]
    few = record.model_copy(update={"whitening": record.whitening[:9]})
    whiten_again(trained, marked.model, few)
    assert load_model(trained).dim == 20


@pytest.mark.parametrize(("adapter", "side"), [(False, 48), (True, 0)])
def test_the_size_of_the_index_is_kept(photos, tmp_path, monkeypatch, adapter, side):
    monkeypatch.setattr(retrain, "_keep_better", lambda *_: None)
    run, small = tmp_path / "run", {"updates": 1, "batch_size": 16, "crops": {"size": 32}}
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    with lw.open_index(tmp_path / "index", tmp_path / "model", max_side=side) as index:
        index.add(photos, workers=0)
        mark_truly(index, [f"class{kind}/0.jpg" for kind in range(8)])
        lw.train(run_folder=run, from_index=index, adapter=adapter, **QUICK, **small)
    assert f"val_max_side: {side or 'null'}\n" in (run / "config.yaml").read_text()
    assert json.loads((run / "run.json").read_text())["max_side"] == side
    assert load_model(run / "model").tuned.max_side == side


def test_a_whitening_that_replaces_a_trained_layer_has_a_note(model, tmp_path):
    layered = with_layer(model, np.eye(model.dim, dtype=np.float32), 3)
    layered.save(tmp_path / "model")
    rows = np.random.default_rng(0).normal(size=(40, model.net.dim)).astype(np.float32)
    notes: list[str] = []
    remove_whitening(tmp_path / "model", notes.append)
    assert "a linear layer that was trained from an index, which is removed too" in notes[0]
    Model(model.net, Whitening.learn([rows], 4)).save(tmp_path / "model")
    remove_whitening(tmp_path / "model", notes.append)
    assert len(notes) == 1


def test_files_of_an_attempt_that_did_not_start_do_not_matter(tmp_path):
    about = {"data": str(tmp_path / "photos")}
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "labels.csv").write_text("path,label\n")
    assert not is_index_run(tmp_path, about)
    assert is_index_run(tmp_path, {"data": str(tmp_path / "labels.csv")})


def test_marks_between_training_and_validation_are_counted(marked, tmp_path):
    ids = [f"class{kind}/0.jpg" for kind in range(8)]
    for one, other in itertools.pairwise(ids):  # all classes are connected
        marked.marks.add(one, different=[other])
    notes: list[str] = []
    settings = QUICK | {"updates": 1}
    lw.train(
        run_folder=tmp_path / "run",
        from_index=marked,
        adapter=True,
        on_plan=lambda plan: notes.extend(plan.notes),
        **settings,
    )
    assert any("are between a training photo and a validation photo" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "resnet18"}, "leave out `backbone`"),
        ({"teacher": "resnet18"}, "leave out `teacher`"),
        ({"photos": "photos"}, "give one of `photos`, `from_index` and `resume`"),
    ],
)
def test_settings_of_the_model_are_refused(marked, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        lw.train(run_folder=tmp_path / "run", from_index=marked, **settings)
    assert not (tmp_path / "run").exists()


def test_mark_export_train_upgrade_and_roll_back(listwise, folder, model_folder, tmp_path):
    """All commands of the tutorial, on a real index."""
    with lw.open_index(folder) as index:
        mark_truly(index, [f"class{kind}/0.jpg" for kind in range(8)])
    code, _, err = listwise("index", "marks", folder, "--export", "labels.csv")
    assert code == 0, err
    assert Path("labels.csv").read_text().startswith("path,label")
    flags = ("--device", "cpu", "--workers", 0, "--learning-rate", 3e-3)
    train = ("train", "--from-index", folder, "--run-folder", "run", "--adapter", *flags)
    code, out, err = listwise(*train)
    assert code == 0, err
    assert "held-out classes" in out
    assert f"the new model is better: listwise index upgrade {folder} --model run/model" in out
    page = Path("run/comparison.html").read_text()
    assert page.count('class="compared"') == 8
    assert read_comparison(Path("run")).better
    code, _, err = listwise(*train)
    assert code == 2
    assert "run contains a run already" in err
    # A finished run that is resumed shows the same comparison.
    code, again, err = listwise("train", "--resume", "run")
    assert code == 0, err
    assert again.splitlines()[-1] == out.splitlines()[-1]
    code, out, err = listwise("index", "upgrade", folder, "--model", "run/model", "--workers", 0)
    assert code == 0, err
    assert listwise("index", "changes", folder)[0] == 0
    with lw.open_index(folder) as index:
        assert index.header.model_folder == str(tmp_path / "run" / "model")
        assert len(index.marks.read()) > 20
    assert listwise("index", "rollback", folder)[0] == 0
    with lw.open_index(folder) as index:
        assert index.header.model_folder == str(model_folder)


def test_a_killed_training_is_resumed_without_the_index(marked, tmp_path):
    marked.close()
    name = Path(marked.uri)
    settings = "--adapter --device cpu --workers 0 --learning-rate 3e-3 --checkpoint-every 1"
    arguments = ["train", "--from-index", name, *settings.split(), "--run-folder"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = programs.listwise(*arguments, whole)
    assert process.wait(120) == 0, process.errors()
    # A checkpoint that waits is replaced by the next one, but the first and the last are written.
    dying = programs.Program(
        programs.run_and_die, "*checkpoint*", 2, *map(str, arguments), str(killed)
    )
    assert dying.wait(120) == -9, dying.errors()
    assert not (killed / "comparison.json").exists()
    name.rename(tmp_path / "away")
    process = programs.listwise("train", "--resume", killed)
    assert process.wait(120) == 0, process.errors()
    found, expected = (read_comparison(run) for run in (killed, whole))
    assert found == expected
    one, other = (load_model(run / "model").fingerprint for run in (killed, whole))
    assert one == other
