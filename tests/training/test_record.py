import time

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from listwise.data import read_labelled, sheets
from listwise.errors import InputError
from listwise.training.run.record import (
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    Record,
    ranked_list_picture,
    read_metrics,
)


def board(run):
    accumulator = EventAccumulator(str(run / TENSORBOARD_FOLDER), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_figures_are_written_at_once_and_read_back(tmp_path):
    record = Record(tmp_path)
    record.write(0, validation_map=0.25)
    record.write(1, loss=0.5, learning_rate=1e-4)
    assert read_metrics(tmp_path) == [
        {"update": 0, "validation_map": 0.25},
        {"update": 1, "loss": 0.5, "learning_rate": 1e-4},
    ]
    record.close()


def test_going_on_forgets_what_came_later(tmp_path):
    record = Record(tmp_path)
    for update in range(6):
        record.write(update, loss=update / 8)
    record.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"update": 6, "lo')  # killed while it wrote
    assert [line["update"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]

    time.sleep(1)  # TensorBoard orders a run's files by the second they were begun in
    record = Record(tmp_path, update=3)
    record.write(4, loss=9.0)
    record.close()
    losses = [(line["update"], line["loss"]) for line in read_metrics(tmp_path)]
    assert losses == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375), (4, 9.0)]
    assert [(e.step, e.value) for e in board(tmp_path).Scalars("loss")] == losses


def test_starting_anew_forgets_everything(tmp_path):
    for value in (0.5, 0.75):
        record = Record(tmp_path)
        record.write(0, validation_map=value)
        record.write(1, loss=value)
        record.close()
        time.sleep(1)
    assert [line.get("loss") for line in read_metrics(tmp_path)] == [None, 0.75]
    assert [(e.step, e.value) for e in board(tmp_path).Scalars("validation_map")] == [(0, 0.75)]


def test_flushed_figures_survive_a_kill(tmp_path):
    record = Record(tmp_path)
    record.write(1, loss=0.5)
    record.flush()
    assert [e.value for e in board(tmp_path).Scalars("loss")] == [0.5]
    record.close()


def test_pictures_reach_tensorboard(tmp_path):
    record = Record(tmp_path)
    record.picture(2, "ranked lists", Image.new("RGB", (30, 20), "red"))
    record.close()
    (event,) = board(tmp_path).Images("ranked lists")
    assert (event.step, event.width, event.height) == (2, 30, 20)


def test_a_photo_that_is_drawn_again_is_not_read_again(photos, tmp_path, monkeypatch):
    images = read_labelled(photos).subset(range(12))
    descriptors = np.eye(12, dtype=np.float32)
    opened = []
    load = sheets.load_image

    def spy(path, *arguments, **options):
        opened.append(path)
        return load(path, *arguments, **options)

    monkeypatch.setattr(sheets, "load_image", spy)
    expected = ranked_list_picture(images, descriptors, [0, 6])
    record = Record(tmp_path)
    opened.clear()
    for _ in range(2):
        found = ranked_list_picture(images, descriptors, [0, 6], load=record.load_thumbnail)
        assert found.tobytes() == expected.tobytes()
    assert len(opened) == len(set(opened)) > 2
    record.close()


def test_metrics_that_are_missing_or_damaged(tmp_path):
    assert read_metrics(tmp_path) == []
    (tmp_path / METRICS_FILE).write_text("no JSON\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1 is damaged"):
        read_metrics(tmp_path)
