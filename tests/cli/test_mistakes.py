"""A mistake of the user is one line on stderr and exit code 2, and changes nothing."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_images
from listwise.descriptors import Whitening, extract, load_model
from listwise.local.asmk import change_index
from listwise.local.codebook import learn_from_files
from listwise.local.extract import HessianAffine, extract_features
from listwise.local.storage import FeatureFile
from listwise.models import RetrievalNet
from listwise.search import open_index

ONNX = Path(__file__).parents[1] / "descriptors" / "version-1.onnx"
SMALL = f"photos --backbone {TINY_NET} --weights random --val-fraction 0.4 --batch-size 12"
SMALL += " --crops-size 32 --updates 2 --device cpu --workers 0"
BUILD = "photos --model model --workers 0 --device cpu"

# By command: what follows it, and a part of the error message.
MISTAKES = {
    "": {
        "trian": "No such command 'trian'",
        "demo --sed 1": "see listwise demo --help",
    },
    "label": {
        "nowhere --out l.csv": "nowhere",
        "photos": "--out",
    },
    "train": {
        "": "give the photos to train on",
        "photos/class0": "put the photos of each class into a folder",
        f"{SMALL} --batch-size 0": "--batch-size must be greater than or equal to 2, not 0",
        f"{SMALL} --batch-size many": "--batch-size must be a non-negative whole number, not",
        f"{SMALL} --patience never": "must be a non-negative whole number or none, not 'never'",
        f"{SMALL} --triplet-form hinge": "--triplet-form must be margin or log-exp, not 'hinge'",
        f"{SMALL} --preset best": "auto or paper",
        f"{SMALL} --color red": "No such option: --color; see listwise train --help",
        "photos --lr 1": "No such option: --lr (did you mean --learning-rate?); see listwise train",
        "photos --epochs 1": "(did you mean --updates?)",
        "photos --crop-size 96": "(did you mean --crops-size",
        "photos --config strange.yaml": "'batchsize'; did you mean batch_size?",
        "photos --resume r": "leave out all other options",
        "--resume r --seed 1": "leave out all other options",
        "--resume r --run-folder x": "leave out all other options",
        "--resume photos": "is not a training run",
    },
    "extract": {
        "nothing photos out.parquet": "no model folder nothing",
        "model nowhere out.parquet": "nowhere: no such file or folder",
        "model photos out.parquet --scales '1;2'": "--scales must be numbers",
        "model photos milvus://localhost:19530/a": "is not a file: OUT must be the name",
        "model photos \udcfc.parquet": r"the path \udcfc.parquet is not UTF-8",
    },
    "whiten": {
        "model": "give the photos to learn from",
        "model photos --remove": "--remove takes only MODEL and --json",
        "model photos --dim 97": "no whitening of this --dim can be learned",
        f"{ONNX} photos": "no model folder",
        "model other.parquet": "made by another model",
        "model white.parquet": "contains whitened descriptors",
        "model other.parquet --supervised": "without labels and photos",
    },
    "tune": {
        "model nowhere": "no such file or folder",
        "nothing photos": "no model folder",
        "model photos/class1": "label",
    },
    "evaluate": {
        "nowhere toy": "no model folder nowhere",
        "model toy --report no/where.html": "the folder no does not exist",
        "model toy --distractors gone.parquet": "gone.parquet",
        "model toy/train.csv --quality best": "--quality",
        "model toy/train.csv --refine diffusion": "--refine",
    },
    "export": {
        "nothing m.onnx": "no model folder nothing",
    },
    "import": {
        "model/model.safetensors photos": "exists already: give a new folder",
    },
    "download": {
        "": "give the name of a data set: choose one of roxford5k",
        "birds": "unknown data set 'birds'",
        "roxford5k --to photo.jpg/inside": "photo.jpg/inside: Not a directory",
    },
    "search": {
        "shop": "give a photo to search by",
        "shop no.jpg": "no.jpg: no such file",
        "nowhere photo.jpg": "no index at nowhere: create one with listwise index build nowhere",
        "shop photo.jpg --refine best": "--refine must be superglobal or diffusion, not 'best'",
        "shop photo.jpg --quality good": "--quality must be fast or best, not 'good'",
        "shop photo.jpg --where 'price <'": "--where cannot be read at the end: expected a value",
        "shop photo.jpg --box 1,2,3": "--box must be four numbers x0,y0,x1,y1, not '1,2,3'",
        "shop photo.jpg --top 5": "No such option: --top (did you mean -k?)",
        "shop photo.jpg --min-scor 5": "(did you mean --min-score?)",
        "shop photo.jpg --sheet a.txt": "must end with .png",
        "shop --entry 0.jpg --same x": "no entry x",
        "shop --entry 0.jpg --same 0.jpg --save": "nothing to save: the marked entry is the query",
        "shop photo.jpg --entry 0.jpg --same 2.jpg --save": "--save needs one photo or one --entry",
    },
    "index": {
        "info http://somewhere": "an index is a folder",
        f"build new {BUILD} --memory lots": "500MB or 2GB",
        f"build new {BUILD} --recall 2": "--recall must be less than or equal to 1, not 2",
        "add shop photos --model other": "build another index",
        "list shop --top 5": "No such option: --top (did you mean --count?)",
        "remove shop": "nothing to remove: give PHOTOS or --where",
        "remove shop 0.jpg nowhere.jpg": "shop has no photo nowhere.jpg",
        "duplicates shop --remove --json": "add --yes",
        "duplicates shop --threshold 2": "--threshold must be above 0 and at most 1, not 2",
        "sync shop missing": "missing: no such folder; nothing was changed",
        "sync shop --watch --dry-run": "--dry-run does not work with --watch",
        "changes shop": "no earlier generation to compare with",
        "marks shop --undo 123": "has no mark 123: give the id of a mark",
        "marks shop --export no/folder.csv": "cannot write no/folder.csv",
    },
    "local": {
        "extract photos x.features --delf nowhere": "nowhere",
        "codebook all.features w --words 100000": "give more photos",
        "codebook all.features all.features --words 40": "all.features exists",
        "index new all.features": "--codebook",
        "index found none.features": "no file of local features at none.features",
        "index found --remove none.jpg": "has no photo none.jpg",
        "search found photo.jpg": "with the same --count and --delf, or",
        "evaluate photos --codebook words.safetensors": "a benchmark contains",
    },
    "serve": {
        "shop --host 0.0.0.0": "reach 0.0.0.0: set a token with --edit, LISTWISE_TOKEN or --token",
        "shop --host ::": "other machines can reach ::",
        "shop --host example.org": "other machines can reach example.org",
        "shop --host 192.0.2.1 --token t": "cannot listen on 192.0.2.1, port 8000: ",
        "shop --port 99999": "cannot listen on 127.0.0.1, port 99999: ",
        "shop --max-pixels 129": "--max-pixels must be from 1 to 128",
        "shop --port 0 --model other": "shop holds descriptors of the model",
    },
    "study": {
        "losses photos": "--out",
        "losses photos --updates 3 --out o": "No such option: --updates",
        "losses photos --preset x --out o": "auto, paper or small",
        "losses photos --dim 4 --out o": "need a --benchmark",
        "bins photos --rates fast --out o": "numbers separated by commas",
        "bins photos --variants 1 --out o": "--variants contains '1': bins must be greater than",
        "classes photos --variants 8 --out o": "or all",
        "poolings toy": "--whiten-on",
        "poolings model --whiten-on gone.csv": "model",
    },
}


@pytest.fixture(scope="module")
def place(photos, toy_landmarks, tmp_path_factory):
    """A folder with photos, models, an index, and files that are broken."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "photos").symlink_to(photos)
    (folder / "toy").symlink_to(toy_landmarks)
    (folder / "photo.jpg").symlink_to(photos / "class0" / "0.jpg")
    (folder / "strange.yaml").write_text("batchsize: 3")
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        RetrievalNet(TINY_NET, weights="random").save(folder / name)
    model, other = (load_model(folder / name, "cpu") for name in ("model", "other"))
    with open_index(folder / "shop", model) as index:
        index.add(photos / "class0", workers=0)
    images = read_images(photos / "class0")
    white = Whitening.learn([model.describe(images, workers=0).descriptors])
    extract(other, images, folder / "other.parquet", workers=0)
    extract(replace(model, whitening=white), images, folder / "white.parquet", workers=0)
    features, words = folder / "all.features", folder / "words.safetensors"
    extract_features(images, features, HessianAffine(60), workers=0)
    learn_from_files([features], words, words=40)
    change_index(folder / "found", [FeatureFile.open(features)], codebook=words)
    return folder


def state(folder):
    """Every file and when it was changed; searches may leave files of SQLite in the index."""
    found = {path: path.lstat() for path in folder.rglob("*") if "shop" not in path.parts}
    return {path: 0 if path.is_dir() else each.st_mtime_ns for path, each in found.items()}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(f"{name} {rest}".strip(), said, id=f"{name} {rest}".strip())
        for name, mistakes in MISTAKES.items()
        for rest, said in mistakes.items()
    ],
)
def test_it_is_one_line_and_changes_nothing(listwise, place, monkeypatch, command, said):
    monkeypatch.chdir(place)
    monkeypatch.setenv("LISTWISE_TOKEN", "")
    before = state(place)
    code, _, err = listwise(*shlex.split(command))
    assert code == 2
    assert err.startswith("listwise: ")
    assert err.count("\n") == 1
    assert said in err
    assert state(place) == before
