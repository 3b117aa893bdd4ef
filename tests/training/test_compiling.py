import threading
from functools import wraps

import torch
from torch import nn

from listwise.losses import QuantizedAPLoss, TieAwareAPLoss, class_balanced_weights
from listwise.training import MultistageStep
from listwise.training.compiling import compile_loss

CPU = torch.device("cpu")


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, descriptors, labels, weights=None):
        self.calls.append(weights)
        return descriptors.sum()


def test_the_loss_runs_in_a_thread_and_changes_nothing(monkeypatch):
    called = []
    loss = QuantizedAPLoss()
    forward = loss.forward

    @wraps(forward)
    def witness(*args, **named):
        called.append((args, named, threading.current_thread().name))
        return forward(*args, **named)

    monkeypatch.setattr(loss, "forward", witness)
    step = MultistageStep(nn.Flatten(), loss, weighting=class_balanced_weights)
    before = torch.get_rng_state()
    labels = torch.tensor([0, 0, 1, 1, 1])
    compile_loss(step, labels, 16, CPU).join()
    (((descriptors, given), options, thread),) = called
    assert thread == "compiling"
    assert torch.equal(given, labels)
    assert descriptors.shape == (5, 16)
    assert descriptors.dtype == torch.float32
    assert descriptors.grad is not None  # the backward pass has kernels too
    assert torch.equal(options["weights"], class_balanced_weights(labels))
    assert torch.equal(torch.get_rng_state(), before)


def test_other_losses_may_have_a_state():
    for loss in (Counted(), TieAwareAPLoss()):
        step = MultistageStep(nn.Flatten(), loss)
        assert compile_loss(step, torch.tensor([0, 0, 1, 1]), 16, CPU) is None
        assert getattr(loss, "calls", []) == []


def test_errors_are_left_to_the_first_update():
    step = MultistageStep(nn.Flatten(), QuantizedAPLoss())
    compile_loss(step, torch.tensor([0, 1, 2]), 16, CPU).join()  # no image has a positive
