import hashlib
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from listwise.data.catalog import (
    ENTRIES,
    Dataset,
    find_dataset,
    find_entry,
    labelled_of,
    photos_of,
)
from listwise.errors import InputError


def fill(folder: Path, photos: Iterable[str], texts: Mapping[str, Iterable[str]] = {}) -> Path:
    """Write small photos, and text files by their lines."""
    for name in (*photos, *texts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in photos:
        Image.new("RGB", (8, 6)).save(folder / name, "JPEG")
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def make_revisited(folder: Path, name: str = "roxford5k", suffix: str = ".jpg") -> Path:
    names, queries = [f"place_{i}" for i in range(5)], ["asked_0", "asked_1"]
    fill(folder, [f"jpg/{image}{suffix}" for image in names + queries])
    judged = [
        {"bbx": [1, 1, 6, 5], "easy": [0], "hard": [1, 2], "junk": []},
        {"bbx": [0.5, 0, 4, 4], "easy": [], "hard": [3], "junk": [4]},
    ]
    content = {"imlist": names, "qimlist": queries, "gnd": judged}
    (folder / f"gnd_{name}.pkl").write_bytes(pickle.dumps(content, protocol=2))
    return folder


def make_oxford(folder: Path, first: str = "all_souls") -> Path:
    names = [f"{first}_00000{i}" for i in range(4)]
    judged = {
        "query": [f"oxc1_{names[0]} 1 1 6 5"],
        "good": names[:2],
        "ok": names[2:3],
        "junk": [],
    }
    texts = {f"gt/{first}_1_{part}.txt": lines for part, lines in judged.items()}
    return fill(folder, [f"jpg/{name}.jpg" for name in names], texts)


def make_distractors(folder: Path) -> Path:
    names = [f"{i:02}/{i}.jpg" for i in range(3)]
    return fill(folder, [f"jpg/{name}" for name in names], {"revisitop1m.txt": names})


def make_sop(folder: Path) -> Path:
    for split, first in (("train", 1), ("test", 3)):
        photos = [f"bicycle_final/{split}_{i}.JPG" for i in range(4)]
        rows = [f"{i + 1} {first + i // 2} 1 {path}" for i, path in enumerate(photos)]
        fill(folder, photos, {f"Ebay_{split}.txt": ["image_id class_id super path", *rows]})
    return folder


def make_cub(folder: Path) -> Path:
    kinds = {1: "001.Albatross", 100: "100.Pelican", 101: "101.White_Pelican", 200: "200.Wren"}
    paths = [f"{name}/{i}.jpg" for name in kinds.values() for i in range(2)]
    labels = [kind for kind in kinds for _ in range(2)]
    texts = {
        "images.txt": [f"{n} {path}" for n, path in enumerate(paths, 1)],
        "image_class_labels.txt": [f"{n} {kind}" for n, kind in enumerate(labels, 1)],
    }
    fill(folder / "CUB_200_2011", [f"images/{path}" for path in paths], texts)
    return folder


def make_cars(folder: Path) -> Path:
    kinds = [1, 98, 99, 196]
    photos = [f"car_ims/{i:06}.jpg" for i in range(4)]
    rows = np.zeros((1, 4), dtype=[("relative_im_path", "O"), ("class", "O"), ("test", "O")])
    rows[0] = [(path, kind, 0) for path, kind in zip(photos, kinds, strict=True)]
    fill(folder, photos)
    savemat(folder / "cars_annos.mat", {"annotations": rows})
    return folder


def make_inshop(folder: Path) -> Path:
    rows = [
        ("img/WOMEN/id_1/a.jpg", "id_1", "train"),
        ("img/WOMEN/id_1/b.jpg", "id_1", "train"),
        ("img/MEN/id_7/a.jpg", "id_7", "query"),
        ("img/MEN/id_7/b.jpg", "id_7", "gallery"),
        ("img/MEN/id_8/a.jpg", "id_8", "gallery"),
        ("img/MEN/id_8/b.jpg", "id_8", "query"),
    ]
    lines = ["6", "image_name item_id evaluation_status", *(" ".join(row) for row in rows)]
    photos = [f"Img/{path}" for path, _, _ in rows]
    return fill(folder, photos, {"Eval/list_eval_partition.txt": lines})


def make_landmarks(folder: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        urls = [f"http://example.org/{split}/{i}.jpg" for i in range(count)]
        names = [hashlib.md5(url.encode()).hexdigest() for url in urls[:-1]]  # the last is dead
        lines = [f"{url} {i % 2}" for i, url in enumerate(urls)]
        photos = [f"images/{name}.jpg" for name in names]
        fill(folder, photos, {f"annotation_clean_{split}.txt": lines})
    return folder


def make_sfm(folder: Path) -> Path:
    content = {}
    for split, first in (("train", 0), ("val", 5)):
        cids = [f"{split}{i:08x}" for i in range(4)]
        fill(folder, [f"ims/{cid[-2:]}/{cid[-4:-2]}/{cid[-6:-4]}/{cid}" for cid in cids])
        cluster = [first, first, first + 1, first + 1]
        content[split] = {"cids": cids, "cluster": cluster, "qidxs": [0], "pidxs": [1]}
    (folder / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(content))
    return folder


def make_gldv2(folder: Path) -> Path:
    lines = ["landmark_id,images", "27,0a1b 0a2c", "3,ffe0"]
    photos = ["train/0/a/1/0a1b.jpg", "train/0/a/2/0a2c.jpg", "train/f/f/e/ffe0.jpg"]
    return fill(folder, photos, {"train_clean.csv": lines})


MAKERS = {
    "roxford5k": make_revisited,
    "rparis6k": lambda folder: make_revisited(folder, "rparis6k"),
    "oxford5k": make_oxford,
    "paris6k": lambda folder: make_oxford(folder, "defense"),
    "revisitop1m": make_distractors,
    "landmarks-clean": make_landmarks,
    "retrieval-SfM-120k": make_sfm,
    "google-landmarks-v2": make_gldv2,
    "SOP": make_sop,
    "CUB-200": make_cub,
    "Cars-196": make_cars,
    "In-shop": make_inshop,
}
LABELLED = {
    "landmarks-clean": {"train": (3, 2), "val": (1, 1)},
    "retrieval-SfM-120k": {"train": (4, 2), "val": (4, 2)},
    "google-landmarks-v2": {"train": (3, 2)},
    "SOP": {"train": (4, 2), "test": (4, 2)},
    "CUB-200": {"train": (4, 2), "test": (4, 2)},
    "Cars-196": {"train": (2, 2), "test": (2, 2)},
    "In-shop": {"train": (2, 1), "query": (2, 2), "gallery": (2, 2)},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "somewhere"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_is_recognised_wherever_it_is(name: str, place: Path, tmp_path: Path) -> None:
    MAKERS[name](place)
    assert find_dataset(place).name == name
    place.rename(tmp_path / name)
    found = find_dataset(name.lower(), root=tmp_path)
    assert (found.name, found.folder) == (name, tmp_path / name)
    assert found.entry is ENTRIES[name]
    assert find_dataset(name, root=tmp_path / name).name == name


@pytest.mark.parametrize("name", MAKERS)
def test_check_finds_nothing_wrong_but_the_counts(name: str, place: Path) -> None:
    found = find_dataset(MAKERS[name](place))
    problems = found.check()
    assert [p for p in problems if "missing" in p] == []
    assert len(problems) == len(ENTRIES[name].counts)
    parts = {part: len(paths) for part, paths in found._parts().items()}
    entry = replace(ENTRIES[name], counts=parts)
    assert Dataset(name, place, entry.layout, entry).check() == []


@pytest.mark.parametrize("name", ["roxford5k", "SOP", "In-shop", "revisitop1m", "Cars-196"])
def test_check_names_a_missing_photo(name: str, place: Path) -> None:
    found = find_dataset(MAKERS[name](place))
    victim = sorted(found.images().paths)[0]
    Path(victim).unlink()
    line = found.check()[-1]
    assert "1 of " in line
    assert line.endswith(f"photos are missing, the first is {victim}")


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_sets_have_their_splits(name: str, place: Path) -> None:
    found = find_dataset(MAKERS[name](place))
    whole = found.labelled()
    assert len(whole) == sum(images for images, _ in LABELLED[name].values())
    for split, (images, classes) in LABELLED[name].items():
        part = found.labelled(split)
        assert (len(part), len(part.class_names)) == (images, classes)
        assert all(Path(path).is_file() for path in part.paths)
    with pytest.raises(InputError, match="no photo has the split 'other'"):
        found.labelled("other")


def test_labels_are_those_of_the_annotations(tmp_path: Path) -> None:
    birds = find_dataset(make_cub(tmp_path / "cub")).labelled("test")
    assert birds.class_names == ("101.White_Pelican", "200.Wren")
    assert birds.labels.tolist() == [0, 0, 1, 1]
    assert birds.ids[2] == "images/200.Wren/0.jpg"
    products = find_dataset(make_sop(tmp_path / "sop")).labelled("test")
    assert products.class_names == ("3", "4")
    assert products.labels.tolist() == [0, 0, 1, 1]
    cars = find_dataset(make_cars(tmp_path / "cars")).labelled()
    assert cars.class_names == ("001", "098", "099", "196")
    assert cars.splits == ("train", "train", "test", "test")
    places = find_dataset(make_gldv2(tmp_path / "gld")).labelled()
    assert [places.class_names[k] for k in places.labels] == ["27", "27", "3"]
    models = find_dataset(make_sfm(tmp_path / "sfm")).labelled("val")
    assert [models.class_names[k] for k in models.labels] == ["5", "5", "6", "6"]


def test_revisited_benchmark(place: Path) -> None:
    benchmark = find_dataset(make_revisited(place)).benchmark()
    assert (benchmark.name, benchmark.labelled) == ("roxford5k", False)
    assert benchmark.database.ids == tuple(f"place_{i}" for i in range(5))
    assert benchmark.queries.boxes == ((1, 1, 6, 5), (0.5, 0, 4, 4))
    assert list(benchmark.judged.protocols) == ["Easy", "Medium", "Hard"]
    assert benchmark.judged.grades["hard"][0].tolist() == [1, 2]
    images = benchmark.database.paths + benchmark.queries.paths
    assert all(Path(path).is_file() for path in images)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".JPEG"])
def test_any_judgments_beside_photos_are_a_benchmark(suffix: str, place: Path) -> None:
    found = find_dataset(make_revisited(place, "mytown", suffix))
    assert (found.name, found.layout, found.entry) == ("somewhere", "revisited", None)
    assert found.check() == []
    benchmark = found.benchmark()
    assert all(path.endswith(suffix) for path in benchmark.queries.paths)


def test_oxford_benchmark_without_damaged_photos(place: Path) -> None:
    make_oxford(place, "defense")
    fill(place, ["jpg/paris_louvre_000136.jpg"])
    benchmark = find_dataset(place).benchmark()
    assert (benchmark.name, benchmark.labelled) == ("paris6k", False)
    assert benchmark.database.ids == tuple(f"defense_00000{i}" for i in range(4))
    assert benchmark.queries.ids == ("defense_000000",)
    assert benchmark.queries.boxes == ((1, 1, 6, 5),)
    assert list(benchmark.judged.protocols) == ["Original"]
    assert benchmark.judged.grades["good"][0].tolist() == [0, 1]
    assert len(ENTRIES["paris6k"].broken) == 20


def test_labelled_benchmarks(tmp_path: Path) -> None:
    products = find_dataset(make_sop(tmp_path / "sop")).benchmark()
    assert products.labelled
    assert products.queries is products.database
    assert len(products.database) == 4
    clothes = find_dataset(make_inshop(tmp_path / "clothes")).benchmark()
    assert clothes.queries.ids == ("img/MEN/id_7/a.jpg", "img/MEN/id_8/b.jpg")
    assert clothes.database.ids == ("img/MEN/id_7/b.jpg", "img/MEN/id_8/a.jpg")
    assert clothes.queries.class_names == clothes.database.class_names == ("id_7", "id_8")


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("revisitop1m", "benchmark", "distractors"),
        ("google-landmarks-v2", "benchmark", "no test part"),
        ("roxford5k", "labelled", "without classes"),
    ],
)
def test_what_a_set_has_not(name: str, call: str, reason: str, place: Path) -> None:
    found = find_dataset(MAKERS[name](place))
    with pytest.raises(InputError, match=reason):
        getattr(found, call)()


@pytest.mark.parametrize(
    ("name", "file", "content", "reason"),
    [
        ("SOP", "Ebay_train.txt", "head\n1 2 3\n", r"line 2: expected 4 words, found 3"),
        ("SOP", "Ebay_test.txt", None, "cannot be read"),
        ("CUB-200", "CUB_200_2011/image_class_labels.txt", "1 1\n", "image 2 has no class"),
        ("Cars-196", "cars_annos.mat", "no MATLAB", "not the annotations of Stanford Cars"),
        ("In-shop", "Eval/list_eval_partition.txt", "1\nhead\na b\n", "found 2"),
        (
            "landmarks-clean",
            "annotation_clean_val.txt",
            "alone\n",
            "expected an address and a class",
        ),
        ("retrieval-SfM-120k", "retrieval-SfM-120k.pkl", "x", "pickle"),
        ("google-landmarks-v2", "train_clean.csv", "a,b\n1,2\n", "columns should be"),
        ("roxford5k", "gnd_roxford5k.pkl", "x", "pickle"),
    ],
)
def test_damaged_annotations_are_a_line(name, file, content, reason, place: Path) -> None:
    found = find_dataset(MAKERS[name](place))
    if content is None:
        (place / file).unlink()
    else:
        (place / file).write_text(content)
    (line,) = found.check()
    assert "\n" not in line
    with pytest.raises(InputError, match=reason):
        raise InputError(line)


def test_what_is_not_there_is_said_with_the_way_to_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="run listwise download SOP --to data/SOP"):
        find_dataset("sop")
    with pytest.raises(InputError, match="original server is offline"):
        find_dataset("Cars-196")
    with pytest.raises(InputError, match=r"did you mean roxford5k\?"):
        find_dataset("roxford")
    with pytest.raises(InputError, match="is not a known data set"):
        find_dataset(tmp_path)
    assert find_entry("cub_200") is ENTRIES["CUB-200"]
    make_revisited(tmp_path / "data" / "roxford5k")
    assert find_dataset("roxford5k").folder == Path("data/roxford5k")


def test_commands_take_data_sets_by_name_and_any_other_source(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_sop(tmp_path / "data" / "SOP")
    by_name = labelled_of("SOP")
    assert by_name.splits is not None
    assert set(by_name.splits) == {"train", "test"}
    assert labelled_of(tmp_path / "data" / "SOP").paths == by_name.paths
    assert photos_of("sop").paths == by_name.paths
    make_revisited(tmp_path / "bench")
    assert len(photos_of("bench")) == 5  # the database, not the queries
    fill(tmp_path / "own", ["a/1.jpg", "b/1.jpg"])
    assert labelled_of("own").class_names == ("a", "b")
    assert len(photos_of("own")) == 2
    with pytest.raises(InputError, match="nowhere"):
        labelled_of("nowhere")
