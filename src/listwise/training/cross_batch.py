"""Cross-batch memory (Wang et al., CVPR 2020): descriptors of earlier batches as references."""

from collections.abc import Mapping

import torch
from torch import Tensor

from listwise.losses.checks import check_count


class CrossBatchMemory:
    """Descriptors of the photos of earlier batches, which the queries of a batch rank too.

    The descriptors are those that the network computed in the update in which a photo was last
    seen, so they are slightly out of date. They get no gradient. Every photo is at most once in a
    ranked list: a photo that is in the batch has no copy from the memory in any list.

    Args:
        size: maximum number of photos; the photos seen longest ago are removed.
        warmup: number of updates at the start that add nothing, because the descriptors of a
            network that changes fast are out of date soon.

    Attributes:
        descriptors: [n, C] descriptors, the oldest first.
        labels: [n] their labels.
        photos: [n] the numbers of their photos.
        updates: the number of updates so far.

    Examples:
        >>> memory = CrossBatchMemory(size=3)
        >>> memory.add(torch.eye(2), torch.tensor([4, 5]), torch.tensor([0, 1]))
        >>> memory.references(torch.tensor([1]))[1]
        tensor([4])
    """

    def __init__(self, size: int, warmup: int = 0) -> None:
        self.size = check_count("size", size, 1)
        self.warmup = check_count("warmup", warmup, 0)
        self.updates = 0
        self.descriptors: Tensor | None = None
        self.labels = torch.empty(0, dtype=torch.int64)
        self.photos = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.photos)

    def references(self, photos: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return descriptors and labels of all photos in memory that are not in a batch.

        Args:
            photos: [B] the numbers of the photos of the batch.

        Returns:
            Descriptors [n, C], None if there are none, and labels [n].
        """
        if self.descriptors is None:
            return None, self.labels
        kept = ~torch.isin(self.photos, photos.to(self.photos.device))
        return self.descriptors[kept], self.labels[kept]

    def add(self, descriptors: Tensor, labels: Tensor, photos: Tensor) -> None:
        """Add the descriptors [B, C], labels [B] and photos [B] of an update."""
        self.updates += 1
        if self.updates <= self.warmup:
            return
        new, labels = descriptors.detach(), labels.to(descriptors.device)
        photos = photos.to(descriptors.device)
        # If a photo is in the batch twice, the last crop is kept.
        later = (photos[:, None] == photos).triu(1).any(1)
        new, labels, photos = new[~later], labels[~later], photos[~later]
        if self.descriptors is not None:
            kept = ~torch.isin(self.photos, photos)
            new = torch.cat([self.descriptors[kept], new])
            labels = torch.cat([self.labels[kept], labels])
            photos = torch.cat([self.photos[kept], photos])
        last = slice(max(0, len(photos) - self.size), None)
        self.descriptors, self.labels, self.photos = (
            new[last].clone(),
            labels[last].clone(),
            photos[last].clone(),
        )

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint."""
        tensors = {"updates": torch.tensor(self.updates)}
        if self.descriptors is not None:
            tensors["descriptors"] = self.descriptors
            tensors |= {"labels": self.labels, "photos": self.photos}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the tensors of `state` on a device."""
        self.updates = int(tensors["updates"])
        if "descriptors" in tensors:
            self.descriptors = tensors["descriptors"].to(device)
            self.labels = tensors["labels"].to(device)
            self.photos = tensors["photos"].to(device)
