"""Proxy-Anchor (Kim et al., CVPR 2020): one learned vector per class stands for its images."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.losses.checks import check_batch, check_count, check_queries
from listwise.losses.tiles import accumulation_dtype


class ProxyAnchorLoss(nn.Module):
    """Pull images to the proxy of their class, and push them away from the other proxies.

    With s(x, p) the cosine of a descriptor x and a proxy p, the loss is the mean of
    log(1 + Σ exp(−α (s(x, p) − δ))) over the proxies p that have an image in the batch, with the
    sum over these images x, plus the mean of log(1 + Σ exp(α (s(x, p) + δ))) over all proxies, with
    the sum over the images x of other classes.

    Call it as loss(descriptors [B, C], labels [B]) -> scalar. The proxies are parameters: train
    them with the network, at a larger learning rate (100 times in the paper). A batch may have
    shorter descriptors than the proxies, which are then cut to the same length.

    Args:
        classes: the number of classes; labels are from 0 to classes − 1.
        dim: the number of dimensions C of the descriptors.
        margin: δ.
        scale: α.

    Examples:
        >>> loss = ProxyAnchorLoss(classes=2, dim=4)
        >>> value = loss(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]))
    """

    def __init__(self, classes: int, dim: int, margin: float = 0.1, scale: float = 32.0) -> None:
        super().__init__()
        if not scale > 0:
            raise InputError(f"scale must be above zero, not {scale}")
        if not math.isfinite(margin):
            raise InputError(f"margin must be a finite number, not {margin}")
        classes = check_count("classes", classes, 2)
        self.margin, self.scale = margin, scale
        self.proxies = nn.Parameter(torch.empty(classes, check_count("dim", dim, 1)))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def forward(
        self, descriptors: Tensor, labels: Tensor, *, queries: tuple[int, int] | None = None
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers from 0 to classes − 1.
            queries: rows (start, stop): return only a share of the loss. The shares of all rows of
                the batch add up to its loss. A share has some of the proxies, and all images.

        Returns:
            A scalar.
        """
        check_batch(descriptors, labels, 1)
        start, stop = check_queries(queries, len(labels))
        count, dim = self.proxies.shape
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= count:
            raise InputError(
                f"labels must be from 0 to {count - 1}, but range from {low} to {high}"
            )
        if descriptors.shape[1] > dim:
            raise InputError(f"descriptors have {descriptors.shape[1]} dimensions, proxies {dim}")
        # Proxies are divided like the rows, so that the shares of all rows have all proxies.
        first, last = count * start // len(labels), count * stop // len(labels)
        present = torch.unique(labels)
        with torch.autocast(descriptors.device.type, enabled=False):
            dtype = accumulation_dtype(descriptors.dtype)
            proxies = self.proxies[first:last, : descriptors.shape[1]].to(dtype)
            scores = normalize(proxies, dim=1) @ descriptors.to(dtype).T
            own = torch.arange(first, last, device=labels.device)[:, None] == labels
            pulled = _log_one_plus_sum(-self.scale * (scores - self.margin), own)
            pushed = _log_one_plus_sum(self.scale * (scores + self.margin), ~own)
            return pulled.sum() / len(present) + pushed.sum() / count

    def extra_repr(self) -> str:  # noqa: D102
        classes, dim = self.proxies.shape
        return f"classes={classes}, dim={dim}, margin={self.margin}, scale={self.scale}"


def _log_one_plus_sum(exponents: Tensor, counted: Tensor) -> Tensor:
    """Compute log(1 + Σ exp(x)) over the counted exponents of each row: [P, B] -> [P]."""
    kept = exponents.masked_fill(~counted, -torch.inf)
    return torch.cat([kept.new_zeros(len(kept), 1), kept], 1).logsumexp(1)
