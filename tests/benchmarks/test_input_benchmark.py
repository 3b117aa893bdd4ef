from pathlib import Path

import pytest
from PIL import Image

from listwise.benchmarks import input as benchmark
from listwise.errors import InputError


def test_each_step_and_number_of_workers_has_a_row():
    rows = list(benchmark.run(photos=3, size=32, workers=(0, 2)))
    assert [(row.step, row.workers) for row in rows] == [
        ("decode", 1),
        ("crop and color", 1),
        ("decode and augment", 0),
        ("decode and augment", 2),
    ]
    assert all(row.per_second > 0 for row in rows[2:])
    assert rows[0].core_ms > 0
    assert rows[1].core_ms > 0


def test_photos_are_as_detailed_as_real_ones(tmp_path):
    paths = benchmark.make_photos(tmp_path, 18, 1152, 864)
    assert len(set(paths)) == 18
    with Image.open(paths[17]) as photo:
        assert photo.size == (1152, 864)
        assert photo.format == "JPEG"
    sizes = [Path(path).stat().st_size for path in paths[:4]]
    assert min(sizes) > 250_000
    assert max(sizes) < 350_000


def test_real_photos_may_be_given(photos):
    rows = list(benchmark.run(size=16, workers=(0,), folder=photos))
    assert rows[-1].per_second > 0


def test_a_gpu_that_cannot_decode_is_said_to(photos):
    *_, row = benchmark.run(size=16, workers=(0,), folder=photos, device="cuda:99")
    assert row.step == "decode on the GPU (nvJPEG)"
    assert row.skipped
    assert "\n" not in row.skipped
    assert row.per_second is None


def test_no_photos():
    with pytest.raises(InputError, match="1 or more"):
        list(benchmark.run(photos=0))
