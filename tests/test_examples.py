"""Every script of examples/ runs as a process, and its output shows that it did its work."""

import pickle
import re
from pathlib import Path

import numpy as np
import programs
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script, *arguments, folder):
    """The standard output of an example that runs in a folder of its own."""
    process = programs.script(EXAMPLES / script, *arguments, cwd=folder)
    out, err = process.communicate(600)
    assert process.returncode == 0, err
    return out


def numbers(text, pattern):
    return [float(found) for found in re.findall(pattern, text)]


def test_train_and_search(tmp_path):
    out = run("train_and_search.py", folder=tmp_path)
    assert len(numbers(out, r"([\d.]+) (?:before training|after)")) == 2
    assert (tmp_path / "example-run" / "run" / "model" / "model.safetensors").is_file()
    query = re.search(r"most similar to (\S+):", out)[1]
    hits = re.findall(r"^  (\d\.\d+) (\S+)$", out, re.MULTILINE)
    assert len(hits) == 3
    assert hits[0][1].endswith(query)  # a photo finds itself first
    assert float(hits[0][0]) > 0.99


def test_learn_from_marks(tmp_path):
    small = ("--buildings", 14, "--views", 6, "--max-side", 64)
    out = run("learn_from_marks.py", *small, folder=tmp_path)
    (marks,) = numbers(out, r"(\d+) marks of")
    assert marks >= 50
    old, new = numbers(out, r"held-out classes: mAP ([\d.]+) -> [\d.]+") + numbers(
        out, r"held-out classes: mAP [\d.]+ -> ([\d.]+)"
    )
    assert (new > old) == ("the new model is better" in out)
    assert out.count("unclear: ") == 3
    assert ("results that stay" in out) == ("the new model is better" in out)


def test_clean_labels(tmp_path):
    out = run("clean_labels.py", folder=tmp_path)
    kept, photos, classes = re.search(r"kept (\d+) of (\d+) photos in (\d+) classes", out).groups()
    assert (photos, classes) == ("24", "3")
    assert 15 <= int(kept) <= 21
    assert "wrong labels: 3, still there: 0" in out
    assert "without labels: 3 classes" in out
    assert (tmp_path / "example-labels" / "labels.html").is_file()


def test_pytorch_loop(tmp_path):
    out = run("pytorch_loop.py", folder=tmp_path)
    before, after = numbers(out, r"mAP \w+ training: ([\d.]+)")
    first, second = numbers(out, r"loss after .*: ([\d.]+)")
    assert after > before
    assert second < first


def test_lightning_module(tmp_path):
    out = run("lightning_module.py", folder=tmp_path)
    one, two = re.findall(r"mAP ([\d.]+) before, ([\d.]+) after", out)
    assert float(one[1]) > float(one[0])
    assert one[0] == two[0]
    assert float(two[1]) == pytest.approx(float(one[1]), abs=0.02)  # the same gradient


def test_metric_learning(tmp_path):
    out = run("metric_learning.py", folder=tmp_path)
    before, ours, theirs = numbers(out, r"mAP@R .*: ([\d.]+)")
    assert before < ours < theirs


def test_evaluate_descriptors(tmp_path):
    out = run("evaluate_descriptors.py", folder=tmp_path)
    easy, medium, hard = numbers(out, r"(?:Easy|Medium|Hard) +mAP ([\d.]+)")
    assert easy > medium > hard
    assert "'Recall@1'" in out


def test_evaluate_descriptors_from_files(tmp_path):
    names = [f"photo{i}" for i in range(20)]
    truth = {"bbx": [0, 0, 9, 9], "easy": [0, 1], "hard": [2], "junk": [3]}
    content = {"imlist": names, "qimlist": ["query"], "gnd": [truth]}
    (tmp_path / "gnd.pkl").write_bytes(pickle.dumps(content))
    rows = np.eye(20, dtype=np.float32)
    np.save(tmp_path / "database.npy", rows)
    np.save(tmp_path / "queries.npy", rows[:1] + rows[1:2] + 0.5 * rows[2:3])
    files = ("--ground-truth", "gnd.pkl", "--queries", "queries.npy", "--database", "database.npy")
    out = run("evaluate_descriptors.py", *files, folder=tmp_path)
    assert numbers(out, r"(?:Easy|Medium|Hard) +mAP ([\d.]+)") == [100.0, 100.0, 100.0]


def test_serve_and_query(tmp_path, photos):
    out = run("serve_and_query.py", photos, folder=tmp_path)
    assert "entries: 47" in out  # all photos but the one that is added over HTTP
    hits = re.findall(r"^  (\d\.\d+) (\S+)$", out, re.MULTILINE)
    assert len(hits) == 3
    assert float(hits[0][0]) > 0.99
