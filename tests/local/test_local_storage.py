import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from programs import Program
from test_features import textured

from listwise.data import Box, Images, read_images
from listwise.errors import InputError
from listwise.local.extract import HessianAffine, extract_features
from listwise.local.features import Features, photo_features
from listwise.local.storage import FeatureFile, FeatureHeader, FeatureWriter, store_exactly

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


def write(
    path: Path, *photos: tuple[str, int, int, Features], header: FeatureHeader = HEADER
) -> None:
    with FeatureWriter(path, header) as writer:
        for row, photo in enumerate(photos):
            writer.write(row, store_exactly(*photo))


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
    photos = [(f"p{n}", 100 + n, 50, random_features(n, seed=n)) for n in (3, 0, 7, 1)]
    write(tmp_path / "f", *photos)
    assert os.listdir(tmp_path) == ["f"]
    file = FeatureFile.open(tmp_path / "f")
    assert len(file) == 4
    assert file.ids == ("p3", "p0", "p7", "p1")
    assert file.counts.tolist() == [3, 0, 7, 1]
    assert file.sizes.tolist() == [[103, 50], [100, 50], [107, 50], [101, 50]]
    assert file.header == HEADER
    for row, (photo, read) in enumerate(zip(photos, file, strict=True)):
        for found in (read, file.get(photo[0]), file.read(row)):
            for name in ("points", "scales", "shapes"):
                np.testing.assert_array_equal(getattr(found, name), getattr(photo[3], name))
            assert found.descriptors.dtype == np.float32
            assert found.descriptors.shape == photo[3].descriptors.shape
            # 8 bits over a range of less than 2, and unit rows again.
            np.testing.assert_allclose(found.descriptors, photo[3].descriptors, atol=0.01)
            np.testing.assert_allclose(np.linalg.norm(found.descriptors, axis=1), 1, atol=1e-5)


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, ("a", 1, 1, random_features(2)))
    before = path.read_bytes()
    with suppress(ZeroDivisionError), FeatureWriter(path, HEADER) as writer:
        writer.write(0, store_exactly("b", 1, 1, random_features(2)))
        raise ZeroDivisionError
    assert path.read_bytes() == before
    with FeatureWriter(path, HEADER) as writer:
        assert writer.missing(2) == [1]
        with pytest.raises(InputError, match="another process is writing it"):
            FeatureWriter(path, HEADER).__enter__()
        writer.write(1, "c.jpg: broken")
    assert os.listdir(tmp_path) == ["f"]
    file = FeatureFile.open(path)
    assert (file.ids, file.header.unreadable) == (("b",), ("c.jpg: broken",))
    with pytest.raises(InputError, match="cannot write"):
        FeatureWriter(tmp_path / "nowhere" / "f", HEADER).__enter__()


def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    def refuses(message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            FeatureFile.open(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)

    path = tmp_path / "f"
    refuses("no file")
    for content in (b"", b"something else", b"SQLite format 3\0" * 20):
        path.write_bytes(content)
        refuses("damaged")
    path.unlink()
    newer = FeatureHeader(extractor="demo", dim=16, format_version=99)
    write(path, ("a", 1, 1, random_features(2)), header=newer)
    refuses("newer Listwise")
    write(path, ("a", 1, 1, random_features(2)))
    with pytest.raises(InputError, match=r"features of demo, not of other: extract them again"):
        FeatureFile.open(path).require("other")
    with pytest.raises(InputError, match="no features of b"):
        FeatureFile.open(path).get("b")


def test_extraction_in_processes_and_in_this_one_are_equal(some: Images, tmp_path: Path) -> None:
    progress: list[int] = []
    here = extract_features(
        some, tmp_path / "a.features", HessianAffine(40), workers=0, on_progress=progress.append
    )
    there = extract_features(some, tmp_path / "b.features", HessianAffine(40), workers=2)
    assert (tmp_path / "a.features").read_bytes() == (tmp_path / "b.features").read_bytes()
    assert sum(progress) == 5
    assert here.ids == there.ids == ("a", "b", "d", "e")
    assert [Path(error.split(":")[0]).name for error in here.header.unreadable] == ["2.png"]
    assert here.header.extractor == HessianAffine(40).name != HessianAffine(41).name
    expected = photo_features(some.paths[4], some.box(4), 40)
    np.testing.assert_array_equal(here.get("e").points, expected.points)
    np.testing.assert_allclose(here.get("e").descriptors, expected.descriptors, atol=2e-3)
    assert here.sizes[3].tolist() == [90, 70]


def test_ctrl_c_is_not_for_the_processes(some: Images, tmp_path: Path) -> None:
    def interrupt(count: int) -> None:
        for worker in multiprocessing.active_children():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)

    out = tmp_path / "f"
    assert (
        len(extract_features(some, out, HessianAffine(40), workers=1, on_progress=interrupt)) == 4
    )
    assert not list(tmp_path.glob("*.partial"))


def test_mistakes_are_one_line(some: Images, tmp_path: Path) -> None:
    out = tmp_path / "f"
    with pytest.raises(InputError, match="no photos"):
        extract_features(some.subset([]), out)
    with pytest.raises(InputError, match=r"2\.png"):
        extract_features(some, out, HessianAffine(40), strict=True, workers=0)
    broken = some.subset([2])
    with pytest.raises(InputError, match="none of the 1 photos can be read"):
        extract_features(broken, out, workers=0)
    out.write_text("my notes")
    with pytest.raises(InputError, match="not a file of local features"):
        extract_features(some, out, workers=0)
    assert out.read_text() == "my notes"


def extract(photos: Path, out: Path) -> None:
    extract_features(
        read_images(photos),
        out,
        HessianAffine(30),
        workers=0,
        on_progress=lambda count: print("done", flush=True),
    )


@pytest.mark.parametrize("same", [True, False])
def test_a_killed_run_is_finished_by_the_next(tmp_path: Path, same: bool) -> None:
    folder, out = tmp_path / "photos", tmp_path / "f"
    folder.mkdir()
    for seed in range(80):
        textured(100, 80, seed).save(folder / f"{seed:02d}.png")
    process = Program(extract, folder, out)
    for _ in range(70):
        assert process.stdout.readline() == "done\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    notes: list[str] = []
    progress: list[int] = []
    extractor = HessianAffine(30 if same else 31)
    file = extract_features(
        read_images(folder),
        out,
        extractor,
        workers=0,
        on_note=notes.append,
        on_progress=progress.append,
    )
    assert len(notes) == 1
    assert ("64 of 80 photos are already done" if same else "discarding it") in notes[0]
    assert progress == [64, *[1] * 16] if same else [0, *[1] * 80]
    assert sorted(os.listdir(tmp_path)) == ["f", "photos"]
    assert len(file) == 80
    expected = photo_features(folder / "11.png", count=extractor.count)
    np.testing.assert_array_equal(file.get("11.png").points, expected.points)
