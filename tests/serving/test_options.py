"""Every option of a search gives the same results in Python, by HTTP, and on the command line."""

import json
import shutil

import pytest
from command_line import listwise  # noqa: F401
from serving_examples import InThread

from listwise.client import Client
from listwise.errors import InputError
from listwise.search import SearchOptions, open_index
from listwise.search.entries import entry_key
from listwise.serving.server import Limits, ServeSettings

NAMES = ["class1/4.jpg", "class4/1.jpg"]
OTHERS = {
    "k": 3,
    "start": 2,
    "expand": True,
    "refine": "superglobal",
    "rerank": True,
    "quality": "best",
    "where": "size > 20",
    "min_score": 0.9,
    "min_probability": 0.5,
    "same": NAMES,
    "different": NAMES,
    "marks": True,
    "exclude": NAMES,
}
"""A value of each option other than its default."""


@pytest.fixture(scope="module")
def shop(model, model_folder, photos, tmp_path_factory):
    """An index of photos with attributes and a mark, its server, and a photo."""
    folder = tmp_path_factory.mktemp("options")
    photos = shutil.copytree(photos, folder / "photos")
    calibrated = model.calibrate(photos, workers=0)
    paths = sorted(photos.rglob("*.jpg"))
    lines = [f"{path.relative_to(photos)},{i}" for i, path in enumerate(paths)]
    (photos / "sizes.csv").write_text("\n".join(["path,size", *lines]))
    calibrated.save(folder / "model")
    with open_index(folder / "index", calibrated) as index:
        index.add(photos / "sizes.csv", workers=0)
        index.marks.add("class0/0.jpg", same=["class3/2.jpg"])
        server = InThread(index, ServeSettings(limits=Limits(seconds=60)))
        yield index, Client(server.url, seconds=60), photos / "class0" / "0.jpg"
        server.stop()


def facts(hits):
    """What a search says of each result; the numbers of JSON are rounded."""
    numbers = [(hit.score, hit.probability, hit.refined or 0) for hit in hits]
    return [
        (hit.id, hit.inliers, pytest.approx(each, abs=1e-4))
        for hit, each in zip(hits, numbers, strict=True)
    ]


def answered(results):
    return [
        (each["id"], each["inliers"], (each["score"], each["probability"], each["refined"] or 0))
        for each in results
    ]


@pytest.mark.parametrize("name", SearchOptions.model_fields)
def test_every_option_does_the_same_everywhere(shop, listwise, name):  # noqa: F811
    index, client, photo = shop
    value = OTHERS[name]
    given = {"k": 20, name: value}
    found = index.search(photo, **given)
    plain = index.search(photo, k=20)
    assert [(hit.id, hit.inliers) for hit in found] != [(hit.id, hit.inliers) for hit in plain]
    expected = facts(found)
    keyed = {**given, name: [str(entry_key(each)) for each in value]} if value is NAMES else given
    assert answered(client.search(photo, **keyed)["results"]) == expected
    flag = f"-{name}" if name == "k" else f"--{name.replace('_', '-')}"
    texts = value if value is NAMES else [None if value is True else value]
    typed = [part for text in texts for part in (flag, text) if part is not None]
    typed += [] if name == "k" else ["-k", 20]
    code, out, err = listwise("search", index.uri, photo, *typed, "--json")
    assert code == 0, err
    assert answered(json.loads(out)["results"]) == expected
    by_entry = facts(index.search(like="class0/0.jpg", **given))
    assert answered(client.similar(str(entry_key("class0/0.jpg")), **keyed)["results"]) == by_entry


WRONG = {"k": 0, "refine": "best", "min_score": float("nan"), "min_probability": 2}
WRONG |= {"where": "size >", "colour": "red", "expand": "perhaps"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_named(shop, name):
    index, client, photo = shop
    for search in index.search, client.search:
        with pytest.raises(InputError, match=name) as refused:
            search(photo, **{name: WRONG[name]})
        assert "\n" not in str(refused.value)
