"""The files of a run: checkpoints, metrics, pictures, and the thread that writes them."""

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.training import run as run_files
from listwise.training.run import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    Progress,
    RunFiles,
    checkpoint_tensors,
    load_checkpoint,
    ranked_list_picture,
    read_metrics,
)


@pytest.fixture
def files(tmp_path):
    return RunFiles(tmp_path, Progress())


def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    net[2].weight = nn.Parameter(net[2].weight.t().contiguous().t())  # with gaps between rows
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


def train(net, optimizer):
    optimizer.zero_grad()
    net(torch.rand(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()


def test_a_checkpoint_comes_back_to_the_bit_or_is_refused(files, tmp_path):
    path, progress = tmp_path / CHECKPOINT_FILE, Progress(update=1, best_map=0.1 + 0.2)
    net, optimizer = make(0)
    train(net, optimizer)
    files.save_checkpoint(
        checkpoint_tensors({"net": net}, optimizer, torch.device("cpu")), progress
    )
    files.close()
    train(net, optimizer)

    again, other_optimizer = make(1)
    found, random_state = load_checkpoint(path, {"net": again}, other_optimizer)
    assert found == progress
    torch.set_rng_state(random_state[0])
    train(again, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))

    other = nn.Linear(2, 2)
    with pytest.raises(InputError, match="does not fit the network") as caught:
        load_checkpoint(path, {"net": other}, torch.optim.Adam(other.parameters()))
    assert "\n" not in str(caught.value)
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:40], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged") as caught:
            load_checkpoint(path, {"net": net}, optimizer)
        assert "\n" not in str(caught.value)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="not a checkpoint"):
        load_checkpoint(path, {"net": net}, optimizer)


def test_a_resumed_run_keeps_the_metrics_up_to_its_checkpoint(files, tmp_path):
    assert read_metrics(tmp_path) == []
    for update in range(6):
        files.write_metrics(update, loss=update / 8)
    files.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"update": 6, "lo')  # killed while it wrote
    assert [line["update"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]

    time.sleep(1)  # TensorBoard orders a run's files by the second they were begun in
    resumed = RunFiles(tmp_path, Progress(update=3))
    resumed.write_metrics(4, loss=9.0)
    resumed.close()
    losses = [(line["update"], line["loss"]) for line in read_metrics(tmp_path)]
    assert losses == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375), (4, 9.0)]
    board = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER), size_guidance={"scalars": 0})
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == losses

    (tmp_path / METRICS_FILE).write_text("no JSON\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1 is damaged"):
        read_metrics(tmp_path)


def test_right_and_wrong_photos_are_framed_so(photos, monkeypatch):
    frames = []
    monkeypatch.setattr(run_files, "ranked_sheet", frames.append)
    images = read_labelled(photos).subset([0, 1, 6, 7, 12])  # of classes 0 0 1 1 2
    angles = np.radians([0, 30, 10, 90, 60])
    descriptors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    ranked_list_picture(images, descriptors, [0, 3], count=3)
    # by angle from photo 0: 2, 1, 4; from photo 3: 4, 1, 2
    assert [[tile.mark for tile in row] for row in frames[0]] == [
        ["query", "wrong", "right", "wrong"],
        ["query", "wrong", "wrong", "right"],
    ]


def test_of_files_that_wait_only_the_newest_is_written(files):
    written, busy = [], threading.Event()
    files.write("picture 1", busy.wait)
    for update in range(40):
        files.write("checkpoint", partial(written.append, f"checkpoint {update}"))
    assert not written
    busy.set()
    files.wait()
    assert written == ["checkpoint 39"]


def test_a_slow_disk_gets_each_best_network_before_its_checkpoint(files):
    written = []

    def task(name):
        time.sleep(0.01)
        written.append(name)

    for update in range(20):
        files.write("model", partial(task, ("model", update)))
        files.write("checkpoint", partial(task, ("checkpoint", update)))
    files.close()
    newest = -1
    for kind, update in written:
        newest = update if kind == "model" else newest
        assert kind == "model" or update == newest
    assert written[-1] == ("checkpoint", 19)
    assert len(written) == 40  # training waited for each


def test_tasks_that_end_at_once_are_no_problem(files):
    for _ in range(2000):
        files.write("checkpoint", int)
    files.close()
