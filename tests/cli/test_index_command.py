"""`listwise index` and `listwise search`, as they are typed."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET

from listwise.models import RetrievalNet

QUICK = ("--workers", 0, "--device", "cpu")
BUILD = ("--model", "model", *QUICK)
PHOTO = "photos/class2/1.jpg"


@pytest.fixture
def build(run, model, photos):
    """Build an index of photos, which can be changed."""
    shutil.copytree(photos, "photos")
    return lambda name, source, *options: run("index", "build", name, source, *BUILD, *options)


@pytest.fixture
def shop(build):
    """The folder has an index of all photos."""
    out = build("shop", "photos")
    assert "48 added; 48 photos in shop" in out
    assert "recall@10 1.000" in out
    assert "listwise serve shop" in out


@pytest.fixture
def few(build):
    """The folder has an index of the photos of one class."""
    build("shop", "photos/class0")


def ids(answer):
    return [each["id"] for each in answer["results"]]


@pytest.mark.usefixtures("shop")
def test_build_add_remove_info(run, build, listwise, tmp_path):
    answer = build("shop", "photos", "--json")
    assert (answer["unchanged"], answer["entries"], answer["search"]["recall"]) == (48, 48, 1.0)
    Image.effect_noise((60, 50), 80).save("new.jpg")
    Path("wreck.jpg").write_bytes(b"\xff\xd8\xff")
    shutil.copy("photos/class0/0.jpg", "copy.jpg")
    out = run("index", "add", "shop", "new.jpg", "wreck.jpg", "copy.jpg", "--workers", 0)
    assert "1 added; 49 photos in shop" in out
    assert "skipped 1 photo that cannot be read: " in out
    assert f"{Path('copy.jpg').absolute()} is the same as class0/0.jpg" in out
    assert run("index", "info", "shop", "--json")["entries"] == 49
    out = run("index", "remove", "shop", "new.jpg", "photos/class3", "class1/2.jpg")
    assert "removed 8 photos from shop; 41 photos left" in out
    answer = run("index", "list", "shop", "--json")
    assert {entry["id"].split("/")[0] for entry in answer["entries"]}.isdisjoint({"class3"})
    code, _, err = listwise("index", "build", "none", "wreck.jpg", *BUILD)
    assert code == 2
    assert f"none of the photos can be read; the first: {tmp_path / 'wreck.jpg'}" in err


INFO = """
import sys
from listwise.cli.main import main
for code, options in (2, ["nowhere"]), (0, ["shop"]), (0, ["shop", "--json"]):
    sys.argv = ["listwise", "index", "info", *options]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == code
assert not {"torch", "torchvision", "timm", "faiss", "pymilvus"} & set(sys.modules)
from listwise.search.engines import store_exists
assert not store_exists("nowhere.db") and "torch" not in sys.modules
"""


def test_info_shows_model_size_and_limits_without_slow_imports(run, build, tmp_path):
    build("shop", "photos/class0", "--max-side", 64, "--scales", "1,0.5", "--recall", 0.9)
    done = subprocess.run([sys.executable, "-c", INFO], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("listwise: no index at nowhere: create one with")
    assert done.stderr.count("\n") == 1
    *lines, answer = done.stdout.splitlines()
    shown = {line[:15].strip(): line[15:].strip() for line in lines}
    assert shown["model folder"] == str(tmp_path / "model")
    assert shown["photo size"] == "long side of 64 pixels at most"
    assert (shown["scales"], shown["whitening"], shown["photos"]) == ("1, 0.5", "no", "6")
    assert shown["limits"] == "recall@10 0.9"
    facts = json.loads(answer)
    assert (facts["model_folder"], facts["whitened"]) == (str(tmp_path / "model"), False)
    assert (facts["settings"]["max_side"], facts["settings"]["scales"]) == (64, [1, 0.5])
    assert (facts["intent"]["recall"], facts["entries"], facts["local"]) == (0.9, 6, None)
    build("other", "photos/class0", "--max-side", 0)
    out = run("index", "info", "other")
    assert "original size" in out
    assert "limits         none" in out


def test_filters(run, build, listwise, photos):
    lines = [f"{path},{i},red" for i, path in enumerate(sorted(photos.rglob("*.jpg")))]
    Path("t.csv").write_text("\n".join(["path,price,color", *lines]))
    build("shop", "t.csv")
    found = run("search", "shop", PHOTO, "--where", "price in (3, 7)", "--json")["results"]
    assert {each["attributes"]["price"] for each in found} == {"3", "7"}
    head, *rows = run("index", "list", "shop", "--where", "price < 2").strip().splitlines()
    assert head.split() == ["photo", "size", "color", "price"]
    assert [row.split()[1:] for row in rows] == [["64×64", "red", "0"], ["72×56", "red", "1"]]
    assert len(run("index", "list", "shop", "--start", 40, "--json")["entries"]) == 8
    reason = "no entry has the attribute prise; known attributes: color, price"
    answer = listwise("search", "shop", PHOTO, "--where", "prise < 2")
    assert answer == (2, "", f"listwise: --where: {reason}\n")
    out = run("index", "remove", "shop", "--where", "price >= 40")
    assert "removed 8 photos from shop; 40 photos left" in out


@pytest.mark.usefixtures("few")
def test_duplicates(run, listwise):
    with Image.open("photos/class0/0.jpg") as photo:
        photo.save("again.png")
    run("index", "add", "shop", "again.png", "--workers", 0)
    shutil.copy("photos/class0/1.jpg", "same.jpg")
    out = run("index", "add", "shop", "same.jpg", "--workers", 0)
    skipped = "skipped 1 photo with the content of another one"
    assert f"{skipped}: {Path('same.jpg').absolute()} is the same as 1.jpg" in out
    command = ("index", "duplicates", "shop", "--threshold", 0.99)
    out = run(*command, "--sheet", "d.png")
    texts = ("near", "again.png", "keep: largest file", "exact", "same.jpg", "same content")
    assert all(text in out for text in (*texts, "2 photos could be removed"))
    assert Image.open("d.png").width > 200
    near, exact = sorted(run(*command, "--json")["groups"], key=lambda group: group["exact"])
    assert {entry["id"] for entry in near["entries"]} == {"0.jpg", "again.png"}
    assert [(entry["id"], entry["copies"]) for entry in exact["entries"]] == [
        ("1.jpg", ["same.jpg"])
    ]
    assert listwise(*command, "--remove")[0] != 0  # nobody answers
    assert "removed 2 photos from shop" in run(*command, "--remove", "--yes")
    assert "no duplicates found" in run(*command)
    assert Path("same.jpg").exists()


@pytest.mark.usefixtures("few")
def test_sync(run, listwise):
    """The folder of the photos is known; a build tells what is missing, and keeps the limits."""
    run("index", "limits", "shop", "--memory", "1MB")
    Path("photos/class0/0.jpg").unlink()
    Path("photos/class0/1.jpg").rename("photos/class0/moved.jpg")
    shutil.copy("photos/class1/0.jpg", "photos/class0/new.jpg")
    dry = run("index", "sync", "shop", "--dry-run", "--prune")
    counts = "1 added, 0 changed, 1 moved, 1 removed"
    assert f"nothing was changed; a sync would have: {counts}; 6 photos in shop" in dry
    assert all(text in dry for text in ("added: new.jpg", "moved: moved.jpg", "removed: 0.jpg"))
    out = run("index", "build", "shop", "photos/class0", "--workers", 0)
    folder = Path("photos/class0").absolute()
    gone = f"1 photo of the index no longer in {folder}: remove them with listwise index sync shop"
    assert f"{gone} --prune" in out
    assert run("index", "info", "shop", "--json")["intent"]["memory"] == 1_000_000
    out = run("index", "sync", "shop", "--workers", 0)
    assert "0 added, 0 changed, 0 moved, 0 removed; 7 photos in shop" in out
    assert "1 photo no longer in the folder: 0.jpg; --prune removes them" in out
    found = run("index", "sync", "shop", "photos/class0", "--prune", "--json")
    assert (found["removed"], found["entries"]) == (["0.jpg"], 6)


@pytest.mark.usefixtures("build")
def test_sync_watches_the_folder(run):
    """Changes are followed until Ctrl-C."""
    pytest.importorskip("watchdog")
    RetrievalNet("test_resnet.r160_in1k", weights="random").save("known")
    run("index", "build", "shop", "photos/class0", "--model", "known", *QUICK)
    command = [sys.executable, "-m", "listwise", "index", "sync", "shop", "--prune", "--watch"]
    text = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **text) as process:
        line = process.stdout.readline()
        assert "0 added, 0 changed, 0 moved, 0 removed" in line, process.stderr.read()
        Path("photos/class0/0.jpg").unlink()
        assert "0 added, 0 changed, 0 moved, 1 removed" in process.stdout.readline()
        shutil.copy("photos/class1/0.jpg", "photos/class0/new.jpg")
        assert "1 added, 0 changed, 0 moved, 0 removed" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "listwise: stopped" in errors


@pytest.mark.usefixtures("few")
def test_check_and_repair(run, listwise):
    assert (
        run("index", "check", "shop", "--photos") == "6 photos checked in shop: no damage found\n"
    )
    (descriptors,) = Path("shop").glob("descriptors-*")
    content = descriptors.read_bytes()
    descriptors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = listwise("search", "shop", PHOTO)
    assert code == 2
    assert err == (
        "listwise: shop is damaged: the checksums of 1 entry do not match (5.jpg); run "
        "listwise index check shop --repair\n"
    )
    code, out, _ = listwise("index", "check", "shop", "--json")
    answer = json.loads(out)
    assert (code, answer["damaged"], answer["ok"]) == (1, ["5.jpg"], False)
    out = run("index", "check", "shop", "--repair", "--device", "cpu")
    assert "6 photos checked in shop: everything is repaired" in out
    run("search", "shop", PHOTO)
    Path("photos/class0/0.jpg").unlink()
    out = run("index", "check", "shop")
    assert "1 entries whose photo does not exist: 0.jpg" in out


@pytest.mark.usefixtures("shop")
def test_searching_by_photo_box_entry_and_several(run, listwise):
    first = run("search", "shop", PHOTO, "-k", 3, "--json")["results"][0]
    assert (first["id"], first["score"]) == ("class2/1.jpg", pytest.approx(1, abs=1e-4))
    Image.open(PHOTO).crop((10, 8, 50, 40)).save("part.png")
    boxed = run("search", "shop", PHOTO, "--box", "10,8,50,40", "--json")
    parts = run("search", "shop", "part.png", "--json")
    assert ids(boxed) == ids(parts)
    found = ids(run("search", "shop", "--entry", "class2/1.jpg", "-k", 47, "--json"))
    assert "class2/1.jpg" not in found
    assert len(found) == 47
    assert {"class2/1.jpg", "class5/0.jpg"} <= set(
        ids(run("search", "shop", PHOTO, "photos/class5/0.jpg", "--json"))
    )
    # The same index, from a descriptor file.
    run("extract", "model", "photos", "all.parquet", "--workers", 0)
    command = ("index", "build", "other", "all.parquet", "--root", "photos", "--model", "model")
    code, _, err = listwise(*command, "--max-side", 40)
    assert code == 2
    assert "all.parquet was created with --max-side 512: leave --max-side out, or extract" in err
    assert "listwise extract model PHOTOS all.parquet --max-side 40" in err
    out = run(*command)
    assert "48 added" in out
    query = (PHOTO, "-k", 7, "--json")
    assert ids(run("search", "other", *query)) == ids(run("search", "shop", *query))


@pytest.mark.usefixtures("shop")
def test_answers_for_people(run):
    search = ("search", "shop", PHOTO, "-k", 4)
    out = run(*search, "--rerank")
    assert "class2/1.jpg" in out.splitlines()[1]
    assert "compared the local features of 48 photos with the query" in out
    assert out.split()[:3] == ["score", "inliers", "photo"]
    assert run(*search, "--refine", "diffusion").split()[:3] == ["score", "refined", "photo"]
    out = run(*search, "--quality", "best")
    assert out.split()[:4] == ["score", "refined", "inliers", "photo"]
    assert "found.png" in run(*search, "--entry", "class0/0.jpg", "--sheet", "found.png")
    width, height = Image.open("found.png").size
    assert width > 700
    assert height > 300


@pytest.mark.usefixtures("shop")
def test_a_program_gets_the_path_of_each_result(run):
    found = run("search", "shop", PHOTO, "-k", 4, "--start", 1, "--rerank", "--json")
    assert len(found["results"]) == 4
    assert found["verified"] == 48  # all that were compared, not only those that are shown
    whole = run("search", "shop", PHOTO, "-k", 5, "--rerank", "--json")
    assert ids(found) == ids(whole)[1:]
    for hit in whole["results"]:
        assert hit["path"] == str(Path("photos", hit["id"]).absolute())
        assert Image.open(hit["path"]).size == (hit["width"], hit["height"])


@pytest.mark.usefixtures("shop")
def test_without_a_display_the_picture_is_written_and_named(run, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    out = run("search", "shop", PHOTO, "-k", 4, "--open")
    picture = re.search(r"^wrote a picture of the results to (.*\.png)$", out, re.MULTILINE)[1]
    assert Image.open(picture).width > 700


@pytest.fixture
def listed(build):
    """An index of photos with long attributes, in the folder `shop`."""
    rows = [f"photos/class0/{n}.jpg,{'long words ' * 8}{n},{n}" for n in range(3)]
    Path("table.csv").write_text("\n".join(["path,title,price", *rows]))
    build("shop", "table.csv")
    return [line.split(",")[0] for line in rows]


@pytest.mark.parametrize("command", [("index", "list", "shop"), ("search", "shop", PHOTO)])
def test_a_table_in_a_pipe_has_a_line_for_each_row(run, listed, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(*command).splitlines()
    assert len(lines) == 4
    for name in listed:
        (line,) = (each for each in lines if name in each)
        assert "long words long words long words" in line
        assert line == line.rstrip()


def test_a_narrow_terminal_shortens_attributes_and_no_id(listed):
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "listwise", "index", "list", "shop"]
    subprocess.run(command, env=environment, stdout=end, stderr=end, check=True)
    os.close(end)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
    assert [line for line in lines if line.split()[0] in listed] == lines[1:]
    assert len(lines) == 4
    assert all(len(line) <= 60 and "…" in line for line in lines[1:])


@pytest.mark.usefixtures("few")
def test_local_features_are_built_filled_and_shown(run, build):
    build("other", "photos/class0", "--local")
    assert run("index", "info", "other", "--json")["local"]["entries"] == 6
    out = run("index", "local", "shop", "--workers", 0)
    assert "stored local features of 6 photos; 6 of 6 photos have them" in out
    run("index", "add", "shop", "photos")
    filled = run("index", "local", "shop", "--json")
    assert (filled["updated"], filled["errors"], filled["local"]["entries"]) == (0, [], 48)
    assert "local features  photos 48, size on disk" in run("index", "info", "shop")


@pytest.mark.usefixtures("few")
def test_the_model_of_an_index_may_move(run, listwise):
    shutil.move("model", "moved")
    for command in (("search", "shop", PHOTO), ("serve", "shop", "--port", 0)):
        code, _, err = listwise(*command)
        assert code == 2
        assert "give its folder as --model" in err
    run("search", "shop", PHOTO, "--model", "moved")


@pytest.mark.usefixtures("few")
def test_upgrade_changes_rollback_discard(run, listwise):
    torch.manual_seed(1)
    RetrievalNet(TINY_NET, weights="random").save("better")
    upgrade = ("index", "upgrade", "shop", "--model", "better", *QUICK)
    Path("photos/class0/0.jpg").rename("away.jpg")
    code, _, err = listwise(*upgrade)
    assert code == 2
    assert "1 of the 6 photos of shop do not exist any more" in err
    assert "with --skip-missing" in err
    Path("away.jpg").rename("photos/class0/0.jpg")
    out = run(*upgrade)
    assert "6 entries to describe or copy, about " in out
    assert f"shop uses the model {Path('better').absolute()} now: 6 photos, 6 photos desc" in out
    assert "current 1, previous 0" in run("index", "info", "shop")
    out = run("index", "changes", "shop", "--queries", 4, "--report", "page.html")
    assert "4 queries: 100.0 % of the first 10 results are the same" in out  # there are only six
    assert Path("page.html").read_text().count("<section") == 4
    answer = run("index", "changes", "shop", "-k", 1, "--json")
    kept = [query["before"][0]["id"] == query["after"][0]["id"] for query in answer["queries"]]
    assert [query["kept"] for query in answer["queries"]] == sorted(map(int, kept))
    assert answer["kept"] == answer["same_first"] == sum(kept) / 6
    answer = run("index", "rollback", "shop", "--json", *QUICK)
    assert (answer["entries"], answer["described"]) == (6, 0)
    assert answer["model"] == str(Path("model").absolute())
    assert "a rollback is not possible any more" in run("index", "discard", "shop")


@pytest.mark.usefixtures("few")
def test_marks_are_used_stored_listed_exported_and_undone(run, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    search = ("search", "shop", "--entry", "0.jpg", "-k", 50, "--json")
    plain = ids(run(*search))
    same, different = plain[-1], plain[0]
    marked = (*search, "--same", same, "--different", different)
    found = ids(run(*marked))
    assert (found[0], found[-1]) == (same, different)
    assert "0 marks" in run("index", "marks", "shop")
    assert ids(run(*marked, "--save")) == ids(run(*search, "--marks")) == found
    out = run("index", "marks", "shop")
    assert "2 marks, 0 undone; 0 conflicts" in out
    assert all(text in out for text in ("0.jpg", same, "different", "ann"))
    listed = run("index", "marks", "shop", "--json")["marks"]
    assert [(mark["entry"], mark["same"]) for mark in listed] == [(same, True), (different, False)]
    out = run("index", "marks", "shop", "--export", "labels.csv")
    assert "wrote 3 photos of 2 classes to labels.csv" in out
    assert Path("labels.csv").read_text().startswith("path,label\n")
    assert "undid 1 mark\n" in run("index", "marks", "shop", "--undo", listed[1]["id"])
    assert "1 mark, 1 undone" in run("index", "marks", "shop")


@pytest.mark.usefixtures("few")
def test_marks_of_people_who_disagree_and_of_searches_that_fail(run, listwise, monkeypatch):
    marked = ("search", "shop", "--entry", "0.jpg", "--same", "1.jpg", "--save")
    for wrong in ("--where", "price <"), ("--box", "0,0,9,9"), ("--min-probability", "0.5"):
        assert listwise(*marked, *wrong)[0] == 2
    assert "0 marks" in run("index", "marks", "shop")
    for person, way in ("ann", "--same"), ("bob", "--different"):
        monkeypatch.setattr("getpass.getuser", lambda person=person: person)
        out = run("search", "shop", PHOTO, way, "1.jpg", "--save")  # not in the index
        assert "stored the marks; list them with listwise index marks shop" in out
    run("search", "shop", PHOTO, "--marks")  # a disputed mark does not count
    out = run("index", "marks", "shop", "--conflicts")
    assert all(text in out for text in ("people disagree", "ann", "bob", "query:", "1 conflict"))
    (conflict,) = run("index", "marks", "shop", "--json")["conflicts"]
    assert conflict["kind"] == "people"
    assert "left out 2 photos in conflict" in run("index", "marks", "shop", "--export", "l.csv")
