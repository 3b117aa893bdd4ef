"""Use the AP loss and the three-stage step inside a LightningModule.

Shows the loss with Lightning's automatic optimization, and `MultistageStep` with manual
optimization, for batches whose activations do not fit into memory.

    pip install . lightning
    python examples/lightning_module.py

Lightning runs on one device here. With several GPUs, `MultistageStep` does the communication
between processes itself: see docs/step.md.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from listwise.evaluation import evaluate_labelled
from listwise.losses import QuantizedAPLoss
from listwise.models import RetrievalNet
from listwise.training import MultistageStep

Batch = tuple[Tensor, Tensor]


class Retrieval(lightning.LightningModule):
    """A retrieval network that is trained on average precision and validated with mAP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = RetrievalNet("test_resnet", pooling="gem", weights="random")
        self.loss = QuantizedAPLoss(bins=20)
        self.validation: list[Batch] = []

    def training_step(self, batch: Batch, number: int) -> Tensor:
        images, labels = batch
        return self.loss(self.net(images), labels)

    def validation_step(self, batch: Batch, number: int) -> None:
        images, labels = batch
        self.validation.append((self.net(images).cpu(), labels.cpu()))

    def on_validation_epoch_end(self) -> None:
        descriptors, labels = (torch.cat(parts) for parts in zip(*self.validation, strict=True))
        self.validation.clear()
        self.log("mAP", evaluate_labelled(descriptors.numpy(), labels.numpy()).mAP)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class LargeBatchRetrieval(Retrieval):
    """The same with the three-stage step: only a micro-batch of activations is in memory."""

    def __init__(self, micro_batch: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False  # the step computes the gradients itself
        self.step = MultistageStep(self.net, self.loss, micro_batch=micro_batch)

    def training_step(self, batch: Batch, number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.step(*batch)
        optimizer.step()


def toy_images(classes: int = 12, per_class: int = 8) -> TensorDataset:
    """Noisy copies of one random pattern per class: images [B, 3, 32, 32] in [0, 1], labels [B]."""
    labels = torch.arange(classes).repeat_interleave(per_class)
    images = nn.functional.interpolate(torch.rand(classes, 3, 4, 4)[labels], size=32)
    return TensorDataset((0.5 * images + 0.5 * torch.randn(images.shape)).clamp(0, 1), labels)


def main() -> None:
    images = toy_images()
    train = DataLoader(images, batch_size=len(images))  # a listwise loss ranks the whole batch
    validation = DataLoader(images, batch_size=32)
    for kind in (Retrieval, LargeBatchRetrieval):
        lightning.seed_everything(0, verbose=False)
        module = kind()
        trainer = lightning.Trainer(
            max_epochs=8,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        before = trainer.validate(module, validation, verbose=False)[0]["mAP"]
        trainer.fit(module, train, validation)
        print(
            f"{kind.__name__}: mAP {before:.3f} before, {trainer.callback_metrics['mAP']:.3f} after"
        )


if __name__ == "__main__":
    main()
