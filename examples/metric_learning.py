"""Combine Listwise with pytorch-metric-learning.

Shows the AP loss inside a trainer of pytorch-metric-learning with its sampler and its accuracy
calculator, and a loss of pytorch-metric-learning inside `MultistageStep`.

    pip install . pytorch-metric-learning
    python examples/metric_learning.py
"""

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import nn
from torch.utils.data import TensorDataset

from listwise.losses import QuantizedAPLoss
from listwise.models import RetrievalNet
from listwise.training import MultistageStep


def toy_images(classes: int = 12, per_class: int = 8) -> TensorDataset:
    """Noisy copies of one random pattern per class: images [B, 3, 32, 32] in [0, 1], labels [B]."""
    labels = torch.arange(classes).repeat_interleave(per_class)
    images = nn.functional.interpolate(torch.rand(classes, 3, 4, 4)[labels], size=32)
    return TensorDataset((0.5 * images + 0.5 * torch.randn(images.shape)).clamp(0, 1), labels)


def map_at_r(net: nn.Module, data: TensorDataset) -> float:
    """Compute mAP@R with pytorch-metric-learning."""
    images, labels = data.tensors
    net.eval()
    with torch.no_grad():
        descriptors = net(images)
    calculator = AccuracyCalculator(
        include=("mean_average_precision_at_r",), knn_func=CustomKNN(CosineSimilarity())
    )
    return calculator.get_accuracy(descriptors, labels)["mean_average_precision_at_r"]


def main() -> None:
    torch.manual_seed(0)
    data = toy_images()
    net = RetrievalNet("test_resnet", pooling="gem", weights="random")
    print(f"mAP@R before training: {map_at_r(net, data):.3f}")

    # A trainer and a sampler of pytorch-metric-learning with the AP loss. The network returns
    # descriptors, so the optional "embedder" of the trainer is not needed.
    trainer = MetricLossOnly(
        models={"trunk": net},
        optimizers={"trunk_optimizer": torch.optim.Adam(net.parameters(), lr=1e-3)},
        batch_size=96,
        loss_funcs={"metric_loss": QuantizedAPLoss(bins=20)},
        dataset=data,
        sampler=MPerClassSampler(data.tensors[1], m=8, length_before_new_iter=96),
        data_device=torch.device("cpu"),
        dataloader_num_workers=0,
        freeze_trunk_batchnorm=True,
    )
    trainer.train(num_epochs=5)
    print(f"mAP@R after 5 updates with QuantizedAPLoss: {map_at_r(net, data):.3f}")

    # The three-stage step with a loss of pytorch-metric-learning.
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    step = MultistageStep(net, MultiSimilarityLoss(), micro_batch=16)
    for _ in range(5):
        optimizer.zero_grad()
        step(*data.tensors)
        optimizer.step()
    print(f"mAP@R after 5 updates with MultiSimilarityLoss: {map_at_r(net, data):.3f}")


if __name__ == "__main__":
    main()
