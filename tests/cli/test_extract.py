import json
import os
import shutil
import sys

import numpy as np
import programs
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_images
from listwise.descriptors import DescriptorFile, extract, load_model
from listwise.models import RetrievalNet


@pytest.fixture
def listwise(listwise):
    """Run the command line in a folder with a model; gives exit code, stdout and stderr."""
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save("model")
    return listwise


def test_photos_become_a_file(listwise, photos):
    code, out, err = listwise("extract", "model", photos, "out.parquet", "--workers", 0)
    assert (code, err) == (0, "")
    assert "wrote 48 descriptors of 96 dimensions to out.parquet" in out
    file = DescriptorFile.open("out.parquet")
    file.require(load_model("model", "cpu").fingerprint)
    assert file.ids[0] == "class0/0.jpg"


def test_flags_reach_the_file_and_the_answer_is_json(listwise, photos, tmp_path):
    flags = ("--max-side", 40, "--scales", "1,0.7071", "--power", 2, "--precision", "bfloat16")
    flags += ("--device", "cpu", "--workers", 0)
    code, out, _ = listwise("extract", "model", photos, "out.parquet", *flags, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["descriptors"] == 48
    assert answer["unreadable"] == []
    assert answer["settings"] == {
        "max_side": 40,
        "scales": [1.0, 0.7071],
        "power": 2.0,
        "precision": "bfloat16",
    }
    settings = DescriptorFile.open("out.parquet").settings
    assert settings.model_dump(mode="json") == answer["settings"]


def test_a_table_with_boxes_and_a_broken_photo(listwise, photos, tmp_path):
    shutil.copy(photos / "class0/0.jpg", "a.jpg")
    (tmp_path / "wreck.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "table.csv").write_text('path,box\na.jpg,"5,6,40,50"\nwreck.jpg,\na.jpg,\n')
    code, out, _ = listwise("extract", "model", "table.csv", "out.parquet", "--workers", 0)
    assert code == 0
    assert "skipped 1 photo that cannot be read: " in out
    assert "wreck.jpg" in out
    file = DescriptorFile.open("out.parquet")
    assert file.sizes.tolist() == [[35, 44], [64, 64]]
    assert np.abs(np.diff(file.read(), axis=0)).max() > 1e-3
    code, _, err = listwise("extract", "model", "table.csv", "out.parquet", "--strict")
    assert code == 2
    assert "wreck.jpg" in err


def test_an_interrupted_run_says_how_to_go_on(listwise, photos, monkeypatch):
    module = sys.modules["listwise.descriptors.extract"]
    monkeypatch.setitem(module.PART, "cpu", 20)
    forward, calls = RetrievalNet.forward, []

    def interrupted(self, images):
        calls.append(len(images))
        if sum(calls) > 25:
            raise KeyboardInterrupt
        return forward(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalNet, "forward", interrupted)
        code, _, err = listwise("extract", "model", photos, "out.parquet", "--workers", 0)
    assert code == 130
    assert err == "listwise: stopped; run the same command again to resume\n"
    code, out, _ = listwise("extract", "model", photos, "out.parquet", "--workers", 0)
    assert code == 0
    assert "note: resuming: 20 of 48 photos are already done" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "photos", "out.parquet"), "no model folder nothing"),
        (("model", "nowhere", "out.parquet"), "nowhere: no such file or folder"),
        (("model", "photos", "out.parquet", "--scales", "1;2"), "--scales must be numbers"),
        (("model", "photos", "out.parquet", "--scales", "0"), "above 0"),
        (
            ("model", "photos", "out.parquet", "--precision", "half"),
            "--precision must be 'float32' or 'bfloat16', not 'half'",
        ),
        (("model", "photos", "model"), "is not a descriptor file"),
        (("model", "photos", "milvus://localhost:19530/a"), "is not a file: OUT must be the name"),
        (("model", "photos", "\udcfc.parquet"), r"the path \udcfc.parquet is not UTF-8"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(listwise, photos, tmp_path, arguments, message):
    (tmp_path / "photos").symlink_to(photos)
    code, out, err = listwise("extract", *arguments)
    assert code == 2
    assert err.startswith("listwise: ")
    assert err.count("\n") == 1
    assert message in err
    assert out == ""
    assert not (tmp_path / "milvus:").exists()


def test_a_missing_source_of_photos_needs_no_labels(listwise):
    _, _, err = listwise("extract", "model", "nowhere", "out.parquet")
    assert "give a folder of photos, a photo, a .csv or .parquet table" in err
    assert "label" not in err
    assert "class" not in err


def test_damaged_weights_are_refused(listwise, photos, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    for place in np.random.default_rng(0).integers(len(content) // 2, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 4
        weights.write_bytes(changed)
        code, out, err = listwise("extract", "model", photos, "out.parquet")
        assert (code, out) == (2, "")
        assert err.startswith("listwise: model is damaged or was edited: model.safetensors and")
        assert err.count("\n") == 1
    assert not (tmp_path / "out.parquet").exists()


def test_a_file_name_that_is_not_utf8_is_named_and_left_out(listwise, photos, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    shutil.copy(photos / "class0/0.jpg", folder / "a.jpg")
    try:
        shutil.copy(photos / "class0/1.jpg", os.fsencode(folder) + b"/caf\xe9.jpg")
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    code, out, err = listwise("extract", "model", "photos", "out.parquet", "--workers", 0)
    assert (code, err) == (0, "")
    message = f"{folder}/caf\\udce9.jpg: the path is not UTF-8: rename the file or its folder"
    assert message in out
    file = DescriptorFile.open("out.parquet")
    assert file.ids == ("a.jpg",)
    assert file.header.unreadable == (message,)
    code, out, err = listwise("extract", "model", "photos", "out.parquet", "--strict")
    assert (code, out, err) == (2, "", f"listwise: {message}\n")


@pytest.mark.parametrize("cells", ["a\0.jpg,x", "a.jpg,x\0"])
def test_a_nul_in_a_table_is_one_line(listwise, tmp_path, cells):
    (tmp_path / "table.csv").write_text(f"path,label\nb.jpg,y\n{cells}\n")
    code, out, err = listwise("extract", "model", "table.csv", "out.parquet")
    column = "path" if "\0." in cells else "label"
    assert (code, out) == (2, "")
    assert err == (
        f"listwise: table.csv, line 3: the cell in column {column} contains a NUL character: "
        "remove it\n"
    )


def extract_slowly(photos, line):
    """Extract, and before each next photo wait for a word from the other end of the line."""

    def wait(count):
        line.send("started")
        line.recv()

    model, images = load_model("model", "cpu"), read_images(photos)
    extract(model, images, "out.parquet", workers=0, on_progress=wait)


def test_two_processes_do_not_write_one_file(listwise, photos, tmp_path):
    here, there = programs.PROCESSES.Pipe()
    first = programs.Program(extract_slowly, str(photos), there)
    assert here.poll(60)
    code, out, err = listwise("extract", "model", photos, "out.parquet", "--workers", 0)
    assert (code, out) == (2, "")
    assert err == (
        "listwise: another process is extracting into out.parquet: wait until it ends, or "
        "give another name\n"
    )
    for _ in range(100):
        here.send("go on")
    assert first.wait(60) == 0, first.errors()
    assert len(DescriptorFile.open("out.parquet")) == 48
    # Nothing is left, and the file can be written again.
    assert sorted(os.listdir(tmp_path)) == ["model", "out.parquet"]
    code, _, _ = listwise("extract", "model", photos, "out.parquet", "--workers", 0)
    assert code == 0
    assert sorted(os.listdir(tmp_path)) == ["model", "out.parquet"]


@pytest.mark.slow
def test_processes_share_the_photos(listwise, photos, tmp_path):
    RetrievalNet("test_resnet", weights="random").save("known")  # other processes know timm's alone
    command = ("extract", "known", photos, "out.parquet", "--workers", 0)
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun sets them
    processes = [
        programs.listwise(
            *command, env={**os.environ, **both, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    for process in processes:
        assert process.wait(60) == 0, process.errors()
    listwise("extract", "known", photos, "whole.parquet", "--workers", 0)
    whole = DescriptorFile.open("whole.parquet")
    shares = [DescriptorFile.open(f"out-0000{i}-of-00002.parquet") for i in (1, 2)]
    assert shares[0].ids + shares[1].ids == whole.ids
    assert [len(share) for share in shares] == [24, 24]
    rows = np.concatenate([share.read() for share in shares])
    assert np.abs(rows - whole.read()).max() < 1e-6
