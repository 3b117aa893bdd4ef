import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from programs import Program
from pyarrow import ipc
from test_features import textured

from listwise.data import Box, Images, PhotoFile, read_images
from listwise.errors import InputError
from listwise.local import extract as module
from listwise.local.extract import HessianAffine, extract_features
from listwise.local.features import Features, photo_features
from listwise.local.storage import FeatureFile, FeatureHeader, FeatureWriter, PhotoFeatures

HEADER = FeatureHeader(extractor="demo", dim=16)


def random_features(n: int, dim: int = 16, seed: int = 0) -> Features:
    generator = np.random.default_rng(seed)
    descriptors = generator.normal(size=(n, dim)).astype(np.float32)
    return Features(
        generator.uniform(0, 500, (n, 2)).astype(np.float32),
        generator.uniform(1, 9, n).astype(np.float32),
        generator.normal(size=(n, 2, 2)).astype(np.float32),
        descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True),
    )


@pytest.fixture
def some(tmp_path: Path) -> Images:
    """Five photos, the third of which is broken, the last with a box."""
    paths = []
    for seed in range(5):
        paths.append(tmp_path / f"{seed}.png")
        textured(90, 70, seed).save(paths[-1])
    paths[2].write_bytes(b"broken")
    boxes: list[Box | None] = [None, None, None, None, (10.0, 5.0, 80.0, 65.0)]
    return Images(tuple(map(str, paths)), tuple("abcde"), tuple(boxes))


def test_features_come_back_by_id_and_by_row(tmp_path: Path) -> None:
    photos = [PhotoFeatures(f"p{n}", 100 + n, 50, random_features(n, seed=n)) for n in (3, 0, 7, 1)]
    with FeatureWriter(tmp_path / "f.arrow", HEADER) as writer:
        writer.write(photos[:2])
        writer.write([])
        writer.write(photos[2:])
    assert os.listdir(tmp_path) == ["f.arrow"]
    file = FeatureFile.open(tmp_path / "f.arrow")
    assert len(file) == 4
    assert file.ids == ("p3", "p0", "p7", "p1")
    assert file.counts.tolist() == [3, 0, 7, 1]
    assert file.sizes.tolist() == [[103, 50], [100, 50], [107, 50], [101, 50]]
    assert file.header == HEADER
    for row, (photo, read) in enumerate(zip(photos, file, strict=True)):
        for found in (read, file.get(photo.id), file.read(row)):
            for name in ("points", "scales", "shapes"):
                np.testing.assert_array_equal(getattr(found, name), getattr(photo.features, name))
            assert found.descriptors.dtype == np.float32
            assert found.descriptors.shape == photo.features.descriptors.shape
            # 8 bits over a range of less than 2, and unit rows again.
            np.testing.assert_allclose(found.descriptors, photo.features.descriptors, atol=0.01)
            np.testing.assert_allclose(np.linalg.norm(found.descriptors, axis=1), 1, atol=1e-5)


def test_bytes_a_feature(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path / "f.arrow", FeatureHeader(extractor="demo", dim=128)) as writer:
        writer.write([PhotoFeatures("a", 1, 1, random_features(5000, 128))])
    assert (tmp_path / "f.arrow").stat().st_size < 5000 * 160


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f.arrow"
    with FeatureWriter(path, HEADER) as writer:
        writer.write([PhotoFeatures("a", 1, 1, random_features(2))])
    before = path.read_bytes()
    with pytest.raises(InputError, match="12 dimensions"), FeatureWriter(path, HEADER) as writer:
        writer.write([PhotoFeatures("b", 1, 1, random_features(2, 12))])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["f.arrow"]
    with pytest.raises(InputError, match="cannot write"):
        FeatureWriter(tmp_path / "nowhere" / "f.arrow", HEADER).__enter__()


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    def refuses(message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            FeatureFile.open(path)
        assert "\n" not in str(caught.value)
        assert "f.arrow" in str(caught.value)

    path = tmp_path / "f.arrow"
    refuses("no file")
    for content in (b"", b"something else", b"ARROW1" * 20):
        path.write_bytes(content)
        refuses("damaged")
    table = pa.table({"id": ["a"]})
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    refuses("not one of local features")
    newer = FeatureHeader(extractor="demo", dim=16, format_version=99)
    with FeatureWriter(path, newer) as writer:
        writer.write([PhotoFeatures("a", 1, 1, random_features(2))])
    refuses("newer Listwise")
    with FeatureWriter(path, HEADER) as writer:
        writer.write([PhotoFeatures("a", 1, 1, random_features(2000))])
    path.write_bytes(path.read_bytes()[:-3000])
    refuses("damaged")


def test_features_of_another_extractor_are_refused(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path / "f.arrow", HEADER) as writer:
        writer.write([PhotoFeatures("a", 1, 1, random_features(2))])
    file = FeatureFile.open(tmp_path / "f.arrow")
    file.require("demo")
    with pytest.raises(InputError, match=r"features of demo, not of other: extract them again"):
        file.require("other")
    with pytest.raises(InputError, match="no features of b"):
        file.get("b")


def test_extraction_in_processes_and_in_this_one_are_equal(some: Images, tmp_path: Path) -> None:
    progress: list[int] = []
    here = extract_features(
        some, tmp_path / "a.arrow", HessianAffine(40), workers=0, on_progress=progress.append
    )
    there = extract_features(some, tmp_path / "b.arrow", HessianAffine(40), workers=2)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()
    assert sum(progress) == 5
    assert here.ids == there.ids == ("a", "b", "d", "e")
    assert [Path(error.split(":")[0]).name for error in here.header.unreadable] == ["2.png"]
    assert here.header.extractor == HessianAffine(40).name != HessianAffine(41).name
    expected = photo_features(some.paths[4], some.box(4), 40)
    np.testing.assert_array_equal(here.get("e").points, expected.points)
    np.testing.assert_allclose(here.get("e").descriptors, expected.descriptors, atol=2e-3)
    assert here.sizes[3].tolist() == [90, 70]


def test_ctrl_c_is_not_for_the_processes(
    some: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 1)

    def interrupt(count: int) -> None:
        for worker in multiprocessing.active_children():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)

    out = tmp_path / "f.arrow"
    assert (
        len(extract_features(some, out, HessianAffine(40), workers=1, on_progress=interrupt)) == 4
    )
    assert not list(tmp_path.glob("*.partial"))


class Counting:
    """Makes features of nothing, and stops the run at some photo."""

    name, dim = "counting", 16

    def __init__(self, stop: str | None = None) -> None:
        self.stop, self.seen = stop, list[str]()

    def __call__(self, file: PhotoFile) -> Features:
        if self.stop is not None and file.path.endswith(self.stop):
            raise KeyboardInterrupt
        self.seen.append(Path(file.path).name)
        return random_features(3, seed=len(file.path))


def test_an_interrupted_run_goes_on(
    some: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 2)
    good = some.subset([0, 1, 3, 4])
    out = tmp_path / "f.arrow"
    with pytest.raises(KeyboardInterrupt):
        extract_features(good, out, Counting(stop="4.png"), workers=0)
    assert not out.exists()
    notes: list[str] = []
    progress: list[int] = []
    second = Counting()
    file = extract_features(
        good, out, second, workers=0, on_note=notes.append, on_progress=progress.append
    )
    assert second.seen == ["3.png", "4.png"]  # the part that was not whole
    assert notes == ["resuming: 2 of 4 photos are already done"]
    assert sum(progress) == 4
    assert file.ids == ("a", "b", "d", "e")

    with pytest.raises(KeyboardInterrupt):
        extract_features(good, out, Counting(stop="4.png"), workers=0)
    third = Counting()
    third.name = "another"
    extract_features(good, out, third, workers=0, on_note=notes.append)
    assert "discarding it" in notes[-1]
    assert len(third.seen) == 4


def test_mistakes_are_one_line(some: Images, tmp_path: Path) -> None:
    out = tmp_path / "f.arrow"
    with pytest.raises(InputError, match="no photos"):
        extract_features(some.subset([]), out)
    with pytest.raises(InputError, match=r"2\.png"):
        extract_features(some, out, Counting(), strict=True, workers=0)
    broken = some.subset([2])
    with pytest.raises(InputError, match="none of the 1 photos can be read"):
        extract_features(broken, out, workers=0)
    out.write_text("my notes")
    with pytest.raises(InputError, match="not a file of local features"):
        extract_features(some, out, workers=0)
    assert out.read_text() == "my notes"


def extract_in_small_parts(photos: Path, out: Path) -> None:
    module.PART = 2
    extract_features(
        read_images(photos),
        out,
        HessianAffine(30),
        workers=0,
        on_progress=lambda count: print("done", flush=True),
    )


def test_a_killed_run_is_finished_by_the_next(tmp_path: Path) -> None:
    folder, out = tmp_path / "photos", tmp_path / "f.arrow"
    folder.mkdir()
    for seed in range(12):
        textured(200, 150, seed).save(folder / f"{seed:02d}.png")
    process = Program(extract_in_small_parts, folder, out)
    for _ in range(5):
        assert process.stdout.readline() == "done\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    parts = sorted((tmp_path / "f.arrow.partial").glob("*.arrow"))
    assert parts
    again = Program(extract_in_small_parts, folder, out)
    assert again.wait(60) == 0, again.errors()
    assert not (tmp_path / "f.arrow.partial").exists()
    file = FeatureFile.open(out)
    assert len(file) == 12
    expected = photo_features(folder / "11.png", count=30)
    np.testing.assert_array_equal(file.get("11.png").points, expected.points)


def extract_and_die_at_the_end(photos: Path, out: Path) -> None:
    module.PART = 1
    FeatureWriter.copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    extract_features(read_images(photos), out, HessianAffine(30), workers=0)


def test_a_run_killed_while_parts_are_joined_leaves_nothing_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 1)
    folder, out = tmp_path / "photos", tmp_path / "f.arrow"
    folder.mkdir()
    for number in (0, 1):
        textured(200, 150, number).save(folder / f"{number}.png")
    assert Program(extract_and_die_at_the_end, folder, out).wait(60) == -signal.SIGKILL
    assert len(extract_features(read_images(folder), out, HessianAffine(30), workers=0)) == 2
    assert sorted(os.listdir(tmp_path)) == ["f.arrow", "photos"]


def test_a_file_of_format_version_1_is_read() -> None:
    file = FeatureFile.open(Path(__file__).with_name("version-1.arrow"))
    assert file.header.format_version == 1
    assert (file.header.extractor, file.header.unreadable) == ("demo", ("c.jpg: broken",))
    assert file.ids == ("a.jpg", "b.jpg")
    assert file.sizes.tolist() == [[640, 480], [30, 40]]
    assert file.counts.tolist() == [3, 0]
    found = file.get("a.jpg")
    np.testing.assert_array_equal(found.points, [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(found.scales, [1, 2, 3])
    np.testing.assert_allclose(found.descriptors, np.eye(8)[:3], atol=0.01)
