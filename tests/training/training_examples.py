"""Settings of a small run on the CPU, a view that records what it is shown, and a comparison."""

import time

import torch
from safetensors.torch import load_file
from tiny_net import TINY_NET

from listwise.training.view import TrainView

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.4,
    "val_max_side": 48,
    "batch_size": 16,
    "micro_batch": 8,
    "crops": {"size": 32},
    "updates": 6,
    "learning_rate": 1e-3,
    "warmup": 0,
    "patience": None,
    "validate_every": 2,
    "checkpoint_every": 3,
    "device": "cpu",
    "workers": 0,
}


class Witness(TrainView):
    """Records all events.

    It interrupts the run at the update `stop_at`, or at the first photos of the task `stop_in`, and
    delays each update by `pause` seconds.
    """

    def __init__(self, stop_at=None, wants_estimate=False, stop_in=None, pause=0.0):
        self.stop_at, self.stop_in, self.pause = stop_at, stop_in, pause
        self.wants_estimate = wants_estimate
        self.lines, self.maps, self.losses, self.work, self.advanced = [], {}, [], [], []

    def message(self, line):
        self.lines.append(line)

    def progress(self, what, done, total):
        if what == self.stop_in:
            raise KeyboardInterrupt
        self.work.append((what, done, total))

    @property
    def done(self):
        """The finished tasks."""
        return [what for what, done, total in self.work if done == total]

    def advance(self, updates, seconds_left):
        self.advanced.append((updates, seconds_left))

    def update(self, update, metrics):
        time.sleep(self.pause)
        self.losses.append(metrics["loss"])
        if update == self.stop_at:
            raise KeyboardInterrupt

    def validation(self, update, value, best):
        self.maps[update] = value


def same_state(a, b):
    """Whether two runs left the same networks, moments and random state, to the bit."""
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        first, second = load_file(a / name), load_file(b / name)
        assert first.keys() == second.keys()
        for key in first:
            assert torch.equal(first[key], second[key]), (name, key)
    return True
