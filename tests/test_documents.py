"""The code in README and docs runs, and links lead to pages and headings that exist."""

import itertools
import pickle
import re
import shlex
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import yaml
from command_line import all_commands, main, parse, typed_commands

from listwise.data import read_labelled
from listwise.settings import make_config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OF_THE_PROJECT = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")]
# These have tests of their own.
OTHERS = ("data.md", "export.md", "training.md", "tutorial-photos.md")
ALONE = [path for path in DOCUMENTS if path.name not in OTHERS and path.parent.name != "api"]
# A training run of seconds in place of minutes.
SMALL = {"backbone": "test_resnet.r160_in1k", "weights": "random", "updates": 2, "workers": 0}
SMALL["device"] = "cpu"
QUICK = {**SMALL, "batch_size": 16, "crops": {"size": 64}}
OF_OTHERS = {"--nnodes", "--epochs", "--batch", "--torch-backend"}  # of torchrun, uv and others
OPTIONS = {
    option
    for command in all_commands().values()
    for parameter in command.params
    for option in (*parameter.opts, *parameter.secondary_opts)
}


def blocks(document, *languages):
    """The code blocks of a page in these languages, each with its language."""
    text = document.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(language, code) for language, code in found if language in languages]


def code_of(name, language):
    """The code blocks of a guide in this language."""
    return [code for _, code in blocks(DOCS / name, language)]


def make_quick(code):
    """The code with short training runs and a small network."""
    small = f'RetrievalNet("{SMALL["backbone"]}", projection='
    code = code.replace('RetrievalNet("resnet18", projection=', small)
    code = re.sub(r'(listwise\.train\("photos"), batch_size=\d+', r"\1", code)
    return code.replace('listwise.train("photos"', 'listwise.train("photos", **QUICK')


@pytest.mark.parametrize("document", ALONE, ids=lambda path: path.name)
def test_python_blocks_run(document, photos, tmp_path, monkeypatch):
    if document.name in ("README.md", "tutorial-training.md"):
        for kind in range(8):
            (tmp_path / "photos" / f"class{kind}").mkdir(parents=True)
            for number in range(3):
                name = Path(f"class{kind}", f"{number}.jpg")
                (tmp_path / "photos" / name).symlink_to(photos / name)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # the networks of some documents have random weights
    names = {"__name__": document.stem, "QUICK": QUICK}
    for _, code in blocks(document, "python"):
        exec(compile(make_quick(code), document.name, "exec"), names)


def write_toy(folder, photos):
    """The files of the toy landmarks, with small photos: three classes are the benchmark."""
    (folder / "jpg").mkdir(parents=True)
    rows, queries, judged = ["path,label,split"], [], []
    names = [f"building{kind:03}_{number:02}" for kind in range(8) for number in range(3)]
    for name in names:
        kind, number = int(name[8:11]), int(name[12:])
        shutil.copy(photos / f"class{kind}" / f"{number}.jpg", folder / "jpg" / f"{name}.jpg")
        if kind >= 3:
            rows.append(f"jpg/{name}.jpg,building{kind:03},{'val' if kind < 5 else 'train'}")
        elif number == 0:
            queries.append(name)
            judged.append({"bbx": [0, 0, 60, 50], "easy": [2 * kind], "hard": [2 * kind + 1]})
    database = [name for name in names[:9] if name not in queries]
    truth = {"imlist": database, "qimlist": queries, "gnd": [{**one, "junk": []} for one in judged]}
    (folder / "gnd_toylandmarks.pkl").write_bytes(pickle.dumps(truth))
    (folder / "train.csv").write_text("\n".join(rows) + "\n")


def test_the_tutorial_on_photos(photos, tmp_path, monkeypatch):
    """Its code and its commands, on small photos and with a short training run."""
    monkeypatch.chdir(tmp_path)
    commands = []
    for language, code in blocks(DOCS / "tutorial-photos.md", "python", "sh"):
        if "make_toy_landmarks" in code:
            write_toy(tmp_path / "toy", photos)
        elif language == "python":
            exec(compile(code, "tutorial-photos.md", "exec"), {})
        for command in code.replace("\\\n", "").splitlines() if language == "sh" else ():
            words = shlex.split(command, comments=True)
            if words[1] == "serve":  # runs until it is stopped; has tests of its own
                continue
            if words[1] == "train":
                small = SMALL | {"batch_size": 8, "crops_size": 64}
                flags = [(f"--{name.replace('_', '-')}", str(small[name])) for name in small]
                words = [*words[:3], *itertools.chain(*flags)]
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as left:
                main()
            assert not left.value.code, command
            commands.append(words[1])
    assert commands == ["index", "search", "search", "evaluate", "train", "evaluate", "index"]
    assert Path("found.png").exists()
    assert "Medium" in Path("report.html").read_text(encoding="utf-8")


def test_the_data_guide(photos, tmp_path, monkeypatch):
    table, levels = code_of("data.md", "csv")
    (tmp_path / "labels.csv").write_text(table)
    images = read_labelled(tmp_path / "labels.csv")
    assert images.class_names == ("eiffel_tower", "louvre")
    assert images.boxes == (None, (120, 40, 560, 700), None, None)
    (tmp_path / "levels.csv").write_text(levels)
    assert read_labelled(tmp_path / "levels.csv").class_names == ("bird/sparrow", "bird/wren")
    listed = [block for block in code_of("data.md", "") if "\t" in block]
    (tmp_path / "list.txt").write_text(listed[0])
    assert read_labelled(tmp_path / "list.txt").class_names == ("eiffel_tower", "louvre")
    monkeypatch.chdir(photos.parent)
    names: dict[str, object] = {}
    for code in code_of("data.md", "python"):
        exec(code, names)


def test_the_training_guide(photos, tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    limited, read, train, own = code_of("training.md", "python")
    assert "minutes=10" in limited  # takes minutes
    quick = '"updates": 20'
    assert quick in train
    names = {"__name__": "guide"}
    exec(train.replace(f"{{{quick}}}", repr(SMALL)), names)
    assert "at update" in capsys.readouterr().out
    (tmp_path / "runs" / "photos").symlink_to(tmp_path / "runs" / "from-python")
    exec(read, {})
    assert capsys.readouterr().out.startswith("0 ")
    assert quick in own
    exec(own.replace(quick, repr(SMALL)[1:-1]), names)
    assert names["run"].result.updates == 2
    assert names["plan"].config.loss == "custom:guide.pairwise_loss"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_options_and_settings_exist(document):
    variables = {}
    for _, code in blocks(document, "sh"):
        variables |= re.findall(r'^([A-Z]+)="([^"]*)"', code, re.MULTILINE)
        for name, value in variables.items():
            code = code.replace(f"${name}", " ".join(value.split()))
        for words in typed_commands(code):
            parse(words)
    text = document.read_text(encoding="utf-8")
    assert {*re.findall(r"`(--[a-z][a-z0-9-]*)[` ]", text)} <= OPTIONS | OF_OTHERS
    for _, code in blocks(document, "yaml"):
        make_config(yaml.safe_load(code), document.name)


def anchors(document):
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        yield re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@pytest.mark.parametrize("document", [*DOCUMENTS, *OF_THE_PROJECT], ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        page = (document.parent / name).resolve() if name else document
        assert page.exists(), target
        if document.parent != ROOT:
            assert page.is_relative_to(DOCS), f"{target} is not on the site"
        if anchor:
            assert anchor in set(anchors(page)), target
