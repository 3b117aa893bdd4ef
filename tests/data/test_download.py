import hashlib
import io
import json
import shutil
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from listwise.data.catalog import ENTRIES, DataSetEntry, RemoteFile
from listwise.data.catalog import download as module
from listwise.data.catalog.download import LOCK_FILE, download, fetch, unpack
from listwise.errors import InputError


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.001)


@dataclass
class Server:
    """Files over HTTP, with the faults that real servers have."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes sent, of each coming answer
    answers: list[int] = field(default_factory=list)  # status of each coming answer
    tag: str = '"1"'
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range")
            state.asked.append((name, wanted))
            if state.answers:
                self.send_error(state.answers.pop(0))
                return
            if name not in state.files:
                self.send_error(404)
                return
            content, start = state.files[name], 0
            if self.headers.get("If-Range", state.tag) != state.tag:
                wanted = None
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                span = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.send_header("Content-Range", span)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("ETag", state.tag)
            self.end_headers()
            rest = content[start:]
            if state.break_after:
                rest = rest[: state.break_after.pop(0)]
                self.close_connection = True
            self.wfile.write(rest)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


def content(size: int = 100_000) -> bytes:
    return hashlib.shake_128(b"seed").digest(size)


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def entry(server: Server, *files: RemoteFile) -> DataSetEntry:
    """A data set of these files, but from the server."""
    here = []
    for file in files:
        beside = file.checksum_url and f"{server.address}/{file.checksum_url.rpartition('/')[2]}"
        url = f"{server.address}/{file.name}"
        here.append(replace(file, url=url, checksum_url=beside, saved_as=file.name))
    return replace(ENTRIES["roxford5k"], name="test", files=tuple(here), gigabytes=0.0)


# --- one file


def get(server: Server, folder: Path, **options) -> bytes:
    fetch(f"{server.address}/a.bin", folder / "a.bin", **options)
    return (folder / "a.bin").read_bytes()


def test_a_broken_connection_resumes_where_it_was(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = content()
    server.break_after = [30_000, 1, 50_000]
    seen = []
    assert get(server, tmp_path, progress=lambda *step: seen.append(step)) == content()
    wanted = [None, "bytes=30000-", "bytes=30001-", "bytes=80001-"]
    assert [asked for _, asked in server.asked] == wanted
    assert seen[-1] == ("downloading a.bin", 100_000, 100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("changed", [False, True])
def test_a_second_run_resumes_unless_the_file_has_changed(
    changed: bool, server: Server, tmp_path: Path
) -> None:
    server.files["a.bin"] = content()
    server.break_after = [40_000, *[0] * module.RETRIES, 0]
    with pytest.raises(InputError, match="broke off"):
        get(server, tmp_path)
    server.asked.clear()
    if changed:
        server.files["a.bin"], server.tag = content()[::-1], '"2"'
    assert get(server, tmp_path) == server.files["a.bin"]
    assert server.asked == [("a.bin", "bytes=40000-")]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = content()
    server.ranges = False
    server.break_after = [30_000]
    assert get(server, tmp_path) == content()


@pytest.mark.parametrize("size", [100_000, 200_000])
def test_a_complete_part_is_used_and_a_longer_one_is_not(
    size: int, server: Server, tmp_path: Path
) -> None:
    server.files["a.bin"] = content()
    (tmp_path / "a.bin.part").write_bytes(content(size))
    assert get(server, tmp_path) == content()


def test_passing_faults_are_tried_again(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = content()
    server.answers = [503, 429]
    assert get(server, tmp_path) == content()
    assert len(server.asked) == 3
    server.answers = [500] * 10
    with pytest.raises(InputError, match="answers 500"):
        get(server, tmp_path)
    assert len(server.asked) == 3 + 1 + module.RETRIES


def test_a_missing_file_is_reported_at_once(server: Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it answers 404; .* save it as .*a\.bin"):
        get(server, tmp_path)
    assert len(server.asked) == 1


def test_offline_is_one_line(tmp_path: Path, monkeypatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InputError, match=rf"cannot reach 127.0.0.1:{port}: .*refused") as caught:
        fetch(f"http://127.0.0.1:{port}/a", tmp_path / "a")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(module, "PAUSE", 60.0)  # it is not tried again
    with pytest.raises(InputError, match=r"name\.invalid: its name cannot be looked up"):
        fetch("http://name.invalid/a", tmp_path / "a")


def test_a_full_disk_is_said_before(server: Server, tmp_path: Path, monkeypatch) -> None:
    server.files["a.tgz"] = tar({"a": content()})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=150_000))
    with pytest.raises(InputError, match=r"a\.tgz needs about 0\.0 GB .* \(`to`\)"):
        download(entry(server, RemoteFile("http://x/a.tgz", unpack=True)), tmp_path)
    big = replace(entry(server, RemoteFile("http://x/a.tgz", unpack=True)), gigabytes=500.0)
    with pytest.raises(InputError, match=r"test needs about 500\.0 GB"):
        download(big, tmp_path)


# --- a data set


def test_files_land_where_they_belong(server: Server, tmp_path: Path) -> None:
    server.files |= {
        "gnd.pkl": b"judgments",
        "photos.tgz": tar({"paris/defense/a.jpg": b"A", "paris/louvre/b.jpg": b"B"}),
        "more.zip": zipped({"inner/c.txt": b"C", "inner/": b""}),
    }
    files = (
        RemoteFile("http://elsewhere.org/data/gnd.pkl", "gnd.pkl"),
        RemoteFile("http://elsewhere.org/photos.tgz", "jpg", unpack=True, flat=True),
        RemoteFile("http://elsewhere.org/x?id=7", unpack=True, saved_as="more.zip"),
    )
    unverified = download(entry(server, *files), tmp_path / "set")
    found = {
        str(path.relative_to(tmp_path / "set")): path.read_bytes()
        for path in (tmp_path / "set").rglob("*")
        if path.is_file() and path.name != LOCK_FILE
    }
    assert found == {
        "gnd.pkl": b"judgments",
        "jpg/a.jpg": b"A",
        "jpg/b.jpg": b"B",
        "inner/c.txt": b"C",
    }
    assert unverified == ["gnd.pkl", "photos.tgz", "more.zip"]
    lock = json.loads((tmp_path / "set" / LOCK_FILE).read_text())
    photos = server.files["photos.tgz"]
    assert lock["photos.tgz"]["sha256"] == hashlib.sha256(photos).hexdigest()
    assert lock["photos.tgz"]["bytes"] == len(photos)
    server.asked.clear()
    download(entry(server, *files), tmp_path / "set")
    assert server.asked == []


def test_a_second_run_fetches_only_what_is_missing(server: Server, tmp_path: Path) -> None:
    files = [RemoteFile(f"http://x/{name}", name) for name in ("a", "b")]
    server.files["a"] = b"first"
    with pytest.raises(InputError, match="404"):
        download(entry(server, *files), tmp_path)
    server.files["b"] = b"second"
    server.asked.clear()
    download(entry(server, *files), tmp_path)
    assert server.asked == [("b", None)]


@pytest.mark.parametrize("kind", ["md5", "sha256", "beside the file"])
def test_checksums(kind: str, server: Server, tmp_path: Path) -> None:
    """A wrong one, then the right one; also published in a file of its own."""
    server.files["a.bin"] = content()
    file = RemoteFile("http://x/a.bin", "sub/a.bin", checksum=f"{kind}:{'0' * 32}")
    if kind == "beside the file":
        kind, file = "md5", replace(file, checksum=None, checksum_url="http://x/md5sum/md5.a.txt")
        server.files["md5.a.txt"] = b"0" * 32 + b"  a.bin\n"
    with pytest.raises(InputError, match=rf"a\.bin from .* is damaged or has changed \({kind} "):
        download(entry(server, file), tmp_path)
    assert list(tmp_path.rglob("*.bin*")) == []
    right = hashlib.new(kind, content()).hexdigest()
    server.files["md5.a.txt"] = f"{right}  a.bin\n".encode()
    known = file if file.checksum is None else replace(file, checksum=f"{kind}:{right}")
    assert download(entry(server, known), tmp_path) == []
    assert (tmp_path / "sub" / "a.bin").read_bytes() == content()
    assert not list(tmp_path.glob(".md5*"))


def test_an_archive_downloaded_by_hand_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "photos.tgz").write_bytes(tar({"a.jpg": b"A"}))
    file = RemoteFile("http://x/photos.tgz", "jpg", unpack=True, flat=True)
    download(entry(server, file), tmp_path)
    assert server.asked == []
    assert (tmp_path / "jpg" / "a.jpg").read_bytes() == b"A"
    assert not (tmp_path / "photos.tgz").exists()


# --- unpacking


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("inside")
        info.type, info.linkname = kind, target
        archive.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "archive",
    [
        tar({"../out.txt": b"x"}),
        tar({"a/../../out.txt": b"x"}),
        tar({"/tmp/listwise-out.txt": b"x"}),
        zipped({"../out.txt": b"x"}),
        zipped({"/tmp/listwise-out.txt": b"x"}),
        link("/etc"),
        link("../.."),
        link("/etc/passwd", tarfile.LNKTYPE),
        link("", tarfile.FIFOTYPE),
    ],
    ids=lambda archive: "archive",  # by number: bytes would be names that hold the time
)
def test_nothing_is_written_outside(archive: bytes, flat: bool, tmp_path: Path) -> None:
    path, folder = tmp_path / "evil", tmp_path / "in" / "here"
    path.write_bytes(archive)
    with suppress(InputError):  # or it is written inside
        unpack(path, folder, flat=flat)
    assert not Path("/tmp/listwise-out.txt").exists()
    outside = [p for p in tmp_path.rglob("*") if not p.is_dir() and folder not in p.parents]
    assert outside == [path]
    assert all(p.is_file() and not p.is_symlink() for p in folder.rglob("*") if not p.is_dir())


@pytest.mark.parametrize("make", [tar, zipped])
@pytest.mark.parametrize("damage", ["cut", "flipped", "nothing"])
def test_damaged_archives(make, damage: str, tmp_path: Path) -> None:
    whole = bytearray(make({"a": content()}))
    if damage == "flipped":
        for place in range(2_000, 90_000, 7_000):
            whole[place] ^= 0xFF
    path = tmp_path / "a.tgz"
    path.write_bytes({"cut": whole[:50_000], "flipped": whole, "nothing": b"nothing"}[damage])
    with pytest.raises(InputError, match="is damaged"):
        unpack(path, tmp_path / "out")
