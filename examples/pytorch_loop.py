"""Use the AP loss and the three-stage step in a plain PyTorch training loop.

Shows `QuantizedAPLoss` with `loss.backward()`, then `MultistageStep`, which computes the same
gradient but keeps the activations of only one micro-batch in memory.

    pip install .
    python examples/pytorch_loop.py
"""

import torch
from torch import Tensor, nn

from listwise.evaluation import evaluate_labelled
from listwise.losses import QuantizedAPLoss
from listwise.models import RetrievalNet
from listwise.training import MultistageStep


def toy_images(
    generator: torch.Generator, classes: int = 12, per_class: int = 8
) -> tuple[Tensor, Tensor]:
    """Noisy copies of one random pattern per class: images [B, 3, 32, 32] in [0, 1], labels [B]."""
    patterns = torch.rand(classes, 3, 4, 4, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    images = nn.functional.interpolate(patterns[labels], size=32)
    noise = torch.randn(images.shape, generator=generator)
    return (0.5 * images + 0.5 * noise).clamp(0, 1), labels


def evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Compute the mAP, with each image as a query and all others as the database."""
    net.eval()
    with torch.no_grad():
        descriptors = net(images)
    net.train()
    return evaluate_labelled(descriptors.numpy(), labels.numpy()).mAP


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = toy_images(generator)

    # Any module that maps images [B, 3, H, W] to unit descriptors [B, C] works.
    net = RetrievalNet("test_resnet", pooling="gem", weights="random")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss = QuantizedAPLoss(bins=20)
    print(f"mAP before training: {evaluate(net, images, labels):.3f}")

    # The loss alone: the whole batch in one pass, as with any other loss.
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(net(images), labels)
        value.backward()
        optimizer.step()
    print(f"loss after 5 updates with loss.backward(): {value.item():.3f}")

    # The step: the same gradient, with the activations of 16 images in memory at a time.
    step = MultistageStep(net, loss, micro_batch=16)
    for _ in range(5):
        optimizer.zero_grad()
        value = step(images, labels)  # adds to .grad, as backward() does
        optimizer.step()
    print(f"loss after 5 more updates with MultistageStep: {value.item():.3f}")
    print(f"mAP after training: {evaluate(net, images, labels):.3f}")


if __name__ == "__main__":
    main()
