"""The triplet loss (Gordo et al., IJCV 2017)."""

from typing import Literal

from torch import Tensor
from torch.nn.functional import softplus

from listwise.errors import InputError
from listwise.losses.tuples import TupleLoss


class TripletLoss(TupleLoss):
    """The triplet loss: a query q should be nearer to its positive p than to its negative n.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        margin: how much nearer, as a difference of squared distances.
        form: "margin" is ½ max(0, margin + ‖q − p‖² − ‖q − n‖²); "log-exp" is
            log(1 + exp(‖q − p‖² − ‖q − n‖²)), which has no margin.

    Examples:
        >>> import torch
        >>> descriptors = torch.eye(4)[[0, 0, 1, 1]]
        >>> TripletLoss()(descriptors, torch.tensor([5, 5, 7, 7])).item()
        0.0
    """

    def __init__(self, margin: float = 0.1, form: Literal["margin", "log-exp"] = "margin") -> None:
        super().__init__(negatives=1)
        if form not in ("margin", "log-exp"):
            raise InputError(f"form must be margin or log-exp, not {form!r}")
        if not margin >= 0:
            raise InputError(f"margin must not be negative, found {margin}")
        self.margin = margin
        self.form = form

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:  # noqa: D102
        difference = positive - negative[:, 0]
        if self.form == "margin":
            return (self.margin + difference).clamp(min=0) / 2
        return softplus(difference)

    def extra_repr(self) -> str:  # noqa: D102
        return f"margin={self.margin}, form={self.form}"
