"""The memory of earlier batches, alone and in the step and the trainer."""

import pytest
import torch
from custom_parts import pairwise_loss
from safetensors.torch import load_file
from step_examples import assert_equal_gradients, gradients, make_batch, make_net
from training_examples import SETTINGS

from listwise.errors import InputError
from listwise.losses import InfoNCELoss, QuantizedAPLoss, class_balanced_weights
from listwise.training import Trainer, prepare
from listwise.training.objective import CrossBatchMemory
from listwise.training.step import MultistageStep


def rows(*photos):
    """Descriptors, labels and numbers of photos, each told by its number."""
    numbers = torch.tensor(photos)
    return numbers[:, None].repeat(1, 2).float(), numbers // 10, numbers


def test_it_keeps_the_newest_descriptors_of_each_photo():
    memory = CrossBatchMemory(4)
    descriptors, labels, photos = rows(11, 12, 21)
    memory.add(descriptors, labels, photos)
    descriptors, labels, photos = rows(12, 31)
    memory.add(descriptors + 0.5, labels, photos)
    assert memory.photos.tolist() == [11, 21, 12, 31]
    assert memory.descriptors[:, 0].tolist() == [11, 21, 12.5, 31.5]
    memory.add(*rows(41, 42, 41))
    assert memory.photos.tolist() == [12, 31, 42, 41]
    found, labels = memory.references(torch.tensor([31, 41, 99]))
    assert found[:, 0].tolist() == [12.5, 42]
    assert labels.tolist() == [1, 4]


def test_it_starts_after_its_warm_up():
    memory = CrossBatchMemory(9, warmup=2)
    for first in (0, 10, 20):
        assert memory.references(torch.tensor([1]))[0] is None
        memory.add(*rows(first, first + 1))
    assert memory.photos.tolist() == [20, 21]


def formula(descriptors, labels, memory, weights):
    """1 − AP of each query over the other images of its batch and over the memory, by hand."""
    values = []
    loss = QuantizedAPLoss()
    for q in range(len(labels)):
        others = [i for i in range(len(labels)) if i != q]
        references = torch.cat([descriptors[others], memory[0]])
        reference_labels = torch.cat([labels[others], memory[1]])
        given = {"references": references, "reference_labels": reference_labels}
        values.append(loss(descriptors[q : q + 1], labels[q : q + 1], **given))
    return (weights * torch.stack(values)).sum() / weights.sum()


@pytest.mark.parametrize("micro_batch", [3, 64])
def test_the_step_ranks_the_memory_too(micro_batch):
    net = make_net()
    images, labels = make_batch(10)
    photos = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    memory = CrossBatchMemory(50)
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    old = torch.nn.functional.normalize(old, dim=1)
    old_labels, old_photos = torch.arange(8) % 4, torch.arange(6, 14)
    memory.add(old, old_labels, old_photos)
    step = MultistageStep(
        net, QuantizedAPLoss(), micro_batch, memory=memory, weighting=class_balanced_weights
    )
    value = step(images, labels, photos)
    actual = gradients(net)

    net.zero_grad()
    others = old_photos >= 10  # the photos 6 to 9 are in the batch
    descriptors = net(images)
    expected = formula(
        descriptors,
        labels,
        (old[others], old_labels[others]),
        class_balanced_weights(labels).double(),
    )
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    assert_equal_gradients(actual, gradients(net), 1e-9)
    assert memory.photos.tolist() == [10, 11, 12, 13, *range(10)]
    torch.testing.assert_close(memory.descriptors[4:], descriptors.detach())


def test_what_it_needs_is_said_first():
    with pytest.raises(InputError, match="this loss cannot rank the photos of a memory"):
        MultistageStep(make_net(), pairwise_loss, memory=CrossBatchMemory(5))
    step = MultistageStep(make_net(), InfoNCELoss(), memory=CrossBatchMemory(5))
    with pytest.raises(InputError, match="the memory needs `photos`"):
        step(*make_batch(4))
    with pytest.raises(InputError, match="size must be a whole number of at least 1"):
        CrossBatchMemory(0)


def test_proxies_are_in_the_checkpoint_and_learn_faster(photos, tmp_path):
    given = {"loss": "proxy-anchor", "updates": 3}
    trainer = Trainer(prepare(photos, SETTINGS | given), tmp_path / "run")
    trainer.fit()
    tensors = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert len(tensors["loss.proxies"]) == len(trainer.plan.train.class_names)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates[1] == pytest.approx(100 * rates[0])
