"""`listwise extract`, also interrupted and in several processes."""

import os
import shutil

import numpy as np
import programs
import pytest
import tiny_net  # noqa: F401  # registers the network in every process

from listwise.data import read_images
from listwise.descriptors import DescriptorFile, extract, load_model
from listwise.models import RetrievalNet

QUICK = ("out.parquet", "--workers", 0, "--device", "cpu")


def test_flags_reach_the_file_and_the_answer_is_json(run, model, photos):
    out = run("extract", model, photos, *QUICK)
    assert "wrote 48 descriptors of 96 dimensions to out.parquet" in out
    file = DescriptorFile.open("out.parquet")
    file.require(load_model(model, "cpu").fingerprint)
    assert file.ids[0] == "class0/0.jpg"
    flags = ("--max-side", 40, "--scales", "1,0.7071", "--power", 2, "--precision", "bfloat16")
    answer = run("extract", model, photos, *QUICK, *flags, "--json")
    assert (answer["descriptors"], answer["unreadable"]) == (48, [])
    settings = {"max_side": 40, "scales": [1.0, 0.7071], "power": 2.0, "precision": "bfloat16"}
    assert answer["settings"] == settings
    assert DescriptorFile.open("out.parquet").settings.model_dump(mode="json") == settings


def test_photos_that_cannot_be_read_are_named_and_left_out(run, listwise, model, photos, tmp_path):
    shutil.copy(photos / "class0/0.jpg", "a.jpg")
    (tmp_path / "wreck.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "table.csv").write_text('path,box\na.jpg,"5,6,40,50"\nwreck.jpg,\na.jpg,\n')
    out = run("extract", model, "table.csv", *QUICK)
    assert "skipped 1 photo that cannot be read: " in out
    assert "wreck.jpg" in out
    assert DescriptorFile.open("out.parquet").sizes.tolist() == [[35, 44], [64, 64]]
    code, out, err = listwise("extract", model, "table.csv", *QUICK, "--strict")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "wreck.jpg" in err
    (tmp_path / "names").mkdir()
    shutil.copy("a.jpg", "names")
    try:
        shutil.copy("a.jpg", os.fsencode(tmp_path) + b"/names/caf\xe9.jpg")
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    message = (
        f"{tmp_path}/names/caf\\udce9.jpg: the path is not UTF-8: rename the file or its folder"
    )
    assert message in run("extract", model, "names", *QUICK)
    assert DescriptorFile.open("out.parquet").header.unreadable == (message,)


def extract_slowly(photos, line):
    """Extract, and before each next photo wait for a word from the other end of the line."""

    def wait(count):
        line.send("started")
        line.recv()

    model, images = load_model("model", "cpu"), read_images(photos)
    extract(model, images, "out.parquet", workers=0, on_progress=wait)


def test_two_processes_do_not_write_one_file(listwise, run, model, photos, tmp_path):
    here, there = programs.PROCESSES.Pipe()
    first = programs.Program(extract_slowly, str(photos), there)
    assert here.poll(60)
    code, out, err = listwise("extract", model, photos, *QUICK)
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
    run("extract", model, photos, *QUICK)
    assert sorted(os.listdir(tmp_path)) == ["model", "out.parquet"]


@pytest.mark.slow
def test_processes_share_the_photos(run, photos):
    RetrievalNet("test_resnet", weights="random").save("known")  # other processes know timm's alone
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun sets them
    processes = [
        programs.listwise(
            *("extract", "known", photos, *QUICK),
            env={**os.environ, **both, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    for process in processes:
        assert process.wait(60) == 0, process.errors()
    run("extract", "known", photos, *QUICK)
    whole = DescriptorFile.open("out.parquet")
    shares = [DescriptorFile.open(f"out-0000{i}-of-00002.parquet") for i in (1, 2)]
    assert shares[0].ids + shares[1].ids == whole.ids
    assert [len(share) for share in shares] == [24, 24]
    rows = np.concatenate([share.read() for share in shares])
    assert np.abs(rows - whole.read()).max() < 1e-6
