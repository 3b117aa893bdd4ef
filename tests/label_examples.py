"""Photos whose geometry is known: several views of the same drawn things."""

import csv

import numpy as np
import pytest
from index_examples import texture
from PIL import Image

FEW = {"features": 200}  # enough for drawn things, and much faster than the default


def view(thing: int, number: int, size: tuple[int, int] = (150, 110)) -> Image.Image:
    """A view of a thing: a part of its texture, stretched a little, with noise."""
    whole = texture(1000 + thing, (400, 300))
    generator = np.random.default_rng([thing, number])
    left, top = generator.integers(0, 60, 2)
    width, height = generator.integers(290, 340), generator.integers(210, 240)
    part = whole.crop((left, top, left + width, top + height)).resize(size)
    noise = generator.normal(0, 6, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(part) + noise, 0, 255).astype(np.uint8))


def write_table(path, rows, columns=("path", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def read_table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def things(tmp_path_factory):
    """A folder with photos THING-NUMBER.jpg: 6 things, 6 views each; leave it as it is."""
    folder = tmp_path_factory.mktemp("things")
    for thing in range(6):
        for number in range(6):
            view(thing, number).save(folder / f"{thing}-{number}.jpg", quality=92)
    return folder


@pytest.fixture(scope="session")
def mixed(things, tmp_path_factory):
    """A labelled table: wrong labels, a class of two things, one thing in two classes.

    `tower` has 5 views of thing 0 and single views of things 4 and 5. `square` has 5 views of thing
    1 and 3 of thing 2. `east` and `west` show thing 3, and `lost` is a file that cannot be read and
    two photos of different things.
    """
    folder = tmp_path_factory.mktemp("mixed")
    rows = [(things / f"0-{i}.jpg", "tower", "train") for i in range(5)]
    rows += [(things / "4-0.jpg", "tower", "train"), (things / "5-0.jpg", "tower", "train")]
    rows += [(things / f"1-{i}.jpg", "square", "train") for i in range(5)]
    rows += [(things / f"2-{i}.jpg", "square", "train") for i in range(3)]
    rows += [(things / f"3-{i}.jpg", "east", "train") for i in range(3)]
    rows += [(things / f"3-{i}.jpg", "west", "val") for i in range(3, 6)]
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a photo")
    rows += [("broken.jpg", "lost", "val"), (things / "4-1.jpg", "lost", "val")]
    rows += [(things / "5-1.jpg", "lost", "val")]
    return write_table(folder / "mixed.csv", rows, ("path", "label", "split"))
