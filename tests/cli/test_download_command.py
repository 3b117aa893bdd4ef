import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from listwise.cli.download import EXAMPLES, download
from listwise.data.catalog import ENTRIES, RemoteFile
from listwise.errors import InputError

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=EXAMPLES)(download)


def run(*arguments: str):
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server of two files of Stanford Online Products."""
    public = tmp_path / "public"
    public.mkdir()
    for split, first in (("train", 1), ("test", 3)):
        rows = [f"{i} {first + i // 2} 1 bicycle_final/{split}{i}.JPG" for i in range(4)]
        (public / f"Ebay_{split}.txt").write_text("\n".join(["image_id ...", *rows]) + "\n")
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(public)))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def products(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(
        RemoteFile(f"{address}/{name}", name) for name in ("Ebay_train.txt", "Ebay_test.txt")
    )
    entry = replace(ENTRIES["SOP"], files=files, gigabytes=0.0, counts={"train": 4, "test": 4})
    monkeypatch.setitem(ENTRIES, "SOP", entry)


@pytest.mark.usefixtures("products")
def test_fetches_says_the_terms_and_checks(tmp_path: Path) -> None:
    folder = tmp_path / "sop"
    result = run("sop", "--to", str(folder))
    lines = result.output.splitlines()
    assert lines[0].startswith("Stanford Online Products: product photos from eBay")
    assert "downloads.json stores the SHA-256 of the downloaded file" in result.output
    assert "note: SOP: 8 of 8 photos are missing" in result.output
    assert lines[-1] == f"SOP is in {folder}"
    assert (folder / "Ebay_test.txt").is_file()


@pytest.mark.usefixtures("products")
def test_a_folder_in_place_is_recognized(tmp_path: Path) -> None:
    run("SOP", "--to", str(tmp_path / "sop"))
    for split in ("train", "test"):
        for i in range(4):
            photo = tmp_path / "sop" / "bicycle_final" / f"{split}{i}.JPG"
            photo.parent.mkdir(exist_ok=True)
            photo.touch()
    (tmp_path / "sop" / "downloads.json").unlink()  # as if it had come in another way
    result = run("SOP", "--to", str(tmp_path / "sop"), "--json")
    answer = json.loads(result.stdout)
    assert answer == {"name": "SOP", "folder": str(tmp_path / "sop"), "problems": []}
    assert not (tmp_path / "sop" / "downloads.json").exists()


@pytest.mark.usefixtures("products")
def test_another_set_in_the_folder_is_refused(tmp_path: Path) -> None:
    run("SOP", "--to", str(tmp_path / "sop"))
    with pytest.raises(InputError, match="contains SOP, not CUB-200"):
        run("CUB-200", "--to", str(tmp_path / "sop"))


def test_list_names_every_set() -> None:
    answer = json.loads(run("--list", "--json").stdout)
    assert [entry["name"] for entry in answer] == list(ENTRIES)
    table = run("--list").output
    assert all(name in table for name in ("SOP", "In-shop", "by hand"))


def test_mistakes_are_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="give the name of a data set: choose one of roxford5k"):
        run()
    with pytest.raises(InputError, match="unknown data set 'birds'"):
        run("birds")
    with pytest.raises(InputError, match="Cars-196: its original server is offline"):
        run("Cars-196")
    assert list(tmp_path.iterdir()) == []
